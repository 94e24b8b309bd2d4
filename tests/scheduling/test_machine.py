"""Any order of calls: the books add up after each, and every request gets the tokens it would get alone."""

from __future__ import annotations

from typing import Any

import hypothesis.strategies as st
import pytest
from hypothesis import HealthCheck, Phase, settings
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from deepinfer.cache import SlotCacheManager
from deepinfer.core import (
    FakeClock,
    FinishReason,
    Request,
    RowResult,
    SamplingParams,
    StepPlan,
    StepResult,
)
from deepinfer.core.errors import InvalidRequest, RequestTooLong
from deepinfer.scheduling import Scheduler, SchedulerLimits

VOCAB = 50
EOS = 3


def choose(ids: tuple[int, ...]) -> int:
    """The toy model: the next token depends on every token before it."""
    state = 17
    for token in ids:
        state = (state * 31 + token) % 10_007
    return state % VOCAB


def alone(request: Request, max_model_len: int) -> tuple[int, ...]:
    params = request.params
    ids = list(request.prompt_token_ids)
    limit = min(len(ids) + params.max_tokens, max_model_len)
    while len(ids) < limit:
        ids.append(choose(tuple(ids)))
        if ids[-1] in params.stop_token_ids or (ids[-1] == EOS and not params.ignore_eos):
            break
    return tuple(ids[request.num_prompt_tokens :])


class FakeRunner:
    """Keeps the ids of each slot, and refuses rows that do not continue them."""

    def __init__(self) -> None:
        self.slots: dict[int, tuple[tuple[str, int, int], list[int]]] = {}

    def run(self, plan: StepPlan, num_right: int, failing: str | None) -> StepResult:
        rows = []
        assert len({row.slot for row in plan.rows}) == len(plan.rows)
        for row in plan.rows:
            owner = (row.rid, row.slot_generation, row.epoch)
            known = self.slots.get(row.slot)
            if known is None or known[0] != owner:
                assert row.first_position == 0
                known = (owner, [])
                self.slots[row.slot] = known
            ids = known[1]
            assert row.first_position == len(ids)
            assert len(row.token_ids) == row.num_tokens - row.num_drafts > 0
            ids += row.token_ids
            tokens: list[int] = []
            accepted = 0
            if row.num_logits:
                right = min(num_right, row.num_drafts)
                for _ in range(right):
                    tokens.append(choose(tuple(ids)))
                    ids.append(tokens[-1])
                tokens.append(choose(tuple(ids)))
                accepted = right
            rows.append(
                RowResult(
                    rid=row.rid,
                    slot=row.slot,
                    slot_generation=row.slot_generation,
                    epoch=row.epoch,
                    token_ids=() if row.rid == failing else tuple(tokens),
                    num_drafts=row.num_drafts,
                    num_accepted=0 if row.rid == failing else accepted,
                    error=ValueError("planted") if row.rid == failing else None,
                )
            )
        return StepResult(step=plan.step, rows=tuple(rows))


