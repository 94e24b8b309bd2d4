"""How an error fades with the distance from where it began."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from deepinfer.core.errors import ShapeError
from deepinfer.viz._axes import check_array, new_axes
from deepinfer.viz.style import COLORS

if TYPE_CHECKING:
    from matplotlib.axes import Axes

__all__ = ["plot_error_by_distance"]


def plot_error_by_distance(
    edges: Sequence[int],
    errors: Mapping[str, Any],
    *,
    unit: str = "added bits per byte",
    ax: Axes | None = None,
    title: str = "",
) -> Axes:
    """Draws one line of steps a case: the error of the tokens between two distances.

    Args:
        edges: Distances in tokens, rising; a value belongs to the tokens from one edge up to the next.
        errors: Values of each case by its name, shape [edges - 1]; NaN where nothing was measured.
        unit: What the values are.
        ax: Axes to draw on; None for a new figure.
        title: Title.

    Returns:
        The axes.

    Raises:
        ShapeError: The edges do not rise, there is no case, or one has another number of values.
        MissingDependency: matplotlib is not installed.
    """
    bounds = check_array("edges", edges, "edges")
    if len(bounds) < 2 or not (np.diff(bounds) > 0).all() or not errors:
        raise ShapeError(
            f"edges is {list(edges)} with {len(errors)} cases; give at least two rising distances and one case.",
            argument="edges",
            expected="rising",
            found=tuple(edges),
        )
    lines = {
        name: check_array(f"errors[{name!r}]", values, "bins") for name, values in errors.items()
    }
    for name, values in lines.items():
        if len(values) != len(bounds) - 1:
            raise ShapeError(
                f"errors[{name!r}] has {len(values)} values for {len(bounds)} edges; give one fewer than edges.",
                argument="errors",
                expected=(len(bounds) - 1,),
                found=values.shape,
            )
    ax = new_axes(ax, width=6.5)
    # Equal widths: distances grow by factors, and the first of them is 0.
    places = np.arange(len(bounds))
    palette = [*COLORS.values()]
    for number, (name, values) in enumerate(lines.items()):
        color = palette[number % len(palette)]
        ax.stairs(values, places, baseline=None, color=color, label=name, linewidth=1.8)
    ax.axhline(0, color="0.6", linewidth=0.8, zorder=0)
    ax.set_xticks(places, [str(edge) for edge in bounds])
    ax.set(title=title, xlabel="distance in tokens", ylabel=unit)
    ax.legend(loc="center left", bbox_to_anchor=(1.0, 0.5))
    return ax
