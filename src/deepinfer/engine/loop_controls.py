"""What can be done to a loop between its steps."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

from deepinfer.core.errors import ConfigError, RequestError
from deepinfer.core.types import Request
from deepinfer.engine.constraints import GrammarMasks
from deepinfer.engine.faults import InterruptGuard, check_books
from deepinfer.engine.outputs import OutputBuilder
from deepinfer.engine.parts import EngineScheduler

__all__ = ["LoopControls"]


class LoopControls:
    """The part of an `EngineLoop` that callers steer it by.

    Attributes:
        is_paused: Whether no steps are run.
    """

    is_paused: bool
    scheduler: EngineScheduler
    _guard: InterruptGuard
    _live: dict[str, OutputBuilder]
    _masks: GrammarMasks
    _orphans: deque[str]
    _requests: dict[str, Request]
    _samples: dict[str, list[str]]

    def abort(self, rid: str) -> list[OutputBuilder]:
        """Ends every sample of a request."""
        raise NotImplementedError

    def raise_if_dead(self) -> None:
        """Raises `EngineDead` once the loop ended."""
        raise NotImplementedError

    def _heal(self) -> None:
        raise NotImplementedError

    def _drain(self) -> None:
        raise NotImplementedError

    def preempt(self, rid: str) -> None:
        """Takes the slots of a request's samples; see `Engine.preempt`."""
        self._heal()
        preempt = self._optional("preempt")
        with self._guard:
            for sample in self._samples.get(rid, ()):
                preempt(sample)

    def reset_prefix_cache(self) -> None:
        """Forgets every cached prefix; see `Engine.reset_prefix_cache`."""
        self.raise_if_dead()
        self._heal()
        reset = self._optional("reset_prefix_cache")
        with self._guard:
            reset()

    def pause(self) -> None:
        """Applies what is in flight and runs no more steps until `resume`."""
        self.raise_if_dead()
        self.is_paused = True
        self._drain()

    def resume(self) -> None:
        """Lets steps run again."""
        self.is_paused = False

    def raise_if_paused(self) -> None:
        """Raises `RequestError` while paused, for those who would wait for ever."""
        if self.is_paused:
            raise RequestError(
                "the engine is paused, so the request cannot go on; call resume() first, from another place."
            )

    def _optional(self, name: str) -> Callable[..., None]:
        method: Callable[..., None] | None = getattr(self.scheduler, name, None)
        if method is None:
            raise ConfigError(
                f"{type(self.scheduler).__name__} has no {name}; use a scheduler that has it.",
                field="scheduler",
            )
        return method

    def abort_later(self, rid: str) -> None:
        """Notes that nobody waits for a request any more; safe to call at any moment from any thread."""
        self._orphans.append(rid)

    def reap(self) -> None:
        """Aborts what `abort_later` noted, and repairs what an interrupt left."""
        self._heal()
        while self._orphans:
            self.abort(self._orphans.popleft())

    def check(self) -> None:
        """Walks every book.

        Raises:
            InvariantBroken: They do not add up.
        """
        self._heal()
        self._check()

    def _check(self) -> None:
        check_books(
            self.scheduler, self._live, self._requests, self._samples, num_masks=len(self._masks)
        )
