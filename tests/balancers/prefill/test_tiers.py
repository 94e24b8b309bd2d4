"""Tiers: engines follow the work, and no more than that."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from deepinfer.balancers import Fleet, RouteRequest, WorkerSnapshot, WorkerState
from deepinfer.balancers.prefill import LeastWork, TierRouter, assign_tiers
from deepinfer.core.errors import ConfigError


def test_largest_remainders() -> None:
    assert np.bincount(assign_tiers([5.3, 2.9, 0.0, 0.8], 9), minlength=4).tolist() == [5, 3, 0, 1]


def test_a_small_tier_has_an_engine_and_the_largest_pays_for_it() -> None:
    assert np.bincount(assign_tiers([100.0, 0.1, 0.1, 0.1], 8)).tolist() == [5, 1, 1, 1]


def test_fewer_engines_than_tiers_serve_the_busiest() -> None:
    assert sorted(assign_tiers([1.0, 5.0, 2.0, 0.5], 2).tolist()) == [1, 2]


def test_noise_moves_nobody() -> None:
    old = [0] * 4 + [1] * 4
    assert assign_tiers([4.6, 3.4], 8, old).tolist() == old
    moved = assign_tiers([6.0, 2.0], 8, old)
    assert np.bincount(moved).tolist() == [6, 2]
    assert (moved[:4] == 0).all(), "engines keep their tier where they can"


def test_a_starved_tier_gets_an_engine_at_once() -> None:
    assert 2 in assign_tiers([10.0, 10.0, 0.1], 8, [0] * 4 + [1] * 4)


def test_without_work_everyone_stays() -> None:
    assert assign_tiers([0.0, 0.0], 3, [1, 0, 1]).tolist() == [1, 0, 1]
    assert assign_tiers([0.0, 0.0], 4).tolist() == [0, 0, 1, 1]


@given(
    load=st.lists(st.floats(0, 1e6), min_size=1, max_size=6),
    engines=st.integers(0, 40),
    seed=st.integers(0, 1000),
)
def test_every_busy_tier_is_served(load: list[float], engines: int, seed: int) -> None:
    old = np.random.default_rng(seed).integers(0, len(load), engines).tolist()
    for before in (None, old):
        new = assign_tiers(load, engines, before)
        assert new.shape == (engines,)
        counts = np.bincount(new, minlength=len(load))
        busy = [tier for tier, work in enumerate(load) if work > 0]
        if busy and engines >= len(busy):
            assert all(counts[tier] >= 1 for tier in busy)


@pytest.mark.parametrize("load", [[], [-1.0], [float("nan")], [[1.0]]])
def test_bad_loads(load: list[float]) -> None:
    with pytest.raises(ConfigError, match="load"):
        assign_tiers(load, 2)


def test_bad_old_assignments() -> None:
    for old in ([0], [0, 2], [0, -1]):
        with pytest.raises(ConfigError, match="old"):
            assign_tiers([1.0, 1.0], 2, old)


def request(tokens: int) -> RouteRequest:
    return RouteRequest(rid="r", prompt_tokens=tokens)


def test_routing_stays_inside_the_tier() -> None:
    router = TierRouter(LeastWork(), 4)
    fleet = Fleet(WorkerSnapshot(name=str(i), waiting_s=4.0 - i) for i in range(4))
    assert [router.tier_of(n) for n in (16_383, 16_384, 65_536, 262_144)] == [0, 1, 2, 3]
    assert [router.decide(request(n), fleet).target for n in (1, 20_000, 70_000, 300_000)] == [
        0,
        1,
        2,
        3,
    ]


def test_a_tier_without_engines_borrows() -> None:
    router = TierRouter(LeastWork(), 2, bounds=(100, 1000))
    router.reassign([1.0, 0.0, 1.0])
    fleet = Fleet([WorkerSnapshot(name="a"), WorkerSnapshot(name="b")])
    decision = router.decide(request(500), fleet)
    assert (decision.target, decision.reason) == (1, "other_tier")
    fleet.update(WorkerSnapshot(name="b", state=WorkerState.DEAD))
    assert router.decide(request(500), fleet).target == 0
    fleet.update(WorkerSnapshot(name="a", state=WorkerState.DRAINING))
    assert router.decide(request(500), fleet).target is None


def test_bad_bounds() -> None:
    for bounds in ((5, 5), (0,), (10, 3)):
        with pytest.raises(ConfigError, match="bounds"):
            TierRouter(LeastWork(), 2, bounds=bounds)
    with pytest.raises(ConfigError, match="load"):
        TierRouter(LeastWork(), 2).reassign([1.0])
