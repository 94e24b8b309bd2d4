"""Pools and their indexer: compression, scores, selection of rows, and the loss that trains the scores.

Shapes: B rows, T tokens, D hidden, N pool rows, d head dim, W window.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from deepinfer.models.deepseek_v41.config import DeepseekV41Config

from . import rounding as R
from .attention import (
    NEVER,
    AttentionInputs,
    Setting,
    pool_logits,
    sink_softmax,
    window_keys,
    window_logits,
)
from .rope import Rope, per_head, rotate
from .streams import rms_norm


class CompressorWeights(NamedTuple):
    """What makes pool rows and index keys; `wgate` is None where every token makes a row."""

    wkv: Tensor
    wgate: Tensor | None
    norm: Tensor
    wk: Tensor
    k_norm: Tensor


class IndexWeights(NamedTuple):
    """Index queries and head weights; names as in the checkpoint."""

    wq_b: Tensor
    weights_proj: Tensor


class Rows(NamedTuple):
    """A pool.

    Attributes:
        values: Rounded pool rows, shape [B, N, d].
        keys: Rounded index keys, shape [B, N, index_head_dim].
        num_visible: How many rows each token sees, shape [T], int64.
    """

    values: Tensor
    keys: Tensor
    num_visible: Tensor


def visible_rows(num_visible: Tensor, num_rows: int) -> Tensor:
    """True where a token sees a row, shape [T, N]."""
    return torch.arange(num_rows, device=num_visible.device) < num_visible[:, None]


def compress(y: Tensor, w: CompressorWeights, rope: Rope) -> tuple[Tensor, Tensor]:
    """Pool rows [B, N, d] and index keys [B, N, index_head_dim] of normed inputs [B, T, D].

    `rope` holds one rotation a pool row, of the row's first token; N divides T.
    """
    k = F.linear(y, w.wkv)
    if w.wgate is not None:
        ratio = y.shape[1] // rope.cos.shape[0]
        g = F.linear(y, w.wgate).float().unflatten(1, (-1, ratio)).softmax(2)
        k = (k.float().unflatten(1, (-1, ratio)) * g).sum(2).to(k.dtype)
    latent = rms_norm(k, w.norm)
    key = rms_norm(F.linear(latent.detach(), w.wk), w.k_norm)
    return R.cache_fp4(rotate(latent, rope)), R.cache_mxfp4(rotate(key, rope))


def index_scores(
    bottleneck: Tensor,
    y: Tensor,
    keys: Tensor,
    w: IndexWeights,
    rope: Rope,
    blend: Tensor,
    c: DeepseekV41Config,
) -> Tensor:
    """Score of every pool row for every token, shape [B, T, N], fp32."""
    B, T = y.shape[:2]
    heads, dim = c.index_n_heads, c.index_head_dim
    q = F.linear(bottleneck, R.weight_fp8(w.wq_b, blend)).unflatten(-1, (heads, dim))
    q = R.cache_mxfp4(rotate(q, per_head(rope)))
    weight = F.linear(y, w.weights_proj).float() * (dim * heads) ** -0.5
    z = (q.reshape(B, T * heads, dim) @ keys.mT).view(B, T, heads, -1)
    return (z.relu() * weight[..., None]).sum(2).float()


def select_rows(
    inputs: AttentionInputs,
    rows: Rows,
    candidates: Tensor | None,
    w: IndexWeights,
    setting: Setting,
    c: DeepseekV41Config,
    *,
    makes_candidates: bool,
) -> tuple[Tensor, Tensor | None]:
    """The pool rows each token attends to. Run it without gradient.

    Args:
        inputs: The index source's attention inputs.
        rows: The pool; N is a multiple of `candidate_block_size`.
        candidates: Rows that may be selected, shape [B, T, N], or None for all.
        w: The indexer.
        setting: Rotations and blend.
        c: The configuration.
        makes_candidates: Whether this layer is the candidate source.

    Returns:
        The selection and the candidates for later layers, shape [B, T, N], bool. Ties go to the lower row.
    """
    S = index_scores(inputs.bottleneck, inputs.y, rows.keys, w, setting.rope, setting.blend, c)
    N, size = S.shape[-1], c.candidate_block_size
    visible = visible_rows(rows.num_visible, N)
    S = S - 1e-6 * torch.arange(N, device=S.device) / N
    S = S.masked_fill(~visible, -torch.inf)
    if makes_candidates:
        blocks = S.unflatten(-1, (-1, size)).amax(-1)
        newest = (rows.num_visible - 1).clamp_min(0) // size
        is_newest = torch.arange(N // size, device=S.device) == newest[:, None]
        kept = _top_mask(blocks.masked_fill(is_newest, torch.inf), c.candidate_topk_blocks)
        candidates = kept.repeat_interleave(size, -1)
    elif candidates is not None:
        S = S.masked_fill(~candidates, -torch.inf)
    return _top_mask(S, c.index_topk) & visible, candidates


def _top_mask(scores: Tensor, k: int) -> Tensor:
    """True at the k best finite scores of each row."""
    top = scores.topk(min(k, scores.shape[-1]), -1, sorted=False)
    found = top.values > -torch.inf
    return torch.zeros_like(scores, dtype=torch.bool).scatter(-1, top.indices, found)


def index_loss(
    inputs: AttentionInputs,
    rows: Rows,
    sink: Tensor,
    chunk_ids: Tensor,
    w: IndexWeights,
    setting: Setting,
    c: DeepseekV41Config,
) -> Tensor:
    """KL(attention mass on the visible pool rows, summed over heads || softmax of the scores), a scalar.

    Args:
        inputs: The index source's attention inputs.
        rows: The pool.
        sink: Sink logits of the layer, shape [H].
        chunk_ids: Chunks of W tokens that it is computed on, shape [n], int64; a tensor, so that
            another choice needs no other graph.
        w: The indexer.
        setting: Rotations, window mask and blend.
        c: The configuration.
    """
    W = c.sliding_window
    visible = visible_rows(rows.num_visible, rows.keys.shape[1])

    def chunks(x: Tensor, axis: int = 1) -> Tensor:
        return x.unflatten(axis, (-1, W)).index_select(axis, chunk_ids)

    seen = chunks(visible, 0).flatten(0, 1)[None]
    with torch.no_grad():
        q = chunks(inputs.queries.detach())
        keys = window_keys(inputs.kv.detach(), W).index_select(1, chunk_ids)
        near = window_logits(q, keys, setting.window_mask.index_select(1, chunk_ids))
        far = pool_logits(q.flatten(1, 2), rows.values.detach(), seen)
        (far, _), total = sink_softmax([far, near.flatten(1, 2)], sink.detach())
        mass = (far / total).sum(2)
        mass = mass / (mass.sum(-1, True) + 1e-12)
    rope = Rope(*(chunks(table, 0).flatten(0, 1) for table in setting.rope))
    bottleneck, y = (chunks(x.detach()).flatten(1, 2) for x in (inputs.bottleneck, inputs.y))
    scores = index_scores(bottleneck, y, rows.keys, w, rope, setting.blend, c)
    log_s = scores.masked_fill(~seen, NEVER).log_softmax(-1).clamp_min(-60)
    return (mass * (mass.clamp_min(1e-12).log() - log_s)).sum(-1).mean()
