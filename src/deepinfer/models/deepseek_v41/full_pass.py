"""One whole sequence at once, with masks and no cache: the readable twin of the cached step."""

from __future__ import annotations

import torch
from torch import Tensor

from deepinfer.models.deepseek_v41.attention import Attention, sink_softmax
from deepinfer.models.deepseek_v41.compressor import Compressor
from deepinfer.models.deepseek_v41.config import DeepseekV41Config
from deepinfer.models.deepseek_v41.indexer import (
    Indexer,
    candidate_mask,
    index_scores,
    select_rows,
)
from deepinfer.models.deepseek_v41.rope import Rotation, apply_rope_, rope_frequencies

__all__ = ["FullPass"]

_QUERY_BLOCK = 128


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
    ) -> None:
        self.config = config
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

    def select(self, attention: Attention, indexer: Indexer, bottleneck: Tensor, y: Tensor) -> None:
        """Scores the pool and keeps each query's best visible rows; the candidate source also keeps blocks."""
        config = self.config
        num_visible = (self.positions + 1) // attention.ratio
        hidden_rows = torch.arange(self.pool.shape[0], device=y.device) >= num_visible.unsqueeze(-1)
        if self.pool.shape[0] == 0:
            self.selected = ~hidden_rows
            return
        queries, weights = indexer.queries(bottleneck, y, self._rotations[True].per_head)
        scores = index_scores(
            queries.unsqueeze(0), weights.unsqueeze(0), self.index_keys.unsqueeze(0)
        ).squeeze(0)
        scores = scores.masked_fill(hidden_rows, -torch.inf)
        if attention.layer_id == config.candidate_source_layer_id:
            blocks, size = config.candidate_topk_blocks, config.candidate_block_size
            self.candidates = candidate_mask(scores, num_visible, blocks, size)
        elif self.candidates is not None:
            scores = scores.masked_fill(~self.candidates, -torch.inf)
        rows = select_rows(scores, config.index_topk)
        valid = scores.gather(-1, rows) > -torch.inf
        self.selected = torch.zeros_like(hidden_rows).scatter_(-1, rows, valid)

    def attend(self, attention: Attention, queries: Tensor, kv: Tensor) -> Tensor:
        """Joint attention over window and selected pool rows, with the sink; shape [tokens, heads, head_dim]."""
        window, scale = self.config.sliding_window, attention.softmax_scale
        sink, out = attention.attn_sink.float(), []
        for at in self.positions.split(_QUERY_BLOCK):
            start, end = int(at[0]), int(at[-1]) + 1
            first = max(start - window + 1, 0)
            age = at.unsqueeze(-1) - self.positions[first:end]
            keys, allowed = kv[first:end], (age >= 0) & (age < window)
            if attention.ratio:
                visible = end // attention.ratio
                keys = torch.cat((keys, self.pool[:visible]))
                allowed = torch.cat((allowed, self.selected[start:end, :visible]), -1)
            keys = keys.float()
            logits = torch.einsum("thd,kd->thk", queries[start:end].float(), keys) * scale
            logits = logits.masked_fill(~allowed.unsqueeze(1), -torch.inf)
            out.append(torch.einsum("thk,kd->thd", sink_softmax(logits, sink), keys))
        return torch.cat(out).to(queries.dtype)
