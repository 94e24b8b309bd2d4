"""The assignment with the largest sum, beside all assignments there are."""

from __future__ import annotations

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from deepinfer.balancers.expert_parallel.assignment import best_assignment


def largest_sum(gain: np.ndarray) -> int:
    """Over all assignments: row by row, the best sum for each set of columns that is used."""
    best = {0: 0}
    for row in gain.tolist():
        following: dict[int, int] = {}
        for used, total in best.items():
            for column, value in enumerate(row):
                if not used >> column & 1:
                    key = used | 1 << column
                    following[key] = max(following.get(key, -1), total + value)
        best = following
    return max(best.values())


@settings(max_examples=60, deadline=None)
@given(st.integers(1, 10), st.sampled_from((1, 3, 100)), st.integers(0, 10**6))
def test_the_sum_is_the_largest(size: int, high: int, seed: int) -> None:
    gain = np.random.default_rng(seed).integers(0, high + 1, (size, size))
    chosen = best_assignment(gain)
    assert sorted(chosen.tolist()) == list(range(size))
    assert gain[np.arange(size), chosen].sum() == largest_sum(gain)


def test_large_ones_are_optimal_by_duality() -> None:
    """A hidden assignment that no other can beat is found."""
    rng = np.random.default_rng(0)
    hidden = rng.permutation(64)
    gain = rng.integers(0, 6, (64, 64))
    gain[np.arange(64), hidden] = 6
    assert gain[np.arange(64), best_assignment(gain)].sum() == 6 * 64
