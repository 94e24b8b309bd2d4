"""Residual streams and their mixing (mHC), with a gradient through the last Sinkhorn iterations only.

Shapes: B rows, T tokens, M streams, D hidden.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from deepinfer.models.deepseek_v41.config import DeepseekV41Config

GRADIENT_ITERATIONS = 4
"""Sinkhorn iterations the gradient passes through; the earlier ones count as fixed scalings."""


class MixWeights(NamedTuple):
    """Parameters of one sublayer's mixing.

    Attributes:
        fn: Projection, shape [(2 + M) * M, M * D].
        base: Bias, shape [(2 + M) * M].
        scale: Factors of the pre, post and matrix parts, shape [3].
    """

    fn: Tensor
    base: Tensor
    scale: Tensor


class Mixes(NamedTuple):
    """Coefficients of one sublayer, fp32.

    Attributes:
        pre: How the next sublayer sums the streams, shape [B, T, M].
        post: How this sublayer's output enters the streams, shape [B, T, M].
        matrix: Stream i enters stream j with weight `matrix[..., i, j]`, shape [B, T, M, M].
    """

    pre: Tensor
    post: Tensor
    matrix: Tensor


def rms_norm(x: Tensor, weight: Tensor, eps: float = 1e-20) -> Tensor:
    """Root-mean-square norm over the last axis, computed in fp32; `x` keeps its dtype."""
    y = x.float()
    return (y * torch.rsqrt(y.square().mean(-1, True) + eps) * weight).to(x.dtype)


def sinkhorn(matrix: Tensor, iterations: int, eps: float) -> Tensor:
    """Row and column normalisations in turn of positive matrices, shape [..., M, M]."""
    for _ in range(iterations):
        matrix = matrix / (matrix.sum(-1, True) + eps)
        matrix = matrix / (matrix.sum(-2, True) + eps)
    return matrix


def stream_mixes(streams: Tensor, weights: MixWeights, c: DeepseekV41Config) -> Mixes:
    """Mixing coefficients from the streams, shape [B, T, M, D]."""
    m, (fn, base, scale) = c.hc_mult, weights
    flat = streams.flatten(-2)
    power = flat.float().square().mean(-1, True) + c.rms_norm_eps
    v = F.linear(flat, fn).float() * torch.rsqrt(power)
    pre = torch.sigmoid(v[..., :m] * scale[0] + base[:m]) + c.hc_eps
    post = 2 * torch.sigmoid(v[..., m : 2 * m] * scale[1] + base[m : 2 * m])
    k = (v[..., 2 * m :] * scale[2] + base[2 * m :]).unflatten(-1, (m, m)).softmax(-1) + c.hc_eps
    k = k / (k.sum(-2, True) + c.hc_eps)
    with torch.no_grad():
        fixed = k.detach()
        scaling = sinkhorn(fixed, c.hc_sinkhorn_iters - 1 - GRADIENT_ITERATIONS, c.hc_eps) / fixed
    return Mixes(pre, post, sinkhorn(k * scaling, GRADIENT_ITERATIONS, c.hc_eps))


def initial_pre(shape: tuple[int, ...], c: DeepseekV41Config, device: torch.device) -> Tensor:
    """The first sublayer reads the first stream alone; shape [*shape, M], fp32."""
    pre = torch.zeros(*shape, c.hc_mult, device=device)
    pre[..., 0] = 1
    return pre


def collapse(streams: Tensor, pre: Tensor) -> Tensor:
    """Weighted sum of the streams, shape [B, T, D]."""
    return (pre[..., None] * streams.float()).sum(-2).to(streams.dtype)


def spread(streams: Tensor, y: Tensor, mixes: Mixes) -> Tensor:
    """New streams: stream j is post_j y + sum_i matrix[i, j] stream_i."""
    mixed = (mixes.matrix[..., None] * streams.float()[..., :, None, :]).sum(-3)
    return (mixes.post[..., None] * y.float()[..., None, :] + mixed).to(streams.dtype)
