"""A simulated engine that runs prompts: ranks that step together, and a prefix cache."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Hashable
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from deepinfer.balancers.simulator.block_cache import LruBlocks
from deepinfer.balancers.simulator.config import CacheKind, PrefillConfig, RankChoice

__all__ = ["PrefillEngine", "PrefillJob", "PrefillStep"]


@dataclass(slots=True)
class PrefillJob:
    """One prompt on an engine.

    Attributes:
        index: Place of the request in the trace.
        tokens: Tokens of the prompt.
        keys: Keys of its whole blocks.
        hit_tokens: Tokens found in the cache when it began, or -1 before.
        done_tokens: Tokens that are in the cache or were run.
        rank: The rank that runs it, or -1 before it has one.
        remaining_s: Seconds that are left, as predicted.
    """

    index: int
    tokens: int
    keys: tuple[Hashable, ...]
    hit_tokens: int = -1
    done_tokens: int = 0
    rank: int = -1
    remaining_s: float = 0.0


@dataclass(slots=True)
class PrefillStep:
    """One step of an engine.

    Attributes:
        begin_s: When it began.
        duration_s: How long the slowest rank takes.
        rank_s: Seconds of each rank, shape [ranks].
        chunks: Jobs and the tokens that they run.
    """

    begin_s: float
    duration_s: float
    rank_s: npt.NDArray[np.float64]
    chunks: list[tuple[PrefillJob, int]] = field(default_factory=list)


class PrefillEngine:
    """Ranks with queues, in lockstep.

    Args:
        name: Name of the engine.
        config: What it is made of.
        cache: Its blocks: its own, or the store that it shares.
    """

    def __init__(self, name: str, config: PrefillConfig, cache: LruBlocks) -> None:
        self.name = name
        self.config = config
        self.cache = cache
        self.queues: list[deque[PrefillJob]] = [deque() for _ in range(config.num_ranks)]
        self.unbound: deque[PrefillJob] = deque()
        self.remaining_s = np.zeros(config.num_ranks)  # of the prompts that have a rank
        self.unbound_s = 0.0
        self.step: PrefillStep | None = None
        self.busy_s = 0.0
        self._turn = 0

    @property
    def num_jobs(self) -> int:
        """Prompts that wait or run."""
        return sum(map(len, self.queues)) + len(self.unbound)

    @property
    def waiting_tokens(self) -> int:
        """Prompt tokens not yet run."""
        return sum(job.tokens - job.done_tokens for queue in self._all for job in queue)

    @property
    def _all(self) -> list[deque[PrefillJob]]:
        return [*self.queues, self.unbound]

    def waiting_s(self, now_s: float) -> float:
        """Seconds until a prompt that came now would begin, when the ranks share evenly.

        Args:
            now_s: The time.

        Returns:
            The seconds.
        """
        steps = self.config.cost.step_s if self.step is None else 0.0
        running = 0.0
        left = (float(self.remaining_s.sum()) + self.unbound_s) / self.config.num_ranks
        if self.step is not None:
            # The chunks of the running step are still in `remaining_s`: count them by the clock instead.
            planned = float(self.step.rank_s.sum()) / self.config.num_ranks
            running = max(0.0, self.step.begin_s + self.step.duration_s - now_s)
            left = max(0.0, left - planned)
        return running + left + steps * (left > 0)

    def add(self, job: PrefillJob) -> None:
        """Queues a prompt.

        Args:
            job: The prompt.
        """
        choice = self.config.ranks
        hit = self._lookup(job)
        job.remaining_s = float(self.config.cost.seconds(float(hit), float(job.tokens - hit)))
        if choice is RankChoice.LATE:
            self.unbound.append(job)
            self.unbound_s += job.remaining_s
            return
        rank = int(self.remaining_s.argmin())
        if choice is RankChoice.IN_TURN:
            rank = self._turn
            self._turn = (rank + 1) % self.config.num_ranks
        self._bind(job, rank)

    def begin(self, now_s: float) -> PrefillStep | None:
        """Plans a step: each rank fills its time, or its tokens, with the heads of its queue.

        Prompts without a rank go, one by one in the order in which they came, to the rank that has used the least of
        its step so far.

        Args:
            now_s: The time.

        Returns:
            The step, or None when nothing waits.
        """
        if self.step is not None or not any(self._all):
            return None
        fills = [_Fill(self.config) for _ in self.queues]
        for fill, queue in zip(fills, self.queues, strict=True):
            for job in queue:
                if fill.is_full:
                    break
                self._look_up_again(job)
                fill.take(job)
        while self.unbound:
            fill = min(fills, key=_used)
            if fill.is_full:
                break
            job = self.unbound.popleft()
            self.unbound_s = max(0.0, self.unbound_s - job.remaining_s) if self.unbound else 0.0
            self._bind(job, fills.index(fill))
            self._look_up_again(job)
            fill.take(job)
        rank_s = np.array([fill.seconds for fill in fills])
        duration = self.config.cost.step_s + float(rank_s.max())
        chunks = [chunk for fill in fills for chunk in fill.chunks]
        self.step = PrefillStep(now_s, duration, rank_s, chunks)
        return self.step

    def end(self) -> tuple[list[PrefillJob], list[Hashable], list[Hashable]]:
        """Ends the running step.

        Returns:
            The prompts that are done, and the blocks that the cache gained and gave up, each in one of the two.
        """
        step = self.step
        if step is None:
            return [], [], []
        self.step = None
        self.busy_s += step.duration_s
        finished: list[PrefillJob] = []
        moved: dict[Hashable, None] = {}  # parents before children
        cost = self.config.cost
        for job, tokens in step.chunks:
            spent = float(cost.seconds(float(job.done_tokens), float(tokens)))
            job.done_tokens += tokens
            left = 0.0 if job.done_tokens >= job.tokens else max(0.0, job.remaining_s - spent)
            self.remaining_s[job.rank] += left - job.remaining_s
            job.remaining_s = left
            if self.config.cache is not CacheKind.NONE:
                new, gone = self.cache.use(job.keys[: job.done_tokens // self.config.block_tokens])
                moved.update(dict.fromkeys([*new, *gone]))
            if job.done_tokens >= job.tokens:
                finished.append(job)
                self.queues[job.rank].remove(job)
        for rank, queue in enumerate(self.queues):
            if not queue:
                self.remaining_s[rank] = 0.0  # no drift from rounding
        # What one prompt of a step brings in, another may drive out.
        stored = [key for key in moved if key in self.cache]
        return finished, stored, [key for key in moved if key not in self.cache]

    def fail(self, now_s: float) -> list[PrefillJob]:
        """Dies.

        Args:
            now_s: The time; the part of its step until now counts as busy.

        Returns:
            The prompts that it held; they must be routed again.
        """
        jobs = [job for queue in self._all for job in queue]
        for queue in self._all:
            queue.clear()
        self.remaining_s[:] = 0.0
        self.unbound_s = 0.0
        if self.step is not None:
            self.busy_s += now_s - self.step.begin_s
        self.step = None
        if self.config.cache is CacheKind.ENGINE:
            self.cache.clear()
        return jobs

    def _bind(self, job: PrefillJob, rank: int) -> None:
        job.rank = rank
        self.queues[rank].append(job)
        self.remaining_s[rank] += job.remaining_s

    def _lookup(self, job: PrefillJob) -> int:
        if self.config.cache is CacheKind.NONE:
            return 0
        return min(self.cache.hit(job.keys) * self.config.block_tokens, job.tokens - 1)

    def _look_up_again(self, job: PrefillJob) -> None:
        """Before its first chunk: prompts that ran meanwhile may have left blocks, or driven some out."""
        if job.done_tokens <= max(job.hit_tokens, 0):
            hit = job.hit_tokens = job.done_tokens = self._lookup(job)
            fresh = float(self.config.cost.seconds(float(hit), float(job.tokens - hit)))
            self.remaining_s[job.rank] += fresh - job.remaining_s
            job.remaining_s = fresh


class _Fill:
    """What one rank runs in a step that is being planned."""

    def __init__(self, config: PrefillConfig) -> None:
        self.config = config
        self.tokens_left = config.chunk_tokens
        self.time_left = math.inf if config.chunk_s is None else config.chunk_s
        self.seconds = 0.0
        self.chunks: list[tuple[PrefillJob, int]] = []
        self.is_full = False

    def take(self, job: PrefillJob) -> None:
        """Adds as much of a prompt as fits; it is full when the prompt does not end in this step."""
        left = job.tokens - job.done_tokens
        tokens = self._chunk(job, left)
        if tokens:
            cost = self.config.cost
            seconds = float(cost.seconds(float(job.done_tokens), float(tokens)))
            self.chunks.append((job, tokens))
            self.seconds += seconds
            self.time_left -= seconds
            self.tokens_left -= tokens
        self.is_full = tokens < left or self.tokens_left < 1 or self.time_left <= 0

    def _chunk(self, job: PrefillJob, left: int) -> int:
        config = self.config
        tokens = min(left, self.tokens_left)
        if self.time_left < math.inf:
            tokens = config.cost.largest(float(job.done_tokens), self.time_left, tokens)
        if tokens < left:
            tokens -= tokens % config.chunk_multiple
            if (
                tokens == 0 and not self.chunks
            ):  # a target below one multiple must not stop the queue
                tokens = min(left, self.tokens_left, config.chunk_multiple)
        return tokens


def _used(fill: _Fill) -> tuple[bool, float]:
    return fill.is_full, fill.seconds
