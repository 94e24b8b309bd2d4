"""Queries, window keys and the joint attention over window, pool and sink, with dense masks.

Shapes: B rows, T tokens, M streams, D hidden, H heads, d head dim, N pool rows, W window.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from deepinfer.models.deepseek_v41.config import DeepseekV41Config

from . import rounding as R
from .rope import Rope, per_head, rotate
from .streams import Mixes, MixWeights, collapse, rms_norm, stream_mixes

NEVER = -1e30
"""Logit of a key that may not be seen."""


class InputWeights(NamedTuple):
    """What turns streams into queries and keys; names as in the checkpoint."""

    mix: MixWeights
    norm: Tensor
    wq_a: Tensor
    q_norm: Tensor
    wq_b: Tensor
    wkv: Tensor
    kv_norm: Tensor


class OutputWeights(NamedTuple):
    """Sink and output projection of an attention; names as in the checkpoint."""

    sink: Tensor
    wo_a: Tensor
    wo_b: Tensor


class Setting(NamedTuple):
    """What a layer needs besides streams and weights.

    Attributes:
        rope: Rotations of the tokens, shape [T, rope_dim / 2] or [B, T, rope_dim / 2].
        window_mask: True where a key may be seen, shape [B, T / W, W, 2 W].
        blend: Scalar: 0 keeps the weights, 1 rounds them to their stored formats.
    """

    rope: Rope
    window_mask: Tensor
    blend: Tensor


class AttentionInputs(NamedTuple):
    """What an attention works on.

    Attributes:
        y: Normed input, shape [B, T, D].
        bottleneck: Query bottleneck, rounded as a linear's input, shape [B, T, q_lora].
        queries: Rotated queries, shape [B, T, H, d].
        kv: Rounded window rows, keys and values at once, shape [B, T, d].
        mixes: Mixing coefficients of the attention sublayer.
    """

    y: Tensor
    bottleneck: Tensor
    queries: Tensor
    kv: Tensor
    mixes: Mixes


class Pool(NamedTuple):
    """Compressed rows that an attention sees.

    Attributes:
        rows: Shape [B, N, d].
        selected: True where a token attends to a row, shape [B, T, N].
    """

    rows: Tensor
    selected: Tensor


def attention_inputs(
    streams: Tensor, pre: Tensor, w: InputWeights, setting: Setting, c: DeepseekV41Config
) -> AttentionInputs:
    """Everything before the attention, from streams [B, T, M, D] and the sublayer's `pre` [B, T, M]."""
    rope, blend = setting.rope, setting.blend
    mixes = stream_mixes(streams, w.mix, c)
    y = rms_norm(collapse(streams, pre), w.norm)
    x = R.cache_fp8(y)
    bottleneck = rms_norm(F.linear(x, R.weight_fp8(w.wq_a, blend)), w.q_norm)
    bottleneck = R.cache_fp8(bottleneck.to(streams.dtype))
    queries = F.linear(bottleneck, R.weight_fp8(w.wq_b, blend))
    queries = queries.unflatten(-1, (c.num_attention_heads, c.head_dim))
    return AttentionInputs(
        y, bottleneck, rotate(queries, per_head(rope)), window_rows(x, w, rope, blend), mixes
    )


def window_rows(x: Tensor, w: InputWeights, rope: Rope, blend: Tensor) -> Tensor:
    """Rounded window rows [B, T, d] of a rounded attention input `x` [B, T, D]."""
    return R.cache_fp8(rotate(rms_norm(F.linear(x, R.weight_fp8(w.wkv, blend)), w.kv_norm), rope))


def window_keys(kv: Tensor, window: int) -> Tensor:
    """The previous and the own chunk of each chunk of W tokens: [B, T, d] to [B, T / W, 2 W, d]."""
    k = kv.unflatten(1, (-1, window))
    return torch.cat([F.pad(k, (0, 0, 0, 0, 1, 0))[:, :-1], k], 2)


