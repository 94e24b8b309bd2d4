"""Stretches of time as a Gantt chart."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from deepinfer.core.errors import ShapeError
from deepinfer.viz._axes import new_axes
from deepinfer.viz.style import COLORS

if TYPE_CHECKING:
    from matplotlib.axes import Axes

__all__ = ["Span", "plot_spans"]


@dataclass(frozen=True, slots=True)
class Span:
    """A stretch of time.

    Attributes:
        lane: What it belongs to; one line of the chart.
        start_s: Begin in seconds, on any clock.
        end_s: End in seconds, not before the begin.
    """

    lane: str
    start_s: float
    end_s: float


def plot_spans(spans: Sequence[Span], *, ax: Axes | None = None, title: str = "") -> Axes:
    """Draws one line a lane, in order of first appearance; time starts at the first span and is in milliseconds.

    Args:
        spans: The spans.
        ax: Axes to draw on; None for a new figure.
        title: Title.

    Returns:
        The axes.

    Raises:
        ShapeError: There is no span, or one ends before it begins.
        MissingDependency: matplotlib is not installed.
    """
    backwards = next((span for span in spans if span.end_s < span.start_s), None)
    if not spans or backwards is not None:
        found = backwards if spans else "no span"
        raise ShapeError(
            f"spans holds {found}; give at least one, each with end_s at or after start_s.",
            argument="spans",
            expected="spans that do not end before they begin",
            found=found,
        )
    lanes = list(dict.fromkeys(span.lane for span in spans))
    origin = min(span.start_s for span in spans)
    ax = new_axes(ax, height=1.0 + 0.34 * len(lanes))
    colors = list(COLORS.values())
    for index, lane in enumerate(lanes):
        bars = [
            (1e3 * (span.start_s - origin), 1e3 * (span.end_s - span.start_s))
            for span in spans
            if span.lane == lane
        ]
        ax.broken_barh(bars, (index - 0.4, 0.8), color=colors[index % len(colors)])
    ax.set(title=title, xlabel="time (ms)")
    ax.set_yticks(range(len(lanes)), lanes)
    ax.set_ylim(len(lanes) - 0.5, -0.5)
    ax.spines["left"].set_visible(False)
    ax.tick_params(axis="y", length=0)
    return ax
