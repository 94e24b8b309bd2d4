"""Which pool rows the tokens of a step with many tokens attend to: scores from packed index keys, segment by segment."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import numpy as np
import torch
from torch import Tensor

from deepinfer.kernels import fp8_fp4_mqa_logits, topk
from deepinfer.models.deepseek_v41.batch import Segment, positions_of, to_device
from deepinfer.models.deepseek_v41.cache import SlotCache
from deepinfer.models.deepseek_v41.indexer import candidate_mask, query_codes
from deepinfer.models.deepseek_v41.packed_rows import PackedRows
from deepinfer.models.deepseek_v41.prompt_keys import PromptKeys

__all__ = ["PromptSelection"]

# Scores that are held at once, 1 GiB of fp32: longer segments are scored in parts.
_MAX_SCORES = 1 << 28


class PromptSelection:
    """The selection of the newest index source over `PromptKeys`.

    Attributes:
        source: KV source of the rows, or None before the first index source.
        lists: Rows of `PromptKeys.pool`, -1 for none, shape [tokens, rows], int32; None while no row is visible.
    """

    def __init__(
        self, segments: Sequence[Segment], cache: SlotCache, rows: PackedRows, keys: PromptKeys
    ) -> None:
        """Starts without a selection.

        Args:
            segments: Segments of the step.
            cache: The cache.
            rows: Its rows.
            keys: Where the rows that are picked lie.
        """
        self._cache, self._rows, self._keys = cache, rows, keys
        self._segments = segments
        self._ends = positions_of(segments) + 1
        bounds = np.cumsum([0, *(s.num_tokens for s in segments)]).tolist()
        self._parts = [slice(a, b) for a, b in pairwise(bounds)]
        self._visible: dict[int, Tensor] = {}
        self._excluded: list[Tensor | None] = [None] * len(segments)
        self._taken_all_of: int | None = None
        self._zeros = torch.zeros(len(self._ends), dtype=torch.int32, device=cache.device)
        self.source: int | None = None
        self.lists: Tensor | None = None

    def needs_scores(self, layer: int) -> bool:
        """Sets the source of an index source; tells whether any row has to be scored, and selects all rows if not."""
        config = self._cache.config
        self.source = source = max(s for s in config.kv_source_layer_ids if s <= layer)
        if layer == config.candidate_source_layer_id:
            self._excluded = [None] * len(self._segments)
        if any(self._scored(layer)):
            return True
        if self._taken_all_of != source:
            self.lists = self._empty()
            for i in range(len(self._segments)):
                self._take_all(i)
            self._taken_all_of = source
        return False

    def pick(self, layer: int, queries: Tensor, weights: Tensor) -> None:
        """Selects the best rows of every segment; `needs_scores` was called for the layer.

        Args:
            layer: The index source.
            queries: Index queries, rounded to MXFP4, shape [tokens, heads, index_head_dim].
            weights: Their weights, shape [tokens, heads], fp32.
        """
        self._taken_all_of = None
        self.lists = self._empty()
        codes, weights = query_codes(queries, weights)
        for i, scored in enumerate(self._scored(layer)):
            if scored:
                self._pick(layer, i, codes, weights)
            else:
                self._take_all(i)

    @property
    def counts(self) -> Tensor | None:
        """Leading places of each list behind which there are no rows, shape [tokens], int32."""
        if self.lists is None:
            return None
        return self._visible_rows().clamp_max(self.lists.shape[1])

    def _scored(self, layer: int) -> list[bool]:
        config = self._cache.config
        makes_candidates = layer == config.candidate_source_layer_id
        most_kept = config.candidate_topk_blocks * config.candidate_block_size
        return [
            most > config.index_topk or cut is not None or (makes_candidates and most > most_kept)
            for most, cut in zip(self._most(), self._excluded, strict=True)
        ]

    @property
    def _ratio(self) -> int:
        return self._cache.config.compress_ratios[self.source or 0]

    def _most(self) -> list[int]:
        """Pool rows that the last token of each segment sees."""
        return [s.end // self._ratio for s in self._segments]

    def _visible_rows(self) -> Tensor:
        """Pool rows that each token sees, shape [tokens], int32."""
        ratio = self._ratio
        if ratio not in self._visible:
            visible = (self._ends // ratio).astype(np.int32)
            self._visible[ratio] = to_device(visible, self._cache.device)
        return self._visible[ratio]

    def _empty(self) -> Tensor | None:
        width = min(self._cache.config.index_topk, max(self._most()))
        if not width:
            return None
        # Only the tail of segments with fewer rows than others is not written below.
        return torch.full((len(self._ends), width), -1, dtype=torch.int32, device=self._cache.device)  # fmt: skip

    def _take_all(self, i: int) -> None:
        most, part = self._most()[i], self._parts[i]
        if self.lists is None or not most:
            return
        rows = torch.arange(most, dtype=torch.int32, device=self.lists.device)
        hidden = rows >= self._visible_rows()[part].unsqueeze(1)
        base = self._keys.bases_of(self._ratio)[i]
        self.lists[part, :most] = (rows + base).expand_as(hidden).masked_fill(hidden, -1)

    def _pick(self, layer: int, i: int, codes: Tensor, weights: Tensor) -> None:
        config, most, part = self._cache.config, self._most()[i], self._parts[i]
        if self.lists is None or self.source is None:
            return
        keys = self._index_keys(self._segments[i].slot, most)
        width = min(config.index_topk, most)
        base = self._keys.bases_of(self._ratio)[i]
        step = max(_MAX_SCORES // most, 1)
        made: list[Tensor] = []
        for start in range(part.start, part.stop, step):
            rows = slice(start, min(start + step, part.stop))
            visible = self._visible_rows()[rows]
            scores = fp8_fp4_mqa_logits(
                codes[rows], keys, weights[rows], self._zeros[rows], visible
            )
            cut = self._cut(layer, i, rows.start - part.start, scores, visible, made)
            to = self.lists[rows, :width]
            topk(scores, width, end=visible, return_value=False, output_idx=to)
            if cut:
                found = scores.gather(1, to.clamp_min(0).long()) > -torch.inf
                to.masked_fill_(~found, -1)
            if base:
                to.copy_(torch.where(to >= 0, to + base, -1))
        if made:
            self._excluded[i] = torch.cat(made)

    def _cut(
        self, layer: int, i: int, at: int, scores: Tensor, visible: Tensor, made: list[Tensor]
    ) -> bool:
        """Keeps the candidates that the scores of some tokens make, or hides what is none; whether it hid some."""
        config = self._cache.config
        blocks, size = config.candidate_topk_blocks, config.candidate_block_size
        if layer == config.candidate_source_layer_id:
            if scores.shape[1] > blocks * size:
                made.append(~candidate_mask(scores, visible.long(), blocks, size))
            return False
        excluded = self._excluded[i]
        if excluded is None:
            return False
        scores.masked_fill_(excluded[at : at + len(scores)], -torch.inf)
        return True

    def _index_keys(self, slot: int, count: int) -> tuple[Tensor, Tensor]:
        """Codes and scales of the first index keys of a slot, shapes [count, dim / 2] and [count, dim / 32], uint8."""
        source = self.source or 0
        blocks = self._cache.table.host[slot, : -(-count // self._cache.block_rows[source])]
        codes, scales = self._rows.key_parts(source)
        if len(blocks) == 1:
            block = int(blocks[0])
            return codes[block, :count], scales[block, :count]
        index = to_device(blocks, codes.device)
        return codes[index].flatten(0, 1)[:count], scales[index].flatten(0, 1)[:count]
