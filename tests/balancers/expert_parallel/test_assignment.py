"""The assignment with the largest sum, beside all assignments there are."""

from __future__ import annotations

import itertools

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from deepinfer.balancers.expert_parallel.assignment import best_assignment


@settings(max_examples=80, deadline=None)
@given(st.integers(1, 6), st.sampled_from((1, 3, 100)), st.integers(0, 10**6))
def test_the_sum_is_the_largest(size: int, high: int, seed: int) -> None:
    gain = np.random.default_rng(seed).integers(0, high + 1, (size, size))
    chosen = best_assignment(gain)
    assert sorted(chosen.tolist()) == list(range(size))
    rows = np.arange(size)
    best = max(gain[rows, list(order)].sum() for order in itertools.permutations(range(size)))
    assert gain[rows, chosen].sum() == best


def test_large_ones_are_optimal_by_duality() -> None:
    """A hidden assignment that no other can beat is found."""
    rng = np.random.default_rng(0)
    hidden = rng.permutation(64)
    gain = rng.integers(0, 6, (64, 64))
    gain[np.arange(64), hidden] = 6
    assert gain[np.arange(64), best_assignment(gain)].sum() == 6 * 64
