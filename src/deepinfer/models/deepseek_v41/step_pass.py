"""One ragged step over a cache: every kind of row (prefill chunk, decode, verify, replay) is the same code.

Keys are read through row indices: each token has a list of window rows and a list of selected pool rows. All index
arithmetic that depends on positions alone is done once a step, on the host, and shared by the layers.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from deepinfer.models.deepseek_v41.attention import Attention, attend_rows
from deepinfer.models.deepseek_v41.batch import ForwardBatch
from deepinfer.models.deepseek_v41.cache import SlotCache
from deepinfer.models.deepseek_v41.compressor import Compressor
from deepinfer.models.deepseek_v41.indexer import Indexer
from deepinfer.models.deepseek_v41.pool_writer import PoolWriter
from deepinfer.models.deepseek_v41.rope import Rotation
from deepinfer.models.deepseek_v41.row_selection import RowSelection, bias_of

__all__ = ["StepPass"]

_TOKEN_BLOCK = 256


class StepPass:
    """State of one forward over a cache.

    Attributes:
        is_image: True for image tokens, shape [tokens], or None.
        engram_rows: Table rows by layer id, each of shape [tokens, columns].
        features: Mean streams that entered the draft's target layers, or None without a draft.
    """

    def __init__(
        self,
        batch: ForwardBatch,
        cache: SlotCache,
        frequencies: tuple[Tensor, Tensor],
        is_image: Tensor | None = None,
        *,
        deterministic: bool = False,
    ) -> None:
        """Prepares the step and writes the token history.

        Args:
            batch: The tokens.
            cache: The cache; its `begin` has accepted the segments.
            frequencies: Radians per position of layers without and with a pool, each of shape [rope_dim / 2].
            is_image: True for image tokens, shape [tokens], or None when there is none.
        """
        self.is_image = is_image
        self.engram_rows: dict[int, Tensor] = {}
        self.features: list[Tensor] | None = [] if cache.config.num_nextn_predict_layers else None
        self._cache = cache
        self._deterministic = deterministic
        self._segments = batch.segments
        self._positions = positions = batch.host_positions()
        self._slots = slots = batch.host_slots()
        at = self._tensor(positions)
        self._rotations = [Rotation.at(f, at) for f in frequencies]
        ring = cache.ring_size
        self._ring_index = self._tensor(slots * ring + positions % ring)
        self._window_index, self._window_bias = self._window_rows(batch)
        self._writer = PoolWriter(batch.segments, positions, cache, frequencies[True])
        self._selection = RowSelection(batch.segments, positions, cache, deterministic=deterministic)
        self._joint_bias: Tensor | None = None
        history_index = self._tensor(slots * cache.max_tokens + positions)
        cache.tokens.view(-1).index_copy_(0, history_index, batch.input_ids)

    def history(self, ngram: int) -> Tensor:
        """Id of each token and of those before it, newest first, shape [tokens, ngram], int64.

        Negative before the start, and on images.
        """
        cache, wanted = self._cache, self._positions[:, None] - np.arange(ngram)
        index = self._slots[:, None] * cache.max_tokens + np.maximum(wanted, 0)
        found = cache.tokens.view(-1)[self._tensor(index)]
        if self._positions.min() < ngram - 1:
            found = found.masked_fill(self._tensor(wanted < 0), -1)
        if any(cache.has_images[s.slot] for s in self._segments):
            found = found.masked_fill(found == cache.config.image_token_id, -1)
        return found

    def rotation(self, compressed: bool) -> Rotation:
        """Rotations of the tokens' positions."""
        return self._rotations[compressed]

    def extend_pool(
        self, attention: Attention, compressor: Compressor, indexer: Indexer, y: Tensor
    ) -> None:
        """Writes the pool rows and index keys that the tokens complete; `y` has shape [tokens, hidden]."""
        self._writer.write(attention.layer_id, compressor, indexer, attention.rounding, y)

    def select(self, attention: Attention, indexer: Indexer, bottleneck: Tensor, y: Tensor) -> None:
        """Chooses the pool rows that this layer and the layers that reuse it attend to."""
        phases = self._rotations[True].per_head
        self._selection.select(attention.layer_id, indexer, bottleneck, y, phases)
        window, pool = self._window_bias, self._selection.bias
        self._joint_bias = None
        if self._selection.index is not None and not (window is None and pool is None):
            tokens, width = self._window_index.shape
            if window is None:
                window = torch.zeros(
                    tokens, 1, width, dtype=torch.float32, device=self._cache.device
                )
            if pool is None:
                width = self._selection.index.shape[1]
                pool = torch.zeros(tokens, 1, width, dtype=torch.float32, device=self._cache.device)
            self._joint_bias = torch.cat((window, pool), -1)

    def attend(self, attention: Attention, queries: Tensor, kv: Tensor) -> Tensor:
        """Writes the window rows, then attends to window and pool rows; shape [tokens, heads, head_dim]."""
        cache, layer = self._cache, attention.layer_id
        cache.rings[layer].index_copy_(0, self._ring_index, kv)
        index, bias = self._window_index + layer * cache.rings[layer].shape[0], self._window_bias
        if attention.ratio and self._selection.index is not None:
            index, bias = torch.cat((index, self._selection.index), 1), self._joint_bias
        if len(queries) <= _TOKEN_BLOCK:
            return self._attend(attention, queries, index, bias)
        out = []
        for start in range(0, len(queries), _TOKEN_BLOCK):
            part = slice(start, start + _TOKEN_BLOCK)
            part_bias = None if bias is None else bias[part]
            out.append(self._attend(attention, queries[part], index[part], part_bias))
        return torch.cat(out)

    def _attend(
        self, attention: Attention, queries: Tensor, index: Tensor, bias: Tensor | None
    ) -> Tensor:
        sink, scale = attention.attn_sink, attention.softmax_scale
        kv, fixed = self._cache.kv, self._deterministic
        return attend_rows(queries, kv, index, bias, sink, scale, deterministic=fixed)

    def _window_rows(self, batch: ForwardBatch) -> tuple[Tensor, Tensor | None]:
        """Rows of every token's window within a layer's rings, and a bias that masks where there are fewer."""
        positions, ring = self._positions[:, None], self._cache.ring_size
        lowest = np.maximum(positions - self._cache.config.sliding_window + 1, 0)
        if any(s.window_start for s in batch.segments):
            starts = batch.per_token([s.window_start for s in batch.segments])
            lowest = np.maximum(lowest, starts[:, None])
        widths = positions - lowest + 1
        # A fixed width, so that neither batch mates nor chunks decide where a row stands.
        width = self._cache.config.sliding_window if self._deterministic else int(widths.max())
        wanted = positions - np.arange(width - 1, -1, -1)
        if int(widths.min()) == width:
            return self._tensor(self._slots[:, None] * ring + wanted % ring), None
        valid = wanted >= lowest
        rows = self._slots[:, None] * ring + np.where(valid, wanted, positions) % ring
        return self._tensor(rows), bias_of(self._tensor(valid))

    def _tensor(self, array: np.ndarray) -> Tensor:
        return torch.from_numpy(array).to(self._cache.device)
