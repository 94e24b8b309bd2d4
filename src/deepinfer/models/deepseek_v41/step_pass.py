"""One ragged step over a cache: every kind of row (prefill chunk, decode, verify, replay) is the same code.

Keys are read through row indices: each token has a list of window rows and a list of selected pool rows. All index
arithmetic that depends on positions alone is done once a step, on the host, and shared by the layers.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from types import ModuleType
from typing import TypeGuard

import numpy as np
import torch
from torch import Tensor

from deepinfer.core.errors import InvariantBroken
from deepinfer.kernels import KVCacheFormat
from deepinfer.models.deepseek_v41.attention import Attention
from deepinfer.models.deepseek_v41.batch import (
    ForwardBatch,
    Segment,
    positions_of,
    repeat_over,
    to_device,
)
from deepinfer.models.deepseek_v41.cache import SlotCache
from deepinfer.models.deepseek_v41.compressor import Compressor
from deepinfer.models.deepseek_v41.few_rows import FewRows
from deepinfer.models.deepseek_v41.indexer import Indexer, IndexQueries
from deepinfer.models.deepseek_v41.packed_pass import (
    attend_packed,
    takes_kernels,
    write_packed_windows,
)
from deepinfer.models.deepseek_v41.packed_rows import PackedRows
from deepinfer.models.deepseek_v41.pool_writer import PoolWriter
from deepinfer.models.deepseek_v41.prompt_keys import PromptKeys, pays
from deepinfer.models.deepseek_v41.prompt_selection import PromptSelection
from deepinfer.models.deepseek_v41.rope import Rotation
from deepinfer.models.deepseek_v41.row_selection import RowSelection, bias_of
from deepinfer.models.deepseek_v41.row_storage import PlainRows

__all__ = ["StepPass"]

_TOKEN_BLOCK = 256


class StepPass:
    """State of one forward over a cache.

    Attributes:
        is_image: True for image tokens, shape [tokens], or None.
        engram_rows: Table rows by layer id, each of shape [tokens, columns].
        features: Mean streams that entered the draft's target layers, or None without a draft.
        narrow_layer: The layer in which rows drop out or windows begin later, or None when there is none.
        kept: Batch rows that are left behind that layer, ascending, or None for all.
        packed: Whether rows are bytes that kernels read and write, so that `packed_stack` may run the layers.
    """

    def __init__(
        self,
        batch: ForwardBatch,
        cache: SlotCache,
        frequencies: tuple[Tensor, Tensor],
        is_image: Tensor | None = None,
        *,
        deterministic: bool = False,
        kernels: ModuleType | None = None,
    ) -> None:
        """Prepares the step and writes the token history.

        Args:
            batch: The tokens.
            cache: The cache; its `begin` has accepted the segments.
            frequencies: Radians per position of layers without and with a pool, each of shape [rope_dim / 2].
            is_image: True for image tokens, shape [tokens], or None when there is none.
            deterministic: Whether a row's bits must be free of the batch: widths are fixed.
            kernels: Row-wise steps for `decode_stack.run_layers`; None when the layers run their own.
        """
        self.kernels = kernels
        self.is_image = is_image
        self.engram_rows: dict[int, Tensor] = {}
        self.features: list[Tensor] | None = [] if cache.config.num_nextn_predict_layers else None
        self.kept: np.ndarray | None = None
        self._cache = cache
        self._segments = batch.segments
        self._frequencies = frequencies
        self._deterministic = deterministic
        keys_fit = cache.config.index_head_dim == KVCacheFormat.INDEXER_MXFP4.channels
        self.packed = kernels is not None and self._packed_kernels(cache.rows) and keys_fit
        self._set_rows(batch.segments, [s.window_start for s in batch.segments])
        self._writer = PoolWriter(
            batch.segments, self._rows.positions, cache, frequencies[True], kernels
        )
        self._joint_bias: Tensor | None = None
        self._has_narrowed = False
        self._floors = cache.full_floors(batch.segments)
        self.narrow_layer = cache.narrowing.first_layer if self._is_narrow() else None
        history_index = self._rows.slots * cache.max_tokens + self._rows.positions
        cache.tokens.view(-1).index_copy_(0, self._tensor(history_index), batch.input_ids)

    def history(self, ngram: int) -> Tensor:
        """Id of each token and of those before it, newest first, shape [tokens, ngram], int64.

        Negative before the start, and on images.
        """
        cache, rows = self._cache, self._rows
        wanted = rows.positions[:, None] - np.arange(ngram)
        index = rows.slots[:, None] * cache.max_tokens + np.maximum(wanted, 0)
        found = cache.tokens.view(-1)[self._tensor(index)]
        if rows.positions.min() < ngram - 1:
            found = found.masked_fill(self._tensor(wanted < 0), -1)
        if any(cache.has_images[s.slot] for s in self._segments):
            found = found.masked_fill(found == cache.config.image_token_id, -1)
        return found

    def rotation(self, compressed: bool) -> Rotation:
        """Rotations of the tokens' positions."""
        return self._rows.rotations[compressed]

    def extend_pool(
        self, attention: Attention, compressor: Compressor, indexer: Indexer, y: Tensor
    ) -> None:
        """Writes the pool rows and index keys that the tokens complete; `y` has shape [tokens, hidden]."""
        # The layer that drops rows is the last one with a pool, and has extended it before.
        table = self._cache.rows
        if self._has_narrowed:
            return
        if self.packed and isinstance(table, PackedRows):
            self._writer.write_packed(table, attention.layer_id, compressor, indexer, y)
        else:
            self._writer.write(attention.layer_id, compressor, indexer, attention.rounding, y)

    def narrow(self) -> Tensor | None:
        """Drops the rows before their segment's `full_start`, and lets the windows of the others begin there.

        Returns:
            The rows that are left, shape [kept], int64, or None for all of them.
        """
        self.narrow_layer, self._has_narrowed = None, True
        segments, floors, kept, at = [], [], [], 0
        for s, floor in zip(self._segments, self._floors, strict=True):
            start = min(max(s.start, s.full_start), s.end)
            kept.append(np.arange(at + start - s.start, at + s.num_tokens))
            at += s.num_tokens
            if start < s.end:
                segments.append(dataclasses.replace(s, start=start, num_tokens=s.end - start))
                floors.append(floor)
        if segments:
            self._set_rows(segments, floors)
        all_kept = np.concatenate(kept)
        if len(all_kept) == at:
            return None
        self.kept = all_kept
        index = self._tensor(all_kept)
        if self.is_image is not None:
            self.is_image = self.is_image[index]
        if self.features:
            self.features = [rows[index] for rows in self.features]
        return index

    def select(self, attention: Attention, indexer: Indexer, bottleneck: Tensor, y: Tensor) -> None:
        """Chooses the pool rows that this layer and the layers that reuse it attend to."""
        if self.packed:
            if self.needs_scores(attention):
                turned = self.phases(True)
                kernels = self._needed_kernels()
                self.pick(attention, indexer.projected_queries(bottleneck, y, turned, kernels))
            return
        rows, device = self._rows, self._cache.device
        phases = rows.rotations[True].per_head
        self._selection.select(attention.layer_id, indexer, bottleneck, y, phases)
        window, pool = rows.window_bias, self._selection.bias
        self._joint_bias = None
        if self._selection.index is not None and not (window is None and pool is None):
            tokens, width = rows.window_index.shape
            if window is None:
                window = torch.zeros(tokens, 1, width, dtype=torch.float32, device=device)
            if pool is None:
                width = self._selection.index.shape[1]
                pool = torch.zeros(tokens, 1, width, dtype=torch.float32, device=device)
            self._joint_bias = torch.cat((window, pool), -1)

    def attend(self, attention: Attention, queries: Tensor, kv: Tensor) -> Tensor:
        """Writes the window rows, then attends to window and pool rows; shape [tokens, heads, head_dim]."""
        layer, rows = attention.layer_id, self._rows
        bias, pool = rows.window_bias, None
        if attention.ratio and self._selection.index is not None:
            pool, bias = self._selection.index, self._joint_bias
        if rows.few is not None and not torch.is_grad_enabled():
            return rows.few.attend(attention, queries, kv, pool, bias)
        self._cache.rows.write_windows(layer, rows.ring_index, kv)
        if len(queries) <= _TOKEN_BLOCK:
            return self._attend(attention, queries, rows.window_index, pool, bias)
        out = []
        for start in range(0, len(queries), _TOKEN_BLOCK):
            part = slice(start, start + _TOKEN_BLOCK)
            pool_part, bias_part = (None if t is None else t[part] for t in (pool, bias))
            index = rows.window_index[part]
            out.append(self._attend(attention, queries[part], index, pool_part, bias_part))
        return torch.cat(out)

    def phases(self, compressed: bool) -> Tensor:
        """Cosines and sines of the positions, shape [tokens, rope_dim / 2, 2], fp32."""
        return torch.view_as_real(self._rows.rotations[compressed].per_token)

    def write_windows(
        self,
        attention: Attention,
        kv: Tensor,
        weight: Tensor,
        eps: float,
        phases: Tensor,
        rounding: str,
    ) -> None:
        """Norms, rotates, rounds and writes window rows from the projection `kv`, shape [tokens, 1, head_dim]."""
        kernels, table = self._needed_kernels(), self._cache.rows
        if self._packed_kernels(table):
            window = table.window_data[attention.layer_id]
            write_packed_windows(window, kv, weight, eps, phases, self._rows.ring_index)
            return
        rows = kernels.norm_rope_round(kv, weight, eps, phases, rounding=rounding).squeeze(1)
        self._cache.rows.write_windows(attention.layer_id, self._rows.ring_index, rows)

    def attend_cached(self, attention: Attention, queries: Tensor) -> Tensor:
        """Attends to rows that are all written; shape [tokens, heads, head_dim]."""
        if self.packed:
            return self.attend_back(attention, queries, None)
        rows, table = self._rows, self._cache.rows
        has_pool = attention.ratio and self._selection.index is not None
        packed = self._packed_kernels(table)
        if not packed and not isinstance(table, PlainRows):
            pool, bias = None, rows.window_bias
            if has_pool:
                pool, bias = self._selection.index, self._joint_bias
            return self._attend(attention, queries, rows.window_index, pool, bias)
        windows = self._real_windows()
        pool = self._selection.real_index if has_pool else None
        if isinstance(table, PackedRows):
            return attend_packed(attention, table, queries, windows, pool)
        return self._needed_kernels().sparse_attention(
            queries, table.kv, windows, pool, attention.attn_sink, attention.softmax_scale,
            offset=attention.layer_id * len(table.rings[attention.layer_id]),
        )  # fmt: skip

    def attend_back(self, attention: Attention, queries: Tensor, phases: Tensor | None) -> Tensor:
        """As `attend_cached` over packed rows, and turns the outputs back by the tokens' rotations if given."""
        rows = self._cache.rows
        if self._prompt is not None:
            keys, selection = self._prompt
            lists, counts = (selection.lists, selection.counts) if attention.ratio else (None, None)
            return keys.attend(attention, queries, phases, selection.source, lists, counts)
        if not isinstance(rows, PackedRows):
            raise InvariantBroken("The cache holds no packed rows; use attend_cached.")
        pool = self._selection.real_index if attention.ratio else None
        return attend_packed(attention, rows, queries, self._real_windows(), pool, phases)

    def needs_scores(self, attention: Attention) -> bool:
        """Whether an index source has to score rows; where it has not, it selects all of them."""
        selection = self._selection if self._prompt is None else self._prompt[1]
        return selection.needs_scores(attention.layer_id)

    def pick(self, attention: Attention, queries: IndexQueries) -> None:
        """Selects rows by index queries."""
        if self._prompt is not None:
            return self._prompt[1].pick(attention.layer_id, queries)
        return self._selection.pick(attention.layer_id, *queries.values())

    def _real_windows(self) -> Tensor:
        """Window rows of each token within a layer's rings, -1 for none, shape [tokens, window]."""
        rows = self._rows
        if rows.windows is not None:
            return rows.windows
        if rows.window_bias is None:
            return rows.window_index
        return rows.window_index.masked_fill(rows.window_bias.squeeze(1) < 0, -1)

    def _packed_kernels(self, table: PlainRows | PackedRows) -> TypeGuard[PackedRows]:
        """Whether kernels read and write the rows as bytes; they are not batch-invariant."""
        return isinstance(table, PackedRows) and not self._deterministic and takes_kernels(table)

    def _needed_kernels(self) -> ModuleType:
        if self.kernels is None:
            raise InvariantBroken("This pass was made without kernels; run the layers themselves.")
        return self.kernels

    def _attend(
        self,
        attention: Attention,
        queries: Tensor,
        windows: Tensor,
        pool: Tensor | None,
        bias: Tensor | None,
    ) -> Tensor:
        return self._cache.rows.attend(
            attention.layer_id, queries, windows, pool, bias, attention.attn_sink,
            attention.softmax_scale, deterministic=self._deterministic,
        )  # fmt: skip

    def _set_rows(self, segments: Sequence[Segment], floors: Sequence[int]) -> None:
        cache, fixed = self._cache, self._deterministic
        self._prompt: tuple[PromptKeys, PromptSelection] | None = None
        if self.packed and isinstance(cache.rows, PackedRows) and pays(segments):
            keys = PromptKeys(segments, floors, cache, cache.rows)
            self._prompt = keys, PromptSelection(segments, cache, cache.rows, keys)
        listed = self._prompt is None  # where keys lie side by side, no list of rows is needed
        self._rows = _Rows(segments, floors, cache, self._frequencies, fixed, listed)
        self._selection = RowSelection(
            segments if listed else (),
            self._rows.positions,
            cache,
            deterministic=fixed,
            kernels=self.kernels,
        )

    def _is_narrow(self) -> bool:
        """Whether a row drops out, or sees a shorter window in the layers above."""
        window = self._cache.config.sliding_window
        return any(
            max(s.full_start, floor) > max(s.window_start, s.start - window + 1, 0)
            for s, floor in zip(self._segments, self._floors, strict=True)
        )

    def _tensor(self, array: np.ndarray) -> Tensor:
        return to_device(array, self._cache.device)


