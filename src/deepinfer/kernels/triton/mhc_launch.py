"""Launches of hyper-connections, for arguments that were already checked."""

from __future__ import annotations

import torch
from torch import Tensor

from deepinfer.kernels import contract
from deepinfer.kernels.configs import rows as configs
from deepinfer.kernels.triton.launches import cdiv, launch
from deepinfer.kernels.triton.mhc_mixes import (
    mhc_coefficients_kernel,
    mhc_project_kernel,
    mhc_split_kernel,
    sinkhorn_kernel,
)
from deepinfer.kernels.triton.mhc_streams import mhc_head_kernel, mhc_post_kernel
from deepinfer.kernels.triton.quant_launch import hardware_level

__all__ = ["mhc_head", "mhc_post", "mhc_pre", "sinkhorn"]

_WARP = 32
_PRODUCTS = 2
_SPLIT_BLOCK = 1024


def sinkhorn(
    scores: Tensor, iterations: int, eps: float, out: Tensor, tuning: tuple[int, int] = (_WARP, 1)
) -> None:
    """Doubly stochastic matrices of scores, both of shape [tokens, 4, 4], fp32, contiguous."""
    tokens, warps = tuning
    launch(
        sinkhorn_kernel,
        cdiv(len(scores), tokens),
        scores,
        out,
        len(scores),
        iterations,
        eps,
        TOKENS=tokens,
        FAST=hardware_level(scores) > 0,
        num_warps=warps,
    )


def mhc_pre(
    streams: Tensor, pre: Tensor, fn: Tensor, base: Tensor, scale: Tensor, iterations: int,
    norm_eps: float, eps: float, following: Tensor, post: Tensor, mix: Tensor, out: Tensor,
    tuning: tuple[int, ...] | None = None, products: int = _PRODUCTS,
    finish: tuple[int, int] | None = None,
) -> None:  # fmt: skip
    """Coefficients and the sum of the streams, in three launches: the projection split, the products, what follows.

    Args:
        streams: Shape [tokens, 4, channels], last stride 1.
        pre: Shape [tokens, 4], fp32, contiguous.
        fn: Shape [24, 4 * channels], fp32, contiguous; or for bf16 streams [products, 24, 4 * channels], bf16.
        base: Shape [24], fp32, contiguous.
        scale: Shape [3], fp32, contiguous.
        iterations: Sinkhorn iterations.
        norm_eps: Added to the mean square.
        eps: Added in the mixing.
        following: Shape [tokens, 4], fp32, contiguous.
        post: Shape [tokens, 4], fp32, contiguous.
        mix: Shape [tokens, 4, 4], fp32, contiguous.
        out: Shape [tokens, channels], contiguous.
        tuning: Of bulk copies (Hopper): how often 64 channels make a part, and the slots of the ring. Of the portable
            kernel: tokens, channels at once, how often, warps, stages. None for those of the table.
        products: bf16 numbers for a coefficient of `fn`, 2 or 3, when the streams are bf16; 2 with bulk copies.
        finish: Tokens and warps of the programs that make the coefficients; None for those of the table.
    """
    count, _, channels = streams.shape
    device = streams.device
    split = products if streams.dtype == torch.bfloat16 else 0
    bulk = split == 2 and len(tuning or (0, 0)) == 2 and _bulk_serves(streams)
    at_once, warps = finish or configs.coefficients(count)
    pieces = 1
    if split and fn.dtype != torch.bfloat16:
        whole = torch.empty((split, *fn.shape), dtype=torch.bfloat16, device=device)
        launch(
            mhc_split_kernel,
            cdiv(fn.numel(), _SPLIT_BLOCK),
            fn,
            whole,
            fn.numel(),
            SPLIT=split,
            BLOCK=_SPLIT_BLOCK,
            num_warps=4,
        )
        fn = whole
    if bulk:
        blocks, depth = tuning or configs.project_bulk(channels)
        if configs.project_bulk_apart(count):
            pieces, blocks = blocks, 1
        parts = channels // (64 * blocks)
        sums = torch.empty((count, parts, 32), dtype=torch.float32, device=device)
        _project_bulk(streams, pre, fn, sums, out, blocks, depth)
    else:
        tokens, block, times, wide, stages = tuning or configs.project(channels, bool(split))
        parts = cdiv(channels, block * times)
        sums = torch.empty((count, parts, 32), dtype=torch.float32, device=device)
        launch(
            mhc_project_kernel, (parts, cdiv(count, tokens), 1),
            streams, pre, fn, sums, out, count, parts, streams.stride(0), streams.stride(1),
            CHANNELS=channels, TOKENS=tokens, BLOCK=block, BLOCKS=times, SPLIT=split,
            num_warps=wide, num_stages=stages,
        )  # fmt: skip
    launch(
        mhc_coefficients_kernel, cdiv(count, at_once),
        sums, base, scale, following, post, mix, count, iterations, norm_eps, eps,
        CHANNELS=channels, TOKENS=at_once, PARTS=parts // pieces, PIECES=pieces,
        FAST=hardware_level(streams) > 0, num_warps=warps,
    )  # fmt: skip


def _bulk_serves(streams: Tensor) -> bool:
    """Whether bulk copies of the chip can read bf16 streams, 64 channels at a time."""
    aligned = streams.data_ptr() % 16 == 0 and streams.stride(0) % 8 == 0
    aligned = aligned and streams.stride(1) % 8 == 0 and streams.shape[2] % 64 == 0
    wide = 3 * streams.stride(1) + streams.shape[2] >= 2**31 or streams.stride(0) == 0
    return aligned and not wide and contract.gluon_refusal(streams) is None


def _project_bulk(
    streams: Tensor, pre: Tensor, fn: Tensor, sums: Tensor, out: Tensor, blocks: int, depth: int,
) -> None:  # fmt: skip

    from deepinfer.kernels.triton.descriptors import matrix, tensor_map, tile_layout
    from deepinfer.kernels.triton.gemm_launch import num_sms
    from deepinfer.kernels.triton.mhc_bulk import mhc_project_bulk_kernel

    count, _, channels = streams.shape
    stream = streams.stride(1)
    # A token's streams are one row to the descriptor, whatever lies between them.
    shape, strides = [count, 3 * stream + channels], [streams.stride(0), 1]
    x_desc = tensor_map(streams, shape, strides, [64, 64], tile_layout(128, 16))
    parts = sums.shape[1]
    at_once = min(cdiv(count, 128), max(1, num_sms(streams.device.index) // parts))
    launch(
        mhc_project_bulk_kernel, parts * at_once,
        x_desc, matrix(fn[0], 32, 64), matrix(fn[1], 32, 64), pre, sums, out, count, parts, stream,
        CHANNELS=channels, BLOCKS=blocks, DEPTH=depth, num_warps=4,
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
    launch(
        mhc_post_kernel, len(streams) * cdiv(channels, block),
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
    launch(
        mhc_head_kernel, len(streams) * cdiv(channels, block),
        streams, pre, out, streams.stride(0), streams.stride(1), CHANNELS=channels, BLOCK=block,
        EVICT=evict, num_warps=warps,
    )  # fmt: skip
