"""Earliest completion: the rule, its ties, and what it must never do."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from deepinfer.balancers import Fleet, RouteRequest, WorkerSnapshot, WorkerState
from deepinfer.balancers.prefill import CacheUpdate, EarliestCompletion, PrefillCost, PrefixIndex
from deepinfer.core.errors import ConfigError

COST = PrefillCost(token_s=1e-3)


def fleet(*waiting: float, **states: WorkerState) -> Fleet:
    names = "abcdefgh"
    return Fleet(
        WorkerSnapshot(name=name, waiting_s=seconds, state=states.get(name, WorkerState.READY))
        for name, seconds in zip(names, waiting, strict=False)
    )


def prompt(tokens: int = 1024, *keys: str, rid: str = "r") -> RouteRequest:
    return RouteRequest(rid=rid, prompt_tokens=tokens, block_keys=keys)


def holding(*keys: str, worker: str = "a") -> PrefixIndex:
    index = PrefixIndex()
    index.apply(CacheUpdate(worker=worker, sequence=0, stored=keys))
    return index


def test_a_hit_is_followed_as_long_as_the_queue_costs_less() -> None:
    router = EarliestCompletion(COST, holding("1"), own_weight=1.0)  # the hit saves 0.512 s
    assert router.decide(prompt(1024, "1", "2"), fleet(0.5, 0.0)).target == 0
    assert router.decide(prompt(1024, "1", "2"), fleet(0.52, 0.0)).target == 1


def test_the_weight_counts_those_who_come_behind() -> None:
    router = EarliestCompletion(COST, holding("1"), own_weight=3.0)
    decision = router.decide(prompt(1024, "1", "2"), fleet(1.5, 0.0))
    assert decision.target == 0
    assert decision.predicted == pytest.approx(1.5 + 0.512), "the prediction is not weighted"
    assert router.decide(prompt(1024, "1", "2"), fleet(1.6, 0.0)).target == 1


def test_the_last_token_always_runs() -> None:
    router = EarliestCompletion(COST, holding("1", "2"))
    assert router.own_seconds(prompt(1024, "1", "2"), fleet(0.0)).tolist() == [pytest.approx(1e-3)]


def test_with_a_shared_store_the_longest_prefix_counts_for_everyone() -> None:
    router = EarliestCompletion(COST, holding("1", worker="b"), is_shared=True)
    assert router.own_seconds(prompt(1024, "1"), fleet(0.0, 0.0, 0.0)).tolist() == [0.512] * 3


def test_ties_prefer_fewer_requests_and_then_spread() -> None:
    idle = Fleet(
        [
            WorkerSnapshot(name="a", num_running=1),
            WorkerSnapshot(name="b"),
            WorkerSnapshot(name="c"),
        ]
    )
    router = EarliestCompletion(COST)
    targets = [router.decide(prompt(rid=str(i)), idle).target for i in range(200)]
    assert set(targets) == {1, 2}
    assert 60 < targets.count(1) < 140
    assert targets == [router.decide(prompt(rid=str(i)), idle).target for i in range(200)]


def test_nobody_ready() -> None:
    decision = EarliestCompletion(COST).decide(prompt(), fleet(0.0, a=WorkerState.DRAINING))
    assert (decision.target, decision.reason) == (None, "no_ready_worker")
    assert EarliestCompletion(COST).decide(prompt(), Fleet()).target is None


@settings(max_examples=50)
@given(
    waiting=st.lists(st.floats(0, 100), min_size=1, max_size=8),
    states=st.lists(st.sampled_from(list(WorkerState)), min_size=8, max_size=8),
    tokens=st.integers(1, 10**6),
)
def test_never_to_a_draining_or_dead_worker(
    waiting: list[float], states: list[WorkerState], tokens: int
) -> None:
    named = dict(zip("abcdefgh", states, strict=True))
    workers = fleet(*waiting, **named)
    target = EarliestCompletion(COST, holding("1")).decide(prompt(tokens, "1"), workers).target
    ready = [i for i in range(len(waiting)) if states[i] is WorkerState.READY]
    assert target in ready if ready else target is None


@pytest.mark.parametrize("options", [{"own_weight": 0.5}, {"block_tokens": 0}])
def test_bad_options(options: dict[str, float]) -> None:
    with pytest.raises(ConfigError):
        EarliestCompletion(COST, **options)  # type: ignore[arg-type]