def window_mask(length: int, window: int, start: Tensor | None, device: torch.device) -> Tensor:
    """Which window keys each token sees.

    Args:
        length: Tokens, a multiple of `window`.
        window: W.
        start: Per row, shape [B]: tokens at or after it see no key before it. None for no such limit.
        device: Where to put it.

    Returns:
        Shape [B or 1, T / W, W, 2 W], bool.
    """
    n = length // window
    query = torch.arange(length, device=device).view(n, window, 1)
    first = torch.arange(n, device=device).view(n, 1, 1) * window - window
    key = first + torch.arange(2 * window, device=device)
    mask = ((key <= query) & (key > query - window) & (key >= 0))[None]
    if start is not None:
        s = start.view(-1, 1, 1, 1)
        mask = mask & ((key >= s) | (query < s))
    return mask


def sink_softmax(groups: Sequence[Tensor], sink: Tensor) -> tuple[list[Tensor], Tensor]:
    """One softmax over several groups of logits and a sink.

    Args:
        groups: Logits, each of shape [..., H, keys], fp32.
        sink: Logit of the sink, shape [H].

    Returns:
        Unnormalised weights of each group, and their sum with the sink's, shape [..., H, 1].
    """
    top = sink
    for logits in groups:
        top = torch.maximum(top, logits.amax(-1))
    top = top.detach()[..., None]
    weights = [(logits - top).exp() for logits in groups]
    total = (sink[:, None] - top).exp()
    for weight in weights:
        total = total + weight.sum(-1, True)
    return weights, total


def window_logits(queries: Tensor, keys: Tensor, mask: Tensor) -> Tensor:
    """Scaled logits of chunked queries [B, n, W, H, d] against keys [B, n, 2 W, d], fp32."""
    B, n, W, H, d = queries.shape
    logits = (queries.reshape(B, n, W * H, d) @ keys.mT).view(B, n, W, H, -1).float() * d**-0.5
    return logits.masked_fill(~mask[:, :, :, None], NEVER)


def pool_logits(queries: Tensor, rows: Tensor, visible: Tensor) -> Tensor:
    """Scaled logits of queries [B, T, H, d] against pool rows [B, N, d]; `visible` is [B or 1, T, N]."""
    B, T, H, d = queries.shape
    logits = (queries.reshape(B, T * H, d) @ rows.mT).view(B, T, H, -1).float() * d**-0.5
    return logits.masked_fill(~visible[:, :, None], NEVER)


def attend(
    inputs: AttentionInputs, pool: Pool | None, mask: Tensor, sink: Tensor, window: int
) -> Tensor:
    """Joint softmax over window rows, selected pool rows and a sink; shape [B, T, H, d]."""
    q = inputs.queries
    B, T, H, d = q.shape
    keys = window_keys(inputs.kv, window)
    logits = [window_logits(q.unflatten(1, (-1, window)), keys, mask).view(B, T, H, -1)]
    if pool is not None:
        logits.append(pool_logits(q, pool.rows, pool.selected))
    weights, total = sink_softmax(logits, sink)
    own = weights[0].to(q.dtype).view(B, T // window, window * H, -1) @ keys
    o = own.view(B, T, H, d).float()
    if pool is not None:
        o = o + (weights[1].to(q.dtype).view(B, T * H, -1) @ pool.rows).view(B, T, H, d).float()
    return (o / total).to(q.dtype)


def project_output(o: Tensor, w: OutputWeights, setting: Setting, c: DeepseekV41Config) -> Tensor:
    """Turns the heads back and projects them in groups: [B, T, H, d] to [B, T, D]."""
    o = rotate(o, per_head(setting.rope), inverse=True).flatten(-2)
    o = o.unflatten(-1, (c.o_groups, -1))
    wo_a = R.weight_fp8(w.wo_a, setting.blend).unflatten(0, (c.o_groups, -1))
    t = torch.einsum("btgd,grd->btgr", o, wo_a).flatten(2)
    return F.linear(R.cache_fp8(t), R.weight_fp8(w.wo_b, setting.blend))
