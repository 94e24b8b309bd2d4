"""The cache's books in a step in which every row runs a few tokens, of which the last may be taken back: all rows at once."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from deepinfer.models.deepseek_v41.batch import Segment
from deepinfer.models.deepseek_v41.cache import SlotCache
from deepinfer.models.deepseek_v41.decode_books import SlotRows

__all__ = ["VerifyRows", "begin_verify", "commit_verify", "take_back"]

Ints = NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class VerifyRows(SlotRows):
    """Segments as columns.

    Attributes:
        counts: Their tokens, at least 1 each, shape [rows], int64.
    """

    counts: Ints

    def why_not(self, cache: SlotCache) -> str:
        """Why they cannot run in a step of fixed shape, or "", see `cannot_decode`.

        Args:
            cache: The cache.
        """
        if self.replays:
            return "a row replays"
        if int(self.counts.max()) > cache.max_rollback + 1:
            return "a row is longer than what can be taken back"
        return ""

    def segments(self) -> tuple[Segment, ...]:
        """The rows as segments."""
        columns = (self.starts, self.counts, self.window_starts, self.pool_starts, self.full_starts)
        rows = zip(self.slots, *[column.tolist() for column in columns], strict=True)
        return tuple([Segment(slot, *values) for slot, *values in rows])


def begin_verify(cache: SlotCache, rows: VerifyRows) -> Ints:
    """Checks rows before anything is written, as `SlotCache.begin` does.

    Args:
        cache: The cache.
        rows: What the step is going to run; none of them replays.

    Returns:
        What `SlotCache.full_floors` returns, shape [rows], int64.

    Raises:
        InvariantBroken: As in `SlotCache.begin`.
        RequestTooLong: As in `SlotCache.begin`.
    """
    ends = rows.starts + rows.counts
    reach = np.maximum(rows.starts - cache.config.sliding_window + 1, rows.window_starts)
    starts, stops = rows.starts.tolist(), ends.tolist()
    if not _fit(cache, rows, starts, stops, reach.tolist()):
        segments = rows.segments()
        cache.begin(segments)  # it knows what to say
        return np.array(cache.full_floors(segments), np.int64)
    spans, high_water = cache.full_spans, cache._high_water
    for slot, stop in zip(rows.slots, stops, strict=True):
        if high_water[slot] < stop:
            high_water[slot] = stop
    flat = itertools.chain.from_iterable([spans[slot] for slot in rows.slots])
    seen = np.fromiter(flat, np.int64, 2 * len(starts))
    firsts, held = seen[::2], seen[1::2]
    firsts = np.where((firsts < held) & (held == rows.starts), firsts, rows.starts)
    floors = np.maximum(firsts, rows.full_starts)
    return np.maximum(floors, rows.window_starts, out=floors)


def _fit(
    cache: SlotCache, rows: VerifyRows, starts: list[int], stops: list[int], reach: list[int]
) -> bool:
    """Whether every row goes on where its slot ends, has room, and reads rows that were written."""
    slots, size = rows.slots, cache.block_size
    if min(slots) < 0 or max(slots) >= cache.num_slots or max(stops) > cache.max_tokens:
        return False
    if int(rows.counts.max()) > cache.max_step_tokens or int(rows.counts.min()) < 1:
        return False
    if rows.full_starts.any() and cache.narrowing.first_layer is None:
        return False
    lengths, counts, windows = cache.lengths, cache.table.counts, cache.window_starts
    if [lengths[slot] for slot in slots] != starts:
        return False
    for slot, stop, lowest in zip(slots, stops, reach, strict=True):
        if stop > counts[slot] * size or lowest < windows[slot] > 0:
            return False
    return True


def commit_verify(cache: SlotCache, rows: VerifyRows) -> None:
    """Counts the tokens of rows that were written, as `SlotCache.commit` does.

    Args:
        cache: The cache.
        rows: What `begin_verify` let pass.
    """
    spans, lengths, windows = cache.full_spans, cache.lengths, cache.window_starts
    stops = (rows.starts + rows.counts).tolist()
    for slot, start, stop in zip(rows.slots, rows.starts.tolist(), stops, strict=True):
        first, end = spans[slot]
        spans[slot] = (first if first < end == start else start, stop)
        if windows[slot] > start:
            windows[slot] = start
        lengths[slot] = stop


def take_back(cache: SlotCache, slots: Sequence[int], lengths: Sequence[int]) -> None:
    """`SlotCache.truncate` of several slots.

    Args:
        cache: The cache.
        slots: The slots.
        lengths: Tokens that each keeps.

    Raises:
        InvariantBroken: As in `SlotCache.truncate`.
    """
    held, adopted, windows = cache.lengths, cache.adopted, cache.window_starts
    full_spans, draft_spans, most = cache.full_spans, cache.draft_spans, cache.max_rollback
    for slot, length in zip(slots, lengths, strict=True):
        now = held[slot]
        if length == now:
            continue
        if not now - most <= length < now or adopted[slot] > length or windows[slot] > length:
            cache.truncate(slot, length)
            continue
        held[slot] = length
        first, end = full_spans[slot]
        if end > length:
            full_spans[slot] = (first if first < length else length, length)
        first, end = draft_spans[slot]
        if end > length:
            draft_spans[slot] = (first if first < length else length, length)
