"""How far drafts survive verification."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from deepinfer.core.errors import ShapeError
from deepinfer.viz._axes import check_array, new_axes
from deepinfer.viz.style import COLORS

if TYPE_CHECKING:
    from matplotlib.axes import Axes

__all__ = ["plot_acceptance"]


def plot_acceptance(accepted: Any, block: int, *, ax: Axes | None = None, title: str = "") -> Axes:
    """Draws, for each place in a block, how often its draft and all before it are accepted.

    The line beside the bars is the conditional rate: how often a draft is accepted once all before it are.

    Args:
        accepted: Accepted drafts of each verified block, shape [blocks], from 0 to `block`.
        block: Drafts in a block.
        ax: Axes to draw on; None for a new figure.
        title: Title.

    Returns:
        The axes.

    Raises:
        ShapeError: `accepted` is empty, or holds a number outside 0 to `block`.
        MissingDependency: matplotlib is not installed.
    """
    lengths = check_array("accepted", accepted, "blocks")
    if lengths.min() < 0 or lengths.max() > block:
        raise ShapeError(
            f"accepted holds {lengths.min()} to {lengths.max()}; a block of {block} drafts has 0 to "
            f"{block} accepted ones.",
            argument="accepted",
            expected=f"0 to {block}",
            found=(int(lengths.min()), int(lengths.max())),
        )
    places = np.arange(1, block + 1)
    reached = np.array([(lengths >= place - 1).sum() for place in places])
    survived = np.array([(lengths >= place).sum() for place in places])
    ax = new_axes(ax, width=5.5)
    ax.bar(places, survived / len(lengths), 0.7, color=COLORS["blue"], label="it and all before it")
    given = reached > 0
    ax.plot(
        places[given], survived[given] / reached[given],
        "o-", color=COLORS["orange"], label="given those before it",
    )  # fmt: skip
    ax.set(title=title, xlabel="place in the block", ylabel="share accepted", ylim=(0, 1.02))
    ax.set_xticks(places)
    handles, labels = ax.get_legend_handles_labels()
    ax.legend(handles[::-1], labels[::-1], loc="center left", bbox_to_anchor=(1.0, 0.5))
    return ax
