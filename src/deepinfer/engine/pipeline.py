"""Steps in flight: planned, launched, sampled and applied, at most one ahead of its predecessor's results."""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from deepinfer.core.clock import Clock
from deepinfer.core.errors import InvariantBroken
from deepinfer.core.plan import StepPlan, StepResult
from deepinfer.core.types import Request
from deepinfer.engine.constraints import GrammarMasks
from deepinfer.engine.faults import failed_result, with_row_errors
from deepinfer.engine.parts import EngineRunner, EngineScheduler
from deepinfer.scheduling import Progress

__all__ = ["Flight", "StepPipeline"]

_LOG = logging.getLogger("deepinfer.engine")


@dataclass(slots=True, eq=False)
class Flight:
    """A launched step without an applied result.

    Attributes:
        plan: Its plan.
        requests: The requests of its rows by id.
        handle: The runner's handle, once the forward pass was launched.
        row_errors: What kept a grammar mask from being made, by request id.
        error: Why the step failed, or None.
        launched_s: When the plan was made, on the engine's clock, in seconds.
        preempted: Requests that lost their slot to it, with the tokens that they have to run again.
        spans: When each part of the step began and ended, by name, in seconds of `time.perf_counter`.
        result: Its result, once collected.
    """

    plan: StepPlan
    requests: Mapping[str, Request]
    handle: Any = None
    row_errors: Mapping[str, Exception] = field(default_factory=dict)
    error: Exception | None = None
    launched_s: float = 0.0
    preempted: tuple[tuple[str, int], ...] = ()
    spans: dict[str, tuple[float, float]] = field(default_factory=dict)
    result: StepResult | None = None

    @property
    def runner_s(self) -> float:
        """Seconds that the host spent in the runner's calls."""
        return sum(self._seconds(part) for part in ("forward", "sample", "collect"))

    @property
    def wall_s(self) -> float:
        """Seconds that the host spent on this step in all."""
        return self.runner_s + sum(self._seconds(part) for part in ("plan", "mask", "apply"))

    def _seconds(self, part: str) -> float:
        begin, end = self.spans.get(part, (0.0, 0.0))
        return end - begin


