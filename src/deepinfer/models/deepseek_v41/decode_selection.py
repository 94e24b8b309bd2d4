"""Which pool rows the tokens of a step of fixed shape attend to."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from deepinfer.models.deepseek_v41.block_table import flat_index
from deepinfer.models.deepseek_v41.cache import SlotCache
from deepinfer.models.deepseek_v41.indexer import (
    Indexer,
    candidate_mask,
    index_scores,
    select_rows,
)

__all__ = ["DecodeSelection"]


class DecodeSelection:
    """The selection of the newest index source; its shapes follow from `context` alone.

    Where all pool rows of the context are taken anyway, nothing is scored.

    Attributes:
        index: Rows of the cache's table of rows, -1 for none, shape [tokens, rows], int64; None before the first
            index source.
    """

    def __init__(
        self,
        cache: SlotCache,
        slots: Tensor,
        positions: Tensor,
        valid: Tensor,
        context: int,
        *,
        deterministic: bool = False,
    ) -> None:
        """Starts without a selection.

        Args:
            cache: The cache.
            slots: Shape [rows], int64.
            positions: Shape [rows, tokens per row], int64.
            valid: False for padding, shape [rows, tokens per row].
            context: Tokens that any row holds at most, this step included.
            deterministic: Whether scores must be free of the batch, and lists have one fixed width.
        """
        self._cache = cache
        self._deterministic = deterministic
        self._slots = slots
        self._valid = valid
        self._ends = torch.where(valid, positions + 1, 0)
        self._context = min(context, cache.table.host.shape[1] * cache.block_size)
        self._candidates: Tensor | None = None
        self._taken_all_of: int | None = None
        self.index: Tensor | None = None

    def num_rows(self, source: int) -> int:
        """Pool rows of a source that the context spans, whole blocks when there are several."""
        ratio = self._cache.config.compress_ratios[source]
        if self._cache.table.host.shape[1] == 1:
            return min(self._context // ratio, self._cache.block_rows[source])
        return -(-self._context // self._cache.block_size) * self._cache.block_rows[source]

    def select(
        self, layer: int, indexer: Indexer, bottleneck: Tensor, y: Tensor, phases: Tensor
    ) -> None:
        """Chooses rows for an index source.

        Args:
            layer: The index source.
            indexer: Its indexer.
            bottleneck: Query bottleneck, rounded as a linear's input, shape [tokens, q_lora].
            y: Normed attention input, shape [tokens, hidden].
            phases: Rotations, shape [tokens, 1, rope_dim / 2], complex64.
        """
        source = max(s for s in self._cache.config.kv_source_layer_ids if s <= layer)
        if self.needs_scores(layer, source):
            queries, weights = indexer.queries(bottleneck, y, phases)
            self.pick(layer, source, queries, weights)
        else:
            self.take_all(source)

    def needs_scores(self, layer: int, source: int) -> bool:
        """Whether rows of a source have to be scored; forgets candidates at the layer that makes new ones."""
        config = self._cache.config
        makes_candidates = layer == config.candidate_source_layer_id
        if makes_candidates:
            self._candidates = None
        rows = self.num_rows(source)
        most_kept = config.candidate_topk_blocks * config.candidate_block_size
        return (
            rows > config.index_topk
            or self._candidates is not None
            or (makes_candidates and rows > most_kept)
        )

    def take_all(self, source: int) -> None:
        """Selects every visible row of a source."""
        if self._taken_all_of == source:
            return
        self._taken_all_of = source
        rows = torch.arange(self.num_rows(source), device=self._slots.device)
        visible = self._visible(source).flatten().unsqueeze(1)
        index = self._flat(source, self._slots.unsqueeze(1), rows.unsqueeze(0))
        tokens = self._ends.shape[1]
        index = index.repeat_interleave(tokens, 0) if tokens > 1 else index
        self._set(index.masked_fill(rows >= visible, -1))

    def pick(self, layer: int, source: int, queries: Tensor, weights: Tensor) -> None:
        """Selects the best rows.

        Args:
            layer: The index source.
            source: Its KV source.
            queries: Index queries, shape [tokens, heads, index_head_dim].
            weights: Their weights, shape [tokens, heads], fp32.
        """
        config = self._cache.config
        self._taken_all_of = None
        shape, visible = self._ends.shape, self._visible(source)
        count = self.num_rows(source)
        scores = index_scores(
            queries.view(*shape, *queries.shape[1:]), weights.view(*shape, -1),
            self._keys(source, count), visible, deterministic=self._deterministic,
        )  # fmt: skip
        if layer == config.candidate_source_layer_id:
            blocks, size = config.candidate_topk_blocks, config.candidate_block_size
            if count > blocks * size:
                self._candidates = candidate_mask(scores, visible, blocks, size)
        elif self._candidates is not None:
            scores = scores.masked_fill(~self._candidates, -torch.inf)
        rows = select_rows(scores, config.index_topk)
        chosen = scores.gather(-1, rows) > -torch.inf
        index = self._flat(source, self._slots.view(-1, 1, 1), rows)
        self._set(index.masked_fill_(~chosen, -1).flatten(0, 1))

    def _set(self, index: Tensor) -> None:
        missing = self._cache.config.index_topk - index.shape[1] if self._deterministic else 0
        self.index = F.pad(index, (0, missing), value=-1) if missing else index

    def _visible(self, source: int) -> Tensor:
        return self._ends // self._cache.config.compress_ratios[source]

    def _keys(self, source: int, count: int) -> Tensor:
        """Index keys of each row's slot, shape [rows, count, index_head_dim]."""
        keys, table = self._cache.index_keys[source], self._cache.table.device
        blocks = table[self._slots, : -(-count // self._cache.block_rows[source])]
        found = keys.index_select(0, blocks.flatten())
        return found.view(len(self._slots), -1, keys.shape[-1])[:, :count]

    def _flat(self, source: int, slots: Tensor, rows: Tensor) -> Tensor:
        cache = self._cache
        index = flat_index(cache.table.device, slots, rows, cache.block_rows[source])
        return index + cache.rows.pool_offsets[source]
