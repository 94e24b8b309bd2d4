"""What a request leaves behind for others: full settled blocks, and its window rows."""

from __future__ import annotations

from collections.abc import Sequence

from deepinfer.cache._books import Books
from deepinfer.cache._holding import Holding
from deepinfer.cache.index_entry import NOWHERE
from deepinfer.cache.prefix_index import Outcome
from deepinfer.core.plan import CacheCopy, CopyKind


def publish_settled(books: Books, holding: Holding, token_ids: Sequence[int]) -> None:
    """Makes the full blocks of the settled tokens findable.

    Args:
        books: The manager's books.
        holding: The request's.
        token_ids: Its tokens.
    """
    pool, index, totals = books.pool, books.index, books.totals
    chain = books.chains[holding.request.rid]
    hasher = chain.hasher
    count = holding.settled // hasher.block_size
    entries = holding.entries
    first = len(entries)
    if holding.loaded or holding.window is not None:
        if holding.settled <= holding.hit.num_tokens:
            return  # nothing was run since, so nobody knows yet whether the copies worked
        first = min(first, len(holding.hit.blocks))  # what was loaded is there, and may be shared
        holding.loaded.clear()
        holding.window = None
    # A block of another table may have stood for one of ours and be gone: ours takes its place.
    while first and not entries[first - 1].alive:
        first -= 1
    if first >= count:
        return
    hasher.extend(token_ids, count)
    parent = entries[first - 1] if first else chain.root
    for number in range(first, count):
        block = holding.table[number]
        entry, outcome, freed = index.publish(
            parent,
            hasher.keys[number],
            hasher.ids[number],
            hasher.extras[number],
            block,
            holding.approximate,
        )
        if entry is None:
            holding.may_publish = False  # nothing behind a collision could be told apart
            return
        if freed != NOWHERE:
            pool.forget(freed)
        if outcome is Outcome.STORED:
            pool.mark(block)
            totals["stored_blocks_total"] += 1
        elif entry.device != block:
            totals["duplicate_blocks_total"] += 1
        if number < len(entries):
            entries[number] = entry
        else:
            entries.append(entry)
        parent = entry


def save_windows(
    books: Books, holding: Holding, *, window_rows: int, ring_spare: int, in_flight: bool
) -> None:
    """Keeps the window rows before the last full block of a request that gives its slot back.

    Args:
        books: The manager's books; a copy is added to them when there is something to keep.
        holding: The request's.
        window_rows: Rows that are kept.
        ring_spare: How many tokens behind the block's end may be settled without rows being overwritten.
        in_flight: Whether a step that writes to the slot may still run.
    """
    windows, block_size = books.index.windows, books.block_size
    count = holding.settled // block_size
    if windows is None or not count or not holding.may_publish or holding.window is not None:
        return
    end = count * block_size
    if len(holding.entries) < count or holding.settled - end > ring_spare:
        return
    if in_flight and holding.settled + 1 < holding.num_known:
        return  # a chunk of known tokens, of any length, may be overwriting the ring
    if holding.hit.replay_tokens and end - window_rows < holding.hit.num_tokens:
        return  # rows that a replay wrote are never kept
    entry = holding.entries[count - 1]
    if not entry.alive:
        return
    now = books.clock.now()
    if entry.window != NOWHERE:
        windows.note_use(entry.window, now)
        return
    place = books.index.add_window(entry, now)
    if place != NOWHERE:
        books.totals["saved_windows_total"] += 1
        books.copies.append(
            CacheCopy(kind=CopyKind.SAVE_WINDOWS, device=holding.slot, host=place, end_position=end)
        )
