"""Faults that were reported of serving engines, each with the small input that exposes it."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
from scheduled_toy import EOS, VOCAB, Loop, alone, request

from deepinfer.cache import BlockCacheManager, SlotCacheManager
from deepinfer.cache.replay import ReplayPolicy
from deepinfer.core import FakeClock, FinishReason, Request, RowRole
from deepinfer.core.errors import Unschedulable
from deepinfer.scheduling import FixedChunks, FreeBlocks, Scheduler, SchedulerLimits

DEPTHS = pytest.mark.parametrize("depth", [0, 1])
OPEN = FreeBlocks(0.0, whole_prompt=False)


def make(
    depth: int = 0,
    *,
    blocks: int | None = 16,
    block_size: int = 4,
    slots: int = 4,
    window: int = 0,
    cache: dict[str, Any] | None = None,
    parts: dict[str, Any] | None = None,
    num_right: int = 1,
    **limits: Any,
) -> Loop:
    given = {
        "max_model_len": 48,
        "max_num_seqs": slots,
        "max_num_batched_tokens": 64,
        "prefill_chunk_tokens": 16,
        "eos_token_ids": (EOS,),
        "async_depth": depth,
        "window": window,
        **limits,
    }
    bounds = SchedulerLimits(**given)
    manager: Any = SlotCacheManager(slots, bounds.max_model_len)
    if blocks is not None:
        replay = ReplayPolicy(mode="bounded", window=window)
        manager = BlockCacheManager(
            num_slots=slots,
            num_blocks=blocks,
            block_size=block_size,
            replay=replay,
            **(cache or {}),
        )
    options = {"admission": OPEN, "clock": FakeClock(), **(parts or {})}
    return Loop(Scheduler(bounds, manager, **options), num_right)


def check(loop: Loop, *requests: Request) -> None:
    """Everything ends with what each request gives alone, and nothing is left."""
    outputs = loop.run()
    limits = loop.scheduler.limits
    for item in requests:
        limit = min(limits.max_model_len, loop.scheduler.cache.capacity_tokens)
        assert outputs[item.rid] == alone(item, limit), item.rid
    loop.scheduler.check()
    cache = loop.scheduler.cache
    assert cache.num_free_blocks == cache.num_blocks
    assert len(cache.peek(cache.num_slots)) == cache.num_slots


def num_preemptions(loop: Loop) -> int:
    return sum(len(plan.preempted) for plan in loop.plans)


class TestLedger:
    """B1 to B9, B15."""

    @DEPTHS
    def test_preempted_with_an_output_in_flight(self, depth: int) -> None:
        """B1, B2: two requests, room for one and a half."""
        items = [request("a", 8, max_tokens=16), request("b", 8, max_tokens=16)]
        loop = make(depth, blocks=9)
        loop.add(*items)
        check(loop, *items)
        assert num_preemptions(loop) > 0
        assert loop.scheduler.num_preempted == num_preemptions(loop)

    @DEPTHS
    def test_requests_that_miss_steps_never_send_an_unknown_id(self, depth: int) -> None:
        """B3: one token of budget for two requests with drafts, so that they take turns; the runner checks ids."""
        items = [request("a", 5, max_tokens=12), request("b", 5, max_tokens=12)]
        loop = make(depth, max_num_batched_tokens=1, draft_length=2)
        loop.add(*items)
        check(loop, *items)
        assert all(plan.num_tokens == 1 for plan in loop.plans)

    @DEPTHS
    def test_chunked_prompt_beside_decoders(self, depth: int) -> None:
        """B4: a long prompt in chunks with three decoders."""
        items = [request(name, 3, max_tokens=20) for name in "abc"]
        long = request("long", 40, max_tokens=4)
        loop = make(depth, blocks=32, max_num_batched_tokens=8)
        loop.add(*items)
        for _ in range(3):
            loop.step()
        loop.add(long)
        check(loop, *items, long)
        mixed = [{row.role for row in plan.rows} for plan in loop.plans]
        assert {RowRole.PREFILL, RowRole.DECODE} in mixed

    @DEPTHS
    def test_reset_in_the_middle_does_not_move_the_end(self, depth: int) -> None:
        """B6: after a reset of the prefix cache the request ends at the same token, in as many steps as cold."""
        item = request("a", 6, max_tokens=10)
        loop = make(depth)
        loop.add(item)
        for _ in range(4):
            loop.step()
        loop.scheduler.reset_prefix_cache()
        assert loop.scheduler.sequence("a").num_orphans == 0  # type: ignore[union-attr]
        known = len(loop.outputs["a"])
        before = len(loop.plans)
        check(loop, item)
        # What was in flight is discarded, so every token still missing takes one step; a void one may follow.
        assert 10 - known <= len(loop.plans) - before <= 10 - known + depth

    @DEPTHS
    @pytest.mark.parametrize("num_right", [0, 1, 5])
    def test_rejected_drafts_at_a_block_edge(self, depth: int, num_right: int) -> None:
        """B7: window 4, block 2, five drafts that are all rejected; blocks in flight stay out of the pool."""
        items = [request("a", 7, max_tokens=20), request("b", 6, max_tokens=20)]
        loop = make(depth, blocks=32, block_size=2, window=4, draft_length=5, num_right=num_right)
        loop.add(*items)
        while loop.scheduler.has_unfinished:
            loop.step()
            pool = loop.scheduler.cache._books.pool  # type: ignore[attr-defined]
            for plan, _ in loop.flying:
                for row in plan.rows:
                    assert not any(map(pool.is_free, loop.runner.tables[row.slot]))
        check(loop, *items)
        starts = [row.num_open for plan in loop.plans for row in plan.rows]
        assert (max(starts) > 0) is (depth == 1)

    def test_slot_is_not_given_on_while_a_step_reads_it(self) -> None:
        """B8: a request that ends while the next step already runs it, and one that waits for its slot."""
        loop = make(1, slots=1)
        item = request("a", 3, max_tokens=9, stop_token_ids=tuple(range(VOCAB)))
        loop.add(item, request("b", 3, max_tokens=1))
        loop.launch()
        loop.launch()
        assert [row.slot for plan, _ in loop.flying for row in plan.rows] == [0, 0]
        loop.collect()
        assert loop.reasons["a"] is FinishReason.STOP
        assert loop.launch() is None  # the slot waits for the void row
        assert loop.collect() == []
        plan = loop.launch()
        assert plan is not None
        assert (plan.rows[0].rid, plan.rows[0].slot_generation) == ("b", 1)

    @DEPTHS
    def test_abort_between_launch_and_collect_of_a_chunk(self, depth: int) -> None:
        """B9: no token comes after an abort."""
        loop = make(depth)
        other = request("b", 5)
        loop.add(request("a", 30), other)
        for _ in range(depth + 1):
            loop.launch()
        loop.scheduler.abort("a")
        while loop.flying:
            assert all(entry.request.rid != "a" for entry in loop.collect())
            loop.scheduler.check()
        check(loop, other)
        assert loop.outputs["a"] == []

    @DEPTHS
    def test_every_sampled_token_of_a_preempted_request_is_kept(self, depth: int) -> None:
        """B15: tokens that come are those that were sampled, one for one."""
        item = request("a", 4, max_tokens=12)
        loop = make(depth)
        loop.add(item)
        for _ in range(4):
            loop.step()
        in_flight = sum(len(row.token_ids) for _, result in loop.flying for row in result.rows)
        known = len(loop.outputs["a"])
        loop.scheduler.preempt("a")
        loop.scheduler.check()
        while loop.flying:
            loop.collect()
            loop.scheduler.check()
        assert len(loop.outputs["a"]) == known + in_flight == known + depth
        plan = loop.launch()
        assert plan is not None
        assert plan.rows[-1].end_position == 4 + known + depth
        check(loop, item)

    def test_kept_token_may_end_a_waiting_request(self) -> None:
        loop = make(1)
        loop.add(request("a", 4, max_tokens=2))
        loop.launch()
        loop.launch()
        loop.scheduler.preempt("a")
        assert loop.launch() is None
        assert [entry.finish_reason for entry in (*loop.collect(), *loop.collect())] == [
            None,
            FinishReason.LENGTH,
        ]
        check(loop, request("a", 4, max_tokens=2))


@DEPTHS
@pytest.mark.parametrize("drafts", [0, 3])
def test_long_outputs_come_back_in_order(depth: int, drafts: int) -> None:
    """What is generated passes a small ring a slot; a preempted request runs all of it again."""
    item = request("a", 5, max_tokens=300)
    loop = make(
        depth, blocks=None, max_model_len=400, prefill_chunk_tokens=400, max_num_batched_tokens=500,
        draft_length=drafts, num_right=2,
    )  # fmt: skip
    loop.add(item)
    for turn in range(95):
        while len(loop.flying) <= depth:  # without a check, which would empty the ring
            loop.launch()
        loop.collect()
        if turn == 80:
            sequence = loop.scheduler.sequence("a")
            assert sequence is not None
            assert sequence.token_ids.tolist() == [*item.prompt_token_ids, *loop.outputs["a"]]
        if turn == 94:
            loop.scheduler.preempt("a")
    loop.run()
    assert tuple(loop.outputs["a"]) == alone(item, 400)


@pytest.mark.parametrize("place", range(12))
def test_nothing_past_a_stop_is_published(place: int) -> None:
    """Drafts behind the token that ends a request may be accepted; their blocks are not for others."""
    plain = alone(request("a", 5, max_tokens=20), 48)
    item = request("a", 5, max_tokens=20, stop_token_ids=(plain[place],))
    loop = make(0, block_size=2, blocks=40, draft_length=3, num_right=3)
    loop.add(item)
    check(loop, item)
    ids = (*item.prompt_token_ids, *plain)
    hit = loop.scheduler.cache.lookup(request("b", ids), ids, len(ids))
    known = 5 + len(loop.outputs["a"])
    assert known - 3 < hit.num_tokens <= known


class TestBlocks:
    """B10 to B12, B17, B19, B39, B41."""

    def test_what_can_never_fit_is_refused(self) -> None:
        """B10."""
        loop = make(blocks=4)
        with pytest.raises(Unschedulable, match="whole cache holds 16"):
            loop.add(request("a", 16))
        item = request("b", 15, max_tokens=40)
        loop.add(item)
        check(loop, item)
        assert loop.reasons["b"] is FinishReason.LENGTH

    @DEPTHS
    def test_two_long_prompts_do_not_hold_half_each(self, depth: int) -> None:
        """B11: together they do not fit; with the gate the second one waits, without it one gives way."""
        items = [request("a", 36, max_tokens=4), request("b", 36, max_tokens=4)]
        for admission in (FreeBlocks(0.0), OPEN):
            loop = make(depth, blocks=12, prefill_chunk_tokens=8, parts={"admission": admission})
            loop.add(*items)
            check(loop, *items)
            assert (num_preemptions(loop) == 0) or admission is OPEN

    @DEPTHS
    def test_blocked_first_is_passed_a_few_times_and_then_served(self, depth: int) -> None:
        """B12: smaller ones pass a big one that has no room, but not for ever."""
        loop = make(depth, blocks=12, slots=3, max_skips=3, parts={"admission": FreeBlocks(0.0)})
        running = request("run", 20, max_tokens=12)
        big = request("big", 40, max_tokens=2)
        small = [request(f"s{i}", 3, max_tokens=2) for i in range(12)]
        loop.add(running)
        loop.step()
        loop.add(big, *small)
        check(loop, running, big, *small)
        started = list(dict.fromkeys(row.rid for plan in loop.plans for row in plan.rows))
        assert started.index("big") == 1 + 3

    def test_seconds_bound_passing_too(self) -> None:
        loop = make(blocks=12, slots=3, max_skip_s=1.0, parts={"admission": FreeBlocks(0.0)})
        loop.add(request("run", 20, max_tokens=20))
        loop.step(now=10.0)
        loop.add(request("big", 40, max_tokens=2), request("s0", 3, max_tokens=2))
        plan = loop.step(now=10.0)
        assert plan is not None
        assert "s0" in plan.rows.rids
        loop.add(request("s1", 3, max_tokens=1))
        assert "s1" in loop.scheduler.plan(10.9).rows.rids  # type: ignore[union-attr]
        assert "s1" not in loop.scheduler.plan(11.0).rows.rids  # type: ignore[union-attr]

    @DEPTHS
    @pytest.mark.parametrize("length", [7, 8, 9, 15, 16, 17])
    @pytest.mark.parametrize("window", [0, 3])
    def test_prompts_around_block_borders_twice_with_preemption(
        self, depth: int, length: int, window: int
    ) -> None:
        """B17: a prompt that is cached as a whole still runs a token; what is run again is counted right."""
        loop = make(depth, window=window)
        for turn in range(3):
            item = request("a", length, max_tokens=6)
            loop.add(item)
            for _ in range(turn + 2):
                loop.step()
            loop.scheduler.preempt("a")
            check(loop, item)
            loop.outputs.clear()
        hits = [row for plan in loop.plans for row in plan.rows if row.pool_start]
        assert hits
        for row in hits:
            assert row.pool_start % 4 == 0
            assert row.num_tokens > 0

    @DEPTHS
    def test_abort_at_every_phase(self, depth: int) -> None:
        """B19: whenever it comes, slot and blocks come back exactly once."""
        for phase in range(14):
            loop = make(depth)
            other = request("b", 6, max_tokens=6)
            loop.add(request("a", 20, max_tokens=6), other)
            for index in range(phase):
                if index % 2 and loop.flying:
                    loop.collect()
                elif len(loop.flying) <= depth:
                    loop.launch()
            loop.scheduler.abort("a")
            loop.scheduler.check()
            while loop.flying:
                loop.collect()
                loop.scheduler.check()
            check(loop, other)

    def test_nobody_is_preempted_for_blocks_that_are_on_their_way(self) -> None:
        """B39: at depth 1 the blocks of a victim come back a step later; one victim is enough."""
        items = [request(name, 7, max_tokens=24) for name in "abcd"]
        loop = make(1, blocks=9, cache={"prefix_cache": False})
        loop.add(*items)
        check(loop, *items)
        for at, plan in enumerate(loop.plans):
            if plan.preempted:
                assert len(plan.preempted) == 1
                assert not {row.first_position for row in plan.rows} & {0}  # nobody starts then
                following = loop.plans[at + 1] if at + 1 < len(loop.plans) else plan
                assert following is plan or not following.preempted

    def test_plan_that_is_never_run_costs_nothing(self) -> None:
        """B41."""
        loop = make(1)
        item = request("a", 10)
        loop.add(item)
        for _ in range(50):
            assert loop.scheduler.plan(0.0) is not None
        cache = loop.scheduler.cache
        assert cache.num_free_blocks == cache.num_blocks
        check(loop, item)


class TestRules:
    """The rules of one step."""

    def test_plan_is_made_ahead_but_not_two(self) -> None:
        """Rule 1."""
        loop = make(1)
        loop.add(request("a", 4, max_tokens=10))
        assert loop.launch()
        assert loop.launch()
        assert loop.launch() is None
        loop.collect()
        assert loop.launch()
        loop = make(0)
        loop.add(request("a", 4))
        assert loop.launch()
        assert loop.launch() is None

    @pytest.mark.parametrize("limit", [1, 2, 3])
    def test_provable_end_is_not_planned_past(self, limit: int) -> None:
        """Rule 2: as many sampling rows as tokens when only the length can end it."""
        loop = make(1)
        item = request("a", 4, max_tokens=limit)
        loop.add(item)
        check(loop, item)
        assert sum(plan.num_logits for plan in loop.plans) == limit

    def test_rows_that_wait_for_the_host_say_so(self) -> None:
        """Rule 3."""
        loop = make(1)
        loop.add(request("a", 4, presence_penalty=0.5), request("b", 4))
        first, second = loop.launch(), loop.launch()
        assert first is not None
        assert second is not None
        assert [row.is_late for row in first.rows] == [False, False]
        assert [(row.rid, row.is_late, row.token_ids) for row in second.rows] == [
            ("a", True, ()),
            ("b", False, ()),
        ]

    def test_rows_after_a_stop_are_void(self) -> None:
        """Rule 4: no token and no block past the stop."""
        item = request("a", 4, max_tokens=20)
        stop = alone(item, 48)[3]
        item = request("a", 4, max_tokens=20, stop_token_ids=(stop,))
        loop = make(1)
        loop.add(item)
        check(loop, item)
        assert loop.reasons["a"] is FinishReason.STOP

    def test_blocks_are_shared_once_they_are_settled(self) -> None:
        """Rule 8: two equal prompts of one step share nothing; a third one does."""
        prompt = tuple(range(12))
        items = [request(name, prompt, max_tokens=2) for name in "ab"]
        loop = make(0)
        loop.add(*items)
        plan = loop.launch()
        assert plan is not None
        assert [row.pool_start for row in plan.rows] == [0, 0]
        check(loop, *items)
        third = request("c", prompt, max_tokens=2)
        loop.add(third)
        plan = loop.launch()
        assert plan is not None
        assert (plan.rows[0].pool_start, plan.rows[0].first_position) == (8, 8)
        check(loop, third)

    def test_logged_plans_can_be_launched_again(self) -> None:
        """Rule 9: the plans of one run, through JSON, drive another scheduler to the same state."""
        import json

        from deepinfer.core import StepPlan

        items = [request("a", 9, max_tokens=12), request("b", 9, max_tokens=12)]
        loop = make(0, blocks=8)
        loop.add(*items)
        check(loop, *items)
        assert num_preemptions(loop)
        again = make(0, blocks=8)
        again.add(*items)
        for plan in loop.plans:
            copy = StepPlan.from_dict(json.loads(json.dumps(plan.to_dict())))
            launched = again.scheduler.launch(copy)
            assert launched == plan
            again.flying.append((launched, again.runner.forward(launched)))
            again.collect()
            again.scheduler.check()
        assert again.outputs == loop.outputs


class TestReplay:
    """R6, R7 and the bounds that rows carry."""

    def test_replay_and_suffix_share_a_step(self) -> None:
        prompt = tuple(range(20))
        loop = make(window=3, narrows=True)
        loop.add(request("a", prompt, max_tokens=1))
        loop.run()
        loop.add(request("b", prompt, max_tokens=3))
        plan = loop.launch()
        assert plan is not None
        bounds = [
            (row.role, row.first_position, row.end_position, row.window_start, row.pool_start)
            for row in plan.rows
        ]
        assert bounds == [
            (RowRole.REPLAY, 13, 16, 13, 16),
            (RowRole.LAST_PREFILL, 16, 20, 13, 16),
        ]
        assert {row.full_start for row in plan.rows} == {17}
        loop.collect()
        sequence = loop.scheduler.sequence("b")
        assert sequence is not None
        assert (sequence.adopted_tokens, sequence.replayed_tokens) == (16, 3)
        assert sequence.is_approximate
        check(loop, request("b", prompt, max_tokens=3))

    def test_prompt_logprobs_keep_out_of_hits_and_narrowing(self) -> None:
        prompt = tuple(range(20))
        loop = make(window=3, narrows=True)
        loop.add(request("a", prompt, max_tokens=1))
        loop.run()
        loop.add(request("b", prompt, max_tokens=1, prompt_logprobs=0))
        plan = loop.launch()
        assert plan is not None
        assert (plan.rows[0].pool_start, plan.rows[0].full_start) == (0, 0)

    @DEPTHS
    def test_progress_when_the_replay_eats_the_budget(self, depth: int) -> None:
        """R6: grain 8, window 2, budget 8, boundary 16: what the replay leaves is less than a grain."""
        prompt = tuple(range(40))
        loop = make(depth, block_size=8, window=2, chunk_grain=8, max_num_batched_tokens=8, slots=1)
        for turn in range(2):
            item = request(f"r{turn}", prompt[: 18 + 16 * turn], max_tokens=2)
            loop.add(item)
            check(loop, item)
        replays = [row for plan in loop.plans for row in plan.rows if row.role is RowRole.REPLAY]
        assert [(row.first_position, row.num_tokens) for row in replays] == [(14, 2)]

    @DEPTHS
    def test_replay_longer_than_the_budget_is_cut(self, depth: int) -> None:
        prompt = tuple(range(40))
        loop = make(depth, window=6, max_num_batched_tokens=4)
        for name in "ab":
            item = request(name, prompt, max_tokens=2)
            loop.add(item)
            check(loop, item)
        rows = [row for plan in loop.plans for row in plan.rows if row.role is RowRole.REPLAY]
        assert sum(row.num_tokens for row in rows) == 6
        assert len(rows) > 1

    @pytest.mark.parametrize("length", range(17, 40))
    def test_no_last_chunk_is_shorter_than_the_window(self, length: int) -> None:
        """R7."""
        item = request("a", length, max_tokens=1)
        loop = make(window=6)
        loop.add(item)
        check(loop, item)
        assert loop.plans[-1].rows[0].role is RowRole.LAST_PREFILL
        assert loop.plans[-1].rows[0].num_tokens >= 6

    @pytest.mark.parametrize("failing", [0, 1])
    def test_failed_replay_ends_its_request_once(self, failing: int) -> None:
        prompt = tuple(range(20))
        loop = make(window=3)
        loop.add(request("a", prompt, max_tokens=1))
        loop.run()
        loop.add(request("b", prompt, max_tokens=3))
        plan = loop.launch()
        assert plan is not None
        assert len(plan.rows) == 2
        _, result = loop.flying.popleft()
        rows = result.rows.with_errors({failing: ValueError("no")})
        progress = loop.scheduler.apply(dataclasses.replace(result, rows=rows))
        ends = [(entry.token_ids, entry.finish_reason) for entry in progress]
        assert sorted(map(str, ends)) == sorted(map(str, [((), FinishReason.ERROR), ((), None)]))
        loop.scheduler.check()
        assert not loop.scheduler.has_unfinished

    def test_failed_load_runs_again_without_what_was_to_come(self) -> None:
        loop = make(1)
        item = request("a", 8, max_tokens=4)
        loop.add(item, request("b", 8, max_tokens=4))
        loop.launch()
        loop.launch()
        plan, result = loop.flying.popleft()
        progress = loop.scheduler.apply(dataclasses.replace(result, failed_loads=("a", "x")))
        assert [entry.request.rid for entry in progress] == ["b"]
        loop.outputs["b"] += progress[0].token_ids
        sequence = loop.scheduler.sequence("a")
        assert sequence is not None
        assert (sequence.epoch, sequence.slot, sequence.num_orphans) == (1, None, 0)
        assert plan.step == 0
        check(loop, item, request("b", 8, max_tokens=4))

    def test_scraps_of_budget_are_left(self) -> None:
        loop = make(window=6, max_num_batched_tokens=18)
        loop.add(request("a", 16), request("b", 16))
        plan = loop.launch()
        assert plan is not None
        assert [(row.rid, row.num_tokens) for row in plan.rows] == [("a", 16)]

    def test_policy_that_gives_nothing_cannot_stop_everything(self) -> None:
        class Nothing(FixedChunks):
            def chunk(self, prefix, remaining, cap, work):  # type: ignore[no-untyped-def]
                return 0

        item = request("a", 20, max_tokens=2)
        loop = make(window=6, parts={"chunks": Nothing()})
        loop.add(item)
        check(loop, item)


@pytest.mark.parametrize("num_right", [0, 1, 3])
@pytest.mark.parametrize("blocks", [None, 10, 40])
def test_depth_one_equals_depth_zero_equals_alone(num_right: int, blocks: int | None) -> None:
    """I8: chunks, drafts, stops, preemption and prefix hits in one run."""
    prompts = [
        tuple((base + 3 * i) % VOCAB for i in range(n)) for base, n in ((0, 9), (0, 21), (5, 13))
    ]
    outputs = []
    for depth in (0, 1):
        loop = make(depth, blocks=blocks, window=3, draft_length=3, num_right=num_right, slots=3)
        items = [
            request(f"{turn}{at}", prompt, max_tokens=6 + 5 * at, ignore_eos=at == 1)
            for turn in range(2)
            for at, prompt in enumerate(prompts)
        ]
        loop.add(*items)
        check(loop, *items)
        outputs.append(loop.outputs)
    assert outputs[0] == outputs[1]


@pytest.mark.parametrize("blocks", [False, True])
def test_an_order_that_raises_leaves_the_books_as_they_were(blocks: bool) -> None:
    def order(sequence):  # type: ignore[no-untyped-def]
        if sequence.rid == "bad":
            raise ValueError("planted")
        return (sequence.order,)

    loop = make(blocks=12 if blocks else None, slots=1, parts={"order": order})
    scheduler = loop.scheduler
    for rid in ("a", "bad", "b", "bad"):
        if rid == "bad":
            with pytest.raises(ValueError, match="planted"):
                loop.add(request(rid))
        else:
            loop.add(request(rid))
        scheduler.check()
        assert scheduler.sequence("bad") is None
    check(loop, request("a"), request("b"))


@pytest.mark.parametrize("failing", [(0,), (1,), (0, 1)])
def test_a_request_that_fails_in_its_replay_is_told_of_once_and_last(
    failing: tuple[int, ...],
) -> None:
    """A replay and the chunk behind it are two rows of one request in one step; the end comes with the last."""
    loop = make(block_size=2, window=4)
    prompt = tuple(range(10, 24))
    loop.add(request("first", prompt, max_tokens=1))
    loop.run()
    loop.add(request("again", prompt, max_tokens=1))
    plan = loop.scheduler.launch(loop.scheduler.plan(0.0))
    assert [row.role for row in plan.rows] == [RowRole.REPLAY, RowRole.LAST_PREFILL]
    result = loop.runner.forward(plan, 0)
    rows = tuple(
        dataclasses.replace(row, token_ids=(), error=ValueError("planted"))
        if at in failing
        else row
        for at, row in enumerate(result.rows)
    )
    said = loop.scheduler.apply(dataclasses.replace(result, rows=rows))
    assert [entry.finish_reason for entry in said] == [None, FinishReason.ERROR]
    assert not loop.scheduler.has_unfinished
    loop.scheduler.check()
