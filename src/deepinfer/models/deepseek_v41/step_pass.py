"""One ragged step over a cache: every kind of row (prefill chunk, decode, verify, replay) is the same code.

Keys are read through row indices: each token has a list of window rows and a list of selected pool rows. All index
arithmetic that depends on positions alone is done once a step, on the host, and shared by the layers.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from deepinfer.models.deepseek_v41.attention import Attention, sink_attention
from deepinfer.models.deepseek_v41.batch import ForwardBatch
from deepinfer.models.deepseek_v41.cache import SlotCache
from deepinfer.models.deepseek_v41.indexer import candidate_mask, index_scores, select_rows
from deepinfer.models.deepseek_v41.rope import apply_rope_, rope_phases

__all__ = ["StepPass"]


@dataclass(slots=True)
class _Group:
    """Segments of equal length, whose index scores are one batched product.

    Attributes:
        tokens: Batch rows, shape [segments * num_tokens].
        slots: Shape [segments].
        end_positions: Position + 1 of every token, shape [segments, num_tokens].
        candidates: Pool rows that later index sources may select, or None for all visible ones.
    """

    tokens: np.ndarray
    slots: np.ndarray
    end_positions: np.ndarray
    candidates: Tensor | None = None


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
        is_image: Tensor | None,
    ) -> None:
        """Prepares the step and writes the token history.

        Args:
            batch: The tokens.
            cache: The cache; its `begin` has accepted the segments.
            frequencies: Radians per position of layers without and with a pool, each of shape [rope_dim / 2].
            is_image: True for image tokens, shape [tokens], or None when there is none.
        """
        self.config = cache.config
        self.cache = cache
        self.device = batch.input_ids.device
        self.is_image = is_image
        self.engram_rows: dict[int, Tensor] = {}
        self.features: list[Tensor] | None = [] if self.config.num_nextn_predict_layers else None
        self._segments = batch.segments
        self._positions = positions = batch.host_positions()
        self._slots = slots = batch.host_slots()
        at = self._tensor(positions)
        self._frequencies = frequencies
        self._phases = [rope_phases(f, at).unsqueeze(1) for f in frequencies]
        ring = cache.ring_size
        self._ring_index = self._tensor(slots * ring + positions % ring)
        self._window_index, self._window_bias = self._window_rows(batch)
        self._pool_index: Tensor | None = None
        self._pool_bias: Tensor | None = None
        self._pool_key: tuple[int, bool] | None = None
        self._groups = self._make_groups(batch)
        history_index = self._tensor(slots * cache.max_tokens + positions)
        cache.tokens.view(-1).index_copy_(0, history_index, batch.input_ids)

    def history(self, ngram: int) -> Tensor:
        """Id of each token and of those before it, newest first, shape [tokens, ngram], int64.

        Negative before the start, and on images.
        """
        cache, wanted = self.cache, self._positions[:, None] - np.arange(ngram)
        index = self._slots[:, None] * cache.max_tokens + np.maximum(wanted, 0)
        found = cache.tokens.view(-1)[self._tensor(index)]
        if (wanted < 0).any():
            found = found.masked_fill(self._tensor(wanted < 0), -1)
        if any(cache.has_images[s.slot] for s in self._segments):
            found = found.masked_fill(found == self.config.image_token_id, -1)
        return found

    # ---- what layers ask for ----

    def phases(self, compressed: bool) -> Tensor:
        """Rotations of the tokens' positions, shape [tokens, 1, rope_dim / 2], complex64."""
        return self._phases[compressed]

    def extend_pool(self, attention: Attention, y: Tensor) -> None:
        """Writes the pool rows and index keys that the tokens complete, shape of `y` [tokens, hidden]."""
        source, ratio, compressor = attention.layer_id, attention.ratio, attention.compressor
        projected = compressor.project(y)
        done = self._completed(ratio)
        if ratio == 1:
            firsts, seconds = (
                (projected if len(done) == len(y) else projected[self._tensor(done)]),
                None,
            )
        else:
            firsts, seconds = self._pairs(source, projected, done)
        if not len(done):
            return
        latents = compressor.latents(firsts, seconds, y.dtype)
        if ratio == 1 and len(done) == len(y):
            phases = self._phases[True].squeeze(1)
        else:
            phases = rope_phases(
                self._frequencies[True], self._tensor(self._positions[done] - (ratio - 1))
            )
        rows = self._slots[done] * self.cache.pool_rows[source] + self._positions[done] // ratio
        index = self._tensor(rows)
        keys = self.cache.index_keys[source]
        keys.view(-1, keys.shape[-1]).index_copy_(0, index, attention.indexer.keys(latents, phases))
        pool = self.cache.pools[source]
        pooled = attention.rounding.pool(apply_rope_(latents, phases))
        pool.view(-1, pool.shape[-1]).index_copy_(0, index, pooled)

    def select(self, attention: Attention, bottleneck: Tensor, y: Tensor) -> None:
        """Chooses the pool rows of every token; nothing is scored where all visible rows are taken anyway."""
        config, ratio = self.config, attention.ratio
        source = config.kv_source(attention.layer_id)
        is_candidate_source = attention.layer_id == config.candidate_source_layer_id
        if is_candidate_source:
            for group in self._groups:
                group.candidates = None
        visible = [group.end_positions // ratio for group in self._groups]
        block_rows = config.candidate_topk_blocks * config.candidate_block_size
        scored = [
            v.max(initial=0) > config.index_topk
            or group.candidates is not None
            or (is_candidate_source and v.max(initial=0) > block_rows)
            for group, v in zip(self._groups, visible, strict=True)
        ]
        if not any(scored):
            if self._pool_key != (source, False):
                self._take_all(source, visible)
                self._pool_key = (source, False)
            return
        self._pool_key = (source, True)
        queries, weights = attention.indexer.queries(bottleneck, y, self._phases[True])
        picks = [
            self._score(group, v, source, queries, weights, is_candidate_source)
            if needed
            else self._all_rows(v)
            for group, v, needed in zip(self._groups, visible, scored, strict=True)
        ]
        self._set_picks(source, picks)

    def attend(self, attention: Attention, queries: Tensor, kv: Tensor) -> Tensor:
        """Writes the window rows, then attends to window and pool rows; shape [tokens, heads, head_dim]."""
        cache = self.cache
        offset = attention.layer_id * cache.num_slots * cache.ring_size
        cache.windows[attention.layer_id].view(-1, kv.shape[-1]).index_copy_(
            0, self._ring_index, kv
        )
        index, bias = self._window_index + offset, self._window_bias
        if attention.ratio and self._pool_index is not None:
            index, bias = torch.cat((index, self._pool_index), 1), self._joint_bias()
        keys = cache.kv.index_select(0, index.view(-1)).view(*index.shape, -1)
        return sink_attention(queries, keys, bias, attention.attn_sink, attention.softmax_scale)

    # ---- window ----

    def _window_rows(self, batch: ForwardBatch) -> tuple[Tensor, Tensor | None]:
        """Rows of every token's window within a layer's rings, and a bias that is -inf where there are fewer."""
        positions, ring = self._positions[:, None], self.cache.ring_size
        lowest = np.maximum(batch.per_token([s.window_start for s in batch.segments])[:, None], 0)
        lowest = np.maximum(lowest, positions - self.config.sliding_window + 1)
        width = int((positions - lowest).max()) + 1
        wanted = positions - np.arange(width - 1, -1, -1)
        valid = wanted >= lowest
        rows = self._slots[:, None] * ring + np.where(valid, wanted, positions) % ring
        return self._tensor(rows), self._bias(valid)

    # ---- pool rows that tokens complete ----

    def _completed(self, ratio: int) -> np.ndarray:
        """Batch rows of the tokens that complete a pool row which is not cached yet."""
        floor = np.repeat(
            [s.pool_start for s in self._segments], [s.num_tokens for s in self._segments]
        )
        return np.flatnonzero((self._positions % ratio == ratio - 1) & (self._positions >= floor))

    def _pairs(
        self, source: int, projected: Tensor, done: np.ndarray
    ) -> tuple[Tensor | None, Tensor | None]:
        """First and second tokens of completed pairs; also keeps the newest tokens for the steps to come."""
        positions, slots, size = self._positions, self._slots, self.cache.tail_size
        tail = self.cache.tails[source].view(-1, *projected.shape[1:])
        firsts = seconds = None
        if len(done):
            before = done - 1
            outside = (
                (before < 0)
                | (slots[before] != slots[done])
                | (positions[before] != positions[done] - 1)
            )
            seconds = projected[self._tensor(done)]
            if outside.any():
                kept = slots[done[outside]] * size + (positions[done[outside]] - 1) % size
                joined = torch.cat((projected, tail[self._tensor(kept)]))
                before[outside] = len(projected) + np.arange(outside.sum())
                firsts = joined[self._tensor(before)]
            else:
                firsts = projected[self._tensor(before)]
        newest = self._newest(size)
        tail.index_copy_(
            0,
            self._tensor(slots[newest] * size + positions[newest] % size),
            projected[self._tensor(newest)],
        )
        return firsts, seconds

    def _newest(self, size: int) -> np.ndarray:
        """Batch rows of the last `size` tokens of each slot."""
        ends = {s.slot: s.end for s in self._segments}
        limit = np.repeat(
            [ends[s.slot] for s in self._segments], [s.num_tokens for s in self._segments]
        )
        return np.flatnonzero(self._positions >= limit - size)

    # ---- selection ----

    def _make_groups(self, batch: ForwardBatch) -> list[_Group]:
        starts = np.cumsum([0, *(s.num_tokens for s in batch.segments)])
        by_length: dict[int, list[int]] = {}
        for i, segment in enumerate(batch.segments):
            by_length.setdefault(segment.num_tokens, []).append(i)
        groups = []
        for length, members in by_length.items():
            tokens = starts[members][:, None] + np.arange(length)
            slots = np.array([batch.segments[i].slot for i in members])
            groups.append(_Group(tokens.reshape(-1), slots, self._positions[tokens] + 1))
        return groups

    def _score(
        self,
        group: _Group,
        visible: np.ndarray,
        source: int,
        queries: Tensor,
        weights: Tensor,
        makes_candidates: bool,
    ) -> tuple[Tensor, Tensor | None]:
        """Best rows of a group, shape [segments, tokens, picks], and which picks are real (None: all)."""
        config = self.config
        shape = visible.shape
        if len(self._groups) > 1:
            tokens = self._tensor(group.tokens)
            queries, weights = queries[tokens], weights[tokens]
        most = int(visible.max())
        keys = self.cache.index_keys[source]
        first = int(group.slots[0])
        if np.array_equal(group.slots, np.arange(first, first + shape[0])):
            keys = keys[first : first + shape[0], :most]
        else:
            keys = keys[self._tensor(group.slots), :most]
        scores = index_scores(
            queries.view(*shape, *queries.shape[1:]), weights.view(*shape, -1), keys
        )
        full = bool((visible == most).all())
        if not full:
            scores.masked_fill_(self._tensor(np.arange(most) >= visible[..., None]), -torch.inf)
        if makes_candidates:
            if most > config.candidate_topk_blocks * config.candidate_block_size:
                blocks, size = config.candidate_topk_blocks, config.candidate_block_size
                group.candidates = candidate_mask(scores, self._tensor(visible), blocks, size)
        elif group.candidates is not None:
            scores.masked_fill_(~group.candidates, -torch.inf)
        if most <= config.index_topk and group.candidates is None:
            return self._all_rows(visible)
        rows, valid = select_rows(scores, config.index_topk)
        always = full and (makes_candidates or group.candidates is None)
        return rows, None if always else valid

    def _all_rows(self, visible: np.ndarray) -> tuple[Tensor, Tensor | None]:
        """Every visible row of each token."""
        rows = np.broadcast_to(
            np.arange(int(visible.max(initial=0))), (*visible.shape, int(visible.max(initial=0)))
        )
        valid = rows < visible[..., None]
        return self._tensor(np.where(valid, rows, 0)), None if valid.all() else self._tensor(valid)

    def _take_all(self, source: int, visible: list[np.ndarray]) -> None:
        self._set_picks(source, [self._all_rows(v) for v in visible])

    def _set_picks(self, source: int, picks: list[tuple[Tensor, Tensor | None]]) -> None:
        """Turns each group's picks into cache rows and a bias over the whole batch."""
        width = max(rows.shape[-1] for rows, _ in picks)
        if width == 0:
            self._pool_index = self._pool_bias = None
            return
        base = self.cache.pool_offsets[source] + self._slots * self.cache.pool_rows[source]
        base = self._tensor(base).unsqueeze(1)
        if len(picks) == 1:
            rows, valid = picks[0]
            self._pool_index = rows.flatten(0, 1) + base
            self._pool_bias = None if valid is None else self._bias_of(valid.flatten(0, 1))
            if valid is not None:
                self._pool_index = torch.where(valid.flatten(0, 1), self._pool_index, base)
            return
        index = base.repeat(1, width)
        allowed = torch.zeros(index.shape, dtype=torch.bool, device=self.device)
        for group, (rows, valid) in zip(self._groups, picks, strict=True):
            tokens = self._tensor(group.tokens)
            k = rows.shape[-1]
            ok = torch.ones_like(rows, dtype=torch.bool) if valid is None else valid
            index[tokens, :k] += torch.where(ok, rows, 0).flatten(0, 1)
            allowed[tokens, :k] = ok.flatten(0, 1)
        self._pool_index, self._pool_bias = index, self._bias_of(allowed)

    # ---- biases and transfers ----

    def _joint_bias(self) -> Tensor | None:
        window, pool = self._window_bias, self._pool_bias
        if window is None and pool is None:
            return None
        shape = (len(self._positions), 1)
        if window is None:
            window = torch.zeros(*shape, self._window_index.shape[1], device=self.device)
        if pool is None:
            pool = torch.zeros(*shape, self._pool_index.shape[1], device=self.device)
        return torch.cat((window, pool), -1)

    def _bias(self, valid: np.ndarray) -> Tensor | None:
        return None if valid.all() else self._bias_of(self._tensor(valid))

    def _bias_of(self, valid: Tensor) -> Tensor:
        return (
            torch.zeros(valid.shape, device=self.device)
            .masked_fill_(~valid, -torch.inf)
            .unsqueeze(1)
        )

    def _tensor(self, array: np.ndarray) -> Tensor:
        return torch.from_numpy(np.ascontiguousarray(array)).to(self.device)
