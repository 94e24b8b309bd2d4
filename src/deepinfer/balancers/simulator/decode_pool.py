"""The decode half of a simulated fleet: its engines, the router over their ranks, and who waits for room."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

import numpy as np
import numpy.typing as npt

from deepinfer.balancers.base import Router, RouteRequest, WorkerSnapshot
from deepinfer.balancers.fleet import Fleet
from deepinfer.balancers.simulator.books import Books
from deepinfer.balancers.simulator.config import DecodeConfig, FleetChangeKind
from deepinfer.balancers.simulator.decode_engine import DecodeEngine, DecodeJob
from deepinfer.core.errors import InvariantBroken

__all__ = ["DecodePool"]


class DecodePool:
    """Engines in lockstep by themselves, and one queue before all of them.

    Args:
        config: What an engine is made of.
        router: Chooses among all ranks; row = engine * num_ranks + rank.
        at: Puts an event into the simulation's queue.
        books: Where the ends of requests are written.
        lost: Called with a request and the tokens that it made when its engine dies.
    """

    def __init__(
        self,
        config: DecodeConfig,
        router: Router,
        at: Callable[[float, Callable[[], None]], None],
        books: Books,
        lost: Callable[[int, int], None],
    ) -> None:
        self.config = config
        self.router = router
        self.at = at
        self.books = books
        self.lost = lost
        self.now_s = 0.0
        self.engines = [DecodeEngine(config) for _ in range(config.num_engines)]
        self.epochs = [0] * config.num_engines
        self.waiting: deque[DecodeJob] = deque()
        self.fleet = Fleet(
            WorkerSnapshot(
                name=f"decode{engine}.{rank}",
                capacity_tokens=config.capacity_tokens,
                max_requests=config.max_requests,
            )
            for engine in range(config.num_engines)
            for rank in range(config.num_ranks)
        )
        self._uneven = np.zeros(
            3
        )  # seconds, and seconds times max over mean of requests and of tokens

    def arrive(self, index: int, context_tokens: int, tokens_left: int) -> None:
        """A request's cache entries are here.

        Args:
            index: Its place in the trace.
            context_tokens: Tokens in its cache.
            tokens_left: Tokens that it still makes.
        """
        self.waiting.append(DecodeJob(index, context_tokens, tokens_left))
        self.admit()

    def admit(self) -> None:
        """Places whoever fits, first come first served; whoever can never fit is left unfinished and holds up nobody."""
        while self.waiting:
            job = self.waiting[0]
            request = RouteRequest(
                rid=str(job.index),
                prompt_tokens=job.context_tokens,
                output_tokens=float(job.tokens_left),
            )
            target = self.router.decide(request, self.fleet).target
            if target is None:
                if not self._never_fits(job):
                    return
                self.waiting.popleft()
                continue
            if not 0 <= target < len(self.fleet) or not self.fleet.ready[target]:
                raise InvariantBroken(
                    f"the decode router chose rank {target}, which is not ready; see Router for what it must keep."
                )
            self.waiting.popleft()
            number, rank = divmod(target, self.config.num_ranks)
            self.engines[number].add(job, rank)
            self._show(number)
            self.begin(number)

    def begin(self, number: int) -> None:
        """Begins a step of an engine, if it is idle and has something to run.

        Args:
            number: The engine.
        """
        engine = self.engines[number]
        seconds = engine.begin()
        if seconds is None:
            return
        counts, tokens = engine.counts, engine.kv_tokens
        mean = max(float(counts.mean()), 1e-9)
        kv_mean = max(float(tokens.mean()), 1e-9)
        self._uneven += (
            seconds,
            seconds * float(counts.max()) / mean,
            seconds * float(tokens.max()) / kv_mean,
        )
        epoch = self.epochs[number]
        self.at(self.now_s + seconds, lambda: self.end(number, epoch))

    def end(self, number: int, epoch: int) -> None:
        """Ends a step of an engine.

        Args:
            number: The engine.
            epoch: Its life when the step began.
        """
        if epoch != self.epochs[number]:
            return
        for job in self.engines[number].end():
            self.books.finish(job.index, self.now_s)
        self._show(number)
        self.admit()
        self.begin(number)

    def change(self, number: int, kind: FleetChangeKind) -> None:
        """Something happens to an engine.

        Args:
            number: The engine.
            kind: What.
        """
        rows = slice(number * self.config.num_ranks, (number + 1) * self.config.num_ranks)
        self.fleet.ready[rows] = kind is FleetChangeKind.JOIN
        if kind is FleetChangeKind.FAIL:
            self.epochs[number] += 1
            for job, made in self.engines[number].fail():
                self.lost(job.index, made)
            self._show(number)
        self.admit()

    def _never_fits(self, job: DecodeJob) -> bool:
        """Whether a request that nobody takes now is one that nobody will ever take."""
        if job.context_tokens + job.tokens_left > self.config.capacity_tokens:
            return True
        return bool(self.fleet.ready.all()) and not any(e.num_jobs for e in self.engines)

    @property
    def efficiency(self) -> float:
        """Mean over max of the ranks' seconds, over all steps."""
        busy = sum(engine.busy_s for engine in self.engines)
        return sum(engine.mean_s for engine in self.engines) / busy if busy else 1.0

    @property
    def busy_s(self) -> npt.NDArray[np.float64]:
        """Seconds in steps of each engine."""
        return np.array([engine.busy_s for engine in self.engines])

    @property
    def max_requests(self) -> float:
        """Requests of the fullest rank over the mean rank's, averaged over time."""
        return float(self._uneven[1] / self._uneven[0]) if self._uneven[0] else 1.0

    @property
    def max_kv(self) -> float:
        """Cached tokens of the fullest rank over the mean rank's, averaged over time."""
        return float(self._uneven[2] / self._uneven[0]) if self._uneven[0] else 1.0

    def _show(self, number: int) -> None:
        rows = slice(number * self.config.num_ranks, (number + 1) * self.config.num_ranks)
        self.fleet.num_requests[rows] = self.engines[number].counts
        self.fleet.kv_tokens[rows] = self.engines[number].kv_tokens
