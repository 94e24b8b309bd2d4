"""Lagged confidences: old enough, and of the right request."""

from __future__ import annotations

import numpy as np
import pytest

from deepinfer.core.errors import ConfigError, ShapeError
from deepinfer.speculative import LaggedConfidence


def test_lag() -> None:
    lagged = LaggedConfidence(1, lag=2)
    for value in (0.1, 0.2, 0.3):
        lagged.push(["a"], [[value]])
    assert lagged.get(["a"]) == pytest.approx(np.array([[0.2]]))
    early = LaggedConfidence(1, lag=2)
    early.push(["a"], [[0.1]])
    assert early.get(["a"]).tolist() == [[1.0]], "nothing is old enough yet"


def test_who_skips_a_step_keeps_its_record() -> None:
    lagged = LaggedConfidence(1, lag=1)
    lagged.push(["a", "b"], [[0.5], [0.25]])
    lagged.push(["b"], [[0.75]])
    assert lagged.get(["a", "b", "c"]).tolist() == [[0.5], [0.75], [1.0]]


def test_another_generation_inherits_nothing() -> None:
    lagged = LaggedConfidence(1, lag=1)
    lagged.push([3], [[0.5]], [1])
    assert lagged.get([3], [1]).tolist() == [[0.5]]
    assert lagged.get([3], [2]).tolist() == [[1.0]]
    lagged.forget([3, 4])
    assert lagged.get([3], [1]).tolist() == [[1.0]]


def test_short_blocks() -> None:
    lagged = LaggedConfidence(3, lag=1)
    lagged.push(["a"], [[0.5, 0.5]])
    assert lagged.get(["a"]).tolist() == [[0.5, 0.25, 0.0]]
    lagged.push([], [])
    assert lagged.get([]).shape == (0, 3)


def test_shapes() -> None:
    lagged = LaggedConfidence(2)
    with pytest.raises(ShapeError):
        lagged.push(["a"], [[0.5, 0.5, 0.5]])
    with pytest.raises(ShapeError):
        lagged.push(["a", "b"], [[0.5]])
    with pytest.raises(ShapeError, match="generations"):
        lagged.push(["a"], [[0.5]], [1, 2])


def test_before_a_push_the_last_one_is_a_step_old() -> None:
    """As the docstring tells it: get, then push, and no budget sees the confidences of its own step."""
    lagged = LaggedConfidence(1, lag=1)
    seen = []
    for value in (0.1, 0.2, 0.3):
        seen.append(float(lagged.get(["a"])[0, 0]))
        lagged.push(["a"], [[value]])
    assert seen == pytest.approx([1.0, 0.1, 0.2])


def test_ids_in_arrays_are_found_again() -> None:
    torch = pytest.importorskip("torch")
    for ids in (torch.tensor([3, 4]), np.array([3, 4]), (3, 4)):
        lagged = LaggedConfidence(1, lag=1)
        lagged.push(ids, [[0.5], [0.25]], np.array([1, 1]))
        assert lagged.get([3, 4], torch.tensor([1, 1])).tolist() == [[0.5], [0.25]]
        assert lagged.get(ids, [1, 2]).tolist() == [[0.5], [1.0]]
        lagged.forget(ids)
        assert lagged.get([3, 4], [1, 1]).tolist() == [[1.0], [1.0]]
    for wrong in ([torch.tensor(3)], [[3]], ["a", "a"]):
        with pytest.raises(ConfigError, match="ids"):
            lagged.push(wrong, [[0.5]] * len(wrong))