def _windows(
    positions: Tensor, slots: Tensor, lowest: Tensor, width: int, ring: int
) -> tuple[Tensor, Tensor]:
    """Ring rows of the `width` positions up to each token's own, -1 below `lowest`; and which are not below."""
    wanted = positions.unsqueeze(1) - torch.arange(width - 1, -1, -1, device=positions.device)
    valid = wanted >= lowest.unsqueeze(1)
    index = slots.unsqueeze(1) * ring + wanted % ring
    return index.masked_fill_(~valid, -1), valid


class _Rows:
    """What follows from the positions of the rows that run a layer.

    Attributes:
        positions: Shape [tokens], int64.
        slots: Shape [tokens], int64.
        rotations: Of layers without and with a pool.
        ring_index: Where each row's window row lies in a layer's rings, shape [tokens].
        window_index: Rows of each token's window within a layer's rings, shape [tokens, window]; only where they are listed.
        windows: The same with -1 where there are fewer; None on a CPU, or where they are not listed.
        window_bias: -inf where there are fewer, shape [tokens, 1, window], fp32, or None.
        few: Attention on arrays, or None for that of the cache's rows.
    """

    def __init__(
        self,
        segments: Sequence[Segment],
        floors: Sequence[int],
        cache: SlotCache,
        frequencies: tuple[Tensor, Tensor],
        deterministic: bool,
        listed: bool,
    ) -> None:
        self.positions = positions = positions_of(segments)
        self.slots = slots = repeat_over(segments, [s.slot for s in segments])
        ring, device = cache.ring_size, cache.device
        at = to_device(positions, device)
        self.rotations = [Rotation.at(f, at) for f in frequencies]
        written = slots * ring + positions % ring
        self.ring_index = to_device(written, device)
        self.window_bias: Tensor | None = None
        self.windows: Tensor | None = None
        self.few: FewRows | None = None
        if not listed:
            return
        lowest = np.maximum(positions - cache.config.sliding_window + 1, 0)
        if any(floors):
            lowest = np.maximum(lowest, repeat_over(segments, floors))
        widths = positions - lowest + 1
        # A fixed width, so that neither batch mates nor chunks decide where a row stands.
        width = cache.config.sliding_window if deterministic else int(widths.max())
        is_full = int(widths.min()) == width
        if device.type != "cpu":  # as many rows as a prompt has are too many for the host
            first = at - width + 1 if is_full else to_device(lowest, device)
            self.windows, valid = _windows(at, to_device(slots, device), first, width, ring)
            self.window_index = self.windows
            if not is_full:
                self.window_bias = bias_of(valid)
                own = self.ring_index.unsqueeze(1)
                self.window_index = torch.where(valid, self.windows, own)
            return
        wanted = positions[:, None] - np.arange(width - 1, -1, -1)
        if not is_full:
            valid = wanted >= lowest[:, None]
            wanted = np.where(valid, wanted, positions[:, None])
            self.window_bias = bias_of(torch.from_numpy(valid))
        index = slots[:, None] * ring + wanted % ring
        self.window_index = torch.from_numpy(index)
        table = cache.rows
        if isinstance(table, PlainRows) and not deterministic and FewRows.fits(table, len(slots)):
            self.few = FewRows(table, written, index)
