"""Simulated engines that decode: ranks that step together, requests that grow by a token a step."""

from __future__ import annotations

import heapq
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from deepinfer.balancers.simulator.config import DecodeConfig

__all__ = ["DecodeEngine", "DecodeJob"]


@dataclass(slots=True)
class DecodeJob:
    """One request that decodes.

    Attributes:
        index: Place of the request in the trace.
        context_tokens: Tokens in its cache when it came.
        tokens_left: Tokens that it still makes.
        rank: The rank that runs it.
        begin_step: Step of the engine at which it came.
    """

    index: int
    context_tokens: int
    tokens_left: int
    rank: int = -1
    begin_step: int = 0


@dataclass(slots=True)
class DecodeEngine:
    """Ranks in lockstep.

    Attributes:
        config: What it is made of.
        counts: Requests of each rank, shape [ranks], int64.
        kv_tokens: Cached tokens of each rank, shape [ranks], int64.
        num_steps: Steps so far.
        busy_s: Seconds in steps.
        mean_s: Sum over the steps of the mean rank's seconds; divided by `busy_s` it says how even the ranks are.
        stepping: Whether a step is running.
    """

    config: DecodeConfig
    num_steps: int = 0
    busy_s: float = 0.0
    mean_s: float = 0.0
    stepping: bool = False
    counts: npt.NDArray[np.int64] = field(init=False)
    kv_tokens: npt.NDArray[np.int64] = field(init=False)
    _late: npt.NDArray[np.int64] = field(init=False)
    _ends: list[tuple[int, int]] = field(default_factory=list)
    _jobs: dict[int, DecodeJob] = field(default_factory=dict)

    def __post_init__(self) -> None:
        """Makes the columns."""
        self.counts = np.zeros(self.config.num_ranks, np.int64)
        self.kv_tokens = np.zeros(self.config.num_ranks, np.int64)
        self._late = np.zeros(self.config.num_ranks, np.int64)

    @property
    def num_jobs(self) -> int:
        """Requests that it holds."""
        return len(self._jobs)

    def add(self, job: DecodeJob, rank: int) -> None:
        """Takes a request; it makes its first token in the next step that begins.

        Args:
            job: The request, with at least one token left.
            rank: The rank that runs it.
        """
        job.rank = rank
        job.begin_step = self.num_steps + self.stepping
        self._jobs[job.index] = job
        heapq.heappush(self._ends, (job.begin_step + job.tokens_left, job.index))
        self.counts[rank] += 1
        self._late[rank] += self.stepping
        self.kv_tokens[rank] += job.context_tokens

    def begin(self) -> float | None:
        """Begins a step.

        Returns:
            Its seconds, or None when there is nothing to run or a step is running.
        """
        if self.stepping or not self._jobs:
            return None
        config = self.config
        rank_s = config.step_s + config.request_s * self.counts + config.kv_token_s * self.kv_tokens
        seconds = float(rank_s.max())
        self.busy_s += seconds
        self.mean_s += float(rank_s.mean())
        self.stepping = True
        return seconds

    def end(self) -> list[DecodeJob]:
        """Ends the running step: every request that was in it has one token more.

        Returns:
            The requests that are done.
        """
        self.stepping = False
        self.num_steps += 1
        self.kv_tokens += self.counts - self._late  # who came during the step had no part in it
        self._late[:] = 0
        done = []
        while self._ends and self._ends[0][0] <= self.num_steps:
            end, index = heapq.heappop(self._ends)
            job = self._jobs.get(index)
            if job is None or job.begin_step + job.tokens_left != end:
                continue
            del self._jobs[index]
            self.counts[job.rank] -= 1
            self.kv_tokens[job.rank] -= job.context_tokens + job.tokens_left
            done.append(job)
        return done

    def fail(self) -> list[tuple[DecodeJob, int]]:
        """Dies.

        Returns:
            The requests that it held, each with the tokens that it had made there.
        """
        lost = [
            (job, max(0, min(job.tokens_left, self.num_steps - job.begin_step)))
            for job in self._jobs.values()
        ]
        self._jobs.clear()
        self._ends.clear()
        self.counts[:] = 0
        self.kv_tokens[:] = 0
        self._late[:] = 0
        self.stepping = False
        return lost
