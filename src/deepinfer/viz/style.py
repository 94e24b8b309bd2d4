"""One look for all plots: colours that colour-blind readers can tell apart, legible on light and dark pages."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

import numpy as np

from deepinfer.core.errors import ShapeError
from deepinfer.core.lazy import optional_import

if TYPE_CHECKING:
    from matplotlib.axes import Axes

__all__ = ["COLORS", "check_array", "new_axes", "use_style"]

COLORS: Mapping[str, str] = MappingProxyType(
    {
        "blue": "#0072B2",
        "orange": "#E69F00",
        "green": "#009E73",
        "red": "#D55E00",
        "sky": "#56B4E9",
        "pink": "#CC79A7",
        "grey": "#8A8F9C",
    }
)
"""Colours by name, after Okabe and Ito."""

_INK = "#7B8190"  # readable on white and on dark pages
_SETTINGS: Mapping[str, Any] = MappingProxyType(
    {
        "figure.facecolor": "none",
        "axes.facecolor": "none",
        "savefig.facecolor": "none",
        "figure.dpi": 110,
        "savefig.dpi": 110,
        "figure.constrained_layout.use": True,
        "font.size": 9.0,
        "axes.titlesize": 10.0,
        "axes.spines.top": False,
        "axes.spines.right": False,
        "axes.edgecolor": _INK,
        "axes.labelcolor": _INK,
        "axes.titlecolor": _INK,
        "xtick.color": _INK,
        "ytick.color": _INK,
        "text.color": _INK,
        "legend.frameon": False,
        "legend.labelcolor": _INK,
    }
)


def use_style() -> None:
    """Sets this look for every figure made afterwards, with `plt.subplots` as well.

    Raises:
        MissingDependency: matplotlib is not installed.
    """
    matplotlib = optional_import("matplotlib", extra="notebooks")
    matplotlib.rcParams.update(_SETTINGS)


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
    before = {name: plt.rcParams[name] for name in _SETTINGS}
    plt.rcParams.update(_SETTINGS)
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
