from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable

import numpy as np
import pytest

from deepinfer.cache import SlotCacheManager
from deepinfer.core import (
    FakeClock,
    FinishReason,
    Request,
    RowResult,
    RowRole,
    SamplingParams,
    StepPlan,
    StepResult,
)
from deepinfer.core.errors import (
    ConfigError,
    InvalidRequest,
    InvariantBroken,
    RequestTooLong,
    Unschedulable,
)
from deepinfer.scheduling import Progress, Scheduler, SchedulerLimits, Sequence
from deepinfer.scheduling.books import Books


class Always:
    """Verifies the same number of drafts of every row."""

    def __init__(self, length: int) -> None:
        self.length = length

    def choose(self, confidences: object, num_running: int) -> list[int]:
        return [self.length for _ in confidences]  # type: ignore[attr-defined]


def make(
    num_slots: int = 4,
    slot_tokens: int | None = None,
    may_draft: Callable[[SamplingParams], bool] | None = None,
    **limits: object,
) -> Scheduler:
    given = {
        "max_model_len": 32,
        "max_num_seqs": 4,
        "prefill_chunk_tokens": 4,
        "max_num_batched_tokens": 16,
    }
    bounds = SchedulerLimits(**{**given, **limits})  # type: ignore[arg-type]
    cache = SlotCacheManager(num_slots, slot_tokens or bounds.max_model_len)
    return Scheduler(bounds, cache, may_draft=may_draft, clock=FakeClock())


def request(rid: str, length: int = 3, **params: object) -> Request:
    given = {"max_tokens": 8, "temperature": 0.0, **params}
    priority = given.pop("priority", 0)
    return Request(
        rid=rid,
        prompt_token_ids=tuple(range(10, 10 + length)),
        params=SamplingParams(**given),  # type: ignore[arg-type]
        priority=priority,  # type: ignore[arg-type]
    )


def result_of(plan: StepPlan, token: int = 7, accepted: int = 0) -> StepResult:
    rows = []
    for row in plan.rows:
        taken = min(accepted, row.num_drafts)
        tokens = (token,) * (taken + 1) if row.num_logits else ()
        rows.append(
            RowResult(
                rid=row.rid,
                slot=row.slot,
                slot_generation=row.slot_generation,
                epoch=row.epoch,
                token_ids=tokens,
                num_drafts=row.num_drafts,
                num_accepted=taken,
            )
        )
    return StepResult(step=plan.step, rows=tuple(rows))


def run(scheduler: Scheduler, **kwargs: int) -> tuple[StepPlan, list[Progress]]:
    plan = scheduler.plan(0.0)
    assert plan is not None
    scheduler.launch(plan)
    scheduler.check()
    progress = scheduler.apply(result_of(plan, **kwargs))
    scheduler.check()
    return plan, progress


def rows(plan: StepPlan) -> list[tuple[str, str, int, int]]:
    return [(row.rid, str(row.role), row.first_position, row.num_tokens) for row in plan.rows]


def test_prompt_runs_in_chunks_then_decodes() -> None:
    scheduler = make()
    scheduler.add(request("a", 10))
    plans = [run(scheduler)[0] for _ in range(5)]
    assert [rows(plan) for plan in plans] == [
        [("a", "prefill", 0, 4)],
        [("a", "prefill", 4, 4)],
        [("a", "last_prefill", 8, 2)],
        [("a", "decode", 10, 1)],
        [("a", "decode", 11, 1)],
    ]
    assert plans[0].rows[0].token_ids == (10, 11, 12, 13)
    assert plans[3].rows[0].token_ids == (7,)


def test_decodes_and_chunks_share_a_step_and_decodes_come_first() -> None:
    scheduler = make(max_num_batched_tokens=6)
    scheduler.add(request("a", 3))
    run(scheduler)
    scheduler.add(request("b", 9))
    scheduler.add(request("c", 3))
    plan, _ = run(scheduler)
    assert rows(plan) == [("a", "decode", 3, 1), ("b", "prefill", 0, 4), ("c", "prefill", 0, 1)]
    plan, _ = run(scheduler)
    assert rows(plan) == [("a", "decode", 4, 1), ("b", "prefill", 4, 4), ("c", "prefill", 1, 1)]
    assert plan.num_tokens == 6


