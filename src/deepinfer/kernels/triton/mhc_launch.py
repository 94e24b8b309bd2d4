"""Launches of hyper-connections, for arguments that were already checked."""

from __future__ import annotations

import torch
import triton
from torch import Tensor

from deepinfer.kernels.configs import rows as configs
from deepinfer.kernels.triton.mhc_mixes import (
    mhc_coefficients_kernel,
    mhc_project_kernel,
    mhc_split_kernel,
    sinkhorn_kernel,
)
from deepinfer.kernels.triton.mhc_streams import mhc_head_kernel, mhc_post_kernel

__all__ = ["mhc_head", "mhc_post", "mhc_pre", "sinkhorn"]

_WARP = 32
_PRODUCTS = 3


def sinkhorn(
    scores: Tensor, iterations: int, eps: float, out: Tensor, tuning: tuple[int, int] = (_WARP, 1)
) -> None:
    """Doubly stochastic matrices of scores, both of shape [tokens, 4, 4], fp32, contiguous."""
    tokens, warps = tuning
    with torch.cuda.device_of(scores):
        sinkhorn_kernel[(triton.cdiv(len(scores), tokens),)](
            scores, out, len(scores), iterations, eps, TOKENS=tokens, num_warps=warps
        )


def mhc_pre(
    streams: Tensor, pre: Tensor, fn: Tensor, base: Tensor, scale: Tensor, iterations: int,
    norm_eps: float, eps: float, following: Tensor, post: Tensor, mix: Tensor, out: Tensor,
    tuning: tuple[int, int, int, int, int] | None = None, products: int = _PRODUCTS,
) -> None:  # fmt: skip
    """Coefficients and the sum of the streams, in three launches: the projection split, the products, what follows.

    Args:
        streams: Shape [tokens, 4, channels], last stride 1.
        pre: Shape [tokens, 4], fp32, contiguous.
        fn: Shape [24, 4 * channels], fp32, contiguous.
        base: Shape [24], fp32, contiguous.
        scale: Shape [3], fp32, contiguous.
        iterations: Sinkhorn iterations.
        norm_eps: Added to the mean square.
        eps: Added in the mixing.
        following: Shape [tokens, 4], fp32, contiguous.
        post: Shape [tokens, 4], fp32, contiguous.
        mix: Shape [tokens, 4, 4], fp32, contiguous.
        out: Shape [tokens, channels], contiguous.
        tuning: Tokens, channels at once, how often, warps, stages; None for those of the table.
        products: bf16 numbers for a coefficient of `fn`, 2 or 3, when the streams are bf16.
    """
    count, _, channels = streams.shape
    narrow = streams.dtype == torch.bfloat16
    tokens, block, times, warps, stages = tuning or configs.project(channels, narrow)
    parts = triton.cdiv(channels, block * times)
    split = products if narrow else 1
    columns = triton.next_power_of_2(24 * split)
    width = 24 * split + 8  # a row of sums: the projections, then the squares
    sums = torch.empty((count, parts, width), dtype=torch.float32, device=streams.device)
    with torch.cuda.device_of(streams):
        if narrow:
            whole = torch.empty(
                (4 * channels, columns), dtype=torch.bfloat16, device=streams.device
            )
            mhc_split_kernel[(triton.cdiv(4 * channels, 64),)](
                fn, whole, 4 * channels, SPLIT=split, COLUMNS=columns, BLOCK=64, num_warps=4
            )
            fn = whole
        mhc_project_kernel[(parts, triton.cdiv(count, tokens))](
            streams, pre, fn, sums, out, count, parts, streams.stride(0), streams.stride(1),
            CHANNELS=channels, TOKENS=tokens, BLOCK=block, BLOCKS=times, COLUMNS=columns, SUMS=width,
            NARROW=narrow, num_warps=warps, num_stages=stages,
        )  # fmt: skip
        mhc_coefficients_kernel[(triton.cdiv(count, _WARP),)](
            sums, base, scale, following, post, mix, count, parts, iterations, norm_eps, eps,
            CHANNELS=channels, TOKENS=_WARP, SPLIT=split, SUMS=width, num_warps=1,
        )  # fmt: skip


def mhc_post(
    streams: Tensor, output: Tensor, post: Tensor, mix: Tensor, out: Tensor,
    tuning: tuple[int, int] | None = None, evict: str = "",
) -> None:  # fmt: skip
    """Streams behind a sublayer.

    Args:
        streams: Shape [tokens, 4, channels], last stride 1.
        output: Shape [tokens, channels], last stride 1.
        post: Shape [tokens, 4], fp32, contiguous.
        mix: Shape [tokens, 4, 4], fp32, contiguous.
        out: Shape [tokens, 4, channels], contiguous.
        tuning: Channels a program, and warps; None for those of the table.
        evict: What the caches are told of the values that are read.
    """
    channels = streams.shape[2]
    block, warps = tuning or configs.stream_block(channels)
    with torch.cuda.device_of(streams):
        mhc_post_kernel[(len(streams), triton.cdiv(channels, block))](
            streams, output, post, mix, out, streams.stride(0), streams.stride(1),
            output.stride(0), CHANNELS=channels, BLOCK=block, EVICT=evict, num_warps=warps,
        )  # fmt: skip


def mhc_head(
    streams: Tensor, pre: Tensor, out: Tensor, tuning: tuple[int, int] | None = None,
    evict: str = "",
) -> None:  # fmt: skip
    """The weighted sum of streams, shape [tokens, 4, channels], last stride 1, to [tokens, channels], contiguous."""
    channels = streams.shape[2]
    block, warps = tuning or configs.stream_block(channels)
    with torch.cuda.device_of(streams):
        mhc_head_kernel[(len(streams), triton.cdiv(channels, block))](
            streams, pre, out, streams.stride(0), streams.stride(1), CHANNELS=channels, BLOCK=block,
            EVICT=evict, num_warps=warps,
        )  # fmt: skip
