"""A simulated engine that runs prompts: ranks that step together, and a prefix cache."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Hashable
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from deepinfer.balancers.simulator.block_cache import LruBlocks
from deepinfer.balancers.simulator.config import CacheKind, PrefillConfig

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
        rank: The rank that runs it.
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
        self.remaining_s = np.zeros(config.num_ranks)
        self.step: PrefillStep | None = None
        self.busy_s = 0.0
        self._turn = 0

    @property
    def num_jobs(self) -> int:
        """Prompts that wait or run."""
        return sum(map(len, self.queues))

    @property
    def waiting_tokens(self) -> int:
        """Prompt tokens not yet run."""
        return sum(job.tokens - max(job.done_tokens, 0) for queue in self.queues for job in queue)

    def waiting_s(self, now_s: float) -> float:
        """Seconds until a prompt that came now would begin, when the ranks share evenly.

        Args:
            now_s: The time.

        Returns:
            The seconds.
        """
        steps = self.config.cost.step_s if self.step is None else 0.0
        running = 0.0
        left = float(self.remaining_s.sum()) / self.config.num_ranks
        if self.step is not None:
            # The chunks of the running step are still in `remaining_s`: count them by the clock instead.
            planned = float(self.step.rank_s.sum()) / self.config.num_ranks
            running = max(0.0, self.step.begin_s + self.step.duration_s - now_s)
            left = max(0.0, left - planned)
        return running + left + steps * (left > 0)

    def add(self, job: PrefillJob) -> None:
        """Queues a prompt at a rank.

        Args:
            job: The prompt.
        """
        cost, config = self.config.cost, self.config
        hit = self._lookup(job)
        job.remaining_s = float(cost.seconds(float(hit), float(job.tokens - hit)))
        if config.ranks_by_cost:
            job.rank = int(self.remaining_s.argmin())
        else:
            job.rank = self._turn
            self._turn = (self._turn + 1) % config.num_ranks
        self.queues[job.rank].append(job)
        self.remaining_s[job.rank] += job.remaining_s

    def begin(self, now_s: float) -> PrefillStep | None:
        """Plans a step: each rank fills its time, or its tokens, with the heads of its queue.

        Args:
            now_s: The time.

        Returns:
            The step, or None when nothing waits.
        """
        if self.step is not None or not any(self.queues):
            return None
        rank_s = np.zeros(self.config.num_ranks)
        chunks: list[tuple[PrefillJob, int]] = []
        for rank, queue in enumerate(self.queues):
            rank_s[rank] = self._fill(queue, chunks)
        duration = self.config.cost.step_s + float(rank_s.max())
        self.step = PrefillStep(now_s, duration, rank_s, chunks)
        return self.step

    def end(self) -> tuple[list[PrefillJob], list[Hashable], list[Hashable]]:
        """Ends the running step.

        Returns:
            The prompts that are done, and the blocks that the cache gained and gave up.
        """
        step = self.step
        if step is None:
            return [], [], []
        self.step = None
        self.busy_s += step.duration_s
        finished: list[PrefillJob] = []
        stored: list[Hashable] = []
        removed: list[Hashable] = []
        cost = self.config.cost
        for job, tokens in step.chunks:
            spent = float(cost.seconds(float(job.done_tokens), float(tokens)))
            job.done_tokens += tokens
            left = 0.0 if job.done_tokens >= job.tokens else max(0.0, job.remaining_s - spent)
            self.remaining_s[job.rank] += left - job.remaining_s
            job.remaining_s = left
            if self.config.cache is not CacheKind.NONE:
                new, gone = self.cache.use(job.keys[: job.done_tokens // self.config.block_tokens])
                stored += new
                removed += gone
            if job.done_tokens >= job.tokens:
                finished.append(job)
                self.queues[job.rank].remove(job)
        for rank, queue in enumerate(self.queues):
            if not queue:
                self.remaining_s[rank] = 0.0  # no drift from rounding
        return finished, stored, removed

    def fail(self) -> list[PrefillJob]:
        """Dies.

        Returns:
            The prompts that it held; they must be routed again.
        """
        jobs = [job for queue in self.queues for job in queue]
        for queue in self.queues:
            queue.clear()
        self.remaining_s[:] = 0.0
        self.step = None
        if self.config.cache is CacheKind.ENGINE:
            self.cache.clear()
        return jobs

    def _lookup(self, job: PrefillJob) -> int:
        if self.config.cache is CacheKind.NONE:
            return 0
        return min(self.cache.hit(job.keys) * self.config.block_tokens, job.tokens - 1)

    def _fill(self, queue: deque[PrefillJob], chunks: list[tuple[PrefillJob, int]]) -> float:
        config = self.config
        cap = config.chunk_tokens
        time_left = math.inf if config.chunk_s is None else config.chunk_s
        spent = 0.0
        for job in queue:
            if cap < 1:
                break
            if job.hit_tokens < 0:  # looked up again: earlier prompts may have left their blocks
                hit = job.hit_tokens = self._lookup(job)
                job.done_tokens = hit
                fresh = float(config.cost.seconds(float(hit), float(job.tokens - hit)))
                self.remaining_s[job.rank] += fresh - job.remaining_s
                job.remaining_s = fresh
            tokens = self._chunk(job, cap, time_left, is_first=spent == 0.0)
            if tokens < 1:
                break
            seconds = float(config.cost.seconds(float(job.done_tokens), float(tokens)))
            chunks.append((job, tokens))
            spent += seconds
            time_left -= seconds
            cap -= tokens
            if job.done_tokens + tokens < job.tokens:
                break
        return spent

    def _chunk(self, job: PrefillJob, cap: int, time_left: float, *, is_first: bool) -> int:
        config, left = self.config, job.tokens - job.done_tokens
        tokens = min(left, cap)
        if time_left < math.inf:
            tokens = config.cost.largest(float(job.done_tokens), time_left, tokens)
        if tokens < left:
            tokens -= tokens % config.chunk_multiple
            if tokens == 0 and is_first:  # a target below one multiple must not stop the queue
                tokens = min(left, cap, config.chunk_multiple)
        return tokens
