"""Writes the pool rows and index keys that the tokens of a step complete, and keeps what waits for a partner."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from types import ModuleType

import numpy as np
import torch
from torch import Tensor

from deepinfer.models.deepseek_v41.batch import Segment, to_device
from deepinfer.models.deepseek_v41.block_table import flat_index
from deepinfer.models.deepseek_v41.cache import SlotCache
from deepinfer.models.deepseek_v41.compressor import Compressor
from deepinfer.models.deepseek_v41.indexer import Indexer
from deepinfer.models.deepseek_v41.packed_pass import write_packed_pool
from deepinfer.models.deepseek_v41.packed_rows import PackedRows
from deepinfer.models.deepseek_v41.rope import apply_rope_, rope_phases
from deepinfer.models.deepseek_v41.rounding import Rounding

__all__ = ["PoolWriter"]


@dataclass(frozen=True, slots=True)
class _Completed:
    """Rows that a step completes at one ratio.

    Attributes:
        index: Where each row lies in a pool of this ratio, shape [rows].
        last: Batch row of the last token of each, shape [rows]; None when it is every token of the batch.
        first: Row of the first token within the batch followed by `outside`, shape [rows]; None for ratio 1.
        outside: Tail rows of first tokens that came in an earlier step.
        phases: Rotations of the rows' positions, shape [rows, rope_dim / 2], complex64; None without rows.
    """

    index: Tensor
    last: Tensor | None
    first: Tensor | None
    outside: Tensor | None
    phases: Tensor | None


class PoolWriter:
    """What a step adds to the pools; index arithmetic is done once a ratio and shared by the KV sources."""

    def __init__(
        self,
        segments: Sequence[Segment],
        positions: np.ndarray,
        cache: SlotCache,
        frequencies: Tensor,
        kernels: ModuleType | None = None,
    ) -> None:
        lengths = [s.num_tokens for s in segments]
        self._cache = cache
        self._positions = positions
        self._slots = np.repeat([s.slot for s in segments], lengths)
        self._floor = np.repeat([s.pool_start for s in segments], lengths)
        ends = {s.slot: s.end for s in segments}
        self._ends = np.repeat([ends[s.slot] for s in segments], lengths)
        self._frequencies = frequencies
        self._kernels = kernels
        self._completed: dict[int, _Completed] = {}
        self._tail_index: tuple[Tensor, Tensor] | None = None
        self._tokens: tuple[Tensor, Tensor] | None = None

    def write(
        self, source: int, compressor: Compressor, indexer: Indexer, rounding: Rounding, y: Tensor
    ) -> None:
        """Extends the pool of a KV source by what `y`, shape [tokens, hidden], completes."""
        cache, ratio = self._cache, compressor.ratio
        projected = compressor.project(y)
        done = self._completed.get(ratio) or self._complete(ratio)
        second = projected if done.last is None else projected[done.last]
        first = None
        if done.first is not None:
            tail = cache.tails[source].view(-1, *projected.shape[1:])
            known = projected
            if done.outside is not None:
                known = torch.cat((projected, tail[done.outside]))
            first = known[done.first]
        if ratio > 1:
            self._keep_tail(source, projected)
        if done.phases is None:
            return
        pair: tuple[Tensor, Tensor | None] = (second, None)
        if first is not None:
            pair = (first, second)
        if self._kernels is None:
            latents = compressor.latents(*pair, y.dtype)
            keys = indexer.keys(latents, done.phases)
            rows = rounding.pool(apply_rope_(latents, done.phases))
        else:
            latents = compressor.fused_latents(*pair, y.dtype, self._kernels)
            phases = torch.view_as_real(done.phases)
            keys = indexer.fused_keys(latents, phases, self._kernels)
            form = "none" if rounding.level == "none" else "nvfp4"
            latents = latents.unsqueeze(1)
            rows = self._kernels.norm_rope_round(latents, phases=phases, rounding=form).squeeze(1)
        cache.rows.write_pool(source, done.index, rows, keys)

    def write_packed(
        self, rows: PackedRows, source: int, compressor: Compressor, indexer: Indexer, y: Tensor
    ) -> None:
        """As `write`, through the kernels of packed rows."""
        ratio = compressor.ratio
        done = self._completed.get(ratio) or self._complete(ratio)
        pairs: dict[str, Tensor] = {}
        if ratio > 1:
            if self._tokens is None:
                self._tokens = self._tensor(self._slots), self._tensor(self._positions)
            requests, positions = self._tokens
            tail = self._cache.tails[source]
            pairs = {"state": tail, "requests": requests, "positions": positions}
        if done.last is not None:
            pairs["last"] = done.last
        phases = y.new_empty((0, len(self._frequencies), 2), dtype=torch.float32)
        if done.phases is not None:
            phases = torch.view_as_real(done.phases)
        write_packed_pool(rows, source, compressor, indexer, y, phases, done.index, **pairs)

    def _complete(self, ratio: int) -> _Completed:
        positions, slots = self._positions, self._slots
        is_last = (positions % ratio == ratio - 1) & (positions >= self._floor)
        last = np.flatnonzero(is_last)
        first = outside = phases = None
        if len(last):
            starts = self._tensor(positions[last] - (ratio - 1))
            phases = rope_phases(self._frequencies, starts)
        if ratio > 1 and len(last):
            before = last - 1
            early = (
                (before < 0)
                | (slots[before] != slots[last])
                | (positions[before] != positions[last] - 1)
            )
            if early.any():
                size = self._cache.tail_size
                kept = slots[last[early]] * size + (positions[last[early]] - 1) % size
                before[early] = len(positions) + np.arange(len(kept))
                outside = self._tensor(kept)
            first = self._tensor(before)
        everything = ratio == 1 and len(last) == len(positions)
        table = self._cache.table
        index = flat_index(
            table.host, slots[last], positions[last] // ratio, table.block_size // ratio
        )
        done = _Completed(
            self._tensor(index),
            None if everything else self._tensor(last),
            first,
            outside,
            phases,
        )
        self._completed[ratio] = done
        return done

    def _keep_tail(self, source: int, projected: Tensor) -> None:
        """Keeps the newest tokens of each slot for partners that are still to come, and for rollback."""
        size = self._cache.tail_size
        if self._tail_index is None:
            newest = np.flatnonzero(self._positions >= self._ends - size)
            rows = self._slots[newest] * size + self._positions[newest] % size
            self._tail_index = self._tensor(rows), self._tensor(newest)
        rows, newest = self._tail_index
        tail = self._cache.tails[source].view(-1, *projected.shape[1:])
        tail.index_copy_(0, rows, projected[newest])

    def _tensor(self, array: np.ndarray) -> Tensor:
        return to_device(array, self._cache.device)
