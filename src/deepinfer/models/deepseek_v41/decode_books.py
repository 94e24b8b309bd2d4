"""The cache's books of rows as columns: `SlotCache.begin` and `commit` for many rows at once."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from deepinfer.models.deepseek_v41.batch import Segment
from deepinfer.models.deepseek_v41.cache import SlotCache

__all__ = ["DecodeRows", "SlotRows", "begin_rows", "commit_rows"]

Ints = NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class SlotRows:
    """What rows of a step, each of a slot of its own, have in common, as columns.

    Attributes:
        slots: Their slots, each once.
        host_slots: The same, shape [rows], int64.
        starts: Their first positions, shape [rows], int64.
        window_starts: As in `Segment`, shape [rows], int64.
        pool_starts: As in `Segment`, shape [rows], int64.
        full_starts: As in `Segment`, shape [rows], int64.
    """

    slots: list[int]
    host_slots: Ints
    starts: Ints
    window_starts: Ints
    pool_starts: Ints
    full_starts: Ints

    def __len__(self) -> int:
        return len(self.slots)

    @property
    def ends(self) -> Ints:
        """Position behind the last token of each, shape [rows], int64."""
        raise NotImplementedError

    def are_sized(self, cache: SlotCache) -> bool:
        """Whether no row has more tokens than a step of a cache takes.

        Args:
            cache: The cache.
        """
        return True

    def segments(self) -> tuple[Segment, ...]:
        """The rows as segments."""
        raise NotImplementedError

    @property
    def replays(self) -> bool:
        """Whether a row lies before what its slot adopted, or before what runs every layer."""
        before = (self.starts < self.full_starts) | (self.starts < self.pool_starts)
        return bool(before.any())


class DecodeRows(SlotRows):
    """Segments of one token each, as columns."""

    __slots__ = ()

    @property
    def ends(self) -> Ints:
        """As in `SlotRows`."""
        return self.starts + 1

    def segments(self) -> tuple[Segment, ...]:
        """The rows as segments."""
        columns = (self.starts, self.window_starts, self.pool_starts, self.full_starts)
        rows = zip(self.slots, *[column.tolist() for column in columns], strict=True)
        return tuple(
            [Segment(slot, at, 1, window, pool, full) for slot, at, window, pool, full in rows]
        )


def begin_rows(cache: SlotCache, rows: SlotRows) -> Ints:
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
    reach = np.maximum(rows.starts - cache.config.sliding_window + 1, rows.window_starts)
    starts, stops = rows.starts.tolist(), rows.ends.tolist()
    if not _fit(cache, rows, starts, stops, reach.tolist()):
        segments = rows.segments()
        cache.begin(segments)  # it knows what to say
        return np.array(cache.full_floors(segments), np.int64)
    spans, high_water = cache.full_spans, cache._high_water
    firsts = []
    for slot, start, stop in zip(rows.slots, starts, stops, strict=True):
        first, end = spans[slot]
        firsts.append(first if first < end == start else start)
        if high_water[slot] < stop:
            high_water[slot] = stop
    floors = np.maximum(np.array(firsts, np.int64), rows.full_starts)
    return np.maximum(floors, rows.window_starts, out=floors)


def _fit(
    cache: SlotCache, rows: SlotRows, starts: list[int], stops: list[int], reach: list[int]
) -> bool:
    """Whether every row goes on where its slot ends, has room, and reads rows that were written."""
    slots, size = rows.slots, cache.block_size
    if min(slots) < 0 or max(slots) >= cache.num_slots or max(stops) > cache.max_tokens:
        return False
    if not rows.are_sized(cache):
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


def commit_rows(cache: SlotCache, rows: SlotRows) -> None:
    """Counts the tokens of rows that were written, as `SlotCache.commit` does.

    Args:
        cache: The cache.
        rows: What `begin_rows` let pass.
    """
    spans, lengths, windows = cache.full_spans, cache.lengths, cache.window_starts
    stops = rows.ends.tolist()
    for slot, start, stop in zip(rows.slots, rows.starts.tolist(), stops, strict=True):
        first, end = spans[slot]
        spans[slot] = (first if first < end == start else start, stop)
        if windows[slot] > start:
            windows[slot] = start
        lengths[slot] = stop
