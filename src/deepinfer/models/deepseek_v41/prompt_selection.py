"""Which pool rows the tokens of a step with many tokens attend to: scores from packed index keys, segment by segment."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import numpy as np
import torch
from torch import Tensor

from deepinfer.kernels import fp8_fp4_mqa_logits, fp8_fp4_paged_mqa_logits, topk
from deepinfer.models.deepseek_v41.batch import Segment, positions_of, repeat_over, to_device
from deepinfer.models.deepseek_v41.cache import SlotCache
from deepinfer.models.deepseek_v41.indexer import PAGED_HEADS, IndexQueries, candidate_mask
from deepinfer.models.deepseek_v41.packed_rows import PackedRows
from deepinfer.models.deepseek_v41.prompt_keys import SHORT, PromptKeys

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
        self._first: dict[int, Tensor] = {}
        self._counts: dict[tuple[int, int], Tensor] = {}
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
            self.lists = self._all()
            self._taken_all_of = source
        return False

    def pick(self, layer: int, queries: IndexQueries) -> None:
        """Selects the best rows of every segment; `needs_scores` was called for the layer.

        Args:
            layer: The index source.
            queries: Index queries of all tokens.
        """
        self._taken_all_of = None
        self.lists = (
            self._all()
        )  # for segments that are not scored, and -1 behind the rows of the others
        codes, weights = queries.codes()
        together: dict[int, list[int]] = {}
        for i, scored in enumerate(self._scored(layer)):
            if scored and self._is_short(layer, i):
                together.setdefault(self._segments[i].num_tokens, []).append(i)
            elif scored:
                self._pick(layer, i, codes, weights)
        for members in together.values():
            self._pick_together(members, codes, weights)

    @property
    def counts(self) -> Tensor | None:
        """Leading places of each list behind which there are no rows, shape [tokens], int32."""
        if self.lists is None:
            return None
        key = self._ratio, self.lists.shape[1]
        if key not in self._counts:  # the layers that reuse a selection ask again
            self._counts[key] = self._visible_rows().clamp_max(key[1])
        return self._counts[key]

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

    def _all(self) -> Tensor | None:
        """Lists of the first visible rows of each token, as many as are ever picked."""
        width = min(self._cache.config.index_topk, max(self._most()))
        if not width:
            return None
        rows = torch.arange(width, dtype=torch.int32, device=self._cache.device)
        hidden = rows >= self._visible_rows().unsqueeze(1)
        return (rows + self._bases().unsqueeze(1)).masked_fill_(hidden, -1)

    def _bases(self) -> Tensor:
        """Where the pool rows of each token's slot begin among those of `PromptKeys.pool`, shape [tokens], int32."""
        ratio = self._ratio
        if ratio not in self._first:
            bases = repeat_over(self._segments, self._keys.bases_of(ratio)).astype(np.int32)
            self._first[ratio] = to_device(bases, self._cache.device)
        return self._first[ratio]

    def _is_short(self, layer: int, i: int) -> bool:
        """Whether a segment is scored together with others, in pages; candidates are made and cut alone."""
        cache, config = self._cache, self._cache.config
        most_kept = config.candidate_topk_blocks * config.candidate_block_size
        cuts = self._excluded[i] is not None
        makes = layer == config.candidate_source_layer_id and self._most()[i] > most_kept
        fits = cache.block_rows[self.source or 0] % 4 == 0 and config.index_n_heads in PAGED_HEADS
        return self._segments[i].num_tokens <= SHORT and fits and not (cuts or makes)

    def _pick_together(self, members: list[int], codes: Tensor, weights: Tensor) -> None:
        """Selects rows for segments of equal length, whose keys are scored where they lie."""
        if self.lists is None or self.source is None:
            return
        cache, device = self._cache, self._cache.device
        page = cache.block_rows[self.source]
        most = max(self._most()[i] for i in members)
        index = np.concatenate(
            [np.arange(self._parts[i].start, self._parts[i].stop) for i in members]
        )
        slots = np.array([self._segments[i].slot for i in members])
        tokens = to_device(index, device)
        table = to_device(cache.table.host[slots, : -(-most // page)].astype(np.int32), device)
        ends = self._visible_rows()[tokens]
        scores = fp8_fp4_paged_mqa_logits(
            codes[tokens].unflatten(0, (len(members), -1)), self._rows.index_keys[self.source], weights[tokens],
            ends.view(len(members), -1), table, None, most, page_size=page, clean_logits=False,
        )  # fmt: skip
        width = self.lists.shape[1]
        _, rows = topk(scores, min(width, most), end=ends, return_value=False)
        rows = torch.where(rows >= 0, rows + self._bases()[tokens].unsqueeze(1), -1)
        self.lists[tokens, : rows.shape[1]] = rows

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
