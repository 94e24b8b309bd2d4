"""Attention of DeepSeek-V4.1: one shared latent is key and value, over a local window and selected pool rows.

The module holds the projections. Where keys come from is the business of the pass it runs in: `FullPass` has the
whole sequence at hand and uses masks; `StepPass` reads a cache through row indices.
"""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor, nn

from deepinfer.kernels import batch_invariant
from deepinfer.models.deepseek_v41.compressor import Compressor
from deepinfer.models.deepseek_v41.config import DeepseekV41Config
from deepinfer.models.deepseek_v41.indexer import Indexer
from deepinfer.models.deepseek_v41.norm import Linear, RMSNorm
from deepinfer.models.deepseek_v41.rope import Rotation, apply_rope_
from deepinfer.models.deepseek_v41.rounding import Rounding
from deepinfer.models.packed import PackedWeight

__all__ = ["Attention", "AttentionPass", "attend_rows", "sink_attention", "sink_softmax"]


class AttentionPass(Protocol):
    """What attention asks of the pass it runs in; one object serves all layers of one forward."""

    def rotation(self, compressed: bool) -> Rotation:
        """Rotations of the tokens' positions."""

    def extend_pool(
        self, attention: Attention, compressor: Compressor, indexer: Indexer, y: Tensor
    ) -> None:
        """Adds the pool rows and index keys that `y`, shape [tokens, hidden], completes."""

    def select(self, attention: Attention, indexer: Indexer, bottleneck: Tensor, y: Tensor) -> None:
        """Chooses the pool rows that this layer and the layers that reuse it attend to."""

    def attend(self, attention: Attention, queries: Tensor, kv: Tensor) -> Tensor:
        """Attention outputs, shape [tokens, heads, head_dim], for rotated queries and window rows."""


def sink_softmax(logits: Tensor, sink: Tensor) -> Tensor:
    """Softmax over the last axis with one more logit per head, whose value is zero.

    Args:
        logits: Shape [tokens, heads, rows], fp32; `-inf` for masked rows.
        sink: Shape [heads], fp32.

    Returns:
        Probabilities of the rows, shape [tokens, heads, rows]; they sum to less than 1.
    """
    column = sink.view(1, -1, 1).expand(logits.shape[0], -1, 1)
    return torch.softmax(torch.cat((logits, column), -1), -1)[..., :-1]


def attend_rows(
    queries: Tensor,
    kv: Tensor,
    index: Tensor,
    bias: Tensor | None,
    sink: Tensor,
    scale: float,
    *,
    deterministic: bool = False,
) -> Tensor:
    """Attention of tokens to rows that are picked from a table by index.

    Args:
        queries: Shape [tokens, heads, head_dim].
        kv: All rows, keys and values at once, shape [table, head_dim].
        index: Rows of each token, shape [tokens, rows], int64.
        bias: Added to the logits, `-inf` masks a row; shape [tokens, 1, rows], fp32, or None.
        sink: Sink logit of each head, shape [heads], fp32.
        scale: Factor on q . k.
        deterministic: Whether a token's bits must be free of the other tokens.

    Returns:
        Shape [tokens, heads, head_dim], in the dtype of `queries`.
    """
    if deterministic:
        valid = _valid(bias, index)
        return batch_invariant.sparse_attention(queries, kv, index, valid, sink, scale)
    keys = kv.index_select(0, index.reshape(-1)).view(*index.shape, -1)
    return sink_attention(queries, keys, bias, sink, scale)


def sink_attention(
    queries: Tensor,
    keys: Tensor,
    bias: Tensor | None,
    sink: Tensor,
    scale: float,
    *,
    deterministic: bool = False,
) -> Tensor:
    """Attention in fp32 where each token has its own list of rows, keys and values at once.

    Args:
        queries: Shape [tokens, heads, head_dim].
        keys: Shape [tokens, rows, head_dim].
        bias: Added to the logits, `-inf` masks a row; shape [tokens, 1, rows], fp32, or None.
        sink: Sink logit of each head, shape [heads], fp32.
        scale: Factor on q . k.
        deterministic: Whether a token's bits must be free of the other tokens.

    Returns:
        Shape [tokens, heads, head_dim], in the dtype of `queries`.
    """
    if deterministic:
        tokens, rows, dim = keys.shape
        index = torch.arange(tokens * rows, device=keys.device).view(tokens, rows)
        kv, valid = keys.reshape(-1, dim), _valid(bias, index)
        return batch_invariant.sparse_attention(queries, kv, index, valid, sink, scale)
    keys = keys.float()
    column = sink.view(1, -1, 1)
    scaled = {"beta": 0, "alpha": scale} if bias is None else {"alpha": scale}
    start = column if bias is None else bias
    logits = torch.baddbmm(start, queries.float(), keys.transpose(1, 2), **scaled)
    return torch.bmm(sink_softmax(logits, sink), keys).to(queries.dtype)


def _valid(bias: Tensor | None, index: Tensor) -> Tensor:
    """Which rows of the lists `index` may be read, by a bias of shape [tokens, 1, rows] or None."""
    return torch.ones_like(index, dtype=torch.bool) if bias is None else bias.squeeze(1) == 0