def test_slots_and_places_bound_admission() -> None:
    scheduler = make(num_slots=2)
    for rid in "abc":
        scheduler.add(request(rid, max_tokens=1))
    plan, progress = run(scheduler)
    assert [row.rid for row in plan.rows] == ["a", "b"]
    assert [entry.finish_reason for entry in progress] == [FinishReason.LENGTH] * 2
    plan, _ = run(scheduler)
    assert [(row.rid, row.slot, row.slot_generation) for row in plan.rows] == [("c", 0, 1)]
    assert not scheduler.has_unfinished
    scheduler = make(max_num_seqs=1)
    scheduler.add(request("a"))
    scheduler.add(request("b"))
    assert [row.rid for row in run(scheduler)[0].rows] == ["a"]


def test_priority_order_and_ties_by_arrival() -> None:
    bounds = SchedulerLimits(max_model_len=32, max_num_seqs=1)
    scheduler = Scheduler(bounds, SlotCacheManager(1, 32), order="priority")
    for rid, priority in (("a", 5), ("b", 1), ("c", 1)):
        scheduler.add(request(rid, max_tokens=1, priority=priority))
    assert [run(scheduler)[0].rows[0].rid for _ in range(3)] == ["b", "c", "a"]
    with pytest.raises(ConfigError, match="did you mean 'priority'"):
        Scheduler(bounds, SlotCacheManager(1, 32), order="priorty")


def test_eos_stop_tokens_and_length() -> None:
    scheduler = make(eos_token_ids=(7,))
    scheduler.add(request("eos"))
    scheduler.add(request("ignored", ignore_eos=True, max_tokens=2))
    scheduler.add(request("stop", ignore_eos=True, stop_token_ids=(7,)))
    _, progress = run(scheduler)
    ends = {entry.request.rid: (entry.finish_reason, entry.stop_token_id) for entry in progress}
    assert ends == {
        "eos": (FinishReason.STOP, 7),
        "ignored": (None, None),
        "stop": (FinishReason.STOP, 7),
    }
    _, progress = run(scheduler)
    assert progress[0].finish_reason is FinishReason.LENGTH


def test_stop_token_wins_over_length_at_the_same_token() -> None:
    scheduler = make(eos_token_ids=(7,))
    scheduler.add(request("a", max_tokens=1))
    assert run(scheduler)[1][0].finish_reason is FinishReason.STOP


def test_output_is_cut_to_the_context() -> None:
    scheduler = make(max_model_len=8)
    scheduler.add(request("a", 6, max_tokens=100))
    run(scheduler)
    assert run(scheduler)[1][0].finish_reason is None
    assert run(scheduler)[1][0].finish_reason is FinishReason.LENGTH
    assert not scheduler.has_unfinished


def test_what_can_never_run_is_refused_at_once() -> None:
    scheduler = make(num_slots=1, slot_tokens=12)
    with pytest.raises(RequestTooLong, match="at most") as caught:
        scheduler.add(request("a", 32))
    assert (caught.value.limit_tokens, caught.value.asked_tokens) == (31, 32)
    with pytest.raises(Unschedulable, match="whole cache holds 12"):
        scheduler.add(request("a", 12))
    scheduler.add(request("a", 11, max_tokens=1))
    with pytest.raises(InvalidRequest, match="not finished"):
        scheduler.add(request("a"))
    assert scheduler.snapshot().num_waiting == 1


def test_plan_changes_nothing() -> None:
    scheduler = make()
    scheduler.add(request("a", 9))
    scheduler.add(request("b"))
    run(scheduler)
    scheduler.add(request("c"))
    before = copy.deepcopy(scheduler._books)
    plans = [scheduler.plan(now) for now in (0.0, 0.0, 5.0)]
    assert plans[0] == plans[1] == plans[2]
    after = scheduler._books
    assert (before.next_step, before.num_added, before.version) == (
        after.next_step,
        after.num_added,
        after.version,
    )
    assert list(map(repr, before.waiting)) == list(map(repr, after.waiting))
    assert repr(before.running) == repr(after.running)
    for name, array in vars(before.table).items():
        if isinstance(array, np.ndarray):
            assert np.array_equal(array, getattr(after.table, name)), name
    assert before.cache.stats() == after.cache.stats()  # type: ignore[attr-defined]


