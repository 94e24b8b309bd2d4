"""Plots of drafts."""

from __future__ import annotations

import numpy as np
import pytest

from deepinfer.core.errors import ShapeError
from deepinfer.viz import plot_reliability, plot_throughput

pytest.importorskip("matplotlib").use("Agg")


def test_reliability() -> None:
    bins = {"before": [[0.1, 0.3, 10], [0.9, 0.6, 40]], "after": np.array([[0.5, 0.5, 3]])}
    ax = plot_reliability(bins, title="t")
    assert [text.get_text() for text in ax.get_legend().get_texts()] == ["before", "after"]
    assert ax.lines[1].get_ydata().tolist() == [0.3, 0.6]
    assert plot_reliability({"one": [[0.1, 0.2, 0]]}, ax=ax) is ax
    for wrong in ([[0.1, 0.2]], [0.1, 0.2, 3]):
        with pytest.raises(ShapeError):
            plot_reliability({"one": wrong})


def test_throughput() -> None:
    ax = plot_throughput([1, 16], {"none": [10, 100], "drafts": [20, 90]})
    assert ax.lines[0].get_ydata().tolist() == [1, 1]
    assert ax.lines[1].get_ydata().tolist() == [2.0, 0.9]
    assert "none" in ax.get_ylabel()
    with pytest.raises(ShapeError, match="2 rates for 1 loads"):
        plot_throughput([1], {"none": [1.0, 2.0]})
