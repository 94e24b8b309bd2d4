"""Where a part gets the time from, so that a recorded clock replays a schedule exactly."""

from __future__ import annotations

import time
from typing import Protocol, runtime_checkable

from deepinfer.core.errors import ConfigError

__all__ = ["Clock", "FakeClock", "MonotonicClock"]


@runtime_checkable
class Clock(Protocol):
    """A source of seconds that never runs backwards."""

    def now(self) -> float:
        """The time in seconds since an arbitrary origin."""
        ...


class MonotonicClock:
    """The machine's monotonic clock."""

    __slots__ = ()

    def now(self) -> float:
        """The time in seconds since an arbitrary origin."""
        return time.monotonic()


class FakeClock:
    """A clock that moves only when told to, for tests, simulation and replay.

    Args:
        start_s: The first reading, in seconds.
    """

    __slots__ = ("_now_s",)

    def __init__(self, start_s: float = 0.0) -> None:
        self._now_s = float(start_s)

    def now(self) -> float:
        """The time in seconds."""
        return self._now_s

    def advance(self, seconds: float) -> float:
        """Moves forward.

        Args:
            seconds: How far, from 0.

        Returns:
            The new time in seconds.

        Raises:
            ConfigError: The step is negative or not a number.
        """
        if not seconds >= 0.0:
            raise ConfigError(
                f"a clock cannot move by {seconds!r} seconds; give a number from 0.",
                field="seconds",
                value=seconds,
                limit="from 0",
            )
        self._now_s += seconds
        return self._now_s
