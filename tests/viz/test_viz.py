"""What the plots draw, read back from the Axes."""

from __future__ import annotations

import io
import sys
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest

from deepinfer import viz
from deepinfer.core import PlanRow, RowRole, StepPlan
from deepinfer.core.errors import MissingDependency, ShapeError


@pytest.fixture
def plt(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    matplotlib = pytest.importorskip("matplotlib")
    matplotlib.use("agg")
    import matplotlib.pyplot as plt

    with matplotlib.rc_context():
        yield plt
    plt.close("all")


def plan(step: int, *rows: tuple[str, RowRole, int]) -> StepPlan:
    return StepPlan(
        step=step,
        rows=tuple(
            PlanRow(rid=rid, slot=0, first_position=0, num_tokens=count, role=role)
            for rid, role, count in rows
        ),
    )


PLANS = [
    plan(0, ("a", RowRole.PREFILL, 8)),
    plan(1, ("a", RowRole.LAST_PREFILL, 3), ("b", RowRole.LAST_PREFILL, 5)),
    plan(2, ("a", RowRole.DECODE, 1), ("b", RowRole.VERIFY, 6)),
]
CALLS: dict[str, Callable[..., Any]] = {
    "plans": lambda **o: viz.plot_plans(PLANS, **o),
    "spans": lambda **o: viz.plot_spans([viz.Span("host", 0.0, 1.0)], **o),
    "matrix": lambda **o: viz.plot_matrix(np.eye(3), **o),
    "mass": lambda **o: viz.plot_attention_mass([0.2], [0.5], [0.3], **o),
    "rows": lambda **o: viz.plot_selected_rows(np.tril(np.ones((4, 4))), **o),
    "load": lambda **o: viz.plot_expert_load(np.ones((2, 4)), **o),
    "acceptance": lambda **o: viz.plot_acceptance([0, 1, 5], 5, **o),
}


@pytest.mark.parametrize("name", CALLS)
def test_draws_on_the_axes_given_or_on_new_ones(plt: Any, name: str) -> None:
    given = plt.subplots()[1]
    assert CALLS[name](ax=given, title="t") is given
    assert given.get_title() == "t"
    fresh = CALLS[name]()
    assert fresh is not given
    assert fresh.figure.get_facecolor()[3] == 0  # transparent, so that the page shows through
    fresh.figure.savefig(io.BytesIO())


def test_plans_are_cells_of_requests_and_steps(plt: Any) -> None:
    ax = viz.plot_plans(PLANS)
    assert [label.get_text() for label in ax.get_yticklabels()] == ["a", "b"]
    cells = {(t.get_position(), t.get_text()) for t in ax.texts}
    assert cells == {((0, 0), "8"), ((1, 0), "3"), ((1, 1), "5"), ((2, 0), "1"), ((2, 1), "6")}
    named = [t.get_text() for t in ax.get_legend().get_texts()]
    assert named == ["prefill", "last_prefill", "decode", "verify"]


def test_spans_start_at_zero_in_milliseconds(plt: Any) -> None:
    spans = [viz.Span("host", 5.0, 5.1), viz.Span("model", 5.1, 5.4), viz.Span("host", 5.4, 5.5)]
    ax = viz.plot_spans(spans)
    assert [label.get_text() for label in ax.get_yticklabels()] == ["host", "model"]
    model = ax.collections[1].get_paths()[0].get_extents()
    assert (model.x0, model.x1) == pytest.approx((100, 400))


def test_attention_mass_is_stacked_to_one(plt: Any) -> None:
    ax = viz.plot_attention_mass([0.2, 0.1], [0.5, 0.9], [0.3, 0.0])
    tops = {
        group.get_label(): [bar.get_y() + bar.get_height() for bar in group]
        for group in ax.containers
    }
    assert tops["window"] == pytest.approx([0.5, 0.9])
    assert tops["pool"] == pytest.approx([0.8, 0.9])
    assert tops["sink"] == pytest.approx([1.0, 1.0])


def test_expert_load_is_relative_to_the_layer(plt: Any) -> None:
    ax = viz.plot_expert_load([[3, 1], [10, 30]])
    assert ax.images[0].get_array().tolist() == [[1.5, 0.5], [0.5, 1.5]]


def test_acceptance_by_place(plt: Any) -> None:
    ax = viz.plot_acceptance([0, 1, 1, 2], 2)
    assert [bar.get_height() for bar in ax.patches] == [0.75, 0.25]
    assert ax.lines[0].get_ydata().tolist() == pytest.approx([0.75, 1 / 3])


def test_matrix_writes_numbers(plt: Any) -> None:
    ax = viz.plot_matrix([[0.25, 1.0, np.nan]], digits=2, column_names=["x", "y", "z"])
    assert [t.get_text() for t in ax.texts] == ["0.25", "1.00"]
    assert [label.get_text() for label in ax.get_xticklabels()] == ["x", "y", "z"]


@pytest.mark.parametrize(
    "call",
    [
        lambda: viz.plot_plans([]),
        lambda: viz.plot_spans([]),
        lambda: viz.plot_spans([viz.Span("host", 1.0, 0.0)]),
        lambda: viz.plot_matrix([1.0, 2.0]),
        lambda: viz.plot_matrix(np.empty((0, 3))),
        lambda: viz.plot_attention_mass([0.2], [0.5, 0.1], [0.3]),
        lambda: viz.plot_attention_mass([0.2], [0.5], [0.4]),
        lambda: viz.plot_expert_load([1, 2]),
        lambda: viz.plot_acceptance([], 5),
        lambda: viz.plot_acceptance([6], 5),
    ],
)
def test_bad_arrays_are_refused(plt: Any, call: Callable[[], Any]) -> None:
    with pytest.raises(ShapeError):
        call()
    assert plt.get_fignums() == []


def test_settings_change_only_when_asked(plt: Any) -> None:
    before = dict(plt.rcParams)
    viz.plot_matrix(np.eye(2))
    assert dict(plt.rcParams) == before
    viz.use_style()
    assert plt.subplots()[0].get_facecolor()[3] == 0


def test_without_matplotlib_the_command_is_given(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(MissingDependency, match=r"deepinfer-sdk\[notebooks\]"):
        viz.use_style()
