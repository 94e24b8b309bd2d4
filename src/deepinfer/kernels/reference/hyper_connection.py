"""The two ends of a sublayer between residual streams, in plain torch."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from deepinfer.kernels.reference.quant import round_fp8

__all__ = ["enter_streams", "leave_streams"]


def enter_streams(
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
    round_input: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Mixing coefficients of a sublayer, and its normed input.

    Args:
        streams: Residual streams, shape [tokens, n, channels].
        pre: Weights of the input sum, from the sublayer before, shape [tokens, n], fp32.
        fn: Projection of the coefficients, shape [n * (n + 2), n * channels], fp32.
        base: Their bias, shape [n * (n + 2)], fp32.
        scale: Factors of the pre, post and mix parts, shape [3], fp32.
        norm_weight: Gains of the norm of the input, shape [channels].
        iterations: Sinkhorn iterations.
        norm_eps: Added to every mean square.
        eps: Added in the mixing.
        round_input: Whether to round the input to FP8 as well.

    Returns:
        Weights of the next input sum, shape [tokens, n], fp32; coefficients, post then mix, shape [tokens, n + n * n],
        fp32; the input and the rounded input, each of shape [tokens, channels]. Without rounding they are one tensor.
    """
    n = streams.shape[1]
    flat = streams.flatten(1).float()
    m = F.linear(flat, fn) * torch.rsqrt(flat.square().mean(-1, keepdim=True) + norm_eps)
    following = torch.sigmoid(m[:, :n] * scale[0] + base[:n]) + eps
    post = 2 * torch.sigmoid(m[:, n : 2 * n] * scale[1] + base[n : 2 * n])
    k = torch.softmax((m[:, 2 * n :] * scale[2] + base[2 * n :]).unflatten(-1, (n, n)), -1) + eps
    k = k / (k.sum(-2, keepdim=True) + eps)
    for _ in range(iterations - 1):
        k = k / (k.sum(-1, keepdim=True) + eps)
        k = k / (k.sum(-2, keepdim=True) + eps)
    y = torch.bmm(pre.unsqueeze(1), streams.float()).squeeze(1).to(streams.dtype).float()
    y = y * torch.rsqrt(y.square().mean(-1, keepdim=True) + norm_eps) * norm_weight.float()
    y = y.to(streams.dtype)
    return following, torch.cat((post, k.flatten(1)), 1), y, round_fp8(y) if round_input else y


def leave_streams(
    streams: Tensor, output: Tensor, coefficients: Tensor, routed: Tensor | None = None
) -> Tensor:
    """Streams behind a sublayer.

    Args:
        streams: Streams before it, shape [tokens, n, channels].
        output: Its output, shape [tokens, channels].
        coefficients: Post then mix, from `enter_streams`, shape [tokens, n + n * n], fp32.
        routed: Outputs that are added to `output` in fp32 first, the sum rounded to the dtype of the streams; shape
            [tokens, parts, channels], or None.

    Returns:
        The new streams, same shape and dtype as `streams`.
    """
    n = streams.shape[1]
    if routed is not None:
        output = (routed.float().sum(1) + output.float()).to(streams.dtype)
    post, mix = coefficients[:, :n], coefficients[:, n:].unflatten(-1, (n, n))
    added = post.unsqueeze(-1) * output.float().unsqueeze(1)
    return torch.baddbmm(added, mix.transpose(1, 2), streams.float()).to(streams.dtype)
