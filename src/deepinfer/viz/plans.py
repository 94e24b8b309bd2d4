"""Plans of consecutive steps as a chart: who runs what, when."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import TYPE_CHECKING

from deepinfer.core.errors import ShapeError
from deepinfer.core.plan import RowRole, StepPlan
from deepinfer.viz._axes import new_axes
from deepinfer.viz.style import COLORS

if TYPE_CHECKING:
    from matplotlib.axes import Axes

__all__ = ["plot_plans"]

_LOOKS: Mapping[RowRole, tuple[str, str]] = MappingProxyType(
    {
        RowRole.REPLAY: ("pink", "..."),
        RowRole.PREFILL: ("sky", ""),
        RowRole.LAST_PREFILL: ("blue", ""),
        RowRole.DECODE: ("green", ""),
        RowRole.VERIFY: ("orange", "///"),
    }
)


def plot_plans(plans: Sequence[StepPlan], *, ax: Axes | None = None, title: str = "") -> Axes:
    """Draws one line a request and one column a step; a cell holds the tokens that the row runs.

    Args:
        plans: Plans in step order.
        ax: Axes to draw on; None for a new figure.
        title: Title.

    Returns:
        The axes; requests are listed from the top in order of their first row.

    Raises:
        ShapeError: There is no plan.
        MissingDependency: matplotlib is not installed.
    """
    if not plans:
        raise ShapeError(
            "plans is empty; give at least one plan.",
            argument="plans",
            expected="[steps]",
            found=(0,),
        )
    rids = list(dict.fromkeys(row.rid for plan in plans for row in plan.rows))
    ax = new_axes(ax, height=1.1 + 0.34 * len(rids))
    shown: set[RowRole] = set()
    for plan in plans:
        for row in plan.rows:
            color, hatch = _LOOKS[row.role]
            line = rids.index(row.rid)
            ax.barh(
                line, 0.9, left=plan.step - 0.45, height=0.8, color=COLORS[color], hatch=hatch,
                edgecolor="white", linewidth=0.4,
                label=None if row.role in shown else str(row.role),
            )  # fmt: skip
            shown.add(row.role)
            ax.text(
                plan.step, line, str(row.num_tokens),
                ha="center", va="center", color="white", fontsize=8, fontweight="bold",
            )  # fmt: skip
    ax.set(title=title, xlabel="step (numbers: tokens of the row)")
    ax.locator_params(axis="x", integer=True)
    ax.set_yticks(range(len(rids)), rids)
    ax.set_ylim(len(rids) - 0.5, -0.5)
    ax.set_xlim(plans[0].step - 0.6, plans[-1].step + 0.6)
    ax.spines["left"].set_visible(False)
    ax.tick_params(axis="y", length=0)
    ax.legend(loc="center left", bbox_to_anchor=(1.0, 0.5))
    return ax
