"""How evenly the router spreads tokens over experts."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from deepinfer.viz._axes import check_array
from deepinfer.viz.matrix import plot_matrix

if TYPE_CHECKING:
    from matplotlib.axes import Axes

__all__ = ["plot_expert_load"]


def plot_expert_load(counts: Any, *, ax: Axes | None = None, title: str = "") -> Axes:
    """Draws the load of every expert as a multiple of its layer's mean.

    Args:
        counts: Tokens routed to each expert, shape [layers, experts].
        ax: Axes to draw on; None for a new figure.
        title: Title.

    Returns:
        The axes.

    Raises:
        ShapeError: `counts` is not a matrix.
        MissingDependency: matplotlib is not installed.
    """
    array = check_array("counts", counts, "layers experts").astype(float)
    means = array.mean(1, keepdims=True)
    load = array / means.clip(min=1e-9)
    return plot_matrix(
        load,
        ax=ax,
        title=title,
        row_label="layer",
        column_label="expert",
        high=max(2.0, load.max()),
    )
