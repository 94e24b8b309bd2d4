"""Fleets: how late first tokens come under different routers, and how evenly engines are used."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import numpy as np

from deepinfer.viz._axes import check_array, new_axes
from deepinfer.viz.style import COLORS

if TYPE_CHECKING:
    from matplotlib.axes import Axes

__all__ = ["plot_engine_load", "plot_latency"]


def plot_latency(
    seconds: Mapping[str, Any], *, ax: Axes | None = None, label: str = "s to the first token"
) -> Axes:
    """Draws what share of requests waits longer than a time, both axes logarithmic, so that tails can be read.

    Args:
        seconds: Seconds of each request by name of the policy, shape [requests] each; NaN is left out.
        ax: Axes to draw on; None for a new figure.
        label: What the seconds are.

    Returns:
        The axes.

    Raises:
        ShapeError: A policy has no requests.
        MissingDependency: matplotlib is not installed.
    """
    ax = new_axes(ax, 6.0, 3.4)
    colors = list(COLORS.values())
    for number, (name, values) in enumerate(seconds.items()):
        array = check_array(name, values, "requests").astype(float)
        array = np.sort(array[~np.isnan(array)])
        share = 1.0 - np.arange(array.size) / max(array.size, 1)
        ax.plot(
            array, share, label=name, color=colors[number % len(colors)], drawstyle="steps-post"
        )
    ax.set(xscale="log", yscale="log", xlabel=label, ylabel="share that waits longer")
    ax.grid(alpha=0.2)
    ax.legend()
    return ax


def plot_engine_load(busy: Mapping[str, Any], *, ax: Axes | None = None) -> Axes:
    """Draws the load of every engine as a multiple of the mean, a band a policy.

    Args:
        busy: Busy seconds of each engine by name of the policy, shape [engines] each.
        ax: Axes to draw on; None for a new figure.

    Returns:
        The axes.

    Raises:
        ShapeError: A policy has no engines.
        MissingDependency: matplotlib is not installed.
    """
    ax = new_axes(ax, 6.0, 0.5 + 0.4 * len(busy))
    for row, (name, values) in enumerate(busy.items()):
        array = check_array(name, values, "engines").astype(float)
        load = array / max(float(array.mean()), 1e-12)
        ax.plot([load.min(), load.max()], [row, row], color=COLORS["grey"], linewidth=5, alpha=0.4)
        ax.plot(load, np.full(load.size, row), "o", color=COLORS["blue"], markersize=4, alpha=0.7)
        ax.annotate(
            f" {load.max():.2f}",
            (load.max(), row),
            va="center",
            textcoords="offset points",
            xytext=(5, 0),
        )
    ax.axvline(1.0, color=COLORS["green"], linewidth=1)
    ax.set(
        yticks=range(len(busy)), yticklabels=list(busy), xlabel="load of an engine over the mean"
    )
    ax.invert_yaxis()
    return ax
