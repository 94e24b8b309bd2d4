"""Rows of a few tokens each, of which the last may be taken back, as columns."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from deepinfer.models.deepseek_v41.batch import Segment
from deepinfer.models.deepseek_v41.cache import SlotCache
from deepinfer.models.deepseek_v41.decode_books import SlotRows

__all__ = ["VerifyRows", "take_back"]

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

    @property
    def ends(self) -> Ints:
        """As in `SlotRows`."""
        return self.starts + self.counts

    def are_sized(self, cache: SlotCache) -> bool:
        """As in `SlotRows`."""
        return int(self.counts.max()) <= cache.max_step_tokens and int(self.counts.min()) >= 1

    def segments(self) -> tuple[Segment, ...]:
        """The rows as segments."""
        columns = (self.starts, self.counts, self.window_starts, self.pool_starts, self.full_starts)
        rows = zip(self.slots, *[column.tolist() for column in columns], strict=True)
        return tuple([Segment(slot, *values) for slot, *values in rows])


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
