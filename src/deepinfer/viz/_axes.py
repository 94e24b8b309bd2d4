"""What every plot does first: check its array and find its Axes."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from deepinfer.core.errors import ShapeError
from deepinfer.core.lazy import optional_import
from deepinfer.viz.style import SETTINGS

if TYPE_CHECKING:
    from matplotlib.axes import Axes

__all__ = ["check_array", "new_axes"]


def new_axes(ax: Axes | None, width: float = 7.0, height: float = 2.8) -> Axes:
    """The given axes, or those of a new figure.

    Args:
        ax: Axes to draw on, or None.
        width: Width of a new figure in inches.
        height: Its height in inches.

    Returns:
        The axes.

    Raises:
        MissingDependency: matplotlib is not installed.
    """
    if ax is not None:
        return ax
    plt = optional_import("matplotlib.pyplot", package="matplotlib", extra="notebooks")
    # Not rc_context: it would also take back the interactive mode that a notebook's backend sets when it starts.
    before = {name: plt.rcParams[name] for name in SETTINGS}
    plt.rcParams.update(SETTINGS)
    try:
        return plt.subplots(figsize=(width, height))[1]
    finally:
        plt.rcParams.update(before)


def check_array(name: str, values: Any, axes: str) -> np.ndarray:
    """An array of the wanted rank.

    Args:
        name: Name of the argument, for the message.
        values: Anything that NumPy takes, torch tensors on a CPU included.
        axes: Names of the axes, separated by spaces.

    Returns:
        The array.

    Raises:
        ShapeError: Another number of axes, or an empty one.
    """
    array = np.asarray(values)
    wanted = f"[{', '.join(axes.split())}]"
    if array.ndim != len(axes.split()) or array.size == 0:
        raise ShapeError(
            f"{name} has shape {list(array.shape)}; it must be {wanted} with at least one entry.",
            argument=name,
            expected=wanted,
            found=array.shape,
        )
    return array
