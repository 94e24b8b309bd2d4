"""Sizes of masks, read back from the Axes."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

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


def test_one_bar_a_token(plt: Any) -> None:
    given = plt.subplots()[1]
    ax = viz.plot_mask_sizes(['{"', " a$", "\n"], [3, 1, 900], 1000, ax=given, title="t")
    assert ax is given
    tops = {bar.get_x() + 0.4: bar.get_y() + bar.get_height() for bar in ax.patches}
    assert tops == {0.0: 3.0, 1.0: 1.0, 2.0: 900.0}
    names = [label.get_text() for label in ax.get_xticklabels()]
    assert names == ['{"', r"␣a\$", r"\n"]
    labels = [text.get_text() for text in ax.get_legend().get_texts()]
    assert sorted(labels) == ["a choice", "all tokens", "no choice"]
    assert ax.get_yscale() == "log"
    assert ax.get_title() == "t"


@pytest.mark.parametrize("allowed", [[1], [0, 1], [1, 1001], []])
def test_numbers_that_do_not_fit(plt: Any, allowed: list[int]) -> None:
    with pytest.raises(ShapeError, match="allowed"):
        viz.plot_mask_sizes(["a", "b"], allowed, 1000)