def test_one_step_is_in_flight_at_a_time() -> None:
    scheduler = make()
    scheduler.add(request("a"))
    plan = scheduler.plan(0.0)
    assert plan is not None
    scheduler.launch(plan)
    assert scheduler.plan(0.0) is None
    assert scheduler.has_unfinished
    with pytest.raises(InvariantBroken, match="launch each plan"):
        scheduler.launch(plan)
    with pytest.raises(InvariantBroken, match="oldest step in flight is 0"):
        scheduler.apply(StepResult(step=3, rows=()))
    with pytest.raises(InvariantBroken, match="not its plan's"):
        scheduler.apply(StepResult(step=0, rows=()))
    scheduler.apply(result_of(plan))
    assert scheduler.plan(0.0) is not None


def test_stale_plan_cannot_be_launched() -> None:
    scheduler = make()
    scheduler.add(request("a"))
    plan = scheduler.plan(0.0)
    assert plan is not None
    scheduler.abort("a")
    with pytest.raises(InvariantBroken, match="not there"):
        scheduler.launch(plan)


def test_plan_that_does_not_fit_the_books_cannot_be_launched() -> None:
    scheduler = make()
    scheduler.add(request("a"))
    plan = scheduler.plan(0.0)
    assert plan is not None
    moved = dataclasses.replace(plan.rows[0], slot=3)
    with pytest.raises(InvariantBroken, match="gave"):
        scheduler.launch(dataclasses.replace(plan, rows=(moved,)))


def test_abort_at_each_phase_drops_the_result_and_keeps_the_slot_until_then() -> None:
    scheduler = make(num_slots=1)
    scheduler.add(request("a"))
    scheduler.abort("a")
    scheduler.abort("a")
    scheduler.abort("unknown")
    assert not scheduler.has_unfinished
    scheduler.add(request("b"))
    plan = scheduler.plan(0.0)
    assert plan is not None
    scheduler.launch(plan)
    scheduler.abort("b")
    scheduler.add(request("b"))  # the same id again, while the old row is in flight
    scheduler.check()
    assert scheduler.cache.stats().quarantined_slots == 1  # type: ignore[attr-defined]
    assert scheduler.apply(result_of(plan)) == []
    scheduler.check()
    plan, progress = run(scheduler)
    assert (plan.rows[0].slot, plan.rows[0].slot_generation) == (0, 1)
    assert progress[0].token_ids == (7,)
    scheduler.abort("b")
    scheduler.check()
    assert not scheduler.has_unfinished


def test_preempted_request_runs_prompt_and_output_again() -> None:
    scheduler = make(num_slots=1, prefill_chunk_tokens=8)
    scheduler.add(request("a"))
    scheduler.add(request("b"))
    run(scheduler, token=1)
    run(scheduler, token=2)
    scheduler.preempt("a")
    scheduler.preempt("b")  # waits, so nothing happens
    scheduler.check()
    plan, progress = run(scheduler, token=3)
    row = plan.rows[0]
    assert (row.rid, row.role, row.epoch) == ("a", RowRole.LAST_PREFILL, 1)
    assert row.token_ids == (10, 11, 12, 1, 2)
    assert progress[0].token_ids == (3,)


def test_cancelled_step_is_run_again() -> None:
    scheduler = make()
    scheduler.add(request("a", 6))
    run(scheduler)
    first = scheduler.plan(0.0)
    assert first is not None
    scheduler.launch(first)
    scheduler.cancel(first.step)
    scheduler.cancel(first.step)
    scheduler.check()
    plan, _ = run(scheduler)
    assert rows(plan) == [("a", "prefill", 0, 4)]
    assert plan.rows[0].epoch == 1
    assert plan.step == first.step + 1


