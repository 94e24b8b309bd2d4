"""What one can see of a running engine, and do to it from outside."""

from __future__ import annotations

import threading

from deepinfer.core import _checks as checks
from deepinfer.core.errors import InvalidRequest
from deepinfer.core.plan import LoadSnapshot
from deepinfer.engine.assemble import Parts
from deepinfer.engine.loop import EngineLoop
from deepinfer.engine.stats import EngineStats
from deepinfer.engine.trace import Trace

__all__ = ["EngineControls"]


class EngineControls:
    """The part of an `Engine` that looks at it and steers it."""

    _lock: threading.RLock
    _loop: EngineLoop
    _parts: Parts

    @property
    def load(self) -> LoadSnapshot:
        """How busy the engine is, as routers and balancers see it."""
        with self._lock:
            return self._parts.scheduler.snapshot()

    def preempt(self, rid: str) -> None:
        """Takes slot and cache of a request's running samples; they wait and are run again, with the same tokens.

        Args:
            rid: Its id; one that is unknown, finished or waits is left alone.

        Raises:
            ConfigError: The scheduler has no `preempt`.
            InvalidRequest: The id is no text.
        """
        checks.check_text("rid", rid, InvalidRequest)
        with self._lock:
            self._loop.preempt(rid)

    def reset_prefix_cache(self) -> None:
        """Forgets every cached prefix, as after a change of the weights; running requests are run again from the start.

        Raises:
            ConfigError: The scheduler has no `reset_prefix_cache`.
            EngineDead: The engine is closed, or stopped.
        """
        with self._lock:
            self._loop.reset_prefix_cache()

    def pause(self) -> None:
        """Stops running steps, once those in flight are applied; requests are still taken, and wait.

        While it is paused, `step` and the loops over it find nothing to do, and `generate` and streams raise
        `RequestError` when they would wait for ever. Calling it twice is harmless.

        Raises:
            EngineDead: The engine is closed, or stopped.
        """
        with self._lock:
            self._loop.pause()

    def resume(self) -> None:
        """Goes on after `pause`; harmless without one."""
        with self._lock:
            self._loop.resume()

    def stats(self) -> EngineStats:
        """Counters since the start, and how busy the engine is."""
        with self._lock:
            return self._loop.recorder.stats(self.load, self._parts.runner, self._parts.cache)

    def trace(self, capacity: int = 200_000) -> Trace:
        """Records where the time goes: `with engine.trace() as trace: ...`, then `trace.save("trace.json")`.

        Args:
            capacity: Most spans kept; older ones are dropped first.

        Returns:
            A context manager that records while its block runs; outside of such blocks nothing is recorded.

        Raises:
            ConfigError: The capacity is out of range.
        """
        recorder = self._loop.recorder
        return Trace(capacity, attach=recorder.attach, detach=recorder.detach)

    def check(self) -> None:
        """Walks the books of every part.

        Raises:
            InvariantBroken: They do not add up.
        """
        with self._lock:
            self._loop.check()