class StepPipeline:
    """Runs steps in order, with up to `depth` of them ahead of their results.

    At depth 0 a step is planned, launched, sampled, collected and applied before the next is planned. At depth 1 step
    k + 1 is planned and its forward pass launched before step k is collected and applied; only then is it sampled, so
    that masks, penalties and processors see every token before theirs. Both give the same tokens.

    Args:
        scheduler: Plans.
        runner: Runs plans.
        masks: Grammar states.
        clock: Time of plans.
        depth: Steps ahead, 0 or 1.
        on_applied: Called with each flight, what it changed, and when its result began to be applied, once that
            is done.

    Attributes:
        flights: Steps in flight, oldest first.
        applying: The step whose result is being applied, or None.
        planned: The plan that was made last.
    """

    def __init__(
        self,
        scheduler: EngineScheduler,
        runner: EngineRunner,
        masks: GrammarMasks,
        clock: Clock,
        depth: int,
        on_applied: Callable[[Flight, Sequence[Progress], float], None],
    ) -> None:
        self.flights: deque[Flight] = deque()
        self.applying: Flight | None = None
        self.planned: StepPlan | None = None
        self._scheduler = scheduler
        self._runner = runner
        self._masks = masks
        self._clock = clock
        self._depth = depth
        self._on_applied = on_applied

    def advance(self, requests: Mapping[str, Request]) -> bool:
        """Launches the next step, and applies the results that are due.

        Args:
            requests: Every unfinished request by id.

        Returns:
            False when there was nothing to plan and nothing in flight.

        Raises:
            Exception: The scheduler failed; its books cannot be trusted any more.
        """
        new = self._launch(requests)
        if new is None and not self.flights:
            return False
        while self.flights and self.flights[0] is not new:
            self._finish(self.flights[0])
        if new is not None and self.flights:  # none are left when a sink closed the engine
            self._sample(new)
            if new.error is not None or not self._depth:
                self._finish(new)
        return True

    def drain(self) -> None:
        """Collects and applies everything in flight."""
        while self.flights:
            self._finish(self.flights[0])

    def cancel(self) -> Flight | None:
        """Takes back everything in flight, after an interrupt.

        Returns:
            The step whose result was being applied, or None.
        """
        applying, self.applying = self.applying, None
        steps = [flight.plan.step for flight in self.flights]
        for flight in self.flights:
            self._forget_saves(flight.plan)
        if self.planned is not None and self.planned.step not in steps:
            steps.append(self.planned.step)  # it may be launched without a flight of its own yet
            forget = getattr(self._scheduler, "reset_prefix_cache", None)
            if forget is not None:  # nobody knows its copies
                forget()
        self.clear()
        for step in steps:
            self._scheduler.cancel(step)
        return applying

    def clear(self) -> None:
        """Forgets everything in flight."""
        self.flights.clear()
        self.planned = None

    def _launch(self, requests: Mapping[str, Request]) -> Flight | None:
        began, now = time.perf_counter(), self._clock.now()
        plan = self._scheduler.plan(now)
        if plan is None:
            return None
        self.planned = plan
        lost = tuple((rid, self._settled(rid)) for rid in plan.preempted)
        launched = self._scheduler.launch(plan)
        if launched is None:
            raise InvariantBroken(
                f"launch of {type(self._scheduler).__name__} returned nothing; it must return the plan to run."
            )
        plan = launched
        flight = Flight(plan, {rid: requests[rid] for rid in plan.rows.rids}, launched_s=now)
        flight.preempted = lost
        self.flights.append(flight)
        self.planned = None
        forward = time.perf_counter()
        flight.spans["plan"] = (began, forward)
        try:
            flight.handle = self._runner.forward(plan, flight.requests)
        except Exception as error:
            self._forget_saves(plan)
            self._fail(flight, error)
        flight.spans["forward"] = (forward, time.perf_counter())
        return flight

    def _sample(self, flight: Flight) -> None:
        if flight.error is not None:
            return
        began = time.perf_counter()
        try:
            drafts = getattr(flight.handle, "drafts", None)
            masks, flight.row_errors = self._masks.masks(flight.plan, flight.requests, drafts)
            flight.spans["mask"] = (began, time.perf_counter())
            began = flight.spans["mask"][1]
            flight.handle = self._runner.sample(flight.handle, masks)
        except Exception as error:
            self._fail(flight, error)
        flight.spans["sample"] = (began, time.perf_counter())

    def _finish(self, flight: Flight) -> None:
        """Collects and applies the oldest step in flight."""
        began = time.perf_counter()
        result = None
        if flight.error is None:
            try:
                result = self._runner.collect(flight.handle)
            except Exception as error:
                self._fail(flight, error)
        if result is None:
            result = failed_result(flight.plan, flight.error)
        elif flight.row_errors:
            result = with_row_errors(result, flight.row_errors)
        flight.result = result
        apply = time.perf_counter()
        flight.spans["collect"] = (began, apply)
        self.applying = flight
        progress = self._scheduler.apply(result)
        self.flights.popleft()
        self._on_applied(flight, progress, apply)
        self.applying = None

    def _forget_saves(self, plan: StepPlan) -> None:
        """The cache manager counts on the saves of every launched plan, and this one did not run to its end."""
        forget = getattr(getattr(self._runner, "host_tier", None), "forget_saves", None)
        if forget is not None and plan.copies:
            forget(plan.copies)

    def _settled(self, rid: str) -> int:
        look_up = getattr(self._scheduler, "sequence", None)
        sequence = look_up(rid) if look_up is not None else None
        return 0 if sequence is None else int(sequence.settled)

    @staticmethod
    def _fail(flight: Flight, error: Exception) -> None:
        flight.error = error
        _LOG.warning("step %d failed and ends its requests", flight.plan.step, exc_info=error)

    def __repr__(self) -> str:
        return f"StepPipeline(depth={self._depth}, {len(self.flights)} in flight)"