def test_failed_row_ends_its_request_alone() -> None:
    scheduler = make()
    scheduler.add(request("a"))
    scheduler.add(request("b"))
    plan = scheduler.plan(0.0)
    assert plan is not None
    scheduler.launch(plan)
    result = result_of(plan)
    error = ValueError("no")
    bad = dataclasses.replace(result.rows[0], token_ids=(), error=error)
    progress = scheduler.apply(dataclasses.replace(result, rows=(bad, result.rows[1])))
    scheduler.check()
    assert progress[0].error is error
    assert progress[0].finish_reason is FinishReason.ERROR
    assert progress[1].token_ids == (7,)
    assert scheduler.num_running == 1


def test_result_that_does_not_fit_its_row_fails_that_request() -> None:
    scheduler = make()
    scheduler.add(request("a"))
    plan = scheduler.plan(0.0)
    assert plan is not None
    scheduler.launch(plan)
    result = result_of(plan)
    bad = dataclasses.replace(result.rows[0], token_ids=(1, 2, 3))
    progress = scheduler.apply(dataclasses.replace(result, rows=(bad,)))
    assert isinstance(progress[0].error, InvariantBroken)
    scheduler.check()


class TestDrafts:
    def test_rows_carry_drafts_as_far_as_budget_and_length_go(self) -> None:
        scheduler = make(draft_length=3, max_num_batched_tokens=6)
        scheduler.add(request("a"))
        scheduler.add(request("b", max_tokens=3))
        run(scheduler)
        plan, _ = run(scheduler)
        assert [(r.rid, r.role, r.num_tokens, r.num_drafts) for r in plan.rows] == [
            ("a", RowRole.VERIFY, 4, 3),
            ("b", RowRole.VERIFY, 2, 1),
        ]
        assert plan.rows[0].token_ids == (7,)
        assert plan.rows[0].num_logits == 4

    def test_accepted_drafts_settle_and_rejected_do_not(self) -> None:
        scheduler = make(draft_length=3)
        scheduler.add(request("a", max_tokens=20))
        run(scheduler)
        plan, progress = run(scheduler, accepted=2)
        assert progress[0].token_ids == (7, 7, 7)
        plan, _ = run(scheduler, accepted=0)
        assert plan.rows[0].first_position == 3 + 3
        plan, _ = run(scheduler)
        assert plan.rows[0].first_position == 3 + 4

    def test_tokens_after_a_stop_are_dropped(self) -> None:
        scheduler = make(draft_length=3)
        scheduler.add(request("a", stop_token_ids=(9,), max_tokens=20))
        run(scheduler)
        plan = scheduler.plan(0.0)
        assert plan is not None
        scheduler.launch(plan)
        result = result_of(plan, accepted=3)
        row = dataclasses.replace(result.rows[0], token_ids=(5, 9, 6, 6))
        progress = scheduler.apply(dataclasses.replace(result, rows=(row,)))
        assert progress[0].token_ids == (5, 9)
        assert progress[0].stop_token_id == 9
        scheduler.check()

    def test_last_token_gets_no_drafts(self) -> None:
        scheduler = make(draft_length=3)
        scheduler.add(request("a", max_tokens=2))
        run(scheduler)
        plan, _ = run(scheduler)
        assert plan.rows[0].role is RowRole.DECODE

    @pytest.mark.parametrize(
        "params",
        [
            {"temperature": 0.0},
            {"temperature": 0.5},
            {"temperature": 0.0, "presence_penalty": 0.5},
            {"temperature": 0.7, "regex": "a"},
        ],
    )
    @pytest.mark.parametrize("drawn", [False, True])
    def test_every_request_that_may_gets_drafts(self, params: dict, drawn: bool) -> None:
        scheduler = make(draft_length=3, may_draft=(lambda p: not p.is_greedy) if drawn else None)
        scheduler.add(request("a", **params))
        run(scheduler)
        plan, _ = run(scheduler)
        allowed = not drawn or params["temperature"] > 0
        assert (plan.rows[0].role is RowRole.VERIFY) is allowed

    def test_policy_may_be_changed_between_steps(self) -> None:
        scheduler = make(draft_length=3)
        scheduler.add(request("a", max_tokens=20))
        run(scheduler)
        assert scheduler.verify_lengths is None
        lengths = []
        for policy in (None, Always(1), Always(0)):
            scheduler.verify_lengths = policy
            plan, _ = run(scheduler)
            scheduler._books.table.confidences[plan.rows[0].slot] = (0.5, 0.5, 0.5)
            lengths.append(plan.rows[0].num_drafts)
        assert lengths == [3, 1, 0]

    def test_prompt_of_one_row_more_than_the_drafts_is_no_verify_row(self) -> None:
        scheduler = make(draft_length=3)
        scheduler.add(request("a", 4))
        plan, _ = run(scheduler)
        assert plan.rows[0].role is RowRole.LAST_PREFILL
        assert plan.rows[0].num_logits == 1