class Machine(RuleBasedStateMachine):
    """Runs a scheduler and a slot manager against the toy model."""

    make_scheduler: Any = Scheduler

    @initialize(
        num_slots=st.integers(1, 4),
        max_num_seqs=st.integers(1, 4),
        chunk=st.integers(4, 9),
        spare=st.integers(0, 12),
        drafts=st.integers(0, 3),
        order=st.sampled_from(["fcfs", "priority"]),
    )
    def start(
        self, num_slots: int, max_num_seqs: int, chunk: int, spare: int, drafts: int, order: str
    ) -> None:
        self.limits = SchedulerLimits(
            max_model_len=24,
            max_num_seqs=max_num_seqs,
            prefill_chunk_tokens=chunk,
            max_num_batched_tokens=max_num_seqs + spare,
            eos_token_ids=(EOS,),
            draft_length=drafts,
        )
        self.cache = SlotCacheManager(num_slots, 24)
        self.scheduler = self.make_scheduler(
            self.limits, self.cache, order=order, clock=FakeClock()
        )
        self.runner = FakeRunner()
        self.requests: dict[str, Request] = {}
        self.outputs: dict[str, list[int]] = {}
        self.flying: StepPlan | None = None
        self.count = 0

    @rule(
        length=st.integers(1, 26),
        max_tokens=st.integers(1, 20),
        greedy=st.booleans(),
        ignore_eos=st.booleans(),
        stop=st.sets(st.integers(0, VOCAB - 1), max_size=2),
        priority=st.integers(-1, 1),
        reuse=st.booleans(),
    )
    def add(self, length, max_tokens, greedy, ignore_eos, stop, priority, reuse) -> None:
        rid = next(iter(self.requests), "r") if reuse else f"r{self.count}"
        self.count += 1
        request = Request(
            rid=rid,
            prompt_token_ids=tuple((self.count * 7 + i) % VOCAB for i in range(length)),
            params=SamplingParams(
                max_tokens=max_tokens,
                temperature=0.0 if greedy else 1.0,
                ignore_eos=ignore_eos,
                stop_token_ids=tuple(stop),
            ),
            priority=priority,
        )
        try:
            self.scheduler.add(request)
        except InvalidRequest:
            assert rid in self.requests
        except RequestTooLong:
            assert length >= 24
        else:
            assert rid not in self.requests
            assert length < 24
            self.requests[rid] = request
            self.outputs[rid] = []

    @precondition(lambda self: self.flying is None)
    @rule(now=st.floats(0, 10))
    def launch(self, now: float) -> None:
        plan = self.scheduler.plan(now)
        assert plan == self.scheduler.plan(now)
        if plan is None:
            assert not self.requests
            return
        assert plan.rows
        assert plan.num_tokens <= self.limits.max_num_batched_tokens
        assert max(row.num_tokens for row in plan.rows) <= self.limits.prefill_chunk_tokens
        assert len(plan.rows) <= self.limits.max_num_seqs
        self.scheduler.launch(plan)
        self.flying = plan

    @precondition(lambda self: self.flying is not None)
    @rule(num_right=st.integers(0, 3), fail=st.integers(0, 12))
    def collect(self, num_right: int, fail: int) -> None:
        plan, self.flying = self.flying, None
        assert plan is not None
        failing = plan.rows[fail].rid if fail < len(plan.rows) else None
        result = self.runner.run(plan, num_right, failing)
        for entry in self.scheduler.apply(result):
            rid = entry.request.rid
            assert self.requests[rid] is entry.request
            self.outputs[rid] += entry.token_ids
            if entry.finish_reason is FinishReason.ERROR:
                assert rid == failing
                self.forget(rid)
            elif entry.finish_reason is not None:
                expected = alone(entry.request, self.limits.max_model_len)
                assert tuple(self.outputs[rid]) == expected
                self.forget(rid)
            else:
                expected = alone(entry.request, self.limits.max_model_len)
                assert tuple(self.outputs[rid]) == expected[: len(self.outputs[rid])]

    @rule(pattern=st.lists(st.integers(0, 3), min_size=1, max_size=6))
    def advance(self, pattern: list[int]) -> None:
        for num_right in pattern:
            if self.flying is None:
                self.launch(0.0)
            if self.flying is not None:
                self.collect(num_right, 99)
            self.books_add_up()

    @precondition(lambda self: self.flying is not None)
    @rule()
    def cancel(self) -> None:
        assert self.flying is not None
        self.scheduler.cancel(self.flying.step)
        self.flying = None

    @precondition(lambda self: self.requests)
    @rule(data=st.data())
    def abort(self, data: st.DataObject) -> None:
        rid = data.draw(st.sampled_from(sorted(self.requests)))
        self.scheduler.abort(rid)
        self.scheduler.abort(rid)
        self.forget(rid)

    @precondition(lambda self: self.requests)
    @rule(data=st.data())
    def preempt(self, data: st.DataObject) -> None:
        self.scheduler.preempt(data.draw(st.sampled_from(sorted(self.requests))))

    def forget(self, rid: str) -> None:
        del self.requests[rid]
        del self.outputs[rid]

    @invariant()
    def books_add_up(self) -> None:
        if not hasattr(self, "scheduler"):
            return
        self.scheduler.check()
        load = self.scheduler.snapshot()
        assert load.num_running + load.num_waiting == len(self.requests)
        stats = self.cache.stats()
        assert stats.free_slots + stats.held_slots + stats.quarantined_slots == stats.num_slots
        if self.flying is None:
            assert stats.quarantined_slots == 0
        else:
            free = set(self.cache._free)
            assert not free & {row.slot for row in self.flying.rows}

    def teardown(self) -> None:
        """Whatever happened, everything ends in a bounded number of steps and nothing is left."""
        if not hasattr(self, "scheduler"):
            return
        bound = sum(r.num_prompt_tokens + r.params.max_tokens for r in self.requests.values()) + 2
        for index in range(bound):
            if self.flying is None:
                self.launch(0.0)
            if self.flying is not None:
                self.collect(index % 4, 99)
        assert not self.requests
        assert not self.scheduler.has_unfinished
        self.scheduler.check()
        assert self.cache.num_free == self.cache.num_slots


def machine_settings(examples: int) -> settings:
    return settings(
        max_examples=examples,
        stateful_step_count=40,
        deadline=None,
        derandomize=True,
        database=None,
        phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
    )


def test_any_order_of_calls() -> None:
    run_state_machine_as_test(Machine, settings=machine_settings(150))


class MiscountsDrafts(Scheduler):
    """Settles one token too few where some drafts were accepted and some were not."""

    def _settle(self, sequence, row, result, step):  # type: ignore[no-untyped-def]
        progress = super()._settle(sequence, row, result, step)
        sequence.settled -= 0 < result.num_accepted < row.num_drafts
        return progress


class FreesAtOnce(Scheduler):
    """Gives a slot back although a step in flight still reads it."""

    def _drop(self, sequence):  # type: ignore[no-untyped-def]
        sequence.flights.clear()
        super()._drop(sequence)


class KeepsEpoch(Scheduler):
    """Does not tell a request that runs again from its first run."""

    def _requeue(self, sequence, after_step):  # type: ignore[no-untyped-def]
        super()._requeue(sequence, after_step)
        sequence.settled = min(1, len(sequence.token_ids) - 1)


class Drains(Scheduler):
    """Plans with side effects."""

    def plan(self, now):  # type: ignore[no-untyped-def]
        plan = super().plan(now)
        if plan is not None and len(self._waiting) > 1:
            self._waiting.append(self._waiting.pop(0))
        return plan


@pytest.mark.parametrize("broken", [MiscountsDrafts, FreesAtOnce, KeepsEpoch, Drains])
def test_the_machine_finds_planted_faults(broken: type[Scheduler]) -> None:
    class Broken(Machine):
        make_scheduler = broken

    with pytest.raises(Exception):  # noqa: B017, PT011 - any failure at all shows that it was seen
        run_state_machine_as_test(Broken, settings=machine_settings(200))
