"""Torch implementations for the CPU: what the Triton kernels are compared with."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from deepinfer.kernels.batch_invariant.pointwise import ordered_sum
from deepinfer.kernels.batch_invariant.row_tiles import tiled_linear
from deepinfer.kernels.reference.experts import ExpertOrder

__all__ = [
    "expert_linear",
    "grouped_linear",
    "index_scores",
    "linear",
    "log_softmax",
    "mean_square",
    "mix_streams",
    "pair_linear",
    "rms_norm",
    "row_sum",
    "sinkhorn",
    "sparse_attention",
    "sum_streams",
]

KEY_TILE = 128


def linear(x: Tensor, weight: Tensor) -> Tensor:
    """See `batch_invariant.linear`."""
    out = tiled_linear(x.reshape(-1, x.shape[-1]), weight)
    return out.view(*x.shape[:-1], weight.shape[0])


def grouped_linear(x: Tensor, weight: Tensor) -> Tensor:
    """See `batch_invariant.grouped_linear`."""
    parts = [tiled_linear(x[:, g], weight[g]) for g in range(weight.shape[0])]
    return torch.stack(parts, 1)


def expert_linear(x: Tensor, weight: Tensor, counts: Sequence[int]) -> Tensor:
    """See `batch_invariant.expert_linear`."""
    parts = x.split(list(counts))
    done = [tiled_linear(p, weight[e]) for e, p in enumerate(parts) if len(p)]
    return torch.cat(done) if done else x.new_empty(0, weight.shape[1])


def pair_linear(x: Tensor, weight: Tensor, order: ExpertOrder, rows_per_input: int) -> Tensor:
    """See `batch_invariant.pair_linear`."""
    place = order.experts.argsort(stable=True)
    counts = torch.bincount(order.experts, minlength=weight.shape[0]).tolist()
    found = expert_linear(x[place // rows_per_input], weight, counts)
    return torch.empty_like(found).index_copy_(0, place, found)


def sparse_attention(
    queries: Tensor, kv: Tensor, index: Tensor, valid: Tensor, sink: Tensor, scale: float
) -> Tensor:
    """See `batch_invariant.sparse_attention`."""
    tokens = queries.shape[0]
    if tokens == 1:
        # With several threads a lone product is cut otherwise than one of a batch.
        queries, index, valid = (t.repeat(2, *[1] * (t.dim() - 1)) for t in (queries, index, valid))
    keys = kv.index_select(0, index.reshape(-1)).view(*index.shape, -1).float()
    logits = torch.bmm(queries.float(), keys.transpose(1, 2)).mul_(scale)
    logits.masked_fill_(~valid.unsqueeze(1), -torch.inf)
    column = sink.view(1, -1, 1).expand(logits.shape[0], -1, 1)
    shares = torch.softmax(torch.cat((logits, column), -1), -1)[..., :-1]
    return torch.bmm(shares, keys)[:tokens].to(queries.dtype)


def index_scores(
    queries: Tensor, weights: Tensor, keys: Tensor, visible: Tensor | None = None
) -> Tensor:
    """See `batch_invariant.index_scores`."""
    groups, tokens, heads, dim = queries.shape
    rows = keys.shape[1]
    flat, wide = queries.reshape(groups, tokens * heads, dim).float(), keys.float()
    out = []
    for group in range(groups):
        tiles = []
        for part in wide[group].split(KEY_TILE):
            if len(part) < KEY_TILE:
                tile = part.new_zeros(KEY_TILE, dim)
                tile[: len(part)] = part
                part = tile
            tiles.append(tiled_linear(flat[group], part))
        dots = torch.cat(tiles, 1)[:, :rows].relu().view(tokens, heads, rows)
        out.append(ordered_sum(dots * weights[group].unsqueeze(-1), 1))
    scores = torch.stack(out)
    if visible is None:
        return scores
    return scores.masked_fill_(torch.arange(rows) >= visible.unsqueeze(-1), -torch.inf)


def mean_square(x: Tensor) -> Tensor:
    """See `batch_invariant.mean_square`."""
    return x.float().square().mean(-1, keepdim=True)


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """See `batch_invariant.rms_norm`."""
    return (x.float() * torch.rsqrt(mean_square(x) + eps) * weight.float()).to(x.dtype)


def row_sum(x: Tensor) -> Tensor:
    """See `batch_invariant.row_sum`."""
    return x.float().sum(-1, keepdim=True)


def log_softmax(x: Tensor) -> Tensor:
    """See `batch_invariant.log_softmax`."""
    return torch.log_softmax(x.float(), -1)


def sinkhorn(scores: Tensor, iterations: int, eps: float) -> Tensor:
    """See `batch_invariant.sinkhorn`."""
    # Entries first and tokens last, so that every step is elementwise over tokens.
    k = scores.permute(1, 2, 0).contiguous()
    k = torch.exp(k - k.amax(1, keepdim=True))
    k = k / ordered_sum(k, 1).unsqueeze(1) + eps
    # For a few tokens calls are the cost, and numpy's cost a third; sums and quotients round alike.
    entries = k.numpy()
    rows, columns = entries.swapaxes(0, 1), entries
    _normalise(columns, eps)
    for _ in range(iterations - 1):
        _normalise(rows, eps)
        _normalise(columns, eps)
    return k.permute(2, 0, 1).contiguous()


def _normalise(k: np.ndarray, eps: float) -> None:
    """Divides `k` in place by its sums over the first axis plus eps."""
    total = k[0] + k[1] if len(k) > 1 else k[0].copy()
    for part in k[2:]:
        total += part
    total += np.float32(eps)
    k /= total


def sum_streams(streams: Tensor, weights: Tensor) -> Tensor:
    """See `batch_invariant.sum_streams`."""
    return ordered_sum(streams.float() * weights.unsqueeze(-1), 1).to(streams.dtype)


def mix_streams(streams: Tensor, output: Tensor, post: Tensor, mix: Tensor) -> Tensor:
    """See `batch_invariant.mix_streams`."""
    out = post.unsqueeze(-1) * output.float().unsqueeze(1)
    for i, stream in enumerate(streams.float().unbind(1)):
        out += mix[:, i].unsqueeze(-1) * stream.unsqueeze(1)
    return out.to(streams.dtype)
