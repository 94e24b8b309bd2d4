"""What one can see of a running engine, and do to it from outside."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import Any

from deepinfer.core import _checks as checks
from deepinfer.core.config import EngineConfig
from deepinfer.core.errors import InvalidRequest
from deepinfer.core.plan import LoadSnapshot
from deepinfer.engine.assemble import Parts
from deepinfer.engine.fingerprint import fingerprint
from deepinfer.engine.loop import EngineLoop
from deepinfer.engine.prompts import Message, PromptEncoder
from deepinfer.engine.stats import EngineStats
from deepinfer.engine.trace import Trace
from deepinfer.engine.verification import profile_parts
from deepinfer.speculative import StepCostModel

__all__ = ["EngineControls"]


class EngineControls:
    """The part of an `Engine` that looks at it and steers it."""

    config: EngineConfig
    _encoder: PromptEncoder
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

    def encode_chat(self, messages: Sequence[Message], **options: Any) -> list[int]:
        """Token ids of a conversation, ready for the assistant's answer.

        Args:
            messages: Mappings with "role" and "content", oldest first.
            options: `tools`, `thinking_mode`, `reasoning_effort` and others of `deepinfer.engine.chat.render_chat`.

        Returns:
            The ids.

        Raises:
            InvalidRequest: A message or an option is unusable, or there is no tokenizer.
        """
        return self._encoder.encode_chat(messages, **options)

    def fingerprint(self) -> dict[str, Any]:
        """Versions, device, options and parts as plain values, for measurements and reports."""
        return fingerprint(self.config, self._parts)

    def profile_steps(
        self, *, context_tokens: int = 64, max_requests: int | None = None, repeats: int = 4
    ) -> StepCostModel:
        """Times steps that decode and verify, with 1, 2, 4, ... requests and every number of drafts.

        `engine.replace(verify=engine.profile_steps())` verifies as many drafts as pay. The result can be saved; it holds
        for this model, device and way of running.

        Args:
            context_tokens: Tokens of each prompt.
            max_requests: Most requests at once; None for `max_num_seqs`.
            repeats: Steps timed of each size.

        Returns:
            Seconds by number of rows, and of drafting by number of requests.

        Raises:
            ConfigError: Requests are unfinished, a number is out of range, or the scheduler cannot be told how much to
                verify.
            EngineDead: The engine is closed, or stopped.
        """
        with self._lock:
            self._loop.raise_if_dead()
            return profile_parts(
                self.config, self._parts, context_tokens=context_tokens, max_requests=max_requests,
                repeats=repeats,
            )  # fmt: skip

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
