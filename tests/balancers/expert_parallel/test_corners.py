"""Corners of expert placement: more slots than experts, loads beyond single precision, arrays that are none."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

from deepinfer.balancers.expert_parallel import (
    Placement,
    planned_imbalance,
    realised_imbalance,
    rebalance_experts,
    slot_imbalance,
    split_tokens,
)
from deepinfer.core.errors import ConfigError, ShapeError


def test_more_slots_than_experts_are_used_as_well_as_in_the_published_result() -> None:
    weight = [[4.0, 1.0]]
    best = rebalance_experts(weight, 6, 1, 1, 2)[0]
    published = rebalance_experts(weight, 6, 1, 1, 2, mode="compatible")[0]
    most = planned_imbalance(weight, published, 2)
    assert (planned_imbalance(weight, best, 2) <= most).all()


@pytest.mark.parametrize("seed", range(40))
def test_best_is_no_worse_unless_the_published_result_has_twins(seed: int) -> None:
    rng = np.random.default_rng(seed)
    nodes = int(rng.integers(1, 3))
    gpus, groups = int(rng.integers(1, 5)) * nodes, int(rng.integers(1, 3)) * nodes
    experts = groups * int(rng.integers(1, 8))
    slots = -(-experts // gpus) + int(rng.integers(0, 3))
    weight = rng.zipf(1.3, (1, experts)).clip(0, 10**9).astype(float)
    best, published = (
        rebalance_experts(weight, slots * gpus, groups, nodes, gpus, mode=mode)[0]
        for mode in ("best", "compatible")
    )
    twins = any(len(set(part)) < slots for part in published.reshape(gpus, -1).tolist())
    on_node = experts // nodes if groups > 1 and nodes > 1 else experts
    if not twins or slots > on_node:
        worst = planned_imbalance(weight, published, gpus)
        assert (planned_imbalance(weight, best, gpus) <= worst * (1 + 1e-9)).all()
    if slots <= on_node:
        assert all(len(set(part)) == slots for part in best.reshape(gpus, -1).tolist())


PLACEMENT = Placement(np.array([[0, 1, 1, 2]]), 3, 2)


@pytest.mark.parametrize(
    ("call", "match"),
    [
        (lambda: rebalance_experts([[1e308, 1e308, 1, 1]], 4, 1, 1, 2), "1e\\+30"),
        (lambda: rebalance_experts([[1, 2], [3]], 2, 1, 1, 1), "unequal lengths"),
        (lambda: split_tokens([[1.5, 2, 1]], PLACEMENT), "fractions"),
        (lambda: slot_imbalance([1, 2, float("nan"), 4], 2), "nan"),
        (lambda: slot_imbalance([1, 2, -7, 4], 2), "-7"),
    ],
)
def test_arrays_are_checked(call: Callable[[], object], match: str) -> None:
    with pytest.raises(ShapeError, match=match):
        call()


@pytest.mark.parametrize("gpus", [0, "2", 1.0, True])
def test_gpus_are_checked(gpus: int) -> None:
    for call in (
        lambda: planned_imbalance([[1, 2]], [[0, 1]], gpus),
        lambda: realised_imbalance([[[1, 2]]], [[0, 1]], gpus),
        lambda: slot_imbalance([1, 2], gpus),
    ):
        with pytest.raises(ConfigError, match="num_gpus"):
            call()
