"""Any order of calls: the books add up after each, and every request gets the tokens it would get alone."""

from __future__ import annotations

from collections import Counter
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
from scheduled_toy import EOS, VOCAB, FakeRunner, alone

from deepinfer.cache import BlockCacheManager, SlotCacheManager
from deepinfer.cache.replay import ReplayPolicy
from deepinfer.core import FakeClock, FinishReason, Request, SamplingParams, StepPlan, StepResult
from deepinfer.core.errors import InvalidRequest, RequestTooLong, Unschedulable
from deepinfer.scheduling import FreeBlocks, Scheduler, SchedulerLimits

LENGTH = 24
WINDOW = 3
PROMPTS = tuple(tuple((base * 7 + i * (base + 1)) % VOCAB for i in range(26)) for base in range(3))


class Machine(RuleBasedStateMachine):
    """Runs a scheduler and a cache manager against the toy model."""

    make_scheduler: Any = Scheduler

    @initialize(
        depth=st.integers(0, 1),
        num_slots=st.integers(1, 5),
        max_num_seqs=st.integers(1, 4),
        budget=st.integers(1, 16),
        chunk=st.integers(4, 9),
        drafts=st.integers(0, 3),
        order=st.sampled_from(["fcfs", "priority", "longest_prefix", "shortest_uncached"]),
        victim=st.sampled_from(["last_admitted", "lowest_priority"]),
        block_size=st.sampled_from([0, 2, 2, 4]),
        spare_blocks=st.integers(0, 8),
        whole_prompt=st.booleans(),
        grain=st.sampled_from([1, 4]),
        max_skips=st.integers(0, 3),
        host=st.sampled_from([0, 3, 9]),
        window_slots=st.sampled_from([0, 2, 4]),
        mode=st.sampled_from(["bounded", "exact", "off"]),
    )
    def start(
        self, depth, num_slots, max_num_seqs, budget, chunk, drafts, order, victim, block_size,
        spare_blocks, whole_prompt, grain, max_skips, host, window_slots, mode,
    ) -> None:  # fmt: skip
        num_slots = max(num_slots, max_num_seqs)
        self.limits = SchedulerLimits(
            max_model_len=LENGTH,
            max_num_seqs=max_num_seqs,
            prefill_chunk_tokens=chunk,
            max_num_batched_tokens=budget,
            eos_token_ids=(EOS,),
            draft_length=drafts,
            async_depth=depth,
            window=WINDOW,
            narrows=True,
            chunk_grain=grain,
            max_skips=max_skips,
        )
        self.cache: Any = SlotCacheManager(num_slots, LENGTH)
        if block_size:
            self.cache = BlockCacheManager(
                num_slots=num_slots,
                num_blocks=LENGTH // block_size + spare_blocks,
                block_size=block_size,
                max_tokens=LENGTH,
                replay=ReplayPolicy(mode=mode, window=WINDOW, layers=2),
                num_host_blocks=host,
                num_window_slots=window_slots,
                window_rows=WINDOW,
                ring_spare=LENGTH,
            )
        self.scheduler = self.make_scheduler(
            self.limits,
            self.cache,
            order=order,
            victim=victim,
            admission=FreeBlocks(0.0, whole_prompt=whole_prompt),
            clock=FakeClock(),
        )
        self.runner = FakeRunner(block_size, WINDOW)
        self.requests: dict[str, Request] = {}
        self.outputs: dict[str, list[int]] = {}
        self.said: list[tuple[int, ...]] = []
        self.flying: list[tuple[StepPlan, StepResult]] = []
        self.count = 0
        self.failing: str | None = None

    @rule(
        base=st.integers(0, 2),
        length=st.integers(1, 26),
        max_tokens=st.integers(1, 20),
        greedy=st.booleans(),
        ignore_eos=st.booleans(),
        stop=st.sets(st.integers(0, VOCAB - 1), max_size=2),
        priority=st.integers(-1, 1),
        reuse=st.booleans(),
        logprobs=st.sampled_from([None, None, None, 0]),
        turn=st.sampled_from([0, 1, 1, 1, 2, 3]),
    )
    def add(
        self, base, length, max_tokens, greedy, ignore_eos, stop, priority, reuse, logprobs, turn
    ) -> None:
        prompt = PROMPTS[base][:length]
        if turn and self.said:  # what another request ended with, and something behind it
            prompt = (*self.said[-min(turn, len(self.said))], *PROMPTS[base][: 1 + length % 5])[:26]
        length = len(prompt)
        rid = next(iter(self.requests), "r") if reuse else f"r{self.count}"
        self.count += 1
        request = Request(
            rid=rid,
            prompt_token_ids=prompt,
            params=SamplingParams(
                max_tokens=max_tokens,
                temperature=0.0 if greedy else 1.0,
                ignore_eos=ignore_eos,
                stop_token_ids=tuple(stop),
                prompt_logprobs=logprobs,
            ),
            priority=priority,
        )
        try:
            self.scheduler.add(request)
        except InvalidRequest:
            assert rid in self.requests
        except (RequestTooLong, Unschedulable):
            assert length >= LENGTH
        else:
            assert rid not in self.requests
            assert length < LENGTH
            self.requests[rid] = request
            self.outputs[rid] = []

    @precondition(lambda self: len(self.flying) <= self.limits.async_depth)
    @rule(
        now=st.floats(0, 10),
        num_right=st.integers(0, 3),
        fail=st.integers(0, 40),
        copies_fail=st.sampled_from([False, False, True]),
        logged=st.booleans(),
    )
    def launch(
        self, now: float, num_right: int, fail: int, logged: bool, copies_fail: bool = False
    ) -> None:
        first, second = self.scheduler.plan(now), self.scheduler.plan(now)
        assert first == second
        plan = first if logged else second  # the scheduler knows by identity which one it made last
        if plan is None:
            assert self.flying or not self.requests
            return
        assert plan.rows
        assert plan.num_tokens <= self.limits.max_num_batched_tokens
        per_slot: dict[int, list[Any]] = {}
        for row in plan.rows:
            assert row.num_tokens > 0
            per_slot.setdefault(row.slot, []).append(row)
        for rows in per_slot.values():
            assert len(rows) == 1 or [row.role == "replay" for row in rows] == [True, False]
            assert sum(row.num_tokens for row in rows) <= self.limits.prefill_chunk_tokens
        assert len(per_slot) <= self.limits.max_num_seqs
        failing = plan.rows[fail].rid if fail < len(plan.rows) else None
        plan = self.scheduler.launch(plan)
        self.flying.append((plan, self.runner.forward(plan, num_right, failing, copies_fail)))

    @precondition(lambda self: self.flying)
    @rule()
    def collect(self) -> None:
        _, result = self.flying.pop(0)
        for entry in self.scheduler.apply(result):
            rid = entry.request.rid
            assert self.requests[rid] is entry.request
            self.outputs[rid] += entry.token_ids
            expected = alone(entry.request, self.limits.max_model_len)
            if entry.finish_reason is FinishReason.ERROR:
                assert isinstance(entry.error, ValueError)
                self.forget(rid)
            elif entry.finish_reason is not None:
                assert tuple(self.outputs[rid]) == expected
                self.forget(rid)
            else:
                assert tuple(self.outputs[rid]) == expected[: len(self.outputs[rid])]
                assert len(self.outputs[rid]) < len(expected)

    @rule(
        pattern=st.lists(st.integers(0, 3), min_size=1, max_size=8),
        copies_fail=st.sampled_from([False, False, True]),
    )
    def advance(self, pattern: list[int], copies_fail: bool) -> None:
        for num_right in pattern:
            self.turn(num_right, copies_fail)
            self.books_add_up()

    def turn(self, num_right: int, copies_fail: bool = False) -> None:
        depth = self.limits.async_depth
        before = len(self.flying)
        if before <= depth:
            self.launch(0.0, num_right, 99, False, copies_fail)
        if (len(self.flying) > depth or len(self.flying) == before) and self.flying:
            self.collect()

    @precondition(lambda self: self.flying)
    @rule()
    def cancel(self) -> None:
        plan, _ = self.flying.pop(0)
        self.scheduler.cancel(plan.step)
        self.scheduler.cancel(plan.step)

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

    @rule()
    def reset_prefix_cache(self) -> None:
        self.scheduler.reset_prefix_cache()

    def forget(self, rid: str) -> None:
        self.said.append((*self.requests[rid].prompt_token_ids, *self.outputs[rid]))
        del self.requests[rid]
        del self.outputs[rid]

    @invariant()
    def books_add_up(self) -> None:
        if not hasattr(self, "scheduler"):
            return
        self.scheduler.check()
        load = self.scheduler.snapshot()
        assert load.num_running + load.num_waiting == len(self.requests)
        if not self.flying:
            assert self.cache.stats().quarantined_slots == 0
            assert self.cache.num_quarantined_blocks == 0
        free = {slot for slot, _ in self.cache.peek(self.cache.num_slots)}
        for plan, _ in self.flying:
            assert not free & {row.slot for row in plan.rows}
            if isinstance(self.cache, BlockCacheManager):
                for slot in {row.slot for row in plan.rows}:
                    for block in self.runner.tables[slot]:
                        assert not self.cache._books.pool.is_free(block)

    def teardown(self) -> None:
        """Whatever happened, everything ends in a bounded number of steps and nothing is left."""
        if not hasattr(self, "scheduler"):
            return
        work = sum(r.num_prompt_tokens + r.params.max_tokens + 2 for r in self.requests.values())
        for index in range(6 * work + 10):
            if not self.requests and not self.flying:
                break
            self.turn(index % 4)
        assert not self.requests
        assert not self.scheduler.has_unfinished
        self.scheduler.check()
        assert len(self.cache.peek(self.cache.num_slots)) == self.cache.num_slots
        assert self.cache.num_free_blocks == self.cache.num_blocks


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


