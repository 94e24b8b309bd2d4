"""Drafts: whether confidences are honest, and what drafting is worth by load."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from deepinfer.core.errors import ShapeError
from deepinfer.viz._axes import check_array, new_axes
from deepinfer.viz.style import COLORS

if TYPE_CHECKING:
    from matplotlib.axes import Axes

__all__ = ["plot_reliability", "plot_throughput"]


def plot_reliability(bins: Mapping[str, Any], *, ax: Axes | None = None, title: str = "") -> Axes:
    """Draws how often what was predicted came true, against the prediction; honest predictions lie on the diagonal.

    Args:
        bins: By name, mean prediction, share that came true, and number of predictions of each bin, shape [bins, 3].
            Areas of the dots follow the numbers.
        ax: Axes to draw on; None for a new figure.
        title: Title.

    Returns:
        The axes.

    Raises:
        ShapeError: A value does not have three columns.
        MissingDependency: matplotlib is not installed.
    """
    ax = new_axes(ax, width=4.6, height=3.6)
    ax.plot([0, 1], [0, 1], color="0.7", linewidth=1, zorder=0)
    colors = list(COLORS.values())
    for number, (name, values) in enumerate(bins.items()):
        array = check_array(name, values, "bins, 3").astype(float)
        if array.shape[1] != 3:
            raise ShapeError(
                f"{name} has {array.shape[1]} columns; it must have 3: prediction, outcome, count.",
                argument=name,
                expected="[bins, 3]",
                found=array.shape,
            )
        predicted, outcome, count = array.T
        color = colors[number % len(colors)]
        ax.plot(predicted, outcome, color=color, linewidth=1, label=name)
        ax.scatter(
            predicted, outcome, 4 + 120 * count / max(1.0, count.max()), color=color, alpha=0.6
        )
    ax.set(title=title, xlabel="predicted", ylabel="came true", xlim=(0, 1), ylim=(0, 1))
    ax.legend(loc="upper left")
    return ax


def plot_throughput(
    loads: Sequence[int], rates: Mapping[str, Any], *, ax: Axes | None = None, title: str = ""
) -> Axes:
    """Draws tokens a second by requests at once, each way of drafting as a multiple of the first.

    Args:
        loads: Requests at once, rising.
        rates: Tokens a second of each way, shape [loads] each; the first is what the others are compared with.
        ax: Axes to draw on; None for a new figure.
        title: Title.

    Returns:
        The axes.

    Raises:
        ShapeError: A way does not have one rate a load.
        MissingDependency: matplotlib is not installed.
    """
    ax = new_axes(ax, width=6.0, height=3.2)
    colors = list(COLORS.values())
    base: np.ndarray | None = None
    for number, (name, values) in enumerate(rates.items()):
        array = check_array(name, values, "loads").astype(float)
        if len(array) != len(loads):
            raise ShapeError(
                f"{name} has {len(array)} rates for {len(loads)} loads; give one a load.",
                argument=name,
                expected=(len(loads),),
                found=array.shape,
            )
        base = array if base is None else base
        style = "-" if number else ":"
        ax.plot(loads, array / base, "o" + style, label=name, color=colors[number % len(colors)])
    first = next(iter(rates), "")
    ax.set(
        xscale="log", title=title, xlabel="requests at once", ylabel=f"tokens a second over {first}"
    )
    ax.set_xticks(list(loads), [str(load) for load in loads])
    ax.minorticks_off()
    ax.grid(alpha=0.2)
    ax.legend()
    return ax
