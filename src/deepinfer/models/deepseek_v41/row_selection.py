"""Which pool rows each token of a step attends to, chosen by the index sources and reused by the layers after them."""

from __future__ import annotations

from collections.abc import Sequence
from types import ModuleType

import numpy as np
import torch
from torch import Tensor

from deepinfer.models.deepseek_v41.batch import Segment, repeat_over, to_device
from deepinfer.models.deepseek_v41.cache import SlotCache
from deepinfer.models.deepseek_v41.indexer import (
    Indexer,
    candidate_mask,
    index_scores,
    select_rows,
)

__all__ = ["RowSelection", "bias_of"]


class RowSelection:
    """The selection of the newest index source.

    Attributes:
        index: Pool rows, as `SlotCache.pool_index` counts them, shape [tokens, rows], int64; None while no row is
            visible to any token.
        bias: 0 for real picks and -inf for padding, shape [tokens, 1, rows], fp32; None without padding.
    """

    def __init__(
        self,
        segments: Sequence[Segment],
        positions: np.ndarray,
        cache: SlotCache,
        *,
        deterministic: bool = False,
        kernels: ModuleType | None = None,
    ) -> None:
        self._cache = cache
        self._deterministic = deterministic
        self._kernels = kernels
        self._config = cache.config
        self._slots = repeat_over(segments, [s.slot for s in segments])
        self._groups = _group(segments, positions)
        self._taken_all_of: int | None = None
        self.index: Tensor | None = None
        self.bias: Tensor | None = None
        self._real: tuple[Tensor, Tensor] | None = None

    @property
    def real_index(self) -> Tensor | None:
        """`index` with -1 for padding; made once a selection."""
        if self.index is None or self.bias is None:
            return self.index
        if self._real is None or self._real[0] is not self.index:
            real = self.index.masked_fill(self.bias.squeeze(1) < 0, -1)
            self._real = self.index, real
        return self._real[1]

    def select(
        self, layer: int, indexer: Indexer, bottleneck: Tensor, y: Tensor, phases: Tensor
    ) -> None:
        """Chooses rows for an index source; where all visible rows are taken anyway, nothing is scored.

        Args:
            layer: The index source.
            indexer: Its indexer.
            bottleneck: Query bottleneck, rounded as a linear's input, shape [tokens, q_lora].
            y: Normed attention input, shape [tokens, hidden].
            phases: Rotations, shape [tokens, 1, rope_dim / 2], complex64.
        """
        if not self.needs_scores(layer):
            return
        if self._kernels is None:
            queries, weights = indexer.queries(bottleneck, y, phases)
        else:
            turned = torch.view_as_real(phases.squeeze(1))
            queries, weights = indexer.fused_queries(bottleneck, y, turned, self._kernels)
        self.pick(layer, queries, weights)

    def needs_scores(self, layer: int) -> bool:
        """Whether an index source has to score rows; where it has not, all visible rows are selected."""
        config = self._config
        source = self._source(layer)
        makes_candidates = layer == config.candidate_source_layer_id
        for group in self._groups:
            group.see(config.compress_ratios[layer])
            if makes_candidates:
                group.excluded = None
        if any(self._needs_scores(group, makes_candidates) for group in self._groups):
            return True
        if self._taken_all_of != source:
            self._set(source, [group.all_rows(self._cache.device) for group in self._groups])
            self._taken_all_of = source
        return False

    def pick(self, layer: int, queries: Tensor, weights: Tensor) -> None:
        """Selects the best rows; `needs_scores` was called for the layer.

        Args:
            layer: The index source.
            queries: Rounded index queries, shape [tokens, heads, index_head_dim].
            weights: Their weights, shape [tokens, heads], fp32.
        """
        source = self._source(layer)
        makes_candidates = layer == self._config.candidate_source_layer_id
        scored = [self._needs_scores(group, makes_candidates) for group in self._groups]
        self._taken_all_of = None
        picks = []
        for group, needed in zip(self._groups, scored, strict=True):
            if needed:
                scores = self._scores(group, source, queries, weights)
                picks.append(self._pick(group, scores, makes_candidates))
            else:
                picks.append(group.all_rows(self._cache.device))
        self._set(source, picks)

    def _source(self, layer: int) -> int:
        return max(s for s in self._config.kv_source_layer_ids if s <= layer)

    def _needs_scores(self, group: _Group, makes_candidates: bool) -> bool:
        config = self._config
        rows_of_blocks = config.candidate_topk_blocks * config.candidate_block_size
        return (
            group.most > config.index_topk
            or group.excluded is not None
            or (makes_candidates and group.most > rows_of_blocks)
        )

    def _scores(self, group: _Group, source: int, queries: Tensor, weights: Tensor) -> Tensor:
        """Scores of a group, shape [segments, tokens, rows], -inf where a row is not visible."""
        if group.keys is None or group.keys[0] != source:
            # Written before the first layer that selects from the source.
            group.keys = source, self._cache.visible_keys(source, group.slots, group.most)
        keys = group.keys[1]
        device = keys.device
        if len(self._groups) > 1:
            tokens = to_device(group.tokens, device)
            queries, weights = queries[tokens], weights[tokens]
        shape, visible = group.visible.shape, None
        if not group.all_see_most:
            visible = to_device(group.visible, device)
        return index_scores(
            queries.view(*shape, *queries.shape[1:]),
            weights.view(*shape, -1),
            keys,
            visible,
            deterministic=self._deterministic,
        )

    def _pick(
        self, group: _Group, scores: Tensor, makes_candidates: bool
    ) -> tuple[Tensor, Tensor | None]:
        """Best rows of a group, shape [segments, tokens, picks], and which picks are real (None: all)."""
        config = self._config
        blocks, size = config.candidate_topk_blocks, config.candidate_block_size
        if makes_candidates:
            if group.most > blocks * size:
                visible = to_device(group.visible, scores.device)
                group.set_candidates(candidate_mask(scores, visible, blocks, size))
        elif group.excluded is not None:
            scores = scores.masked_fill_(group.excluded, -torch.inf)
        rows = select_rows(scores, config.index_topk)
        if group.all_see_most and (
            makes_candidates or group.excluded is None or config.index_topk <= group.fewest
        ):
            return rows, None
        valid = scores.gather(-1, rows) > -torch.inf
        return rows, None if valid.is_cpu and bool(valid.all()) else valid

    def _set(self, source: int, picks: list[tuple[Tensor, Tensor | None]]) -> None:
        """Turns each group's picks into cache rows and a bias over the whole batch."""
        width = max(rows.shape[-1] for rows, _ in picks)
        if self._deterministic:
            width = self._config.index_topk
        self.index = self.bias = None
        if width == 0:
            return
        cache, device = self._cache, self._cache.device
        if len(picks) == 1 and picks[0][0].shape[-1] == width:
            rows, valid = picks[0]
            self.index = cache.pool_index(source, self._slots, rows.flatten(0, 1))
            if valid is not None:
                valid = valid.flatten(0, 1).to(device)
                self.index.masked_fill_(~valid, cache.rows.null_row)
                self.bias = bias_of(valid)
            return
        shape = len(self._slots), width
        self.index = torch.full(shape, cache.rows.null_row, dtype=torch.int64, device=device)
        allowed = torch.zeros(shape, dtype=torch.bool, device=device)
        for group, (rows, valid) in zip(self._groups, picks, strict=True):
            k = rows.shape[-1]
            found = cache.pool_index(source, self._slots[group.tokens], rows.flatten(0, 1))
            tokens = to_device(group.tokens, device)
            if valid is None:
                allowed[tokens, :k] = True
            else:
                valid = valid.flatten(0, 1).to(device)
                allowed[tokens, :k] = valid
                found.masked_fill_(~valid, cache.rows.null_row)
            self.index[tokens, :k] = found
        self.bias = bias_of(allowed)


