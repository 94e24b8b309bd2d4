"""Corners of the fleet simulator: prompts that fit nowhere, caches in the middle of a step, routers that break rules."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from deepinfer.balancers import Decision, DecodeBalancer, Fleet, RouteRequest
from deepinfer.balancers.prefill import (
    EarliestCompletion,
    LeastRequests,
    LeastWork,
    PrefillCost,
    PrefixIndex,
    RoundRobin,
    TierRouter,
)
from deepinfer.balancers.simulator import (
    CacheKind,
    DecodeConfig,
    FleetChange,
    FleetChangeKind,
    FleetSimulator,
    PrefillConfig,
    RankChoice,
    Slo,
)
from deepinfer.balancers.simulator.simulator import _Run
from deepinfer.balancers.traffic import TraceRecord, generate_chat_trace
from deepinfer.core.errors import ConfigError, InvariantBroken

COST = PrefillCost(token_s=1e-3, step_s=0.1)
ONE = PrefillConfig(num_engines=1, cost=COST, block_tokens=4, cache_blocks=100)


def record(arrival_s: float, tokens: int, output: int = 1, *ids: int) -> TraceRecord:
    return TraceRecord(arrival_s, tokens, output, ids, 4 if ids else 0)


def change(time_s: float, kind: FleetChangeKind, engine: int = 0) -> FleetChange:
    return FleetChange(time_s=time_s, engine=engine, kind=kind)


class Fixed:
    """Always the same worker, ready or not."""

    def __init__(self, target: int) -> None:
        self.target = target

    def decide(self, request: RouteRequest, fleet: Fleet) -> Decision:
        return Decision(self.target, "fixed")


@pytest.mark.parametrize("tokens", [5_000, 950])
def test_a_request_that_fits_nowhere_holds_up_nobody(tokens: int) -> None:
    """The first prompt is above the capacity; the second fits, and its answer does not."""
    simulator = FleetSimulator(
        ONE,
        LeastWork(),
        decode=DecodeConfig(capacity_tokens=1_000),
        decode_router=DecodeBalancer(),
    )
    report = simulator.run([record(0.0, tokens, 100), record(1.0, 50, 10)])
    assert np.isnan(report.finish_s).tolist() == [True, False]
    assert (report.num_unserved, report.num_unfinished) == (0, 1)
    assert report.summary()["unfinished"] == 1
    assert report.goodput(Slo(ttft_s=100.0, tpot_s=100.0)) == pytest.approx(1 / report.end_s)


def test_a_request_that_the_router_never_takes_holds_up_nobody() -> None:
    decode = DecodeConfig(capacity_tokens=1_000)
    router = DecodeBalancer(reserve_tokens=500)
    simulator = FleetSimulator(ONE, LeastWork(), decode=decode, decode_router=router)
    report = simulator.run([record(0.0, 600, 5), record(1.0, 50, 10)])
    assert np.isnan(report.finish_s).tolist() == [True, False]


def test_an_index_of_what_came_and_went_in_one_step() -> None:
    config = dataclasses.replace(ONE, cache_blocks=1)
    index = PrefixIndex()
    FleetSimulator(config, RoundRobin(), index=index).run(
        [record(0.0, 4, 1, 9), record(0.0, 4, 1, 1), record(0.0, 4, 1, 2)]
    )
    assert index.match([2]) == {"prefill0": 1}
    assert index.match([1]) == {}, "the last prompt of the step drove it out"


@pytest.mark.parametrize("ranks", list(RankChoice))
def test_the_cache_is_looked_up_when_a_prompt_begins(ranks: RankChoice) -> None:
    """The second prompt waits beside the first, and begins when the first has left its blocks."""
    config = dataclasses.replace(ONE, chunk_tokens=12, chunk_multiple=1, ranks=ranks)
    trace = [record(0.0, 12), record(0.0, 12, 1, 1, 2, 3), record(0.0, 13, 1, 1, 2, 3)]
    assert FleetSimulator(config, RoundRobin()).run(trace).hit_tokens.tolist() == [0, 0, 12]
    late = dataclasses.replace(config, chunk_tokens=13, chunk_multiple=8)
    assert FleetSimulator(late, RoundRobin()).run(trace).hit_tokens.tolist() == [0, 0, 12]


def test_what_one_engine_drives_out_of_a_store_is_claimed_by_none() -> None:
    config = dataclasses.replace(ONE, num_engines=2, cache=CacheKind.STORE, cache_blocks=1)
    index = PrefixIndex()
    simulator = FleetSimulator(config, RoundRobin(), index=index)
    simulator.run([record(0.0, 4, 1, 1), record(1.0, 4, 1, 2)])
    assert (index.match([1]), index.match([2])) == ({}, {"prefill1": 1})


def test_a_store_outlives_its_engines() -> None:
    config = dataclasses.replace(ONE, num_engines=2, cache=CacheKind.STORE)
    index = PrefixIndex()
    router = EarliestCompletion(COST, index, block_tokens=4, is_shared=True)
    changes = [change(1.0, FleetChangeKind.FAIL), change(1.0, FleetChangeKind.FAIL, 1)]
    changes += [change(2.0, FleetChangeKind.JOIN), change(2.0, FleetChangeKind.JOIN, 1)]
    simulator = FleetSimulator(config, router, index=index, changes=changes)
    report = simulator.run([record(0.0, 4, 1, 1), record(3.0, 9, 1, 1, 2)])
    assert report.hit_tokens.tolist() == [0, 4]
    assert index.match([1]) != {}


def test_without_decode_there_is_no_time_between_tokens() -> None:
    report = FleetSimulator(ONE, LeastWork()).run([record(0.0, 9, 10)])
    assert np.isnan(report.tpot_s).all()
    assert report.goodput(Slo()) == pytest.approx(1 / report.end_s)


def test_the_end_is_that_of_the_work() -> None:
    late = [change(1e6, FleetChangeKind.DRAIN), change(2e6, FleetChangeKind.JOIN)]
    router = TierRouter(LeastWork(), 1)
    simulator = FleetSimulator(ONE, router, changes=late, event_delay_s=50.0)
    report = simulator.run([record(0.0, 900)])
    assert report.end_s == pytest.approx(1.0)
    assert report.busy_share == pytest.approx(1.0)


def test_a_step_that_a_failure_cuts_short_was_busy_until_then() -> None:
    changes = [change(0.25, FleetChangeKind.FAIL), change(1.0, FleetChangeKind.JOIN)]
    report = FleetSimulator(ONE, LeastWork(), changes=changes).run([record(0.0, 400)])
    assert report.prefill_busy_s.tolist() == pytest.approx([0.25 + 0.5])
    assert report.ttft_s.tolist() == pytest.approx([1.5])


def test_a_draining_engine_refuses_before_the_router_knows() -> None:
    config = dataclasses.replace(ONE, num_engines=2)
    drain = [change(0.5, FleetChangeKind.DRAIN)]
    simulator = FleetSimulator(config, LeastRequests(), changes=drain, event_delay_s=30.0)
    report = simulator.run([record(1.0, 100), record(1.0, 100)])
    assert report.engine.tolist() == [1, 1]


@pytest.mark.parametrize("target", [0, -1, 7])
def test_a_router_that_breaks_the_rules_is_named(target: int) -> None:
    dead = [change(0.0, FleetChangeKind.FAIL)]
    with pytest.raises(InvariantBroken, match=f"engine {target}"):
        FleetSimulator(ONE, Fixed(target), changes=dead).run([record(1.0, 9)])
    decode = DecodeConfig(num_ranks=1)
    dead = [dataclasses.replace(dead[0], is_decode=True)]
    with pytest.raises(InvariantBroken, match=f"rank {target}"):
        FleetSimulator(
            ONE, LeastWork(), decode=decode, decode_router=Fixed(target), changes=dead
        ).run([record(1.0, 9, 5)])


def test_blocks_of_another_size_are_refused() -> None:
    trace = [TraceRecord(0.0, 32, 1, (1, 2), 16)]
    with pytest.raises(ConfigError, match=r"PrefillConfig\(block_tokens=16\)"):
        FleetSimulator(ONE, LeastWork()).run(trace)


def test_nothing_of_nothing() -> None:
    report = FleetSimulator(ONE, TierRouter(LeastWork(), 1)).run([])
    assert (report.num_unserved, report.end_s, report.goodput(Slo())) == (0, 0.0, 0.0)


@pytest.mark.parametrize(
    ("make", "match"),
    [
        (lambda: dataclasses.replace(ONE, cache="none"), "CacheKind.NONE"),
        (lambda: dataclasses.replace(ONE, ranks="late"), "RankChoice.LATE"),
        (lambda: dataclasses.replace(ONE, cost=None), "PrefillCost"),
        (lambda: change(float("nan"), FleetChangeKind.FAIL), "time_s"),
        (lambda: change(0.0, "fail"), "FleetChangeKind.FAIL"),  # type: ignore[arg-type]
        (lambda: change(0.0, FleetChangeKind.FAIL, -1), "engine"),
        (lambda: Slo(ttft_s=float("nan")), "ttft_s"),
        (lambda: FleetSimulator(ONE, None), "router"),  # type: ignore[arg-type]
        (lambda: FleetSimulator(ONE, LeastWork()).run([], max_time_s=float("nan")), "max_time_s"),
        (
            lambda: FleetSimulator(
                ONE,
                LeastWork(),
                changes=[dataclasses.replace(change(0.0, FleetChangeKind.FAIL), is_decode=True)],
            ),
            "decode pool does not exist",
        ),
    ],
)
def test_options_are_checked(make: object, match: str) -> None:
    with pytest.raises(ConfigError, match=match):
        make()  # type: ignore[operator]


@settings(max_examples=25, deadline=None)
@given(
    moves=st.lists(
        st.tuples(
            st.sampled_from([0.0, 2.0, 2.5, 7.0, 90.0]),
            st.sampled_from(list(FleetChangeKind)),
            st.integers(0, 1),
            st.booleans(),
        ),
        max_size=10,
    ),
    cache=st.sampled_from(list(CacheKind)),
    ranks=st.sampled_from(list(RankChoice)),
    seed=st.integers(0, 9),
)
def test_whatever_happens_the_counters_come_back_to_zero(
    moves: list[tuple[float, FleetChangeKind, int, bool]],
    cache: CacheKind,
    ranks: RankChoice,
    seed: int,
) -> None:
    changes = [FleetChange(time_s=t, engine=e, kind=k, is_decode=d) for t, k, e, d in moves]
    changes += [
        FleetChange(time_s=100.0, engine=e, kind=FleetChangeKind.JOIN, is_decode=d)
        for e in (0, 1)
        for d in (False, True)
    ]
    index = PrefixIndex()
    config = PrefillConfig(num_engines=2, num_ranks=2, cache=cache, ranks=ranks, cache_blocks=12)
    simulator = FleetSimulator(
        config,
        EarliestCompletion(config.cost, index),
        index=index,
        decode=DecodeConfig(num_engines=2, num_ranks=2, max_requests=3),
        decode_router=DecodeBalancer(),
        changes=changes,
    )
    run = _Run(simulator, generate_chat_trace(40, seed=seed, mean_output_tokens=10))
    report = run.run(None)
    assert report.num_unfinished == 0
    assert (report.hit_tokens < report.prompt_tokens).all()
    assert (report.hit_blocks <= report.blocks).all()
    assert not run.pending
    assert run.pool is not None
    assert not run.pool.waiting
    for engine in run.pool.engines:
        assert engine.counts.tolist() == engine.kv_tokens.tolist() == [0, 0]
    for prefill in run.engines:
        assert (prefill.num_jobs, prefill.waiting_tokens) == (0, 0)
        assert prefill.remaining_s.tolist() == [0.0, 0.0]
        if cache is CacheKind.ENGINE:
            claimed = {key for key in prefill.cache._blocks if index.match([key]).get(prefill.name)}
            assert len(claimed) == len(prefill.cache)
    held = len({key for engine in run.engines for key in engine.cache._blocks})
    assert len(index) == held
    index.check()
