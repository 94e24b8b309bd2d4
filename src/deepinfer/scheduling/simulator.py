"""Runs a scheduler on a virtual clock, with a cost model in the place of a model."""

from __future__ import annotations

from array import array
from collections import deque
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np

from deepinfer.core import _checks as checks
from deepinfer.core.errors import ConfigError, InvariantBroken, RequestError
from deepinfer.core.plan import ROLES, RowResults, RowRole, StepPlan, StepResult
from deepinfer.core.protocols import Scheduler
from deepinfer.core.types import Request
from deepinfer.scheduling.simulation import RequestTiming, SimulatedStep, Simulation
from deepinfer.scheduling.step_work import StepWork

__all__ = ["Simulator", "StepTimer"]

_REPLAY = ROLES.index(RowRole.REPLAY)
_LAST_PREFILL = ROLES.index(RowRole.LAST_PREFILL)


class StepTimer(Protocol):
    """Says how long a step takes; `StepTimeModel` is one."""

    def seconds(self, work: StepWork) -> float:
        """Seconds of a step."""
        ...


class Simulator:
    """Drives a scheduler through a trace as an engine would, only that time is computed and not spent.

    Scheduler and cache manager are the real ones, so admission, prefix hits, evictions and preemptions are what an
    engine would do with the same requests at the same times. What a step takes comes from a cost model, and the
    tokens are made up: requests end after `max_tokens`, unless they name token 0 as a stop token.

    Args:
        scheduler: A fresh scheduler with its cache manager.
        cost: What steps cost; the truth, as against the model that a chunk policy may have.
        async_depth: Steps launched before the results of the one before are applied: 0, or 1 to plan while the device
            runs. It must not exceed what the scheduler was made for.
        host_s: Seconds that a step costs on the host, where they are not hidden behind the device: at depth 0.
        noise: Standard deviation of the logarithm of a random factor on the duration of steps.
        acceptance: Probability that a draft is accepted, given that those before it were.
        seed: Seed of noise and acceptance. Equal arguments give equal simulations.
        keep_steps: Whether the plans are kept, for charts; long traces need much memory for them.

    Raises:
        ConfigError: A number is out of range.
    """

    def __init__(
        self,
        scheduler: Scheduler,
        cost: StepTimer,
        *,
        async_depth: int = 0,
        host_s: float = 0.0,
        noise: float = 0.0,
        acceptance: float = 0.0,
        seed: int = 0,
        keep_steps: bool = True,
    ) -> None:
        self.scheduler = scheduler
        self.cost = cost
        self.async_depth = checks.check_int("async_depth", async_depth, 0, 1, ConfigError)
        self.host_s = checks.check_float("host_s", host_s, 0.0, 1e6, ConfigError)
        self.noise = checks.check_float("noise", noise, 0.0, 10.0, ConfigError)
        self.acceptance = checks.check_float("acceptance", acceptance, 0.0, 1.0, ConfigError)
        self.seed = checks.check_int("seed", seed, 0, 2**64 - 1, ConfigError)
        self.keep_steps = checks.check_bool("keep_steps", keep_steps, ConfigError)

    def run(self, requests: Iterable[Request], *, max_time_s: float | None = None) -> Simulation:
        """Runs a trace to its end.

        Args:
            requests: Requests in order of arrival, taken one at a time as their time comes.
            max_time_s: Virtual time after which no further step is launched; None runs until every request ended.

        Returns:
            What happened.

        Raises:
            ConfigError: A request arrives before the one in front of it.
            InvariantBroken: The scheduler plans nothing although requests are left.
        """
        return _Run(self, requests, max_time_s).finish()


@dataclass(slots=True)
class _Books:
    arrival_s: float
    prompt_tokens: int
    cached_tokens: int = -1
    replayed_tokens: int = 0
    first_token_s: float | None = None
    last_token_s: float = 0.0
    finish_s: float | None = None
    output_tokens: int = 0
    preemptions: int = 0

    def timing(self, rid: str) -> RequestTiming:
        return RequestTiming(
            rid=rid,
            arrival_s=self.arrival_s,
            prompt_tokens=self.prompt_tokens,
            cached_tokens=max(0, self.cached_tokens),
            replayed_tokens=self.replayed_tokens,
            output_tokens=self.output_tokens,
            first_token_s=self.first_token_s,
            finish_s=self.finish_s,
            preemptions=self.preemptions,
        )


@dataclass(slots=True)
class _Totals:
    steps: int = 0
    busy_s: float = 0.0
    longest_step_s: float = 0.0
    prefill_tokens: int = 0
    decode_tokens: int = 0
    rejected: list[str] = field(default_factory=list)


