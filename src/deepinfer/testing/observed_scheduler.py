"""A scheduler that tells others of every call."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

from deepinfer.core.plan import LoadSnapshot, StepPlan, StepResult
from deepinfer.core.types import Request

__all__ = ["ObservedScheduler", "SchedulerObserver"]


class SchedulerObserver(Protocol):
    """Is told of every call of an `ObservedScheduler`, after it returned; a call that raises is not reported."""

    def on_call(self, name: str, argument: Any, result: Any) -> None:
        """Takes one call.

        Args:
            name: Name of the method: "add", "abort", "preempt", "reset_prefix_cache", "plan", "launch", "apply",
                "cancel" or "reset".
            argument: Its argument, or None.
            result: What it returned.
        """
        ...


class ObservedScheduler:
    """Passes every call on to a scheduler, and tells observers.

    An engine, or a loop of your own, drives it as it would drive the scheduler itself. What it tells is what a runner
    could see as well, so observers can keep books of their own and compare.

    Args:
        scheduler: The scheduler.
        observers: Who is told, in order.

    Attributes:
        inner: The scheduler.
        observers: Who is told; may be changed at any time.

    Examples:
        >>> from deepinfer import Engine
        >>> from deepinfer.scheduling import Scheduler
        >>> from deepinfer.testing import ToyModel, ToyTokenizer
        >>> def make(limits, cache):
        ...     return ObservedScheduler(Scheduler(limits, cache))
        >>> with Engine(model=ToyModel(), tokenizer=ToyTokenizer(), scheduler=make) as engine:
        ...     len(engine.generate("abc", {"max_tokens": 3, "ignore_eos": True})[0].token_ids)
        3
    """

    def __init__(self, scheduler: Any, *observers: SchedulerObserver) -> None:
        self.inner = scheduler
        self.observers = list(observers)

    @property
    def has_unfinished(self) -> bool:
        """Whether any request waits, runs, or is in flight."""
        return bool(self.inner.has_unfinished)

    def add(self, request: Request) -> None:
        """Takes a request.

        Args:
            request: The request.
        """
        self.inner.add(request)
        self._tell("add", request)

    def abort(self, rid: str) -> None:
        """Ends a request.

        Args:
            rid: Its id.
        """
        self.inner.abort(rid)
        self._tell("abort", rid)

    def preempt(self, rid: str) -> None:
        """Takes the slot of a running request.

        Args:
            rid: Its id.
        """
        self.inner.preempt(rid)
        self._tell("preempt", rid)

    def reset_prefix_cache(self) -> None:
        """Runs every request again without what is cached."""
        self.inner.reset_prefix_cache()
        self._tell("reset_prefix_cache")

    def plan(self, now: float) -> StepPlan | None:
        """Makes the next plan.

        Args:
            now: Time in seconds.

        Returns:
            The plan, or None.
        """
        plan: StepPlan | None = self.inner.plan(now)
        self._tell("plan", now, plan)
        return plan

    def launch(self, plan: StepPlan) -> StepPlan:
        """Commits to a plan.

        Args:
            plan: The plan.

        Returns:
            The plan to run.
        """
        launched: StepPlan = self.inner.launch(plan)
        self._tell("launch", plan, launched)
        return launched

    def apply(self, result: StepResult) -> Sequence[Any]:
        """Settles the result of the oldest launched step.

        Args:
            result: The result.

        Returns:
            What changed.
        """
        progress: Sequence[Any] = self.inner.apply(result)
        self._tell("apply", result, progress)
        return progress

    def cancel(self, step: int) -> None:
        """Takes a launched step back.

        Args:
            step: Its id.
        """
        self.inner.cancel(step)
        self._tell("cancel", step)

    def reset(self) -> None:
        """Forgets every request."""
        self.inner.reset()
        self._tell("reset")

    def check(self) -> None:
        """Walks the scheduler's own books."""
        self.inner.check()

    def snapshot(self) -> LoadSnapshot:
        """How busy the engine is."""
        load: LoadSnapshot = self.inner.snapshot()
        return load

    def _tell(self, name: str, argument: Any = None, result: Any = None) -> None:
        for observer in tuple(self.observers):
            observer.on_call(name, argument, result)

    def __getattr__(self, name: str) -> Any:
        if name == "inner":  # while it is being made or copied
            raise AttributeError(name)
        return getattr(self.inner, name)

    def __repr__(self) -> str:
        return f"ObservedScheduler({self.inner!r}, {len(self.observers)} observers)"
