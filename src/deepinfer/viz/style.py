"""One look for all plots: colours that colour-blind readers can tell apart, legible on light and dark pages."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

from deepinfer.core.lazy import optional_import

__all__ = ["COLORS", "use_style"]

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
SETTINGS: Mapping[str, Any] = MappingProxyType(
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
    matplotlib.rcParams.update(SETTINGS)
