"""Tokens of a step over copies: sums kept, as even as can be, better realised balance than equal shares."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from deepinfer.balancers.expert_parallel import (
    DriftingLoad,
    Placement,
    TokenSplitter,
    place_experts,
    planned_imbalance,
    realised_imbalance,
    rebalance_experts,
    slot_imbalance,
    split_tokens,
)
from deepinfer.core.errors import ConfigError, ShapeError


def smallest_maximum(counts: np.ndarray, phy2log: np.ndarray, gpus: int) -> float:
    """The optimum of the linear program of one layer, exact: the worst set of GPUs by what can run nowhere else."""
    gpu_of = np.arange(len(phy2log)) // (len(phy2log) // gpus)
    homes = [set(gpu_of[phy2log == expert].tolist()) for expert in range(len(counts))]
    sets = (c for n in range(1, gpus + 1) for c in itertools.combinations(range(gpus), n))
    return max(
        sum(count for count, home in zip(counts, homes, strict=True) if home <= set(chosen))
        / len(chosen)
        for chosen in sets
    )


@settings(max_examples=40, deadline=None)
@given(st.data())
def test_splits_are_optimal_and_keep_sums(data: st.DataObject) -> None:
    rng = np.random.default_rng(data.draw(st.integers(0, 10**6)))
    gpus = data.draw(st.integers(1, 6))
    experts = data.draw(st.integers(gpus, 16))
    slots = (-(-experts // gpus) + data.draw(st.integers(0, 3))) * gpus
    mode = data.draw(st.sampled_from(("best", "compatible")))
    maps = rebalance_experts(rng.gamma(0.5, 1.0, (2, experts)), slots, 1, 1, gpus, mode=mode)
    placement = Placement(maps[0], experts, gpus)
    counts = rng.multinomial(30_000, rng.dirichlet(np.full(experts, 0.3)), size=2)
    counts[1] //= data.draw(st.sampled_from((1, 100, 10_000, 100_000)))
    tokens = split_tokens(counts, placement)
    assert tokens.dtype == np.int64
    assert tokens.min() >= 0
    assert (placement.logical_counts(tokens) == counts).all()
    worst = tokens.reshape(2, gpus, -1).sum(2).max(1)
    for layer in range(2):
        optimum = smallest_maximum(counts[layer], placement.phy2log[layer], gpus)
        assert worst[layer] <= optimum * 1.001 + slots // gpus  # rounding: a token a slot at most
    assert (split_tokens(counts, placement) == tokens).all()


def test_small_example() -> None:
    placement = Placement(np.array([[0, 1, 0, 2]]), 3, 2)
    assert split_tokens([[60, 40, 10]], placement).tolist() == [[15, 40, 45, 10]]
    assert split_tokens([[1, 0, 0]], placement).tolist() == [[1, 0, 0, 0]]
    assert split_tokens([[0, 0, 0]], placement).tolist() == [[0, 0, 0, 0]]


def test_without_copies_there_is_nothing_to_split() -> None:
    placement = Placement.in_order(1, 4, 2)
    assert split_tokens([[1, 2, 3, 4]], placement).tolist() == [[1, 2, 3, 4]]


def test_layers_with_different_copies_do_not_mix() -> None:
    one = Placement(np.array([[0, 1, 0, 2]]), 3, 2)
    both = Placement(np.array([[0, 1, 0, 2], [1, 0, 1, 2]]), 3, 2)
    tokens = split_tokens([[60, 40, 10], [40, 60, 10]], both)
    assert tokens[0].tolist() == split_tokens([[60, 40, 10]], one)[0].tolist()
    assert tokens[1].tolist() == [15, 40, 45, 10]


def drift(gpus: int, further: int, assignments: int, seed: int) -> tuple[float, float, float]:
    """Planned, realised and split imbalance: a plan from 100 steps, and what the next 40 made of it."""
    load = DriftingLoad(3, 384, assignments, walk=0.005, burst=6_000, seed=seed)
    window = np.sum(list(load.steps(100)), axis=0)
    slots = 384 + gpus * further
    placement = Placement(place_experts(window, slots, gpus, for_splitter=True), 384, gpus)
    splitter = TokenSplitter(placement)
    after = np.stack(list(load.steps(40)))
    split = [slot_imbalance(splitter.split(counts), gpus).mean() for counts in after[::4]]
    realised = realised_imbalance(after, placement.phy2log, gpus).mean()
    planned = planned_imbalance(window, placement.phy2log, gpus).mean()
    return float(planned), float(realised), float(np.mean(split))


@pytest.mark.parametrize(
    ("gpus", "further", "assignments", "drifted", "limit"),
    [
        (4, 4, 4 * 8_192 * 6, (1.015, 1.035), 1.01),
        (64, 1, 64 * 1_440, (1.18, 1.28), 1.14),
    ],
)
def test_drift(
    gpus: int, further: int, assignments: int, drifted: tuple[float, float], limit: float
) -> None:
    """Equal shares lose what is known of deployments under drift; the splitter gets most of it back."""
    planned, realised, split = drift(gpus, further, assignments, seed=7)
    assert planned <= 1.01
    assert drifted[0] < realised < drifted[1]
    assert split <= limit


def test_copies_are_spread_for_the_splitter() -> None:
    weight = DriftingLoad(4, 384, 100_000, seed=8).step()
    parts = {}
    for for_splitter in (False, True):
        phy2log = place_experts(weight, 448, 64, for_splitter=for_splitter)
        placement = Placement(phy2log, 384, 64)
        assert len(placement.twins()) == 0
        assert placement.imbalance(weight).max() < 1.01
        alone = np.take_along_axis(placement.logcnt == 1, phy2log, 1)
        stuck = np.where(alone, np.take_along_axis(weight, phy2log, 1), 0).reshape(4, 64, -1).sum(2)
        parts[for_splitter] = (stuck.max(1) / weight.sum(1) * 64).max()
    assert parts[True] < 0.8 < parts[False]  # of a GPU's load, what cannot run elsewhere


def test_bad_counts_are_refused() -> None:
    placement = Placement.in_order(1, 4, 2)
    for counts in ([[1, 2, 3]], [[1, 2, 3, 0.5]]):
        with pytest.raises(ShapeError, match="whole numbers of shape"):
            split_tokens(counts, placement)
    with pytest.raises(ConfigError, match="sweeps is 0"):
        TokenSplitter(placement, sweeps=0)
    with pytest.raises(ConfigError, match="burst is 0"):
        DriftingLoad(1, 4, 10, burst=0.0)


def test_imbalance_of_arrays_that_do_not_fit() -> None:
    with pytest.raises(ShapeError, match="3 slots cannot be divided among 2 GPUs"):
        planned_imbalance([[1, 2, 3]], [[0, 1, 2]], 2)
    with pytest.raises(ShapeError, match="indices must be from 0 to 2"):
        planned_imbalance([[1, 2, 3]], [[0, 1, 3, 2]], 2)
    with pytest.raises(ShapeError, match="counts has shape"):
        realised_imbalance([[1, 2, 3]], [[0, 1, 2]], 3)
    assert planned_imbalance([[0, 0]], [[0, 1]], 2).tolist() == [1.0]
    assert realised_imbalance([[[4, 1]], [[0, 0]]], [[0, 1]], 2).tolist() == [[1.6], [1.0]]
