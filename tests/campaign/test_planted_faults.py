"""The machine finds faults that are put in on purpose: each within a bounded number of actions."""

from __future__ import annotations

import dataclasses
from typing import Any, ClassVar

import numpy as np
import pytest

from deepinfer.core.errors import InvariantBroken
from deepinfer.core.plan import PlanRows, RowRole
from deepinfer.testing import Mutation, run_campaign

MOST_ACTIONS = 2_000
"""Actions within which each fault must be found; all but a few take under 100."""


class SkipQuarantine(Mutation):
    """Blocks come back while a step in flight still touches them."""

    changes: ClassVar = {"depth": 1, "slots_only": False}

    def scheduler(self, scheduler: Any) -> None:
        pool = scheduler.cache._books.pool
        give_back = pool.give_back
        pool.give_back = lambda table, after_step: give_back(table, -1)


class ReuseSlotEarly(Mutation):
    """Slots come back while a step in flight still touches them."""

    changes: ClassVar = {"depth": 1, "slots_only": False}

    def scheduler(self, scheduler: Any) -> None:
        slots = scheduler.cache._books.slots
        give_back = slots.give_back
        slots.give_back = lambda slot, after_step: give_back(slot, -1)


class PublishUnsettled(Mutation):
    """Blocks can be found although their last tokens are only known, not settled."""

    changes: ClassVar = {"slots_only": False, "window": 0}

    def scheduler(self, scheduler: Any) -> None:
        books = scheduler._books

        def settle_blocks(sequence: Any, step: int) -> None:
            room = int(books.table.room[sequence.slot])
            settled = min(sequence.num_tokens, room)
            books.cache.settle(sequence.request, sequence.token_ids, settled, step)

        books.settle_blocks = settle_blocks


class ForgetReference(Mutation):
    """A shared block does not count the table that shares it."""

    changes: ClassVar = {"slots_only": False, "window": 0}

    def scheduler(self, scheduler: Any) -> None:
        pool = scheduler.cache._books.pool
        share = pool.share

        def forgetful(block: int) -> None:
            if pool.is_free(block):
                share(block)

        pool.share = forgetful


class HitBeyondLastToken(Mutation):
    """A hit may cover the whole prompt, so that nothing is left to run."""

    changes: ClassVar = {"slots_only": False, "window": 0, "block_size": 2}

    def scheduler(self, scheduler: Any) -> None:
        cache = scheduler.cache
        lookup = cache.lookup

        def too_long(request: Any, token_ids: Any, limit: int) -> Any:
            return lookup(request, [*token_ids, 5], limit + 1)

        cache.lookup = too_long


class WrongAcceptCount(Mutation):
    """The runner claims one accepted draft less than it brings tokens for."""

    changes: ClassVar = {"drafts": 4}

    def engine(self, engine: Any) -> None:
        runner = engine._parts.runner.inner
        collect = runner.collect

        def wrong(handle: Any) -> Any:
            result = collect(handle)
            rows = result.rows
            accepted = np.maximum(rows.num_accepted - 1, 0)
            object.__setattr__(rows, "num_accepted", accepted)
            return result

        runner.collect = wrong


class KeepRejectedDrafts(Mutation):
    """Cache rows of rejected drafts stay."""

    changes: ClassVar = {"drafts": 4}

    def engine(self, engine: Any) -> None:
        engine._parts.runner.cache.truncate = lambda slot, length: None


class KeepStaleEpoch(Mutation):
    """A request that lost its slot keeps its epoch, so that late results of before count for it."""

    def scheduler(self, scheduler: Any) -> None:
        books = scheduler._books
        requeue = books.requeue

        def same_epoch(sequence: Any, *, keep_tokens: bool) -> None:
            requeue(sequence, keep_tokens=keep_tokens)
            sequence.epoch -= 1

        books.requeue = same_epoch


class DropKeptTokens(Mutation):
    """Tokens sampled for a request that lost its slot meanwhile are thrown away."""

    changes: ClassVar = {"depth": 1}

    def scheduler(self, scheduler: Any) -> None:
        books = scheduler._books
        requeue = books.requeue
        books.requeue = lambda sequence, keep_tokens: requeue(sequence, keep_tokens=False)


class CountTokenTwice(Mutation):
    """A token that came is stored twice in the ids of its request."""

    def scheduler(self, scheduler: Any) -> None:
        table = scheduler._books.table
        add = table.add

        def twice(slots: Any, counts: Any, tokens: Any) -> Any:
            known = add(slots, counts, tokens)
            for slot, count in zip(slots.tolist(), counts.tolist(), strict=True):
                if count and table.known[slot] < table.limit[slot]:
                    last = table.last_token[[slot]]
                    add(np.array([slot]), np.array([1]), last)
            return known

        table.add = twice


