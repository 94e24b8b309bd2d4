"""The chart of requests over time, read back from the Axes."""

from __future__ import annotations

import io
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import pytest

from deepinfer import viz
from deepinfer.core import PlanRow, RowRole, StepPlan
from deepinfer.core.errors import ShapeError


@dataclass
class Step:
    plan: StepPlan
    start_s: float
    end_s: float


@pytest.fixture
def plt(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    matplotlib = pytest.importorskip("matplotlib")
    matplotlib.use("agg")
    import matplotlib.pyplot as plt

    with matplotlib.rc_context():
        yield plt
    plt.close("all")


def step(start_s: float, *rows: tuple[str, RowRole, int], preempted: tuple[str, ...] = ()) -> Step:
    plan = StepPlan(
        step=0,
        rows=tuple(
            PlanRow(rid=rid, slot=0, first_position=0, num_tokens=count, role=role)
            for rid, role, count in rows
        ),
        preempted=preempted,
    )
    return Step(plan, start_s, start_s + 1.0)


STEPS = [
    step(10.0, ("a", RowRole.PREFILL, 8)),
    step(11.0, ("a", RowRole.LAST_PREFILL, 3), ("b", RowRole.REPLAY, 3), ("b", RowRole.PREFILL, 1)),
    step(12.0, ("a", RowRole.DECODE, 1), ("b", RowRole.LAST_PREFILL, 2)),
    step(13.0, ("a", RowRole.DECODE, 1)),
    step(14.0, ("b", RowRole.DECODE, 1), preempted=("a",)),
    step(15.0, ("b", RowRole.DECODE, 1)),
    step(16.0, ("a", RowRole.LAST_PREFILL, 12), ("b", RowRole.VERIFY, 3)),
]


def drawn(ax: Any) -> dict[str, list[tuple[float, float, float]]]:
    """Line, begin and end of every bar by state."""
    found: dict[str, list[tuple[float, float, float]]] = {}
    colors = {}
    for bars in ax.collections:
        color = tuple(bars.get_facecolor()[0])
        if not bars.get_label().startswith("_"):
            colors[color] = bars.get_label()
        for path in bars.get_paths():
            box = path.get_extents()
            line = (box.y0 + box.y1) / 2
            found.setdefault(colors[color], []).append(
                tuple(round(float(x), 9) for x in (line, box.x0, box.x1))
            )
    return found


def test_every_state_is_a_bar(plt: Any) -> None:
    ax = viz.plot_gantt(STEPS, arrivals={"a": 9.5, "b": 10.5}, title="t")
    assert drawn(ax) == {
        "queued": [(0, 0.0, 0.5), (1, 1.0, 1.5)],
        "replay": [(1, 1.5, 2.25)],
        "prefill": [(0, 0.5, 1.5), (0, 1.5, 2.5), (0, 6.5, 7.5), (1, 2.25, 2.5), (1, 2.5, 3.5)],
        "decode": [(0, 2.5, 4.5), (1, 4.5, 7.5)],
        "paused": [(1, 3.5, 4.5)],
        "preempted": [(0, 4.5, 6.5)],
    }
    assert [label.get_text() for label in ax.get_yticklabels()] == ["a", "b"]
    assert ax.get_title() == "t"
    assert ax.get_xlabel() == "time (s)"
    named = [text.get_text() for text in ax.get_legend().get_texts()]
    assert named == ["queued", "replay", "prefill", "decode", "paused", "preempted"]
    ax.figure.savefig(io.BytesIO())


def test_waiting_is_drawn_for_known_arrivals_only(plt: Any) -> None:
    assert "queued" not in drawn(viz.plot_gantt(STEPS))


def test_lines_are_bounded(plt: Any) -> None:
    steps = [step(float(i), (f"r{i}", RowRole.LAST_PREFILL, 1)) for i in range(60)]
    ax = viz.plot_gantt(steps, max_requests=30)
    assert len(drawn(ax)["prefill"]) == 30
    assert ax.get_ylabel() == "30 requests"


def test_axes_are_taken(plt: Any) -> None:
    ax = plt.subplots()[1]
    assert viz.plot_gantt(STEPS, ax=ax) is ax


def test_nothing_to_draw_is_refused(plt: Any) -> None:
    with pytest.raises(ShapeError, match="steps"):
        viz.plot_gantt([])
    assert plt.get_fignums() == []
