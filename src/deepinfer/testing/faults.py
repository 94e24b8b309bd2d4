"""Faults on purpose: calls that raise, copies that fail, clocks that jump, sinks that raise, results that come late."""

from __future__ import annotations

import dataclasses
import random
from collections import Counter
from collections.abc import Callable, Mapping
from typing import Any

from deepinfer.core.clock import FakeClock
from deepinfer.core.plan import CacheCopy, CopyKind, StepPlan, StepResult
from deepinfer.core.types import OutputDelta, Request

__all__ = [
    "SITES",
    "FaultInjector",
    "FaultyRunner",
    "JumpingClock",
    "PlantedFault",
    "PlantedInterrupt",
    "RaisingSink",
    "plant",
]

SITES = (
    "forward",
    "forward_done",
    "sample",
    "sample_done",
    "collect",
    "collect_done",
    "save",
    "load",
)
"""Where a `FaultInjector` is asked: before and after each call of a runner, and before each copy."""

Action = BaseException | Callable[[], Any]


class PlantedFault(RuntimeError):
    """A fault that was asked for."""


class PlantedInterrupt(KeyboardInterrupt):
    """An interrupt that was asked for, so that a real one can be told from it."""


class FaultInjector:
    """Decides at which visit of which site something happens.

    The same seed, rates and order of visits give the same faults. Each site draws from a stream of its own, so that
    changing the rate of one does not move the faults of another.

    Args:
        seed: Seed of the draws.
        rates: Probability of a `PlantedFault` at each visit, by site; sites that are missing have none.

    Attributes:
        visits: Visits so far, by site.
        fired: What happened: site, and which visit of it, from 0.

    Examples:
        >>> injector = FaultInjector()
        >>> injector.arm("collect", after=1)
        >>> injector.visit("collect")
        >>> injector.visit("collect")
        Traceback (most recent call last):
            ...
        deepinfer.testing.faults.PlantedFault: planted at visit 1 of collect
        >>> injector.fired
        [('collect', 1)]
    """

    def __init__(self, seed: int = 0, rates: Mapping[str, float] | None = None) -> None:
        self.visits: Counter[str] = Counter()
        self.fired: list[tuple[str, int]] = []
        self._seed = seed
        self._rates = dict(rates or {})
        self._armed: dict[str, dict[int, Action | None]] = {}
        self._streams: dict[str, random.Random] = {}

    def arm(self, site: str, action: Action | None = None, *, after: int = 0) -> None:
        """Makes something happen at a later visit.

        Args:
            site: One of `SITES`, or a name of your own.
            action: What is raised or, when it is not an exception, called; None for a `PlantedFault`.
            after: Visits to let pass first.
        """
        self._armed.setdefault(site, {})[self.visits[site] + after] = action

    def disarm(self) -> None:
        """Forgets what was armed and has not happened."""
        self._armed.clear()

    def visit(self, site: str) -> None:
        """Tells that a site is passed.

        Args:
            site: Its name.

        Raises:
            PlantedFault: When the draw says so, or it was armed without an action.
            BaseException: The exception that was armed, or what the armed function raises.
        """
        number = self.visits[site]
        self.visits[site] += 1
        armed = self._armed.get(site)
        if armed and number in armed:
            action = armed.pop(number)
            self.fired.append((site, number))
            if action is None:
                raise PlantedFault(f"planted at visit {number} of {site}")
            if isinstance(action, BaseException):
                raise action
            action()
        rate = self._rates.get(site, 0.0)
        if rate:
            stream = self._streams.setdefault(site, random.Random(f"{self._seed}/{site}"))
            if stream.random() < rate:
                self.fired.append((site, number))
                raise PlantedFault(f"planted at visit {number} of {site}")

    def __repr__(self) -> str:
        return f"FaultInjector({sum(self.visits.values())} visits, {len(self.fired)} fired)"