class _Run:
    """One run of a simulator."""

    def __init__(
        self, simulator: Simulator, requests: Iterable[Request], max_time_s: float | None
    ) -> None:
        self.simulator = simulator
        self.scheduler = simulator.scheduler
        self.arrivals = _ordered(requests)
        self.next = next(self.arrivals, None)
        self.max_time_s = float("inf") if max_time_s is None else max_time_s
        self.random = np.random.default_rng(simulator.seed)
        self.now = self.start_s = self.next.arrival_s if self.next else 0.0
        self.device_free_s = self.now
        self.in_flight: deque[tuple[StepPlan, float, float]] = deque()
        self.books: dict[str, _Books] = {}
        self.gaps = array("d")
        self.steps: list[SimulatedStep] = []
        self.totals = _Totals()

    def finish(self) -> Simulation:
        """Runs to the end."""
        while True:
            while len(self.in_flight) <= self.simulator.async_depth and self.launch():
                pass
            if self.in_flight:
                self.apply()
            elif self.now >= self.max_time_s:
                break
            elif self.next is not None:
                self.now = max(self.now, self.next.arrival_s)
            elif self.scheduler.has_unfinished:
                raise InvariantBroken(
                    f"{self.scheduler!r} has requests left, none is in flight, and it plans nothing."
                )
            else:
                break
        totals = self.totals
        return Simulation(
            requests=tuple(books.timing(rid) for rid, books in self.books.items()),
            rejected=tuple(totals.rejected),
            steps=tuple(self.steps),
            inter_token_s=np.frombuffer(self.gaps) if self.gaps else np.zeros(0),
            num_steps=totals.steps,
            start_s=self.start_s,
            end_s=self.now,
            busy_s=totals.busy_s,
            longest_step_s=totals.longest_step_s,
            prefill_tokens=totals.prefill_tokens,
            decode_tokens=totals.decode_tokens,
        )

    def launch(self) -> bool:
        """Launches the next step; False when there is none."""
        if self.now >= self.max_time_s:
            return False
        self.admit()
        plan = self.scheduler.plan(self.now)
        if plan is None:
            return False
        plan = self.scheduler.launch(plan) or plan
        work = StepWork.of_plan(plan)
        simulator = self.simulator
        seconds = simulator.cost.seconds(work)
        if simulator.noise:
            seconds *= float(np.exp(simulator.noise * self.random.standard_normal()))
        if not simulator.async_depth:
            seconds += simulator.host_s
        start = max(self.now, self.device_free_s)
        self.device_free_s = start + seconds
        self.in_flight.append((plan, start, self.device_free_s))
        totals = self.totals
        totals.steps += 1
        totals.busy_s += seconds
        totals.longest_step_s = max(totals.longest_step_s, seconds)
        self.note_rows(plan)
        if simulator.keep_steps:
            self.steps.append(SimulatedStep(plan, start, self.device_free_s))
        return True

    def admit(self) -> None:
        """Hands over the requests that have arrived."""
        while self.next is not None and self.next.arrival_s <= self.now:
            request = self.next
            self.next = next(self.arrivals, None)
            try:
                self.scheduler.add(request)
            except RequestError:
                self.totals.rejected.append(request.rid)
            else:
                self.books[request.rid] = _Books(request.arrival_s, request.num_prompt_tokens)

    def note_rows(self, plan: StepPlan) -> None:
        """Counts the rows of a launched plan."""
        for rid in plan.preempted:
            self.books[rid].preemptions += 1
        rows = plan.rows
        prompts = np.flatnonzero(rows.roles <= _LAST_PREFILL)
        in_prompts = 0
        for index in prompts.tolist():
            books = self.books[rows.rids[index]]
            count = int(rows.num_tokens[index])
            if rows.roles[index] == _REPLAY:
                books.replayed_tokens += count
            if books.cached_tokens < 0:
                books.cached_tokens = int(rows.pool_starts[index])
            in_prompts += count
        self.totals.prefill_tokens += in_prompts
        self.totals.decode_tokens += int(rows.num_tokens.sum()) - in_prompts

    def apply(self) -> None:
        """Settles the oldest step in flight."""
        plan, start, end = self.in_flight.popleft()
        self.now = end
        for progress in self.scheduler.apply(self.result(plan, end - start)):
            count = len(progress.token_ids)
            books = self.books[progress.request.rid]
            if count:
                books.output_tokens += count
                if books.first_token_s is None:
                    books.first_token_s = end
                else:
                    self.gaps.append(end - books.last_token_s)
                if count > 1:
                    self.gaps.extend([0.0] * (count - 1))
                books.last_token_s = end
            if progress.finish_reason is not None:
                books.finish_s = end

    def result(self, plan: StepPlan, seconds: float) -> StepResult:
        """Token 0 for each row that samples, and accepted drafts as they are drawn."""
        rows = plan.rows
        sampled = (rows.num_logits > 0).astype(np.int64)
        accepted = np.zeros(len(rows), np.int64)
        if rows.num_drafts.any() and self.simulator.acceptance:
            longest = int(rows.num_drafts.max())
            kept = self.random.random((len(rows), longest)) < self.simulator.acceptance
            accepted = np.minimum(np.cumprod(kept, axis=1).sum(axis=1), rows.num_drafts)
        counts = sampled + accepted
        return StepResult(
            step=plan.step,
            rows=RowResults(
                rows,
                np.zeros(int(counts.sum()), np.int64),
                num_token_ids=counts,
                num_accepted=accepted,
            ),
            duration_s=seconds,
        )


def _ordered(requests: Iterable[Request]) -> Iterator[Request]:
    last: Any = None
    for request in requests:
        if last is not None and request.arrival_s < last.arrival_s:
            raise ConfigError(
                f"{request.rid!r} arrives at {request.arrival_s} s, after {last.rid!r} at "
                f"{last.arrival_s} s; sort the requests by arrival_s.",
                field="requests",
                value=request.arrival_s,
            )
        yield request
        last = request