class _Group:
    """Segments of equal length, whose scores are one batched product.

    Attributes:
        tokens: Batch rows, shape [segments * num_tokens].
        slots: Slot of each segment, shape [segments], int64.
        visible: Pool rows that each token sees at the current ratio, shape [segments, num_tokens].
        most: The largest of them.
        all_see_most: Whether they are all equal.
        excluded: Rows that later index sources must not pick, shape [segments, num_tokens, most], or None.
        fewest: The least number of rows that they may pick, 0 when it is not known.
        keys: A KV source and its index keys, shape [segments, most, index_head_dim].
    """

    def __init__(self, tokens: np.ndarray, slot_ids: list[int], end_positions: np.ndarray) -> None:
        self.tokens = tokens
        self.slots = np.array(slot_ids, dtype=np.int64)
        self.visible = self._end_positions = end_positions
        self._ratio = 1
        self._measure()
        self.excluded: Tensor | None = None
        self.fewest = 0
        self.keys: tuple[int, Tensor] | None = None

    def see(self, ratio: int) -> None:
        """Sets what is visible at a ratio."""
        if ratio != self._ratio:
            self.visible = self._end_positions // ratio
            self._ratio = ratio
            self._measure()

    def set_candidates(self, candidates: Tensor) -> None:
        """Sets which rows later index sources may pick, shape [segments, num_tokens, most]."""
        self.excluded = ~candidates
        self.fewest = 0
        if candidates.is_cpu:
            self.fewest = int(np.add.reduce(candidates.numpy(), -1, dtype=np.int64).min())

    def _measure(self) -> None:
        self.most = int(self.visible.max())
        self.all_see_most = int(self.visible.min()) == self.most

    def all_rows(self, device: torch.device) -> tuple[Tensor, Tensor | None]:
        """Every visible row of each token, and which are real (None: all)."""
        shape = (*self.visible.shape, self.most)
        if device.type != "cpu":
            rows = torch.arange(self.most, device=device)
            visible = to_device(self.visible, device).unsqueeze(-1)
            return rows.expand(shape), None if self.all_see_most else rows < visible
        host = np.broadcast_to(np.arange(self.most), shape)
        valid = None
        if not self.all_see_most:
            valid = torch.from_numpy(host < self.visible[..., None])
        return torch.from_numpy(host.copy()), valid


def _group(segments: Sequence[Segment], positions: np.ndarray) -> list[_Group]:
    starts = np.cumsum([0, *(s.num_tokens for s in segments)])
    by_length: dict[int, list[int]] = {}
    for i, segment in enumerate(segments):
        by_length.setdefault(segment.num_tokens, []).append(i)
    groups = []
    for length, members in by_length.items():
        tokens = starts[members][:, None] + np.arange(length)
        slots = [segments[i].slot for i in members]
        groups.append(_Group(tokens.reshape(-1), slots, positions[tokens] + 1))
    return groups


def bias_of(valid: Tensor) -> Tensor:
    """0 where `valid`, shape [tokens, rows], is True and -inf elsewhere, shape [tokens, 1, rows], fp32."""
    zeros = torch.zeros(valid.shape, dtype=torch.float32, device=valid.device)
    return zeros.masked_fill_(~valid, -torch.inf).unsqueeze(1)
