"""Where attention goes: mass by kind of row, and which pool rows the queries select."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from deepinfer.core.errors import ShapeError
from deepinfer.viz._axes import check_array, new_axes
from deepinfer.viz.style import COLORS

if TYPE_CHECKING:
    from matplotlib.axes import Axes

__all__ = ["plot_attention_mass", "plot_selected_rows"]


def plot_attention_mass(
    sink: Any, window: Any, pool: Any, *, ax: Axes | None = None, title: str = ""
) -> Axes:
    """Draws how each layer shares its attention among the sink, the window and the pool, as stacked bars.

    Args:
        sink: Mass on the sinks, shape [layers], from 0 to 1.
        window: Mass on window rows, shape [layers].
        pool: Mass on pool rows, shape [layers].
        ax: Axes to draw on; None for a new figure.
        title: Title.

    Returns:
        The axes.

    Raises:
        ShapeError: The shapes differ, or the masses of a layer do not sum to 1.
        MissingDependency: matplotlib is not installed.
    """
    given = {"sink": sink, "window": window, "pool": pool}
    parts = {name: check_array(name, values, "layers") for name, values in given.items()}
    shapes = {name: part.shape for name, part in parts.items()}
    if len(set(shapes.values())) > 1:
        raise ShapeError(
            f"sink, window and pool have different shapes: {shapes}; give one mass a layer in each.",
            argument="sink, window, pool",
            expected="[layers]",
            found=shapes,
        )
    total: np.ndarray = np.sum(list(parts.values()), 0)
    if not np.allclose(total, 1.0, atol=1e-3):
        worst = int(np.abs(total - 1).argmax())
        raise ShapeError(
            f"the masses of layer {worst} sum to {total[worst]:.4f}; sink, window and pool must sum to 1.",
            argument="sink, window, pool",
            expected="masses that sum to 1",
            found=float(total[worst]),
        )
    ax = new_axes(ax)
    layers = np.arange(len(total))
    below = np.zeros(len(total))
    looks = (("window", "sky", ""), ("pool", "blue", ""), ("sink", "orange", "///"))
    for name, color, hatch in looks:
        ax.bar(
            layers, parts[name], 0.8, bottom=below, label=name,
            color=COLORS[color], hatch=hatch, edgecolor="white", linewidth=0.4,
        )  # fmt: skip
        below = below + parts[name]
    ax.set(title=title, xlabel="layer", ylabel="share of attention", ylim=(0, 1))
    ax.set_xticks(layers)
    ax.legend(loc="center left", bbox_to_anchor=(1.0, 0.5))
    return ax


def plot_selected_rows(selected: Any, *, ax: Axes | None = None, title: str = "") -> Axes:
    """Draws which pool rows each query attends to: a dark cell is selected, a light one visible but left out.

    Args:
        selected: 2 for a selected row, 1 for a visible one, 0 for one that the query cannot see, shape
            [queries, rows]. A boolean array marks selected rows only.
        ax: Axes to draw on; None for a new figure.
        title: Title.

    Returns:
        The axes.

    Raises:
        ShapeError: `selected` is not a matrix.
        MissingDependency: matplotlib is not installed.
    """
    array = check_array("selected", selected, "queries rows")
    if array.dtype == np.bool_:
        array = array * 2
    ax = new_axes(ax, height=3.6)
    shades = np.array([[0, 0, 0, 0], [0x56, 0xB4, 0xE9, 90], [0x00, 0x72, 0xB2, 255]]) / 255
    ax.imshow(shades[array.astype(int)], aspect="auto", interpolation="nearest")
    ax.set(title=title, xlabel="pool row", ylabel="query position")
    return ax
