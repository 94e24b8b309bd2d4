"""Commits the books to a plan."""

from __future__ import annotations

import dataclasses

from deepinfer.core.errors import InvariantBroken
from deepinfer.core.plan import PlanRow, RowRole, StepPlan
from deepinfer.scheduling.books import Books
from deepinfer.scheduling.ledger import Sequence
from deepinfer.scheduling.plan_draft import Admission, Decision

__all__ = ["decision_of", "execute"]


def decision_of(books: Books, plan: StepPlan, now: float) -> Decision:
    """What a plan means for the books, read off its rows alone; for plans that were not made just now.

    Args:
        books: The requests.
        plan: The plan.
        now: Time in seconds.

    Returns:
        The plan and its meaning.

    Raises:
        InvariantBroken: The plan does not fit the books.
    """
    decision = Decision(plan, books.version, now, [], [], [], [])
    for rid in plan.preempted:
        sequence = books.running.get(rid)
        if sequence is None:
            raise InvariantBroken(
                f"step {plan.step} preempts {rid!r}, which does not run. {_STALE}"
            )
        decision.preempted.append(sequence)
    flying = books.flying()
    place = {sequence.rid: at for at, sequence in enumerate(books.active.sequences)}
    ends: dict[str, int] = {}
    for row in plan.rows:
        sequence = books.sequences.get(row.rid)
        if sequence is None or sequence.epoch != row.epoch:
            raise InvariantBroken(
                f"step {plan.step} runs {row.rid!r}, which is not there. {_STALE}"
            )
        if sequence.slot is None:
            first = ends.get(row.rid)
            if first is None:
                decision.admissions.append(_admission(books, sequence, row))
                first = row.first_position
        else:
            flown = 0 if flying is None else int(flying.tokens[place[row.rid]])
            first = ends.get(row.rid, sequence.settled + flown)
            if row.slot != sequence.slot or row.slot_generation != sequence.slot_generation:
                raise InvariantBroken(f"step {plan.step} has the row {row}, and now is {sequence}.")
            if row.end_position > int(books.table.room[row.slot]):
                decision.growth.append((sequence, row.end_position))
        if row.first_position != first:
            raise InvariantBroken(
                f"step {plan.step} has the row {row}, and {sequence} goes on at {first}."
            )
        ends[row.rid] = row.end_position
    for at, admission in enumerate(decision.admissions):
        upto = max(admission.upto, ends[admission.sequence.rid])
        decision.admissions[at] = dataclasses.replace(admission, upto=upto)
    decision.passed += _passed(books, decision)
    return decision


def _passed(books: Books, decision: Decision) -> list[Sequence]:
    """The first request that keeps waiting, once for each one behind it that starts."""
    starting = {admission.sequence.rid for admission in decision.admissions}
    queue = iter(books.waiting)
    first = next((s for s in queue if not s.num_orphans and s.rid not in starting), None)
    if first is None:
        return []
    return [first for sequence in queue if sequence.rid in starting]


_STALE = "Launch each plan before anything else changes."


def _admission(books: Books, sequence: Sequence, row: PlanRow) -> Admission:
    hit = None
    if row.pool_start:
        hit = books.look_up(sequence)
        if hit is None or hit.num_tokens != row.pool_start:
            raise InvariantBroken(
                f"{row} takes over {row.pool_start} cached tokens, and the cache has "
                f"{0 if hit is None else hit.num_tokens}."
            )
        if row.role is RowRole.REPLAY and row.first_position != hit.replay_start:
            raise InvariantBroken(f"{row} does not replay from {hit.replay_start} on.")
    return Admission(sequence, hit, row.pool_start)


def execute(books: Books, decision: Decision) -> StepPlan:
    """Carries a decision out.

    Args:
        books: The requests.
        decision: The plan and its meaning.

    Returns:
        The plan with block updates and copies filled in.

    Raises:
        InvariantBroken: The cache does not give what it promised.
    """
    plan, cache, table = decision.plan, books.cache, books.table
    books.version += 1
    for sequence in decision.preempted:
        books.requeue(sequence, keep_tokens=True)
    growth = decision.growth
    if decision.admissions:
        growth = growth + _start(books, decision)
    for sequence, upto in growth:
        allocation = cache.allocate(sequence.request, None, upto)
        if allocation is None:
            raise InvariantBroken(
                f"the cache has no room for {upto} tokens of {sequence}, which step {plan.step} counts on."
            )
        table.room[sequence.slot] = allocation.num_tokens
    for sequence in decision.passed:
        sequence.num_skips += 1
        if sequence.skipped_since_s is None:
            sequence.skipped_since_s = decision.now
    updates, copies = cache.take_updates()
    if updates or copies:
        plan = dataclasses.replace(plan, block_updates=updates, copies=copies)
    table.last_step[plan.rows.slots] = plan.step
    books.launched[plan.step] = plan
    books.next_step += 1
    return plan


def _start(books: Books, decision: Decision) -> list[tuple[Sequence, int]]:
    """Gives slots to those that start, hits first; returns those that need room behind their hit."""
    cache, plan = books.cache, decision.plan
    rows = plan.rows
    place = {rid: at for at, rid in reversed(tuple(enumerate(rows.rids)))}
    growth = []
    for admission in decision.admissions:
        sequence, hit = admission.sequence, admission.hit
        upto = admission.upto if hit is None else len(hit.blocks) * cache.block_size
        allocation = cache.allocate(sequence.request, hit, upto)
        at = place[sequence.rid]
        given = None if allocation is None else (allocation.slot, allocation.slot_generation)
        if allocation is not None:
            books.admit(sequence, allocation, hit)
        if given != (int(rows.slots[at]), int(rows.slot_generations[at])):
            raise InvariantBroken(f"the cache gave {allocation} to the planned row {rows[at]}.")
        if hit is not None and admission.upto > upto:
            growth.append((sequence, admission.upto))
    return growth
