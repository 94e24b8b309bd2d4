from __future__ import annotations

import json
import pickle

import numpy as np
import pytest

from deepinfer.core.errors import ShapeError
from deepinfer.core.plan import (
    ROLES,
    BlockUpdate,
    CacheCopy,
    CopyKind,
    LoadSnapshot,
    PlanRow,
    PlanRows,
    RowResult,
    RowResults,
    RowRole,
    StepPlan,
    StepResult,
)


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


ROWS = (
    PlanRow(
        rid="a", slot=3, slot_generation=2, epoch=1, first_position=8, num_tokens=2, role=RowRole.REPLAY,
        token_ids=(4, 5), window_start=8, pool_start=10, full_start=12,
    ),
    PlanRow(
        rid="b", slot=0, first_position=9, num_tokens=4, num_drafts=3, role=RowRole.VERIFY, num_open=2, is_late=True,
    ),
    PlanRow(rid="c", slot=1, first_position=2, num_tokens=1, role=RowRole.DECODE, token_ids=(6,)),
)  # fmt: skip


class TestPlanRows:
    def test_columns_and_values_are_the_same_rows(self) -> None:
        rows = PlanRows.of(ROWS)
        again = pickle.loads(pickle.dumps(rows))  # has the columns only
        assert again == rows == ROWS
        assert [ROWS].count(again) == 1  # the tuple on the left
        assert tuple(again) == ROWS
        assert again[1] == ROWS[1]
        assert again[1:] == ROWS[1:]
        assert hash(again) == hash(ROWS)
        assert (len(rows), rows.index(ROWS[2]), rows.count(ROWS[0])) == (3, 2, 1)
        assert ROWS[1] in again
        assert again != ROWS[:2]
        assert again != PlanRows.of(ROWS[:2])
        assert (again == 3) is False
        assert "rid='b'" in repr(again)

    def test_columns(self) -> None:
        rows = PlanRows.of(ROWS)
        assert rows.rids == ("a", "b", "c")
        assert [ROLES[code] for code in rows.roles] == [row.role for row in ROWS]
        assert rows.num_known.tolist() == [2, 0, 1]
        assert rows.token_ids.tolist() == [4, 5, 6]
        assert rows.token_offsets.tolist() == [0, 2, 2]
        assert rows.num_logits.tolist() == [row.num_logits for row in ROWS]
        assert rows.end_positions.tolist() == [row.end_position for row in ROWS]

    def test_nothing_can_be_changed(self) -> None:
        slots = np.array([0])
        rows = PlanRows(("a",), slots, [0], [1], [RowRole.DECODE])
        slots[0] = 7
        assert rows[0].slot == 0
        with pytest.raises(ValueError, match="read-only"):
            rows.slots[0] = 1
        with pytest.raises(AttributeError, match="frozen"):
            rows.slots = slots
        with pytest.raises(AttributeError, match="frozen"):
            del rows.slots

    def test_bad_columns_are_refused(self) -> None:
        with pytest.raises(ShapeError, match="slots has shape"):
            PlanRows(("a",), [0, 1], [0], [1], [RowRole.DECODE])
        with pytest.raises(ShapeError, match="num_known adds up to 2"):
            PlanRows(("a",), [0], [0], [2], [RowRole.DECODE], num_known=[2], token_ids=[5])
        with pytest.raises(TypeError, match="slot_generation'"):
            PlanRows(("a",), [0], [0], [2], ["decode"], slot_generation=[2])

    def test_plan_passes_through_json(self) -> None:
        plan = StepPlan(
            step=4,
            rows=ROWS,
            preempted=("z",),
            block_updates=(BlockUpdate(slot=3, first=0, blocks=(7, 8)),),
            copies=(CacheCopy(kind=CopyKind.LOAD_BLOCK, device=7, host=1, rid="a"),),
            predicted_s=0.5,
        )
        assert StepPlan.from_dict(json.loads(json.dumps(plan.to_dict()))) == plan
        bare = StepPlan(step=4, rows=())
        assert StepPlan.from_dict(json.loads(json.dumps(bare.to_dict()))) == bare


class TestRowResults:
    def test_columns_and_values_are_the_same_results(self) -> None:
        plan_rows = PlanRows.of(ROWS)
        results = RowResults(
            plan_rows,
            [7, 8, 9],
            num_token_ids=[0, 2, 1],
            num_accepted=[0, 1, 0],
            draft_token_ids={2: (1, 2)},
            draft_confidences={2: (0.5, 0.25)},
        )
        values = (
            RowResult(rid="a", slot=3, slot_generation=2, epoch=1),
            RowResult(rid="b", slot=0, token_ids=(7, 8), num_drafts=3, num_accepted=1),
            RowResult(
                rid="c",
                slot=1,
                token_ids=(9,),
                draft_token_ids=(1, 2),
                draft_confidences=(0.5, 0.25),
            ),
        )
        assert results == values
        assert RowResults.of(values) == results
        assert pickle.loads(pickle.dumps(results)) == RowResults.of(values)
        assert results.token_offsets.tolist() == [0, 0, 2]

    def test_errors_of_rows(self) -> None:
        error = ValueError("no")
        results = RowResults(PlanRows.of(ROWS), [7, 8]).with_errors({1: error})
        assert [result.error for result in results] == [None, error, None]
        assert RowResults.of(results).errors == {1: error}

    def test_bad_columns_are_refused(self) -> None:
        with pytest.raises(ShapeError, match="num_token_ids adds up to 2"):
            RowResults(PlanRows.of(ROWS), [7])
        with pytest.raises(ShapeError, match="num_accepted has shape"):
            RowResults(PlanRows.of(ROWS), [7, 8], num_accepted=[0])
