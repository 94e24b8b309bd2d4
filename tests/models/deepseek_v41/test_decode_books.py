"""The cache's books of rows as columns are those of segments."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from deepinfer.core.errors import InvariantBroken, RequestTooLong
from deepinfer.models.deepseek_v41 import DeepseekV41Config, Segment, SlotCache
from deepinfer.models.deepseek_v41.decode_books import (
    DecodeRows,
    SlotRows,
    begin_rows,
    commit_rows,
)
from deepinfer.models.deepseek_v41.verify_books import VerifyRows

BOOKS = ("lengths", "window_starts", "full_spans", "adopted", "_high_water")


def message_of(call: Callable[[], Any]) -> str:
    try:
        call()
    except (InvariantBroken, RequestTooLong) as error:
        return str(error)
    return ""


class TestDecodeBooks:
    def scrambled(self, config: DeepseekV41Config, seed: int) -> SlotCache:
        draw = np.random.default_rng(seed)
        cache = SlotCache(config, 6, 128, 32, num_blocks=24, block_size=16)
        for slot in range(cache.num_slots):
            length = int(draw.integers(0, 100))
            cache.lengths[slot] = cache._high_water[slot] = length
            cache.adopted[slot] = int(draw.integers(0, length + 1))
            cache.window_starts[slot] = int(draw.choice([0, max(0, length - 20), length]))
            first = int(draw.integers(0, length + 1))
            cache.full_spans[slot] = (first, int(draw.choice([length, first])))
            cache.table.counts[slot] = int(draw.choice([8, -(-length // 16)]))
        return cache

    @pytest.mark.parametrize("verifies", [False, True])
    @pytest.mark.parametrize("seed", range(60))
    def test_they_are_those_of_segments(
        self, small_config: Callable[..., Any], seed: int, verifies: bool
    ) -> None:
        one, other = (self.scrambled(small_config(), seed) for _ in range(2))
        draw = np.random.default_rng(1000 + seed)
        slots = draw.permutation(6)[: int(draw.integers(1, 7))].astype(np.int64)
        starts = np.array([one.lengths[slot] for slot in slots], np.int64)
        if seed % 5 == 0:
            starts[0] += 1
        windows = np.minimum(starts, [one.window_starts[slot] for slot in slots])
        if seed % 3 == 0:
            windows[:] = 0
        zeros = np.zeros(len(slots), np.int64)
        fulls = np.minimum(starts, draw.integers(0, 100)) if seed % 4 == 0 else zeros
        columns = (starts, windows, zeros, fulls)
        rows: SlotRows = DecodeRows(slots.tolist(), slots, *columns)
        counts = np.ones(len(slots), np.int64)
        if verifies:
            counts = draw.integers(1, 34 if seed % 7 == 0 else 7, len(slots))
            counts[0] *= seed % 11 != 0
            rows = VerifyRows(slots.tolist(), slots, *columns, counts)
        parts = [c.tolist() for c in (slots, starts, counts, windows, fulls)]
        segments = tuple(
            Segment(slot, at, count, window, 0, full)
            for slot, at, count, window, full in zip(*parts, strict=True)
        )
        assert rows.segments() == segments
        refused = message_of(lambda: other.begin(segments))
        assert message_of(lambda: begin_rows(self.scrambled(small_config(), seed), rows)) == refused
        if not refused:
            assert begin_rows(one, rows).tolist() == other.full_floors(segments)
            commit_rows(one, rows)
            other.commit(segments)
        for name in BOOKS:
            assert getattr(one, name) == getattr(other, name), name

    def test_rows_before_what_runs_every_layer_replay(self) -> None:
        columns = [np.array(values) for values in ([5, 5], [0, 0], [0, 6], [0, 0])]
        slots = np.array([0, 1])
        assert DecodeRows([0, 1], slots, *columns).replays
        assert not DecodeRows([0], slots[:1], *[column[:1] for column in columns]).replays