def test_any_order_of_calls_with_host_memory() -> None:
    """Few blocks, host memory for more, window slots, and copies that fail."""
    seen: Counter[str] = Counter()

    class Tiered(Machine):
        @initialize(
            depth=st.integers(0, 1),
            drafts=st.integers(0, 2),
            num_slots=st.integers(1, 3),
            block_size=st.sampled_from([2, 4]),
            spare_blocks=st.integers(0, 3),
            host=st.sampled_from([4, 12]),
            window_slots=st.sampled_from([2, 5]),
            mode=st.sampled_from(["bounded", "exact", "off"]),
        )
        def start(self, **options: Any) -> None:
            super().start(
                **options, max_num_seqs=options["num_slots"], budget=16, chunk=9, order="fcfs",
                victim="last_admitted", whole_prompt=True, grain=1, max_skips=1,
            )  # fmt: skip

        def teardown(self) -> None:
            super().teardown()
            if hasattr(self, "scheduler"):
                stats = self.cache.stats()
                seen["loads"] += self.runner.num_loads
                for name in ("host_hit_tokens_total", "window_hits_total", "failed_loads_total"):
                    seen[name] += getattr(stats, name)

    run_state_machine_as_test(Tiered, settings=machine_settings(150))
    assert min(seen.values()) > 0, seen


