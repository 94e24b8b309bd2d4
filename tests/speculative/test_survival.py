"""The order of draft slots: total, and prefixes by itself."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays

from deepinfer.core.errors import ShapeError
from deepinfer.speculative import prefix_survival, slot_order
from deepinfer.speculative.survival import best_lengths

CONFIDENCES = arrays.arrays(
    np.float32,
    st.tuples(st.integers(0, 6), st.integers(0, 5)),
    elements=st.sampled_from([0.0, 1e-30, 0.1, 0.5, 0.9, 1.0, float("nan"), 2.0, -1.0])
    | st.floats(0, 1, width=32),
)


def test_running_products_and_broken_heads() -> None:
    assert prefix_survival([[0.5, 0.5, 1.0]]).tolist() == [[0.5, 0.25, 0.25]]
    assert prefix_survival([[0.5, np.nan, 1.0]]).tolist() == [[0.5, 0.0, 0.0]]
    assert prefix_survival([[np.inf, -np.inf]]).tolist() == [[1.0, 0.0]]
    given_ = np.array([[0.5, 0.5]], np.float32)
    prefix_survival(given_)
    assert given_.tolist() == [[0.5, 0.5]], "the input is left alone"
    with pytest.raises(ShapeError, match=r"\[requests, drafts\]"):
        prefix_survival([0.5])


@given(CONFIDENCES)
def test_order_is_that_of_sorted_triples(confidence: np.ndarray) -> None:  # type: ignore[type-arg]
    survival = prefix_survival(confidence)
    order = slot_order(survival)
    slots = [
        (-float(survival[r, j]), j, r)
        for r in range(survival.shape[0])
        for j in range(survival.shape[1])
        if survival[r, j] > 0
    ]
    slots.sort()
    assert order.survival.tolist() == [-s for s, _, _ in slots]
    assert order.positions.tolist() == [j for _, j, _ in slots]
    assert order.requests.tolist() == [r for _, _, r in slots]
    for k in range(len(slots) + 2):
        lengths = order.lengths(k)
        assert lengths.sum() == min(k, len(slots))
        assert lengths.tolist() == best_lengths(survival, k).tolist()
        taken = {(r, j) for _, j, r in slots[:k]}
        assert taken == {(r, j) for r, n in enumerate(lengths) for j in range(n)}, "prefixes"


def test_saturated_confidences_keep_the_sum_and_the_prefixes() -> None:
    """Ties by falling position would take (3, 3) where four slots were priced."""
    order = slot_order(prefix_survival(np.ones((2, 4))))
    assert order.lengths(4).tolist() == [2, 2]
    assert order.lengths(5).tolist() == [3, 2]


def test_two_planners_agree_or_differ_only_by_their_input() -> None:
    survival = prefix_survival(np.random.default_rng(0).random((50, 5)))
    assert (
        slot_order(survival).lengths(70).tolist()
        == slot_order(survival.copy("F")).lengths(70).tolist()
    )


def test_limits() -> None:
    with pytest.raises(ShapeError, match="256"):
        slot_order(np.zeros((1, 257)))
    assert len(slot_order(np.ones((3, 2)), min_survival=1.0)) == 0
