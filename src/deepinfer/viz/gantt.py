"""Requests over time: when each one waits, runs chunks of its prompt, decodes, or lost its slot."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import TYPE_CHECKING, Protocol

from deepinfer.core.errors import ShapeError
from deepinfer.core.plan import ROLES, RowRole, StepPlan
from deepinfer.viz._axes import new_axes
from deepinfer.viz.style import COLORS

if TYPE_CHECKING:
    from matplotlib.axes import Axes

__all__ = ["TimedStep", "plot_gantt"]

# State: colour, hatch, height of the bar.
_LOOKS: Mapping[str, tuple[str, str, float]] = MappingProxyType(
    {
        "queued": ("grey", "", 0.16),
        "replay": ("pink", "...", 0.8),
        "prefill": ("blue", "", 0.8),
        "decode": ("green", "", 0.8),
        "paused": ("orange", "", 0.16),
        "preempted": ("red", "///", 0.4),
    }
)
_STATES: Mapping[RowRole, str] = MappingProxyType(
    {
        RowRole.REPLAY: "replay",
        RowRole.PREFILL: "prefill",
        RowRole.LAST_PREFILL: "prefill",
        RowRole.DECODE: "decode",
        RowRole.VERIFY: "decode",
    }
)
_Bar = tuple[float, float]


class TimedStep(Protocol):
    """A plan and when it ran."""

    @property
    def plan(self) -> StepPlan:
        """What the step ran."""
        ...

    @property
    def start_s(self) -> float:
        """When it began, in seconds on any clock."""
        ...

    @property
    def end_s(self) -> float:
        """When it ended."""
        ...


def plot_gantt(
    steps: Sequence[TimedStep],
    *,
    arrivals: Mapping[str, float] | None = None,
    max_requests: int = 40,
    ax: Axes | None = None,
    title: str = "",
) -> Axes:
    """Draws one line a request, in order of the first row: thick bars where a step runs it, thin ones where it waits.

    Every chunk of a prompt is a bar of its own, and decoding steps that follow each other are one bar. *Queued* is the
    time before the first row, *paused* a time in which the request kept its slot and steps ran without it, and
    *preempted* the time from losing the slot to the next row.

    Args:
        steps: Steps in order; `deepinfer.scheduling.Simulation.steps`, or any objects with these three attributes.
        arrivals: When requests arrived, by id, on the clock of the steps; waiting is drawn for those named only.
        max_requests: Most lines; later requests are left out.
        ax: Axes to draw on; None for a new figure.
        title: Title.

    Returns:
        The axes; time starts at 0 with the first step or the first arrival drawn, and is in seconds.

    Raises:
        ShapeError: There is no step with a row.
        MissingDependency: matplotlib is not installed.
    """
    bars = _bars(steps, arrivals or {}, max_requests)
    if not bars:
        raise ShapeError(
            "steps holds no row; give at least one step that runs a request.",
            argument="steps",
            expected="[steps]",
            found=(len(steps),),
        )
    origin = min(start for lane in bars.values() for spans in lane.values() for start, _ in spans)
    labelled = len(bars) <= 24
    ax = new_axes(ax, height=min(9.0, 1.2 + (0.3 if labelled else 0.16) * len(bars)))
    for state, (color, hatch, height) in _LOOKS.items():
        label: str | None = state
        for index, lane in enumerate(bars.values()):
            spans = [(start - origin, end - start) for start, end in lane.get(state, ())]
            if spans:
                ax.broken_barh(
                    spans, (index - height / 2, height), color=COLORS[color], hatch=hatch,
                    edgecolor="white", linewidth=0.4 if state == "prefill" else 0.0, label=label,
                )  # fmt: skip
                label = None
    ax.set(title=title, xlabel="time (s)")
    ax.set_ylim(len(bars) - 0.5, -0.5)
    if labelled:
        ax.set_yticks(range(len(bars)), list(bars))
    else:
        ax.set_yticks([])
        ax.set_ylabel(f"{len(bars)} requests")
    ax.spines["left"].set_visible(False)
    ax.tick_params(axis="y", length=0)
    ax.legend(loc="center left", bbox_to_anchor=(1.0, 0.5))
    return ax


def _bars(
    steps: Sequence[TimedStep], arrivals: Mapping[str, float], max_requests: int
) -> dict[str, dict[str, list[_Bar]]]:
    """Bars by request and state; decoding steps without a gap between them are joined."""
    bars: dict[str, dict[str, list[_Bar]]] = {}
    until: dict[str, float] = {}  # up to where a request's line is drawn
    lost: dict[str, float] = {}  # since when it has no slot
    for step in steps:
        start, end = step.start_s, step.end_s
        for rid in step.plan.preempted:
            if rid in bars:
                lost[rid] = start
        rows = step.plan.rows
        replayed: dict[str, tuple[int, int]] = {}  # place of the bar of a replay, and its tokens
        for rid, code, count in zip(
            rows.rids, rows.roles.tolist(), rows.num_tokens.tolist(), strict=True
        ):
            state = _STATES[ROLES[code]]
            lane = bars.get(rid)
            if lane is None:
                if len(bars) >= max_requests:
                    continue
                lane = bars[rid] = {}
                _add(lane, "queued", arrivals.get(rid, start), start)
            elif rid in lost:
                _add(lane, "preempted", lost.pop(rid), start)
            elif rid not in replayed:
                _add(lane, "paused", until[rid], start)
            _add(lane, state, start, end, join=state == "decode")
            if state == "replay":
                replayed[rid] = (len(lane[state]) - 1, count)
            elif rid in replayed:
                # Both rows run in the same step: they share its time by tokens.
                place, before = replayed[rid]
                border = start + (end - start) * before / (before + count)
                lane["replay"][place] = (start, border)
                lane[state][-1] = (border, end)
            until[rid] = end
    return bars


def _add(
    lane: dict[str, list[_Bar]], state: str, start: float, end: float, *, join: bool = False
) -> None:
    if end - start <= 1e-9 * max(1.0, abs(end)):
        return
    spans = lane.setdefault(state, [])
    if join and spans and start - spans[-1][1] <= 1e-9 * max(1.0, abs(start)):
        start = spans.pop()[0]
    spans.append((start, end))