class Attention(nn.Module):
    """Projections of one layer's attention.

    Attributes:
        layer_id: Number of the layer; draft stages count on after the last layer.
        ratio: Tokens per pool row, or 0 for a layer that sees its window only.
        wq_a: Query bottleneck, weight [q_lora, hidden].
        q_norm: Norm of the bottleneck.
        wq_b: Queries, weight [heads * head_dim, q_lora].
        wkv: Window latent, weight [head_dim, hidden].
        kv_norm: Norm of the window latent.
        attn_sink: Sink logit of each head, shape [heads], fp32.
        wo_a: Output bottleneck by group, weight [groups * o_lora, heads / groups * head_dim].
        wo_b: Output, weight [hidden, groups * o_lora].
        compressor: Present when the layer owns a pool.
        indexer: Present when the layer selects pool rows.
        deterministic: Whether a token's bits must be free of the other tokens.
        joined: The bytes of `wq_a` and `wkv` one above the other, see `packed_products.prepare_products`, or None.
    """

    deterministic = False
    joined: PackedWeight | None = None

    def __init__(
        self,
        config: DeepseekV41Config,
        layer_id: int,
        rounding: Rounding,
        *,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        factory = {"device": device, "dtype": dtype}
        hidden, heads, dim = config.hidden_size, config.num_attention_heads, config.head_dim
        eps = config.rms_norm_eps
        self.layer_id = layer_id
        self.ratio = config.compress_ratios[layer_id]
        self.num_heads = heads
        self.num_groups = config.o_groups
        self.softmax_scale = dim**-0.5
        self.rounding = rounding
        self.wq_a = Linear(hidden, config.q_lora_rank, **factory)
        self.q_norm = RMSNorm(config.q_lora_rank, eps, **factory)
        self.wq_b = Linear(config.q_lora_rank, heads * dim, **factory)
        self.wkv = Linear(hidden, dim, **factory)
        self.kv_norm = RMSNorm(dim, eps, **factory)
        self.attn_sink = nn.Parameter(torch.zeros(heads, device=device, dtype=torch.float32))
        self.wo_a = Linear(
            heads * dim // config.o_groups, config.o_groups * config.o_lora_rank, **factory
        )
        self.wo_b = Linear(config.o_groups * config.o_lora_rank, hidden, **factory)
        owns_pool = layer_id in config.kv_source_layer_ids
        self.compressor = Compressor(config, self.ratio, **factory) if owns_pool else None
        self.indexer: Indexer | None = None
        if layer_id in config.index_source_layer_ids:
            self.indexer = Indexer(config, rounding, owns_keys=owns_pool, **factory)

    def forward(self, y: Tensor, run: AttentionPass) -> Tensor:
        """Runs the layer's attention.

        Args:
            y: Normed input, shape [tokens, hidden].
            run: The pass, which holds positions and keys.

        Returns:
            Output, shape [tokens, hidden].
        """
        rotation = run.rotation(self.ratio > 0)
        x = self.rounding.activation(y)
        bottleneck = self.rounding.activation(self.q_norm(self.wq_a(x)))
        queries = self.wq_b(bottleneck).view(len(y), self.num_heads, -1)
        apply_rope_(queries, rotation.per_head)
        kv = self.window_rows(x, rotation.per_token)
        if self.indexer is not None:
            if self.compressor is not None:
                run.extend_pool(self, self.compressor, self.indexer, y)
            run.select(self, self.indexer, bottleneck, y)
        return self.output(run.attend(self, queries, kv), rotation.per_head_inverse)

    def window_rows(self, x: Tensor, phases: Tensor) -> Tensor:
        """Window rows of tokens.

        Args:
            x: Rounded input, shape [tokens, hidden].
            phases: Rotations, shape [tokens, rope_dim / 2], complex64.

        Returns:
            Rotated and rounded rows, shape [tokens, head_dim].
        """
        return self.rounding.window(apply_rope_(self.kv_norm(self.wkv(x)), phases))

    def output(self, attended: Tensor, inverse: Tensor) -> Tensor:
        """Undoes the rotation and projects the heads back, group by group.

        Args:
            attended: Shape [tokens, heads, head_dim].
            inverse: Inverse rotations of the queries, shape [tokens, 1, rope_dim / 2], complex64.

        Returns:
            Shape [tokens, hidden].
        """
        grouped = apply_rope_(attended, inverse).view(len(attended), self.num_groups, -1)
        return self.wo_b(self.rounding.activation(self.group_outputs(grouped).flatten(1)))

    def group_outputs(self, grouped: Tensor) -> Tensor:
        """The output bottleneck of each group of heads.

        Args:
            grouped: Shape [tokens, groups, heads / groups * head_dim].

        Returns:
            Shape [tokens, groups, o_lora].
        """
        weight = self.wo_a.weight.view(self.num_groups, -1, grouped.shape[-1])
        if self.deterministic:
            return batch_invariant.grouped_linear(grouped, weight)
        return torch.bmm(grouped.transpose(0, 1), weight.transpose(1, 2)).transpose(0, 1)
