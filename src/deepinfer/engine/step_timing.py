"""Requests that decode together while steps are timed, and what fixes the lengths of their drafts meanwhile."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

import numpy as np

from deepinfer.core.params import SamplingParams
from deepinfer.core.plan import ROLES, LoadSnapshot, RowRole
from deepinfer.core.types import OutputDelta, Request
from deepinfer.engine.loop import EngineLoop
from deepinfer.engine.pipeline import Flight
from deepinfer.engine.stats import StatsRecorder
from deepinfer.scheduling import Progress

__all__ = ["Crowd", "Fixed", "FixedLive", "Probe", "most_tokens"]

_DECODE = ROLES.index(RowRole.DECODE)
_SHORT = 8  # steps without all requests and without a prompt after which the rest is given up
_PLAIN = 8
_LONG_S = 1.0  # after which two timings of a size are enough
_WARM = 3  # steps behind a change of lengths that are not counted: recordings, and a step in flight


class Fixed:
    """Verifies the same number of drafts of every row.

    Attributes:
        length: The number.
    """

    def __init__(self) -> None:
        self.length = 0

    def choose(self, confidences: Sequence[Sequence[float]], num_running: int) -> list[int]:
        """As in `VerifyLengthPolicy`."""
        return [min(self.length, len(row)) for row in confidences]


class FixedLive(Fixed):
    """The same, decided once the drafts are there, as `LiveLengths` does.

    Args:
        longest: Drafts of a whole block.
    """

    takes_arrays = True

    def __init__(self, longest: int) -> None:
        super().__init__()
        self._longest = longest

    def drafts(self, num_requests: int) -> bool:
        """As in `LiveLengths`."""
        return self.length > 0

    def skips(self, num_blocks: int) -> bool:
        """As in `LiveLengths`."""
        return self.length >= self._longest

    def trim(
        self, confidences: Any, counts: Sequence[int], other_rows: int = 0, *, margins: Any = ()
    ) -> Any:
        """As in `LiveLengths`."""
        return np.minimum(self.length, np.asarray(counts, np.int64))


class Probe(StatsRecorder):
    """Notes the last step instead of counting it.

    Attributes:
        rows: Rows that it scored.
        requests: Requests that it ran.
        is_decoding: Whether none of them ran a prompt.
        draft_s: Seconds spent drafting.
    """

    def __init__(self) -> None:
        super().__init__()
        self.rows = self.requests = 0
        self.is_decoding = False
        self.draft_s = 0.0

    def step(
        self, flight: Flight, progress: Sequence[Progress], load: LoadSnapshot | None, *, now: float
    ) -> None:
        """Notes a step."""
        rows, result = flight.plan.rows, flight.result
        self.requests = len(rows)
        self.is_decoding = bool((rows.roles >= _DECODE).all())
        drafts = 0 if result is None else sum(row.num_drafts for row in result.rows)
        self.rows = self.requests + drafts
        self.draft_s = float(getattr(flight.handle, "draft_s", 0.0))


def most_tokens(draft_length: int, repeats: int) -> int:
    """Tokens that a request may make while steps of one number of requests are timed.

    Args:
        draft_length: Most drafts of a row.
        repeats: Steps timed of each size.

    Returns:
        The number.
    """
    return 2 * (draft_length + 1) * (_WARM + repeats) + 2 * _WARM + _PLAIN * repeats


class Crowd:
    """Requests that decode together; they stay while they are enough and have room.

    Args:
        loop: Runs them.
        probe: The loop's recorder.
        policy: Chooses the lengths.
        prompt: Token ids that every request begins with, turned around by its number.
        max_model_len: Most tokens of a request.
    """

    def __init__(
        self,
        loop: EngineLoop,
        probe: Probe,
        policy: Fixed,
        prompt: Sequence[int],
        max_model_len: int,
    ) -> None:
        self._loop, self._probe, self._policy = loop, probe, policy
        self._prompt, self._room = prompt, max_model_len - len(prompt)
        self._names: list[str] = []
        self._number = self._spent = 0  # requests so far; tokens that each may have made

    def timed(
        self, count: int, lengths: Sequence[int], repeats: int
    ) -> list[tuple[int, float, float]]:
        """Times steps.

        Args:
            count: Requests; no more than before, or all of them are new.
            lengths: Drafts of a row that are verified, most first; 0 drafts none.
            repeats: Steps of each.

        Returns:
            Rows, seconds and seconds of drafting of each step; fewer, or none, when so many requests do not fit.
        """
        found: list[tuple[int, float, float]] = []
        if not self._gather(count, lengths, repeats):
            return found
        for length in lengths:
            self._policy.length = length
            # Steps that verify nothing may run ahead of their results: only several of them tell what one takes.
            warm, steps = (_WARM, repeats) if length else (2 * _WARM, _PLAIN * repeats)
            together = 1 if length else _PLAIN
            total, first, known = 0.0, time.perf_counter(), len(found)
            for step in range(warm + steps):
                began = time.perf_counter()
                self._loop.run_step()
                elapsed = time.perf_counter() - began
                probe = self._probe
                if probe.requests != count or not probe.is_decoding:
                    self.disperse()  # the cache is full, or they came to their end
                    return found
                total += elapsed if step >= warm else 0.0
                if step >= warm and (step - warm + 1) % together == 0:
                    found.append((probe.rows, total / together, probe.draft_s if length else 0.0))
                    total = 0.0
                    if len(found) - known > 1 and time.perf_counter() - first > _LONG_S:
                        break
        return found

    def _gather(self, count: int, lengths: Sequence[int], repeats: int) -> bool:
        """Whether so many decode together."""
        loop, probe = self._loop, self._probe
        self._policy.length = lengths[0]
        tokens = sum(
            (n + 1) * (_WARM + repeats) if n else 2 * _WARM + _PLAIN * repeats for n in lengths
        )
        if len(self._names) < count or self._spent + tokens > self._room:
            self.disperse()
            self._submit(count)
        for rid in self._names[count:]:
            loop.abort(rid)
        del self._names[count:]
        probe.requests = short = 0
        while probe.requests != count or not probe.is_decoding:
            loop.run_step()
            self._spent += lengths[0] + 1
            short = short + 1 if probe.is_decoding and probe.requests < count else 0
            if short > _SHORT or loop.num_live < count:
                self.disperse()  # they do not fit together
                return False
        self._spent += tokens
        return True

    def _submit(self, count: int) -> None:
        params = SamplingParams(temperature=0.0, ignore_eos=True, max_tokens=self._room)
        prompt, self._spent = self._prompt, 0
        for index in range(count):
            rid = f"profile-{self._number}"
            self._number += 1
            # Different first tokens, so that no prompt is a hit on another's.
            ids = (*prompt[index % len(prompt) :], *prompt[: index % len(prompt)])
            request = Request(rid=rid, prompt_token_ids=ids, params=params, cache_salt=rid)
            self._names.append(rid)
            self._loop.submit(rid, [request], _drop)

    def disperse(self) -> None:
        """Ends them all."""
        for rid in self._names:
            self._loop.abort(rid)
        self._names.clear()


def _drop(delta: OutputDelta) -> None:
    """Takes a delta that nobody wants."""