def test_snapshot_counts() -> None:
    scheduler = make(num_slots=1)
    scheduler.add(request("a", 6))
    scheduler.add(request("b", 5))
    run(scheduler)
    load = scheduler.snapshot()
    assert (load.num_running, load.num_waiting) == (1, 1)
    assert (load.waiting_tokens, load.cached_tokens, load.capacity_tokens) == (2 + 5, 4, 32)
    assert "1 running, 1 waiting" in repr(scheduler)


def _plant(name: str, value: int) -> Callable[[Books], None]:
    def plant(books: Books) -> None:
        getattr(books.table, name)[books.running["a"].slot] = value

    return plant


@pytest.mark.parametrize(
    "plant",
    [
        lambda b: b.waiting.append(b.running["a"]),
        lambda b: b.sequences.pop("a"),
        lambda b: b.waiting.reverse(),
        _plant("settled", 99),
        _plant("known", 99),
        _plant("limit", 3),
        _plant("room", 1),
        _plant("generation", 7),
        _plant("epoch", 7),
        _plant("last_token", 1),
        _plant("is_held", 0),
        _plant("pool_start", 2),
        lambda b: setattr(b.running["a"], "num_orphans", 1),
        lambda b: b.orphans.update({9: [(0, b.running["a"])]}),
        lambda b: b.running.update({str(i): Sequence(request(str(i)), 9, i) for i in range(9)}),
        lambda b: b.cache.release(b.running["a"].request, 77),
        lambda b: b.launched.update(dict.fromkeys(range(3), b.fake)),
        lambda b: b.launched.update({0: dataclasses.replace(b.fake, rows=(b.far,))}),
    ],
)
def test_check_finds_planted_faults(plant: Callable[[Books], None]) -> None:
    scheduler = make()
    scheduler.add(request("a"))
    run(scheduler)
    for rid in ("b", "c"):
        scheduler.add(request(rid, 30))
    for rid in ("d", "e", "f"):
        scheduler.add(request(rid))
    plan, _ = run(scheduler)
    scheduler.check()
    books = scheduler._books
    assert len(books.waiting) == 2
    row = scheduler.plan(0.0).rows[0]  # type: ignore[union-attr]
    books.fake, books.far = plan, dataclasses.replace(row, num_tokens=9)  # type: ignore[attr-defined]
    plant(books)
    with pytest.raises(InvariantBroken):
        scheduler.check()


def test_limits_are_checked() -> None:
    with pytest.raises(ConfigError, match="max_num_batched_tokens"):
        SchedulerLimits(max_model_len=8, max_num_seqs=4, max_num_batched_tokens=0)
    with pytest.raises(ConfigError, match="async_depth"):
        SchedulerLimits(max_model_len=8, async_depth=2)
    with pytest.raises(ConfigError, match="max_skip_s"):
        SchedulerLimits(max_model_len=8, max_skip_s=-1.0)
    with pytest.raises(ConfigError, match="below prefill_chunk_tokens"):
        SchedulerLimits(max_model_len=8, prefill_chunk_tokens=4, draft_length=4)
