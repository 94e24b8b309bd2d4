from __future__ import annotations

import itertools

import pytest

from deepinfer import Engine, SamplingParams
from deepinfer.core import FinishReason, OutputDelta
from deepinfer.testing import (
    FaultInjector,
    JumpingClock,
    PlantedFault,
    RaisingSink,
    ToyModel,
    ToyTokenizer,
    plant,
)
from deepinfer.testing.faults import SITES

GREEDY = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True)


def make_engine(depth: int = 0) -> Engine:
    config = {"device": "cpu", "max_num_seqs": 2, "async_depth": depth}
    return Engine(model=ToyModel(), tokenizer=ToyTokenizer(), config=config)


def draws(injector: FaultInjector, site: str, count: int) -> list[int]:
    for _ in range(count):
        try:
            injector.visit(site)
        except PlantedFault:
            continue
    return [number for name, number in injector.fired if name == site]


def test_faults_depend_on_the_seed_and_their_own_site_only() -> None:
    alone = draws(FaultInjector(7, {"sample": 0.2}), "sample", 100)
    busy = FaultInjector(7, {"sample": 0.2, "forward": 0.5})
    draws(busy, "forward", 33)
    assert draws(busy, "sample", 100) == alone
    assert 5 < len(alone) < 40
    assert draws(FaultInjector(8, {"sample": 0.2}), "sample", 100) != alone


@pytest.mark.parametrize("depth", [0, 1])
@pytest.mark.parametrize("site", [site for site in SITES if site not in ("save", "load")])
def test_fault_at_each_site_ends_its_requests_and_leaves_the_engine_usable(
    site: str, depth: int
) -> None:
    with make_engine(depth) as engine:
        before = engine.generate("abc", GREEDY)[0].token_ids
        injector = FaultInjector()
        plant(engine, injector)
        injector.arm(site, after=2)
        output = engine.generate("abc", GREEDY, on_error="return")[0]
        assert output.finish_reason is FinishReason.ERROR
        assert isinstance(output.error.__cause__, PlantedFault)  # type: ignore[union-attr]
        engine.check()
        assert engine.generate("abc", GREEDY)[0].token_ids == before


def test_armed_functions_are_called_and_disarmed_ones_are_not() -> None:
    called: list[int] = []
    injector = FaultInjector()
    injector.arm("forward", lambda: called.append(1))
    injector.arm("forward", after=1)
    injector.visit("forward")
    injector.disarm()
    injector.visit("forward")
    assert called == [1]


def test_late_results_move_the_clock() -> None:
    clock = JumpingClock()
    config = {"device": "cpu"}
    with Engine(model=ToyModel(), tokenizer=ToyTokenizer(), config=config, clock=clock) as engine:
        plant(engine, FaultInjector(), duration_s=lambda plan: 2.5, clock=clock)
        output = engine.generate("abc", GREEDY)[0]
    assert output.finish_s == 6 * 2.5
    assert output.first_token_s == 2.5


def test_clock_jumps_and_never_runs_back() -> None:
    clock = JumpingClock(3, tick_s=0.25, jump_s=100.0, rate=0.1)
    times = [clock.now() for _ in range(200)]
    steps = [after - before for before, after in itertools.pairwise(times)]
    assert min(steps) >= 0.25
    assert 5 < sum(step > 50 for step in steps) < 50


def test_raising_sink_aborts_its_request_alone() -> None:
    taken: list[OutputDelta] = []
    with make_engine() as engine:
        sink = RaisingSink(taken.append, at=2)
        engine.add_request("abc", GREEDY, sink=sink, rid="a")
        other = engine.add_request("abd", GREEDY, keep_output=True)
        while engine.has_unfinished:
            engine.step()
            engine.check()
        assert engine.take_output(other)[0].finish_reason is FinishReason.LENGTH
    assert (len(taken), sink.num_deltas) == (2, 3)
