"""A matrix as a heat map."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from deepinfer.viz._axes import check_array, new_axes

if TYPE_CHECKING:
    from matplotlib.axes import Axes

__all__ = ["plot_matrix"]


def plot_matrix(
    values: Any,
    *,
    ax: Axes | None = None,
    title: str = "",
    row_label: str = "",
    column_label: str = "",
    row_names: Sequence[str] = (),
    column_names: Sequence[str] = (),
    low: float | None = 0.0,
    high: float | None = None,
    digits: int | None = None,
    colorbar: bool = True,
) -> Axes:
    """Draws a matrix, first row on top; NaN cells stay empty.

    Args:
        values: Shape [rows, columns], any number type.
        ax: Axes to draw on; None for a new figure.
        title: Title.
        row_label: What rows are.
        column_label: What columns are.
        row_names: One name a row, or none for numbers.
        column_names: One name a column, or none for numbers.
        low: Value of the darkest colour; None for the lowest value.
        high: Value of the lightest colour; None for the highest value.
        digits: Digits after the point to write into the cells, or None to write nothing.
        colorbar: Whether to draw the scale.

    Returns:
        The axes.

    Raises:
        ShapeError: `values` is not a matrix.
        MissingDependency: matplotlib is not installed.
    """
    array = check_array("values", values, "rows columns")
    rows, columns = array.shape
    low = float(np.nanmin(array)) if low is None else low
    high = float(np.nanmax(array)) if high is None else high
    ax = new_axes(ax, height=min(5.0, max(2.2, 1.2 + 0.24 * rows)))
    image = ax.imshow(
        array, aspect="auto", cmap="cividis", vmin=low, vmax=high, interpolation="nearest"
    )
    ax.set(title=title, xlabel=column_label, ylabel=row_label)
    ax.spines[:].set_visible(False)
    if row_names:
        ax.set_yticks(range(rows), row_names)
    elif rows <= 16:
        ax.set_yticks(range(rows))
    if column_names:
        ax.set_xticks(range(columns), column_names)
    elif columns <= 16:
        ax.set_xticks(range(columns))
    if digits is not None:
        middle = (low + high) / 2
        for (row, column), value in _cells(array):
            color = "black" if value > middle else "white"
            text = f"{value:.{digits}f}"
            ax.text(column, row, text, ha="center", va="center", color=color, fontsize=8)
    if colorbar:
        ax.figure.colorbar(image, ax=ax, pad=0.02)
    return ax


def _cells(array: Any) -> list[tuple[tuple[int, int], float]]:
    return [
        ((row, column), float(array[row, column]))
        for row in range(array.shape[0])
        for column in range(array.shape[1])
        if not np.isnan(array[row, column])
    ]
