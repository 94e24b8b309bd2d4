"""A bound on the time that one compilation may take."""

from __future__ import annotations

import time

from deepinfer.core.errors import GrammarTooLarge

__all__ = ["Budget"]

_STRIDE = 64


class Budget:
    """Counts work and stops it when it has taken too long.

    Args:
        milliseconds: CPU time of this thread that may be used from now on; None for no bound.
    """

    __slots__ = ("_count", "_end", "_limit")

    def __init__(self, milliseconds: float | None) -> None:
        self._limit = milliseconds
        self._end = (
            float("inf") if milliseconds is None else time.thread_time() + milliseconds / 1000
        )
        self._count = 0

    def spend(self, amount: int = 1) -> None:
        """Notes some work; 1 is about a microsecond or ten.

        Raises:
            GrammarTooLarge: The time is used up.
        """
        self._count += amount
        if self._count >= _STRIDE:
            self._count = 0
            if time.thread_time() > self._end:
                raise GrammarTooLarge(
                    f"the schema took more than {self._limit:g} ms to compile; simplify it or raise budget_ms",
                    resource="ms",
                    limit=self._limit,
                )
