"""How much a grammar leaves open at each token of an output."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from deepinfer.core.errors import ShapeError
from deepinfer.viz._axes import check_array, new_axes
from deepinfer.viz.style import COLORS

if TYPE_CHECKING:
    from matplotlib.axes import Axes

__all__ = ["plot_mask_sizes"]


def plot_mask_sizes(
    tokens: Sequence[str],
    allowed: Any,
    vocab_size: int,
    *,
    ax: Axes | None = None,
    title: str = "",
) -> Axes:
    """Draws how many tokens were allowed where each token of an output was chosen, on a logarithmic scale.

    Tokens without a choice, where one token was allowed, are drawn in another colour.

    Args:
        tokens: Text of each token of the output.
        allowed: Allowed tokens at each, shape [tokens], from 1 to `vocab_size`.
        vocab_size: Tokens of the vocabulary.
        ax: Axes to draw on; None for a new figure.
        title: Title.

    Returns:
        The axes.

    Raises:
        ShapeError: `allowed` has another length than `tokens`, or holds a number outside of 1 to `vocab_size`.
        MissingDependency: matplotlib is not installed.
    """
    counts = check_array("allowed", allowed, "tokens")
    if len(counts) != len(tokens) or counts.min() < 1 or counts.max() > vocab_size:
        raise ShapeError(
            f"allowed holds {len(counts)} numbers from {counts.min()} to {counts.max()} for {len(tokens)} tokens; "
            f"give one a token, from 1 to {vocab_size}.",
            argument="allowed",
            expected=f"[{len(tokens)}], 1 to {vocab_size}",
            found=counts.shape,
        )
    ax = new_axes(ax, width=max(4.0, 1.2 + 0.24 * len(counts)))
    places = np.arange(len(counts))
    for alone, color, label in ((False, "blue", "a choice"), (True, "orange", "no choice")):
        chosen = (counts == 1) == alone
        if chosen.any():
            # From half a token, so that a single one shows on the logarithmic scale.
            ax.bar(
                places[chosen], counts[chosen] - 0.5, 0.8,
                bottom=0.5, color=COLORS[color], label=label,
            )  # fmt: skip
    ax.axhline(vocab_size, color=COLORS["grey"], linestyle=":", label="all tokens")
    ax.set(title=title, ylabel="allowed tokens", yscale="log", ylim=(0.5, 2 * vocab_size))
    ax.set_xticks(places)
    names = [repr(token)[1:-1].replace(" ", "␣").replace("$", r"\$") for token in tokens]
    ax.set_xticklabels(names, rotation=90, family="monospace", fontsize=8)
    ax.legend(loc="center left", bbox_to_anchor=(1.0, 0.5))
    return ax
