"""Manifold-constrained hyper-connections (mHC): residual streams, mixed by a doubly stochastic matrix.

Each sublayer computes three things from the streams: `pre`, how the NEXT sublayer sums the streams into its
input (so a sublayer reads with the `pre` of the one before it); `post`, how its own output is spread over the
streams; and `mix`, the matrix by which the streams themselves move on.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from deepinfer.kernels import batch_invariant, mhc_head
from deepinfer.models.deepseek_v41 import small_cpu
from deepinfer.models.deepseek_v41.norm import rms_norm

__all__ = [
    "StreamMix",
    "collapse",
    "enter_sublayer",
    "initial_pre",
    "leave_sublayer",
    "sinkhorn",
    "stream_mix",
]


class StreamMix(NamedTuple):
    """Coefficients of one sublayer, all fp32.

    Attributes:
        pre: Weights by which the next sublayer sums the streams, shape [tokens, streams].
        post: Weights by which this sublayer's output enters the streams, shape [tokens, streams].
        mix: Stream i enters stream j with weight `mix[:, i, j]`, shape [tokens, streams, streams].
    """

    pre: Tensor
    post: Tensor
    mix: Tensor


def sinkhorn(scores: Tensor, iterations: int, eps: float) -> Tensor:
    """Doubly stochastic matrices: softmax over the last axis, then column and row normalisation in turn.

    Args:
        scores: Scores, shape [tokens, n, n], fp32.
        iterations: Column normalisations; one fewer row normalisations lie between them.
        eps: Added to the softmax and to every sum.

    Returns:
        The matrices, shape [tokens, n, n], fp32; columns sum to 1 up to `eps`.
    """
    k = torch.softmax(scores, -1) + eps
    if k.is_cpu and not k.requires_grad:
        return torch.from_numpy(small_cpu.normalise(k.numpy(), iterations, eps))
    k = k / (k.sum(-2, keepdim=True) + eps)
    for _ in range(iterations - 1):
        k = k / (k.sum(-1, keepdim=True) + eps)
        k = k / (k.sum(-2, keepdim=True) + eps)
    return k


def stream_mix(
    streams: Tensor,
    fn: Tensor,
    base: Tensor,
    scale: Tensor,
    *,
    iterations: int,
    norm_eps: float,
    eps: float,
    deterministic: bool = False,
) -> StreamMix:
    """Mixing coefficients of one sublayer.

    Args:
        streams: Residual streams, shape [tokens, n, channels].
        fn: Projection, shape [n * (n + 2), n * channels], fp32.
        base: Bias, shape [n * (n + 2)], fp32.
        scale: Factors of the pre, post and mix parts, shape [3], fp32.
        iterations: Sinkhorn iterations.
        norm_eps: Added to the mean square over all streams of a token.
        eps: The `hc_eps` of the configuration.
        deterministic: Whether a token's bits must be free of the other tokens.

    Returns:
        The coefficients.
    """
    n = streams.shape[1]
    flat = streams.flatten(1).float()
    if deterministic:
        products, square = batch_invariant.linear(flat, fn), batch_invariant.mean_square(flat)
        sigmoid = batch_invariant.sigmoid
    else:
        products, square = F.linear(flat, fn), flat.square().mean(-1, keepdim=True)
        sigmoid = torch.sigmoid
    m = products * torch.rsqrt(square + norm_eps)
    pre, post, mix = m.split([n, n, n * n], -1)
    pre = sigmoid(pre * scale[0] + base[:n]) + eps
    post = 2 * sigmoid(post * scale[1] + base[n : 2 * n])
    mix = (mix * scale[2] + base[2 * n :]).unflatten(-1, (n, n))
    normalise = batch_invariant.sinkhorn if deterministic else sinkhorn
    return StreamMix(pre, post, normalise(mix, iterations, eps))


def initial_pre(num_tokens: int, streams: int, device: torch.device) -> Tensor:
    """Weights of the very first sublayer: stream 0 alone, shape [tokens, streams], fp32."""
    pre = torch.zeros(num_tokens, streams, dtype=torch.float32, device=device)
    pre[:, 0] = 1
    return pre


def collapse(streams: Tensor, pre: Tensor, *, deterministic: bool = False) -> Tensor:
    """The weighted sum of the streams, in fp32 and then in the streams' dtype, shape [tokens, channels]."""
    if deterministic:
        return batch_invariant.sum_streams(streams, pre)
    if streams.is_cuda and not torch.is_grad_enabled():
        return mhc_head(streams, pre)
    return torch.bmm(pre.unsqueeze(1), streams.float()).squeeze(1).to(streams.dtype)


def enter_sublayer(
    streams: Tensor,
    pre: Tensor,
    fn: Tensor,
    base: Tensor,
    scale: Tensor,
    norm_weight: Tensor,
    *,
    iterations: int,
    norm_eps: float,
    eps: float,
    deterministic: bool = False,
) -> tuple[StreamMix, Tensor]:
    """Everything between the streams and a sublayer.

    Args:
        streams: Residual streams, shape [tokens, n, channels].
        pre: Weights of the input sum, from the sublayer before, shape [tokens, n], fp32.
        fn: Projection of the coefficients, shape [n * (n + 2), n * channels], fp32; see `stream_mix`.
        base: Bias of the coefficients, shape [n * (n + 2)], fp32.
        scale: Factors of the coefficients, shape [3], fp32.
        norm_weight: Gains of the sublayer's norm, shape [channels].
        iterations: Sinkhorn iterations.
        norm_eps: Added to every mean square.
        eps: The `hc_eps` of the configuration.
        deterministic: Whether a token's bits must be free of the other tokens.

    Returns:
        The sublayer's coefficients, and its normed input, shape [tokens, channels].
    """
    mixes = stream_mix(
        streams, fn, base, scale,
        iterations=iterations, norm_eps=norm_eps, eps=eps, deterministic=deterministic,
    )  # fmt: skip
    summed = collapse(streams, pre, deterministic=deterministic)
    return mixes, rms_norm(summed, norm_weight, norm_eps, deterministic=deterministic)


def leave_sublayer(
    streams: Tensor, output: Tensor, mixes: StreamMix, *, deterministic: bool = False
) -> Tensor:
    """Streams behind a sublayer, in fp32 and then in the streams' dtype.

    Args:
        streams: Streams before it, shape [tokens, n, channels].
        output: The sublayer's output, shape [tokens, channels].
        mixes: Its coefficients. Stream j becomes `post[j] * output + sum_i mix[i, j] * streams[i]`: the sum
            runs over the FIRST axis of `mix`.
        deterministic: Whether a token's bits must be free of the other tokens.

    Returns:
        The new streams, same shape and dtype as `streams`.
    """
    if deterministic:
        return batch_invariant.mix_streams(streams, output, mixes.post, mixes.mix)
    added = mixes.post.unsqueeze(-1) * output.float().unsqueeze(1)
    moved = torch.baddbmm(added, mixes.mix.transpose(1, 2), streams.float())
    return moved.to(streams.dtype)
