from __future__ import annotations

import json
import pickle

import pytest

from deepinfer.core.plan import LoadSnapshot, PlanRow, RowResult, RowRole, StepPlan, StepResult


def row(role: RowRole, num_tokens: int = 1, num_drafts: int = 0) -> PlanRow:
    return PlanRow(
        rid="a",
        slot=0,
        first_position=8,
        num_tokens=num_tokens,
        num_drafts=num_drafts,
        role=role,
    )


@pytest.mark.parametrize(
    ("plan_row", "num_logits"),
    [
        (row(RowRole.REPLAY, 8), 0),
        (row(RowRole.PREFILL, 8), 0),
        (row(RowRole.LAST_PREFILL, 8), 1),
        (row(RowRole.DECODE), 1),
        (row(RowRole.VERIFY, 4, 3), 4),
    ],
)
def test_logits_follow_from_the_role(plan_row: PlanRow, num_logits: int) -> None:
    assert plan_row.num_logits == num_logits


def test_plan_sums_and_serialises() -> None:
    plan = StepPlan(step=3, rows=(row(RowRole.PREFILL, 8), row(RowRole.VERIFY, 4, 3)))
    assert plan.num_tokens == 12
    assert plan.num_logits == 4
    assert plan.rows[0].end_position == 16
    assert json.loads(json.dumps(plan.to_dict()))["rows"][1]["role"] == "verify"
    assert repr(plan) == "StepPlan(step=3, tokens=12, rows=[a:prefill[8:16], a:verify[8:12]])"
    assert pickle.loads(pickle.dumps(plan)) == plan
    with pytest.raises(AttributeError):
        plan.step = 4  # type: ignore[misc]


def test_results_are_plain_values() -> None:
    result = StepResult(step=3, rows=(RowResult(rid="a", slot=0, token_ids=(5,)),))
    assert pickle.loads(pickle.dumps(result)) == result
    assert result.rows[0].error is None


def test_used_ratio() -> None:
    assert LoadSnapshot(time_s=0.0, num_running=0, num_waiting=0).used_ratio == 0.0
    load = LoadSnapshot(
        time_s=0.0, num_running=1, num_waiting=0, cached_tokens=3, capacity_tokens=4
    )
    assert load.used_ratio == 0.75
