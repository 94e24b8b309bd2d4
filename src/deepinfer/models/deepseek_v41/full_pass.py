"""One whole sequence at once, with masks and no cache: the readable twin of the cached step."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from deepinfer.models.deepseek_v41.attention import Attention, attend_rows, sink_softmax
from deepinfer.models.deepseek_v41.compressor import Compressor
from deepinfer.models.deepseek_v41.config import DeepseekV41Config
from deepinfer.models.deepseek_v41.indexer import (
    Indexer,
    candidate_mask,
    index_scores,
    select_rows,
)
from deepinfer.models.deepseek_v41.narrowing import narrowing_of
from deepinfer.models.deepseek_v41.rope import Rotation, apply_rope_, rope_frequencies
from deepinfer.models.deepseek_v41.row_selection import bias_of

__all__ = ["FullPass", "Truncation"]

_QUERY_BLOCK = 128


@dataclass(frozen=True, slots=True, kw_only=True)
class Truncation:
    """What rows of a prompt do without: the twin of the same fields of `Segment`, with masks.

    Attributes:
        window_start: Rows from here on read no window row before it.
        pool_start: Pool rows and index keys that end before it are those of a full run.
        full_start: From the last KV source on, rows from here on read no window row before it.
    """

    window_start: int = 0
    pool_start: int = 0
    full_start: int = 0


class FullPass:
    """State of one forward over positions 0 .. tokens - 1 of one sequence.

    Attributes:
        is_image: True for image tokens, shape [tokens], or None.
        engram_rows: Table rows by layer id, each of shape [tokens, columns].
        features: Mean streams that entered the draft's target layers, each of shape [tokens, hidden].
        pool: Rows of the newest KV source, shape [rows, head_dim].
        index_keys: Their index keys, shape [rows, index_head_dim].
        selected: Pool rows that each query attends to, bool, shape [tokens, rows].
        candidates: Pool rows that later index sources may select, bool, shape [tokens, rows], or None.
        pools: Pool rows and index keys of every KV source so far.
    """

    narrow_layer = None

    def __init__(
        self,
        config: DeepseekV41Config,
        num_tokens: int,
        device: torch.device,
        *,
        is_image: Tensor | None = None,
        engram_rows: dict[int, Tensor] | None = None,
        truncation: Truncation | None = None,
        cached_pools: dict[int, tuple[Tensor, Tensor]] | None = None,
    ) -> None:
        """Prepares the pass.

        Args:
            config: The configuration.
            num_tokens: Tokens of the sequence.
            device: Where it runs.
            is_image: True for image tokens, shape [tokens], or None.
            engram_rows: Table rows by layer id, each of shape [tokens, columns].
            truncation: What rows do without, or None. Rows before its `window_start` and `full_start` are then run,
                but nothing that comes after them reads them.
            cached_pools: The `pools` of a full run, for `truncation.pool_start`.
        """
        self.config = config
        self.pools: dict[int, tuple[Tensor, Tensor]] = {}
        self._truncation = truncation or Truncation()
        self._cached_pools = cached_pools or {}
        self._narrow_layer = narrowing_of(config).first_layer
        self.is_image = is_image
        self.engram_rows = engram_rows or {}
        self.features: list[Tensor] = []
        self.positions = torch.arange(num_tokens, device=device)
        self._rotations = [
            Rotation.at(rope_frequencies(config, compressed=kind, device=device), self.positions)
            for kind in (False, True)
        ]
        nothing = torch.empty(0, dtype=torch.float32, device=device)
        self.pool = self.index_keys = self.selected = nothing
        self.candidates: Tensor | None = None
        self._picks = nothing, nothing

    def rotation(self, compressed: bool) -> Rotation:
        """Rotations of all positions."""
        return self._rotations[compressed]

    def narrow(self) -> Tensor | None:
        """Keeps all rows."""
        return None

    def extend_pool(
        self, attention: Attention, compressor: Compressor, indexer: Indexer, y: Tensor
    ) -> None:
        """Makes the pool and the index keys of a KV source from its input, shape [tokens, hidden]."""
        ratio = attention.ratio
        projected = compressor.project(y)
        groups = y.shape[0] // ratio
        second = projected[1 : groups * ratio : ratio] if ratio > 1 else None
        latents = compressor.latents(projected[: groups * ratio : ratio], second, y.dtype)
        phases = self._rotations[True].per_token[: groups * ratio : ratio]
        self.index_keys = indexer.keys(latents, phases)
        self.pool = attention.rounding.pool(apply_rope_(latents, phases))
        kept = self._truncation.pool_start // ratio
        if kept:
            pool, keys = self._cached_pools[attention.layer_id]
            self.pool = torch.cat((pool[:kept], self.pool[kept:]))
            self.index_keys = torch.cat((keys[:kept], self.index_keys[kept:]))
        self.pools[attention.layer_id] = self.pool, self.index_keys

    def select(self, attention: Attention, indexer: Indexer, bottleneck: Tensor, y: Tensor) -> None:
        """Scores the pool and keeps each query's best visible rows; the candidate source also keeps blocks."""
        config = self.config
        num_visible = (self.positions + 1) // attention.ratio
        hidden_rows = torch.arange(self.pool.shape[0], device=y.device) >= num_visible.unsqueeze(-1)
        if self.pool.shape[0] == 0:
            self.selected = ~hidden_rows
            self._picks = hidden_rows.long(), self.selected
            return
        queries, weights = indexer.queries(bottleneck, y, self._rotations[True].per_head)
        scores = index_scores(
            queries.unsqueeze(0),
            weights.unsqueeze(0),
            self.index_keys.unsqueeze(0),
            deterministic=attention.deterministic,
        ).squeeze(0)
        scores = scores.masked_fill(hidden_rows, -torch.inf)
        if attention.layer_id == config.candidate_source_layer_id:
            blocks, size = config.candidate_topk_blocks, config.candidate_block_size
            self.candidates = candidate_mask(scores, num_visible, blocks, size)
        elif self.candidates is not None:
            scores = scores.masked_fill(~self.candidates, -torch.inf)
        rows = select_rows(scores, config.index_topk)
        valid = scores.gather(-1, rows) > -torch.inf
        self._picks = rows, valid
        self.selected = torch.zeros_like(hidden_rows).scatter_(-1, rows, valid)

    def attend(self, attention: Attention, queries: Tensor, kv: Tensor) -> Tensor:
        """Joint attention over window and selected pool rows, with the sink; shape [tokens, heads, head_dim]."""
        if attention.deterministic:
            return self._attend_rows(attention, queries, kv)
        window, scale = self.config.sliding_window, attention.softmax_scale
        sink, out = attention.attn_sink.float(), []
        for at in self.positions.split(_QUERY_BLOCK):
            start, end = int(at[0]), int(at[-1]) + 1
            first = max(start - window + 1, 0)
            age = at.unsqueeze(-1) - self.positions[first:end]
            keys, allowed = kv[first:end], (age >= 0) & (age < window)
            for floor in self._floors(attention.layer_id):
                allowed &= (at.unsqueeze(-1) < floor) | (self.positions[first:end] >= floor)
            if attention.ratio:
                visible = end // attention.ratio
                keys = torch.cat((keys, self.pool[:visible]))
                allowed = torch.cat((allowed, self.selected[start:end, :visible]), -1)
            keys = keys.float()
            logits = torch.einsum("thd,kd->thk", queries[start:end].float(), keys) * scale
            logits = logits.masked_fill(~allowed.unsqueeze(1), -torch.inf)
            out.append(torch.einsum("thk,kd->thd", sink_softmax(logits, sink), keys))
        return torch.cat(out).to(queries.dtype)

    def _attend_rows(self, attention: Attention, queries: Tensor, kv: Tensor) -> Tensor:
        """The same over lists of rows in the order of the cached step, which gives the bits of that step."""
        window, at = self.config.sliding_window, self.positions.unsqueeze(-1)
        index = at - torch.arange(window - 1, -1, -1, device=at.device)
        valid = index >= 0
        for floor in self._floors(attention.layer_id):
            valid &= (at < floor) | (index >= floor)
        index, table = index.where(valid, at), kv
        if attention.ratio:
            missing = self.config.index_topk - self._picks[0].shape[1]
            rows, real = (F.pad(t, (0, missing)) for t in self._picks)
            index = torch.cat((index, (rows + len(kv)).where(real, at)), 1)
            valid = torch.cat((valid, real), 1)
            table = torch.cat((kv, self.pool))
        sink, scale, bias = attention.attn_sink, attention.softmax_scale, bias_of(valid)
        out = []
        for part in self.positions.split(_QUERY_BLOCK):
            lists = table, index[part], bias[part]
            out.append(attend_rows(queries[part], *lists, sink, scale, deterministic=True))
        return torch.cat(out)

    def _floors(self, layer: int) -> list[int]:
        """Positions that the windows of rows from there on do not look behind."""
        cut = self._truncation
        is_narrow = self._narrow_layer is not None and layer >= self._narrow_layer
        return [f for f in (cut.window_start, cut.full_start if is_narrow else 0) if f]
