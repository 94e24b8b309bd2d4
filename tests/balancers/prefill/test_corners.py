"""Corners of the routers of prompts: strange ids and options, fleets larger or smaller than the tiers."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from deepinfer.balancers import Fleet, Router, RouteRequest, WorkerSnapshot, WorkerState
from deepinfer.balancers.prefill import (
    CacheUpdate,
    DynamoCost,
    EarliestCompletion,
    LeastRequests,
    LeastWork,
    LoadAware,
    LongestPrefix,
    PowerOfTwo,
    PrefillCost,
    PrefixIndex,
    RandomChoice,
    RoundRobin,
    SglangCacheAware,
    TierRouter,
)
from deepinfer.core.errors import ConfigError

COST = PrefillCost(token_s=1e-3, pair_s=1e-8)
ALL: list[Callable[[PrefixIndex], Router]] = [
    lambda index: RoundRobin(),
    lambda index: RandomChoice(),
    lambda index: LeastRequests(),
    lambda index: LeastWork(),
    lambda index: PowerOfTwo(),
    LongestPrefix,
    SglangCacheAware,
    DynamoCost,
    LoadAware,
    lambda index: EarliestCompletion(COST, index),
    lambda index: EarliestCompletion(COST, index, is_shared=True),
    lambda index: TierRouter(EarliestCompletion(COST, index), 3),
]


def snapshot(name: str, state: WorkerState = WorkerState.READY) -> WorkerSnapshot:
    return WorkerSnapshot(name=name, state=state)


@pytest.mark.parametrize("make", ALL)
@pytest.mark.parametrize("count", [1, 2, 5, 10_000])
def test_only_ready_workers_whatever_the_fleet(
    make: Callable[[PrefixIndex], Router], count: int
) -> None:
    states = list(WorkerState)
    fleet = Fleet(snapshot(f"w{i}", states[i % 3]) for i in range(count))
    index = PrefixIndex()
    for i in range(min(count, 5)):
        index.apply(CacheUpdate(worker=f"w{i}", sequence=0, stored=("x", "y")[: 1 + i % 2]))
    router = make(index)
    for keys in ((), ("x",), ("x", "y", "z")):  # more blocks than the prompt has tokens
        decision = router.decide(RouteRequest(rid="r", prompt_tokens=1, block_keys=keys), fleet)
        assert decision.target is not None
        assert fleet.ready[decision.target]
    gone = Fleet(snapshot(f"w{i}", WorkerState.DEAD) for i in range(count))
    for nobody in (gone, Fleet()):
        assert router.decide(RouteRequest(rid="r", prompt_tokens=1), nobody).target is None


def test_an_id_that_is_no_text_of_utf8() -> None:
    fleet = Fleet([snapshot("a"), snapshot("b")])
    request = RouteRequest(rid="\ud800", prompt_tokens=1)
    assert EarliestCompletion(COST).decide(request, fleet).is_placed


def test_a_fleet_that_grows_and_one_smaller_than_the_tiers() -> None:
    router = TierRouter(LeastWork(), 4)
    fleet = Fleet([snapshot("a")])
    huge = RouteRequest(rid="r", prompt_tokens=2**30)
    assert router.decide(huge, fleet).target == 0, "fewer engines than the router was made for"
    for name in "bcde":
        fleet.update(snapshot(name))
    assert router.decide(huge, fleet).target == 3
    fleet.update(snapshot("d", WorkerState.DEAD))
    assert router.decide(huge, fleet).target == 4, "later engines belong to every tier"


def test_sglang_follows_its_published_rule() -> None:
    """Load when the spread is above 32 and above a tenth; else a match above half; else the smallest tree."""
    index = PrefixIndex()
    index.apply(CacheUpdate(worker="a", sequence=0, stored=("x",)))
    router = SglangCacheAware(index, block_tokens=100)

    def decide(loads: list[int], tokens: int) -> str:
        fleet = Fleet(
            WorkerSnapshot(name="ab"[i], num_running=load) for i, load in enumerate(loads)
        )
        request = RouteRequest(rid="r", prompt_tokens=tokens, block_keys=("x",))
        decision = router.decide(request, fleet)
        assert decision.target is not None
        return f"{decision.reason} {fleet.names[decision.target]}"

    assert decide([33, 0], 150) == "least_requests b"
    assert decide([32, 0], 150) == "longest_prefix a", "32 are not more than 32"
    assert decide([400, 366], 150) == "longest_prefix a", "34 more, and less than a tenth"
    assert decide([403, 366], 150) == "least_requests b"
    assert decide([0, 0], 200) == "smallest_tree a", "half is not more than half"
    assert decide([0, 0], 200) == "smallest_tree a", "150 + 50 + 100 tokens went to b by load"
    assert decide([0, 0], 100_000) in ("smallest_tree a", "smallest_tree b")


def test_dynamo_adds_up_blocks() -> None:
    """Blocks to run, waiting ones included, plus blocks that decode, the request's own included."""
    index = PrefixIndex()
    index.apply(CacheUpdate(worker="b", sequence=0, stored=("x",)))
    fleet = Fleet(
        [
            WorkerSnapshot(name="a", waiting_tokens=100, cached_tokens=300),
            WorkerSnapshot(name="b", waiting_tokens=200, cached_tokens=250),
        ]
    )
    request = RouteRequest(rid="r", prompt_tokens=200, block_keys=("x",))
    decision = DynamoCost(index, block_tokens=100).decide(request, fleet)
    assert (decision.target, decision.predicted) == (1, 2 + 1 + 2.5 + 2)
    heavy = DynamoCost(index, block_tokens=100, overlap_weight=0.0).decide(request, fleet)
    assert (heavy.target, heavy.predicted) == (1, 4.5)


@pytest.mark.parametrize(
    ("make", "match"),
    [
        (lambda: TierRouter(LeastWork(), 4, bounds=5), "bounds"),  # type: ignore[arg-type]
        (lambda: TierRouter(LeastWork(), 4, bounds=(True,)), "bounds"),
        (lambda: PrefillCost.of_rate(1, crossover_tokens="a"), "crossover"),  # type: ignore[arg-type]
        (lambda: PrefillCost.of_rate(1, crossover_tokens=float("nan")), "crossover"),
        (lambda: SglangCacheAware(PrefixIndex(), balance_rel=float("nan")), "balance_rel"),
        (lambda: SglangCacheAware(PrefixIndex(), match_threshold=2.0), "match_threshold"),
        (lambda: DynamoCost(PrefixIndex(), overlap_weight=-1.0), "overlap_weight"),
        (lambda: LoadAware(PrefixIndex(), beta=float("inf")), "beta"),
    ],
)
def test_options_are_checked(make: Callable[[], object], match: str) -> None:
    with pytest.raises(ConfigError, match=match):
        make()


def test_attention_that_costs_nothing() -> None:
    assert PrefillCost.of_rate(100, crossover_tokens=float("inf")).pair_s == 0.0
