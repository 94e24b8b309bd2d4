"""Manifold-constrained hyper-connections in plain torch: coefficients, what enters a sublayer, and what leaves it."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from deepinfer.kernels import contract
from deepinfer.kernels.reference.norm import rms_norm

__all__ = ["mhc_head", "mhc_post", "mhc_pre", "prepare_mhc_projection", "sinkhorn"]


def prepare_mhc_projection(fn: Tensor) -> Tensor:
    """The projection of `mhc_pre` in the form that its kernel reads, made once for all calls.

    Args:
        fn: Projection, shape [n * (n + 2), n * channels], fp32.

    Returns:
        Shape [2, n * (n + 2), n * channels], bf16: the nearest numbers, and what they leave, which make 16 bits together.

    Raises:
        ShapeError: `fn` has another dtype or another number of axes.
    """
    contract.check_dtype("fn", fn, torch.float32)
    contract.check_shape("fn", fn, (None, None), "coefficients, streams * channels")
    # Rounded in the bits of fp32: a compiler may drop a cast to bf16 and back, and nothing would be left.
    bits = fn.contiguous().view(torch.int32)
    high = ((bits + (0x7FFF + ((bits >> 16) & 1))) & -0x10000).view(torch.float32)
    high = torch.where(fn.isfinite(), high, fn)
    return torch.stack((high.bfloat16(), (fn - high).bfloat16()))


def sinkhorn(scores: Tensor, iterations: int = 20, eps: float = 1e-6) -> Tensor:
    """Doubly stochastic matrices; see `deepinfer.kernels.mhc.sinkhorn`."""
    k = torch.softmax(scores.float(), -1) + eps
    k = k / (k.sum(-2, keepdim=True) + eps)
    for _ in range(iterations - 1):
        k = k / (k.sum(-1, keepdim=True) + eps)
        k = k / (k.sum(-2, keepdim=True) + eps)
    return k


def mhc_pre(
    streams: Tensor,
    pre: Tensor,
    fn: Tensor,
    base: Tensor,
    scale: Tensor,
    iterations: int = 20,
    norm_eps: float = 1e-20,
    eps: float = 1e-6,
    norm_weight: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Input and coefficients of a sublayer; see `deepinfer.kernels.mhc.mhc_pre`."""
    n = streams.shape[1]
    flat = streams.flatten(1).float()
    if fn.dim() == 3:
        fn = fn.float().sum(0)
    m = F.linear(flat, fn) * torch.rsqrt(flat.square().mean(-1, keepdim=True) + norm_eps)
    following = torch.sigmoid(m[:, :n] * scale[0] + base[:n]) + eps
    post = 2 * torch.sigmoid(m[:, n : 2 * n] * scale[1] + base[n : 2 * n])
    scores = (m[:, 2 * n :] * scale[2] + base[2 * n :]).unflatten(-1, (n, n))
    mix = sinkhorn(scores, iterations, eps)
    return mhc_head(streams, pre, norm_weight, norm_eps), post, mix, following


def mhc_post(streams: Tensor, output: Tensor, post: Tensor, mix: Tensor) -> Tensor:
    """Streams behind a sublayer; see `deepinfer.kernels.mhc.mhc_post`."""
    added = post.unsqueeze(-1) * output.float().unsqueeze(1)
    return torch.baddbmm(added, mix.transpose(1, 2), streams.float()).to(streams.dtype)


def mhc_head(
    streams: Tensor, pre: Tensor, norm_weight: Tensor | None = None, norm_eps: float = 1e-20
) -> Tensor:
    """The weighted sum of the streams; see `deepinfer.kernels.mhc.mhc_head`."""
    summed = torch.bmm(pre.unsqueeze(1), streams.float()).squeeze(1).to(streams.dtype)
    return summed if norm_weight is None else rms_norm(summed, norm_weight, norm_eps)