class ReplayWritesTheFloor(Mutation):
    """A replay writes into the shared blocks that it reads."""

    changes: ClassVar = {
        "window": 2,
        "replay": "bounded",
        "deterministic": False,
        "slots_only": False,
    }

    def engine(self, engine: Any) -> None:
        runner = engine._parts.runner.inner
        forward = runner.forward

        def without_floor(plan: Any, requests: Any) -> Any:
            rows = [
                dataclasses.replace(row, pool_start=row.first_position)
                if row.role is RowRole.REPLAY
                else row
                for row in plan.rows
            ]
            return forward(dataclasses.replace(plan, rows=PlanRows.of(rows)), requests)

        runner.forward = without_floor


class LoseBlockUpdates(Mutation):
    """New entries of a block table do not reach the runner, now and then."""

    changes: ClassVar = {"slots_only": False}

    def scheduler(self, scheduler: Any) -> None:
        launch = scheduler.launch

        def lossy(plan: Any) -> Any:
            plan = launch(plan)
            return dataclasses.replace(plan, block_updates=plan.block_updates[:1])

        scheduler.launch = lossy


class VictimLoop(Mutation):
    """Whoever runs loses its slot after every step, so that no prompt of several chunks is ever through."""

    actions_per_machine = 6  # it shows when all should end

    def engine(self, engine: Any) -> None:
        step = engine.step

        def cruel() -> Any:
            deltas = step()
            engine.reset_prefix_cache()
            return deltas

        engine.step = cruel


class ImpurePlan(Mutation):
    """Planning moves the queue."""

    def scheduler(self, scheduler: Any) -> None:
        plan = scheduler.plan

        def moving(now: float) -> Any:
            made = plan(now)
            waiting = scheduler._books.waiting
            if len(waiting) > 1:
                waiting.append(waiting.pop(0))
            return made

        scheduler.plan = moving


class OverBudget(Mutation):
    """Plans hold more tokens than they may."""

    def scheduler(self, scheduler: Any) -> None:
        limits = scheduler._books.limits
        more = dataclasses.replace(limits, max_num_batched_tokens=limits.max_num_batched_tokens + 3)
        scheduler._books.limits = scheduler._planner._limits = more


class StaleLoads(Mutation):
    """Loads from the host do nothing and say that they worked."""

    changes: ClassVar = {"num_host": 6, "slots_only": False, "spare_blocks": 0, "window": 0}

    def engine(self, engine: Any) -> None:
        engine._parts.runner.cache.load_block = lambda block, data: None


class FreeOnOptimisticCount(Mutation):
    """Blocks behind what is settled are taken from a table while drafts in flight still write there."""

    changes: ClassVar = {"depth": 1, "drafts": 4, "slots_only": False}

    def scheduler(self, scheduler: Any) -> None:
        cache = scheduler.cache
        settle = cache.settle

        def shrinking(request: Any, token_ids: Any, settled: int, step: int) -> None:
            settle(request, token_ids, settled, step)
            holding = cache._books.held.get(request.rid)
            needed = -(-settled // cache.block_size)
            if holding is not None and len(holding.table) > needed:
                last = holding.table.pop()
                cache._books.pool.give_back([last], step)

        cache.settle = shrinking


FAULTS = [
    SkipQuarantine, ReuseSlotEarly, PublishUnsettled, ForgetReference, HitBeyondLastToken,
    WrongAcceptCount, KeepRejectedDrafts, KeepStaleEpoch, DropKeptTokens, CountTokenTwice,
    ReplayWritesTheFloor, LoseBlockUpdates, VictimLoop, ImpurePlan, OverBudget, StaleLoads,
    FreeOnOptimisticCount,
]  # fmt: skip


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.__name__)
def test_fault_is_found(fault: type[Mutation], record_property: Any) -> None:
    changes: ClassVar = {"faults": False, **getattr(fault, "changes", {})}
    report = run_campaign(
        MOST_ACTIONS,
        actions_per_machine=getattr(fault, "actions_per_machine", 120),
        mutation=fault,
        changes=changes,
        most_violations=1,
    )
    assert report.violations, f"not found in {report.num_actions} actions"
    assert isinstance(report.violations[0].error, InvariantBroken)
    record_property("actions", report.num_actions)


def test_nothing_is_found_without_a_fault() -> None:
    assert run_campaign(120, changes={"faults": False}).violations == []
