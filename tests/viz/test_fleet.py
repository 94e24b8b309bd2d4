"""Plots of fleets, read back from the Axes."""

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


def test_latency_curves_fall_from_everyone_to_the_last(plt: Any) -> None:
    ax = viz.plot_latency({"a": [3.0, 1.0, np.nan, 2.0], "b": [5.0]})
    line = ax.get_lines()[0]
    assert line.get_xdata().tolist() == [1.0, 2.0, 3.0]
    assert line.get_ydata() == pytest.approx([1.0, 2 / 3, 1 / 3])
    assert [text.get_text() for text in ax.get_legend().get_texts()] == ["a", "b"]
    with pytest.raises(ShapeError):
        viz.plot_latency({"a": []})


def test_loads_are_multiples_of_the_mean(plt: Any) -> None:
    ax = viz.plot_engine_load({"even": [1.0, 1.0], "uneven": [1.0, 3.0]})
    dots = [line for line in ax.get_lines() if line.get_marker() == "o"]
    assert dots[1].get_xdata().tolist() == [0.5, 1.5]
    assert [label.get_text() for label in ax.get_yticklabels()] == ["even", "uneven"]
