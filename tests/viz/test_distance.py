"""Errors by distance, read back from the Axes."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from deepinfer import viz
from deepinfer.core.errors import ShapeError


@pytest.fixture
def plt() -> Iterator[Any]:
    matplotlib = pytest.importorskip("matplotlib")
    matplotlib.use("agg")
    import matplotlib.pyplot as plt

    with matplotlib.rc_context():
        yield plt
    plt.close("all")


def test_one_line_a_case(plt: Any) -> None:
    given = plt.subplots()[1]
    values = {"one window": [0.5, 0.1, np.nan], "exact": [0.0, 0.0, 0.0]}
    ax = viz.plot_error_by_distance([0, 4, 16, 64], values, ax=given, title="t")
    assert ax is given
    assert [text.get_text() for text in ax.get_legend().get_texts()] == list(values)
    assert [patch.get_data().values.tolist()[:2] for patch in ax.patches] == [[0.5, 0.1], [0, 0]]
    assert [label.get_text() for label in ax.get_xticklabels()] == ["0", "4", "16", "64"]
    assert ax.get_title() == "t"


@pytest.mark.parametrize(
    ("edges", "errors", "message"),
    [
        ([0, 4], {}, "0 cases"),
        ([0], {"a": [1]}, "two rising"),
        ([0, 4, 4], {"a": [1, 2]}, "two rising"),
        ([0, 4, 8], {"a": [1]}, "1 values for 3 edges"),
    ],
)
def test_what_does_not_fit(edges: Any, errors: Any, message: str) -> None:
    with pytest.raises(ShapeError, match=message):
        viz.plot_error_by_distance(edges, errors)
