"""Brings results into the books."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from deepinfer.core.errors import InvariantBroken
from deepinfer.core.plan import PlanRows, RowResults, StepPlan
from deepinfer.core.types import FinishReason
from deepinfer.scheduling import ledger
from deepinfer.scheduling.books import DECODE, LAST_PREFILL, REPLAY, Books
from deepinfer.scheduling.progress import ProgressList

__all__ = ["settle_result"]

Ints = NDArray[np.int64]
_Ends = dict[int, tuple[int, FinishReason | None, int | None, Exception | None]]


def settle_result(books: Books, plan: StepPlan, results: RowResults) -> ProgressList:
    """Settles the result of the oldest launched step, which has left `books.launched`.

    Args:
        books: The requests.
        plan: The step's plan.
        results: One result a row.

    Returns:
        What changed.
    """
    rows = plan.rows
    ends: _Ends = {}
    if books.is_active(rows):
        kept, sequences = None, books.active.sequences
    else:
        valid = books.valid(rows)
        kept = np.flatnonzero(valid)
        table = books.table.sequences
        sequences = tuple([table[slot] for slot in rows.slots[kept].tolist()])
    if sequences:
        if _is_plain(books, rows, results, kept):
            _settle_plain(books, plan.step, sequences, rows, results, ends)
        elif kept is not None or not _settle_verified(books, plan.step, sequences, rows, results):
            _settle_any(books, plan.step, sequences, rows, results, kept, ends)
    if books.notes_confidences:
        _note_confidences(books, rows, results)
    orphans = books.orphans.pop(plan.step, None)
    where = None if kept is None else kept.tolist()
    if orphans:
        where = list(range(len(rows))) if where is None else where
        sequences = list(sequences)  # type: ignore[assignment]
        _settle_orphans(books, plan.step, orphans, rows, results, sequences, where, ends)  # type: ignore[arg-type]
    return ProgressList(rows, results, sequences, where, ends)


def _is_plain(books: Books, rows: PlanRows, results: RowResults, kept: Ints | None) -> bool:
    """Whether every row decoded one token of a request that still runs in the same company."""
    count = len(rows)
    columns = books.active.columns
    return (
        kept is None
        and not results.errors
        and rows.num_tokens is columns["num_tokens"]
        and rows.num_open is columns["num_open"]
        and len(results.token_ids) == count
        and np.count_nonzero(results.num_token_ids) == count  # which are not negative, so 1 each
        and np.count_nonzero(results.num_accepted) == 0
    )


def _settle_plain(
    books: Books,
    step: int,
    sequences: tuple[ledger.Sequence, ...],
    rows: PlanRows,
    results: RowResults,
    ends: _Ends,
) -> None:
    table, active = books.table, books.active
    slots, tokens = rows.slots, results.token_ids
    settled = rows.first_positions + 1
    table.settled[slots] = settled
    known = table.add_one_each(slots, settled, tokens)
    if books.grows:
        stride = books.stride
        inside = settled & (stride - 1) if stride & (stride - 1) == 0 else settled % stride
        if np.count_nonzero(inside) < len(slots):
            for at in np.flatnonzero(inside == 0).tolist():
                books.settle_blocks(sequences[at], step)
    over = known >= active.limit
    is_eos = table.ends_sequence(tokens)
    if is_eos is not None:
        over |= is_eos & active.uses_eos
    for at in active.own_stops:
        if int(tokens[at]) in sequences[at].stop_token_ids:
            over[at] = True
    if np.count_nonzero(over):
        for at in np.flatnonzero(over).tolist():
            sequence = sequences[at]
            _, reason, stop = sequence.cut((int(tokens[at]),), int(known[at]) - 1)
            ends[at] = (1, reason, stop, None)
            books.drop(sequence)


def _settle_verified(
    books: Books,
    step: int,
    sequences: tuple[ledger.Sequence, ...],
    rows: PlanRows,
    results: RowResults,
) -> bool:
    """Settles rows that decode or verify, if nothing is wrong and none of their requests ends; else changes nothing."""
    table, active = books.table, books.active
    counts, accepted, drafts = results.num_token_ids, results.num_accepted, rows.num_drafts
    if results.errors or active.own_stops or int(rows.roles.min()) < DECODE:
        return False
    if int(accepted.min()) < 0 or np.count_nonzero((accepted > drafts) | (counts != accepted + 1)):
        return False
    slots, tokens = rows.slots, results.token_ids
    if np.count_nonzero(table.known[slots] + counts >= active.limit):
        return False
    if table.ends_sequence(tokens) is not None and active.uses_eos.any():
        return False  # maybe
    old = table.settled[slots]
    table.settled[slots] = new = old + rows.num_tokens - drafts + accepted
    table.add(slots, counts, tokens)
    if books.grows:
        low = np.maximum(old, table.pool_start[slots])
        for at in np.flatnonzero(new // books.stride > low // books.stride).tolist():
            books.settle_blocks(sequences[at], step)
    return True


def _settle_any(
    books: Books,
    step: int,
    sequences: tuple[ledger.Sequence, ...],
    rows: PlanRows,
    results: RowResults,
    kept: Ints | None,
    ends: _Ends,
) -> None:
    table = books.table
    if kept is None:
        kept = np.arange(len(rows))
    slots, roles = rows.slots[kept], rows.roles[kept]
    counts, accepted = results.num_token_ids[kept], results.num_accepted[kept]
    drafts = rows.num_drafts[kept]
    moved = rows.num_tokens[kept] - drafts + accepted
    expected = np.where(roles >= LAST_PREFILL, accepted + 1, 0)
    bad = (counts != expected) | (accepted < 0) | (accepted > drafts)
    failed: dict[int, Exception] = {}
    if bad.any() or results.errors:
        place = {row: at for at, row in enumerate(kept.tolist())}
        for at in np.flatnonzero(bad).tolist():
            row = int(kept[at])
            failed[at] = InvariantBroken(
                f"step {step} gave {counts[at]} tokens with {accepted[at]} drafts accepted for "
                f"{rows[row]}; expected {expected[at]}."
            )
        for row, error in results.errors.items():
            if row in place:
                failed[place[row]] = error
        lost = {id(sequences[at]): at for at in sorted(failed, reverse=True)}
        for at, sequence in enumerate(sequences):
            first = lost.get(id(sequence))
            if first is not None:  # the other row of a replay and the chunk behind it, too
                counts[at] = accepted[at] = moved[at] = 0  # copies, made by indexing
                ends[at] = (0, None, None, None)
                if at > first:  # the end is the last that is said of a request
                    failed[at] = failed.pop(first)
                    lost[id(sequence)] = at
    old = table.settled[slots]
    if (roles == REPLAY).any():  # a slot occurs twice
        np.add.at(table.settled, slots, moved)
        tokens_of = roles != REPLAY
    else:
        table.settled[slots] = old + moved
        tokens_of = np.ones(len(slots), np.bool_)
    starts = results.token_offsets[kept]
    owner = np.repeat(np.arange(len(slots)), counts)
    inner = np.arange(len(owner)) - np.repeat(np.cumsum(counts) - counts, counts)
    tokens = results.token_ids[starts[owner] + inner]
    known = np.zeros(len(slots), np.int64)
    known[tokens_of] = table.add(slots[tokens_of], counts[tokens_of], tokens)
    over = known[owner] + inner + 1 >= table.limit[slots[owner]]
    is_eos = table.ends_sequence(tokens)
    if is_eos is not None:
        over |= is_eos & table.uses_eos[slots[owner]]
    for at in np.flatnonzero(table.has_own_stops[slots[owner]]).tolist():
        sequence = sequences[int(owner[at])]
        over[at] |= int(tokens[at]) in sequence.stop_token_ids
    for at in np.unique(owner[over]).tolist():
        sequence, before = sequences[at], int(known[at])
        mine = tuple(tokens[owner == at].tolist())
        count, reason, stop = sequence.cut(mine, before)
        ends[at] = (count, reason, stop, None)
        slot = int(slots[at])
        table.drop_last(slot, before + count)
        table.settled[slot] = min(int(table.settled[slot]), before + count)
    _publish(books, step, sequences, slots, roles, old, moved)
    for at, (_, reason, _, _) in list(ends.items()):
        if reason is not None:
            books.drop(sequences[at])
    for at, error in failed.items():
        if books.sequences.get(sequences[at].rid) is sequences[at]:
            ends[at] = (0, FinishReason.ERROR, None, error)
            books.drop(sequences[at])


def _publish(
    books: Books,
    step: int,
    sequences: tuple[ledger.Sequence, ...],
    slots: Ints,
    roles: NDArray[np.uint8],
    old: Ints,
    moved: Ints,
) -> None:
    """Tells the cache of blocks that were settled; what a replay ran again is none."""
    if not books.grows:
        return
    table = books.table
    size = np.where(roles >= DECODE, books.stride, books.block_size)
    new = table.settled[slots]
    low = np.maximum(old, table.pool_start[slots])
    crossed = (new // size > low // size) & (moved > 0)
    done = set()
    for at in np.flatnonzero(crossed).tolist():
        sequence = sequences[at]
        if sequence.rid not in done:  # a replay and the chunk behind it
            done.add(sequence.rid)
            books.settle_blocks(sequence, step)


def _note_confidences(books: Books, rows: PlanRows, results: RowResults) -> None:
    table = books.table
    for row, values in results.draft_confidences.items():
        slot = int(rows.slots[row])
        if table.is_held[slot] and table.generation[slot] == rows.slot_generations[row]:
            table.confidences[slot] = tuple(values)


def _settle_orphans(
    books: Books,
    step: int,
    orphans: list[tuple[int, ledger.Sequence]],
    rows: PlanRows,
    results: RowResults,
    sequences: list[ledger.Sequence],
    where: list[int],
    ends: _Ends,
) -> None:
    """Keeps what was sampled for requests that lost their slot meanwhile; what they cached is gone."""
    offsets, counts = results.token_offsets, results.num_token_ids
    for row, sequence in orphans:
        sequence.num_orphans -= 1
        if books.sequences.get(sequence.rid) is not sequence:
            continue
        error = results.errors.get(row)
        at, count = int(offsets[row]), int(counts[row])
        tokens = () if error is not None else tuple(results.token_ids[at : at + count].tolist())
        reason: FinishReason | None
        used, reason, stop = sequence.cut(tokens, sequence.num_tokens)
        if error is not None:
            reason = FinishReason.ERROR
        books.store_waiting(sequence, tokens[:used])
        ends[len(sequences)] = (used, reason, stop, error)
        sequences.append(sequence)
        where.append(row)
        if reason is not None:
            books.drop(sequence)
