"""Walks the books of a scheduler."""

from __future__ import annotations

from typing import NoReturn

import numpy as np

from deepinfer.core.errors import InvariantBroken
from deepinfer.scheduling.books import LAST_PREFILL, Active, Books
from deepinfer.scheduling.ledger import Sequence

__all__ = ["check_books"]


def check_books(books: Books) -> None:
    """Compares every book with every other one.

    Args:
        books: The requests.

    Raises:
        InvariantBroken: They do not add up.
    """
    queued = [*books.waiting, *books.running.values()]
    if {s.rid: s for s in queued} != books.sequences or len(queued) != len(books.sequences):
        raise InvariantBroken("a request is in two queues or none, or an ended one is in one.")
    cache, limits = books.cache, books.limits
    if not len(books.running) == cache.num_held <= limits.max_num_seqs:
        raise InvariantBroken(
            f"{len(books.running)} requests run, {cache.num_held} hold a slot, and max_num_seqs is "
            f"{limits.max_num_seqs}."
        )
    if len(books.launched) > limits.async_depth + 1:
        raise InvariantBroken(f"steps {list(books.launched)} are in flight at once.")
    if sorted(map(books.key, books.waiting)) != list(map(books.key, books.waiting)):
        raise InvariantBroken("the queue is not in order.")
    _check_orphans(books)
    for sequence in books.sequences.values():
        _check_sequence(books, sequence)
    _check_active(books)
    _check_flights(books)


def _check_sequence(books: Books, sequence: Sequence) -> None:
    def fail(what: str) -> NoReturn:
        raise InvariantBroken(f"{what}: {sequence}.")

    held = books.cache.holding(sequence.request)
    runs = sequence.rid in books.running
    expected = (sequence.slot, sequence.slot_generation) if runs else None
    found = None if held is None else (held.slot, held.slot_generation)
    if found != expected:
        fail(f"the cache knows {held}")
    if runs != (sequence.slot is not None):
        fail("it runs without a slot, or waits with one")
    if not sequence.request.num_prompt_tokens <= sequence.num_tokens < sequence.limit:
        fail(f"it has {sequence.num_tokens} tokens, and {sequence.limit} may be")
    if sequence.num_pending < 1:
        fail("nothing is left to run")
    table, slot = books.table, sequence.slot
    if slot is None:
        return
    if table.sequences[slot] is not sequence or not table.is_held[slot]:
        fail("its slot belongs to somebody else")
    if (table.generation[slot], table.epoch[slot]) != (sequence.slot_generation, sequence.epoch):
        fail("its slot is of another time")
    if held is not None and table.room[slot] != held.num_tokens:
        fail(f"it has room for {held.num_tokens} tokens, and the table says {table.room[slot]}")
    if table.last_token[slot] != sequence.token_ids[-1]:
        fail(f"its last token is not {table.last_token[slot]}")
    table.check(slot, fail)


def _check_active(books: Books) -> None:
    table = books.table
    if int(table.is_held.sum()) != len(books.running):
        raise InvariantBroken("a slot is held by nobody.")
    active = books.active
    now = Active.of(tuple(books.running.values()), table)
    same = active.sequences == now.sequences and all(
        np.array_equal(array, now.columns[name]) for name, array in active.columns.items()
    )
    if not same or not np.array_equal(active.limit, now.limit):
        raise InvariantBroken("what is kept of the running requests is not what they are.")


def _check_flights(books: Books) -> None:
    flying = books.flying()
    if flying is None:
        return
    table, active = books.table, books.active
    known, settled = table.known[active.slots], table.settled[active.slots]
    scheduled = settled + flying.tokens
    if (scheduled - flying.drafts > known + flying.samples * len(books.launched)).any():
        raise InvariantBroken("more is in flight than there is.")
    if (scheduled > table.room[active.slots]).any():
        raise InvariantBroken("more is in flight than there is room for.")
    if (scheduled > table.limit[active.slots]).any():  # all drafts in flight may be right
        raise InvariantBroken("more is in flight than may be generated.")


def _check_orphans(books: Books) -> None:
    counts: dict[int, int] = {}
    for step, entries in books.orphans.items():
        plan = books.launched.get(step)
        if plan is None:
            raise InvariantBroken(f"step {step} is not in flight, and rows of it are waited for.")
        for row, sequence in entries:
            if plan.rows.rids[row] != sequence.rid or plan.rows.roles[row] < LAST_PREFILL:
                raise InvariantBroken(f"{sequence} waits for row {row} of step {step}.")
            counts[id(sequence)] = counts.get(id(sequence), 0) + 1
    for sequence in books.sequences.values():
        if sequence.num_orphans != counts.get(id(sequence), 0):
            raise InvariantBroken(f"{sequence} waits for {sequence.num_orphans} rows.")
