"""The invariants of a schedule, walked on real objects and derived a second time from what a runner was told.

| name | what holds |
|---|---|
| I1 | every block is blank, idle, held or in quarantine, and their numbers add up |
| I2 | no block that a launched step may touch is free or given to somebody else |
| I3 | a block counts as many tables as hold it |
| I4 | what can be found holds the tokens that it is found by |
| I5 | settled <= scheduled <= known + drafts <= the most that may be |
| I6 | a plan stays within the budget, the rows and the chunk |
| I7 | every request ends within a bounded number of steps |
| I9 | when all ended, nothing is held |
| I10 | usage sums match what steps brought |
| I11 | planning changes nothing, and the same state gives the same plan |

I8, that outputs do not depend on depth or company, is what `deepinfer.testing.Machine` compares.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from deepinfer.cache import BlockCacheManager
from deepinfer.core.errors import InvariantBroken
from deepinfer.core.plan import StepPlan
from deepinfer.testing.shadow_books import ShadowBooks

__all__ = ["check_all", "check_drained", "check_pure"]


def check_all(scheduler: Any, books: ShadowBooks | None = None, engine: Any = None) -> None:
    """Checks I1 to I6 and I10 now.

    Args:
        scheduler: The scheduler, observed or not; its `check` is called, which walks the cache as well.
        books: Shadow books that observe it since its first request, or None to trust its own books.
        engine: The engine around it, or None; its `check` is called, and its runner's tables are compared when
            its cache has them.

    Raises:
        InvariantBroken: Something does not hold.

    Examples:
        >>> from deepinfer.cache import SlotCacheManager
        >>> from deepinfer.scheduling import Scheduler, SchedulerLimits
        >>> from deepinfer.testing import ObservedScheduler
        >>> limits = SchedulerLimits(max_model_len=8)
        >>> scheduler = ObservedScheduler(Scheduler(limits, SlotCacheManager(1, 8)))
        >>> scheduler.observers.append(books := ShadowBooks(scheduler))
        >>> check_all(scheduler, books)
    """
    (engine if engine is not None else scheduler).check()
    if books is None:
        return
    if books.problems:
        raise InvariantBroken(f"{books.problems[0]} ({len(books.problems)} problems).")
    _check_requests(scheduler, books)
    cache = scheduler.cache
    if isinstance(cache, BlockCacheManager):
        _check_blocks(cache, books)
        _check_entries(cache, books)
    _check_slots(cache, books)
    if engine is not None:
        _check_runner(engine, books)
        _check_usage(engine, books)


def check_drained(scheduler: Any, books: ShadowBooks | None = None, engine: Any = None) -> None:
    """Checks I9: nothing waits, runs, flies or is held.

    Args:
        scheduler: The scheduler.
        books: Shadow books, or None.
        engine: The engine around it, or None.

    Raises:
        InvariantBroken: Something is left.
    """
    check_all(scheduler, books, engine)
    cache = scheduler.cache
    left = {
        "unfinished requests": int(scheduler.has_unfinished),
        "held slots": cache.num_held,
        "slots not free": cache.num_slots - len(cache.peek(cache.num_slots)),
        "blocks not free": cache.num_blocks - cache.num_free_blocks,
        "blocks in quarantine": cache.num_quarantined_blocks,
    }
    if books is not None:
        left |= {
            "requests": len(books.requests),
            "seats": len(books.seats),
            "steps": len(books.flights),
        }
    if any(left.values()):
        raise InvariantBroken(f"all ended, and {left} are left.")


def check_pure(scheduler: Any, now: float) -> StepPlan | None:
    """Checks I11: plans twice.

    Args:
        scheduler: The scheduler.
        now: Time in seconds.

    Returns:
        The plan, which was not launched.

    Raises:
        InvariantBroken: The second plan differs from the first, or the state does.
    """
    before = _state(scheduler)
    first, second = scheduler.plan(now), scheduler.plan(now)
    if first != second:
        raise InvariantBroken(f"the same state gave {first} and then {second}.")
    if _state(scheduler) != before:
        raise InvariantBroken(f"planning changed the state from {before} to {_state(scheduler)}.")
    plan: StepPlan | None = first
    return plan


def _state(scheduler: Any) -> tuple[Any, ...]:
    cache, load = scheduler.cache, scheduler.snapshot()
    return (
        load.num_running,
        load.num_waiting,
        load.waiting_tokens,
        load.cached_tokens,
        cache.num_held,
        cache.num_free_blocks,
        cache.num_quarantined_blocks,
        cache.peek(cache.num_slots),
    )


def _fail(name: str, what: str) -> None:
    raise InvariantBroken(f"{name}: {what}.")


def _check_requests(scheduler: Any, books: ShadowBooks) -> None:
    load = scheduler.snapshot()
    counts = (load.num_running, load.num_waiting)
    mine = (len(books.seats), len(books.requests) - len(books.seats))
    if counts != mine:
        _fail("I5", f"{counts} requests run and wait, and {mine} should")
    for rid, request in books.requests.items():
        sequence = scheduler.sequence(rid)
        seat = books.seats.get(rid)
        ids = books.ids[rid]
        if sequence is None or sequence.request is not request:
            _fail("I5", f"{rid!r} is not known")
        if sequence.token_ids.tolist() != ids:
            _fail("I5", f"{sequence} has the ids {sequence.token_ids.tolist()}, not {ids}")
        slot = None if seat is None else seat.slot
        if sequence.slot != slot:
            _fail("I5", f"{sequence} should be in slot {slot}")
        if seat is None:
            continue
        found = (sequence.slot_generation, sequence.epoch, sequence.settled)
        if found != (seat.generation, seat.epoch, seat.settled):
            _fail("I5", f"{sequence} (generation, epoch, settled) is {found}, and {seat} is right")
        tokens, drafts, samples = books.in_flight(rid)
        scheduled = seat.settled + tokens
        unknown = drafts + samples * len(books.flights)
        limit = books.limit(request)
        if not 0 <= seat.settled <= scheduled <= len(ids) + unknown or scheduled > limit:
            _fail("I5", f"{sequence} has {scheduled} scheduled of {len(ids)} + {unknown} tokens")


def _check_blocks(cache: BlockCacheManager, books: ShadowBooks) -> None:
    pool = cache._books.pool
    references = [0] * cache.num_blocks
    for rid, seat in books.seats.items():
        table = books.tables.get(seat.slot, [])
        held = cache.holding(books.requests[rid])
        if held is None or list(held.blocks) != table:
            _fail("I3", f"{seat} has the table {table}, and the cache says {held}")
        for block in table:
            references[block] += 1
    free = [pool.is_free(block) for block in range(cache.num_blocks)]
    for block, count in enumerate(references):
        if pool.references(block) != count:
            _fail("I3", f"block {block} counts {pool.references(block)} tables of {count}")
        if count and free[block]:
            _fail("I3", f"block {block} is free, and {count} tables hold it")
    for step, flight in books.flights.items():
        for block in flight.blocks:
            if free[block]:
                _fail("I2", f"block {block} is free, and step {step} may touch it")
    num_held = sum(map(bool, references))
    flying = {block for flight in books.flights.values() for block in flight.blocks}
    stats = cache.stats()
    counted = (stats.held_blocks, stats.free_blocks + stats.idle_blocks)
    if counted != (num_held, sum(free)) or cache.num_free_blocks != sum(free):
        _fail("I1", f"(held, free) blocks are counted as {counted}, not {(num_held, sum(free))}")
    if sum(counted) + stats.quarantined_blocks != cache.num_blocks:
        _fail("I1", f"{counted} and {stats.quarantined_blocks} are not {cache.num_blocks} blocks")
    if stats.quarantined_blocks and not books.flights:
        _fail("I1", f"{stats.quarantined_blocks} blocks wait for a step, and none is in flight")
    if not books.flights and len(flying):
        _fail("I1", "a step is in flight and is not")
    index = cache._books.index
    idle = sum(free[b] and index.of_block(b) is not None for b in range(cache.num_blocks))
    if stats.idle_blocks != idle:
        _fail("I1", f"{stats.idle_blocks} blocks are counted as idle, and {idle} are")


def _check_entries(cache: BlockCacheManager, books: ShadowBooks) -> None:
    index, size = cache._books.index, cache.block_size
    for block in range(cache.num_blocks):
        entry = index.of_block(block)
        if entry is None:
            continue
        chain = []
        at: Any = entry
        while at is not None and at.ids:
            chain.append(at)
            at = at.parent
        ids = b"".join(item.ids for item in reversed(chain))
        tokens: list[int] = np.frombuffer(ids, "<i4").tolist()
        if len(tokens) != size * len(chain):
            _fail("I4", f"block {block} is found by {len(tokens)} tokens in {len(chain)} blocks")
        content = books.content.get(block)
        whole = [] if content is None else [*content.prefix, *content.ids]
        is_reachable = all(item.alive for item in chain)  # behind a dead one it is never found
        if whole[-len(tokens) :] != tokens or (is_reachable and whole != tokens):
            _fail("I4", f"block {block} can be found by {tokens} and holds {content}")


def _check_slots(cache: Any, books: ShadowBooks) -> None:
    free = {slot for slot, _ in cache.peek(cache.num_slots)}
    if cache.num_held != len(books.seats):
        _fail("I1", f"{cache.num_held} slots are held, and {len(books.seats)} requests run")
    for seat in books.seats.values():
        if seat.slot in free:
            _fail("I2", f"the slot of {seat} is free")
    for step, flight in books.flights.items():
        used = free & set(flight.plan.rows.slots.tolist())
        if used:
            _fail("I2", f"slots {sorted(used)} are free, and step {step} may touch them")
    if not books.flights and len(free) + len(books.seats) != cache.num_slots:
        _fail("I1", f"{len(free)} slots are free and {len(books.seats)} of {cache.num_slots} held")


def _check_runner(engine: Any, books: ShadowBooks) -> None:
    tables = getattr(getattr(engine._parts.runner, "cache", None), "tables", None)
    if not isinstance(tables, list) or not books.has_blocks:
        return
    for seat in books.seats.values():
        if list(tables[seat.slot]) != books.tables.get(seat.slot, []):
            _fail("I3", f"the runner's table of {seat} is {tables[seat.slot]}")


def _check_usage(engine: Any, books: ShadowBooks) -> None:
    for rid, builder in engine._loop._live.items():
        usage, request = builder.usage, books.requests.get(rid)
        if request is None:
            _fail("I10", f"{rid!r} is waited for, and the scheduler does not know it")
        generated = len(books.ids[rid]) - request.num_prompt_tokens  # type: ignore[union-attr]
        right = 0 <= usage.accepted <= usage.verified <= usage.drafted
        if usage.generated != generated or not right:
            _fail("I10", f"{rid!r} has {usage}, and {generated} tokens were generated")
        hit = books.first_hits.get(rid, (0, 0))
        if generated and (usage.cached, usage.replayed) != hit:
            _fail("I10", f"{rid!r} has {usage}, and its first hit was {hit}")