class FaultyRunner:
    """A runner whose calls and copies fail where an injector says so, and take as long as one likes.

    Args:
        runner: The runner; its attributes are those of this one. The copies of its `host_tier`, if it has one, fail at
            the sites "save" and "load".
        injector: Decides.
        duration_s: Called with the plan of each step; gives the seconds that its result claims it took. None leaves
            what was measured.
        clock: Moved on by these seconds in `collect`, or None.

    Attributes:
        inner: The runner.
        injector: Decides.
    """

    def __init__(
        self,
        runner: Any,
        injector: FaultInjector,
        *,
        duration_s: Callable[[StepPlan], float] | None = None,
        clock: FakeClock | None = None,
    ) -> None:
        self.inner = runner
        self.injector = injector
        self._duration_s = duration_s
        self._clock = clock
        self._plans: dict[int, StepPlan] = {}
        tier = getattr(runner, "host_tier", None)
        if tier is not None:
            tier.hook = self._copy

    @property
    def info(self) -> Any:
        """Facts of the model."""
        return self.inner.info

    def forward(self, plan: StepPlan, requests: Mapping[str, Request]) -> Any:
        """Starts the forward pass, between the sites "forward" and "forward_done".

        Args:
            plan: What to run.
            requests: The requests of its rows by id.

        Returns:
            The runner's handle.
        """
        self.injector.visit("forward")
        handle = self.inner.forward(plan, requests)
        self._plans = {plan.step - 1: self._plans.get(plan.step - 1, plan), plan.step: plan}
        self.injector.visit("forward_done")
        return handle

    def sample(self, handle: Any, masks: Any = None) -> Any:
        """Starts sampling, between the sites "sample" and "sample_done".

        Args:
            handle: What `forward` returned.
            masks: Allowed tokens, or None.

        Returns:
            The runner's handle.
        """
        self.injector.visit("sample")
        handle = self.inner.sample(handle, masks)
        self.injector.visit("sample_done")
        return handle

    def collect(self, handle: Any) -> StepResult:
        """Waits for a step, between the sites "collect" and "collect_done".

        Args:
            handle: What `sample` returned.

        Returns:
            Its result, with the duration that was asked for.
        """
        self.injector.visit("collect")
        result: StepResult = self.inner.collect(handle)
        plan = self._plans.get(result.step)
        if self._duration_s is not None and plan is not None:
            seconds = self._duration_s(plan)
            result = dataclasses.replace(result, duration_s=seconds)
            if self._clock is not None:
                self._clock.advance(seconds)
        self.injector.visit("collect_done")
        return result

    def close(self) -> None:
        """Gives the memory back."""
        self.inner.close()

    def _copy(self, copy: CacheCopy) -> None:
        is_save = copy.kind in (CopyKind.SAVE_BLOCK, CopyKind.SAVE_WINDOWS)
        self.injector.visit("save" if is_save else "load")

    def __getattr__(self, name: str) -> Any:
        if name == "inner":
            raise AttributeError(name)
        return getattr(self.inner, name)

    def __repr__(self) -> str:
        return f"FaultyRunner({self.inner!r}, {self.injector!r})"


def plant(engine: Any, injector: FaultInjector, **options: Any) -> FaultyRunner:
    """Puts a `FaultyRunner` around the runner of an engine that was made already.

    Args:
        engine: An `Engine` on which nothing runs yet.
        injector: Decides.
        options: `duration_s` and `clock` of `FaultyRunner`.

    Returns:
        The runner that the engine uses from now on.

    Examples:
        >>> from deepinfer import Engine
        >>> from deepinfer.testing import ToyModel, ToyTokenizer
        >>> injector = FaultInjector()
        >>> with Engine(model=ToyModel(), tokenizer=ToyTokenizer()) as engine:
        ...     runner = plant(engine, injector)
        ...     injector.arm("sample")
        ...     output = engine.generate("abc", on_error="return")[0]
        >>> str(output.finish_reason)
        'error'
    """
    runner = FaultyRunner(engine._parts.runner, injector, **options)
    engine._parts.runner = runner
    engine._loop.runner = runner
    engine._loop._pipeline._runner = runner
    return runner


class JumpingClock(FakeClock):
    """A clock that moves a little at every reading, and jumps now and then; never backwards.

    Args:
        seed: Seed of the jumps.
        tick_s: Seconds that a reading takes.
        jump_s: Seconds of a jump.
        rate: Probability of a jump at each reading.
    """

    __slots__ = ("_jump_s", "_rate", "_stream", "_tick_s")

    def __init__(
        self, seed: int = 0, *, tick_s: float = 0.0, jump_s: float = 3600.0, rate: float = 0.0
    ) -> None:
        super().__init__()
        self._tick_s, self._jump_s, self._rate = tick_s, jump_s, rate
        self._stream = random.Random(seed)

    def now(self) -> float:
        """The time in seconds."""
        if self._rate and self._stream.random() < self._rate:
            self.advance(self._jump_s)
        return self.advance(self._tick_s)


class RaisingSink:
    """A sink that passes deltas on, and raises at one of them.

    Args:
        sink: Takes the deltas.
        at: Which delta it raises at, from 0, instead of passing it on.

    Attributes:
        num_deltas: Deltas that came.
    """

    def __init__(self, sink: Callable[[OutputDelta], None], at: int) -> None:
        self.num_deltas = 0
        self._sink = sink
        self._at = at

    def __call__(self, delta: OutputDelta) -> None:
        """Takes a delta.

        Args:
            delta: The delta.

        Raises:
            PlantedFault: It is the one.
        """
        number = self.num_deltas
        self.num_deltas += 1
        if number == self._at:
            raise PlantedFault(f"planted at delta {number}")
        self._sink(delta)