class FreesAtOnce(Scheduler):
    """Gives a slot back although a step in flight still reads it."""

    def launch(self, plan):  # type: ignore[no-untyped-def]
        plan = super().launch(plan)
        self._books.table.last_step[plan.rows.slots] = -1
        return plan


class KeepsEpoch(Scheduler):
    """Does not run a request again from its beginning."""

    def launch(self, plan):  # type: ignore[no-untyped-def]
        plan = super().launch(plan)
        for sequence in self._books.running.values():
            if sequence.epoch and sequence.settled == 0 and sequence.num_tokens > 2:
                self._books.table.settled[sequence.slot] = 1
        return plan


class DropsOrphans(Scheduler):
    """Forgets tokens that were sampled for a request before it lost its slot."""

    def apply(self, result):  # type: ignore[no-untyped-def]
        for _, sequence in list(self._books.orphans.get(result.step, ())):
            self._books.discard_orphans(sequence)
            sequence.store((7,))
        return super().apply(result)


class Drains(Scheduler):
    """Plans with side effects."""

    def plan(self, now):  # type: ignore[no-untyped-def]
        plan = super().plan(now)
        if plan is not None and len(self._books.waiting) > 1:
            self._books.waiting.append(self._books.waiting.pop(0))
        return plan


@pytest.mark.parametrize("broken", [FreesAtOnce, KeepsEpoch, DropsOrphans, Drains])
def test_the_machine_finds_planted_faults(broken: type[Scheduler]) -> None:
    class Broken(Machine):
        make_scheduler = broken

    with pytest.raises(Exception):  # noqa: B017, PT011 - any failure at all shows that it was seen
        run_state_machine_as_test(Broken, settings=machine_settings(1000))
