"""Launch of the products with prepared MXFP4 weights on Hopper, for arguments that were already checked."""

from __future__ import annotations

import torch
from torch import Tensor

from deepinfer.kernels.triton.descriptors import listed, matrix
from deepinfer.kernels.triton.gemm_launch import (
    SwappedTuning,
    num_sms,
    register_shares,
    used_tiles,
)
from deepinfer.kernels.triton.grouped_folded import grouped_folded_kernel
from deepinfer.kernels.triton.launches import launch

__all__ = ["grouped_folded"]


def grouped_folded(
    x: Tensor,
    x_scale: Tensor,
    words: Tensor,
    steps: Tensor,
    rows_of: Tensor | None,
    out: Tensor,
    tuning: SwappedTuning,
) -> None:
    """Multiplies tokens with prepared MXFP4 weights: dense, each row with its group, or the first rows of each group.

    Args:
        x: Tokens, shape [M, K] or [groups, max_m, K], e4m3, contiguous.
        x_scale: Shape [..., K / 128], fp32, any strides; or [..., K / 32], e8m0 as uint8, four of a row in a word.
        words: Shape [groups, N, K / 8], int32, contiguous.
        steps: Shape [groups, K / 128 + 1, N rounded up to 4], int32, contiguous.
        rows_of: None: dense, one group. Shape [M] for x [M, K]: the group of each row, -1 for rows that are left alone,
            one group a tile, and no
            rows of a group behind others of -1 in a tile. Shape [groups] for x [groups, max_m, K]: rows of each group. int32.
        out: Shape [..., N], bf16 or fp32, last stride 1.
        tuning: Sizes of the tiles.
    """
    mode = 0 if rows_of is None else x.dim() - 1
    groups, n, k = words.shape[0], words.shape[1], 8 * words.shape[2]
    max_m = x.shape[-2]
    span = tuning.span
    x_group = 128
    if x_scale.dtype == torch.uint8:
        x_group, x_scale = 32, x_scale.view(torch.int32)
    w_desc = matrix(words.view(torch.uint32).view(groups * n, k // 8), 64, 16 * span)
    x_desc = matrix(x.view(-1, k), tuning.block_m, 128)
    factors = steps.view(torch.float32).select(1, -1)
    places = groups if mode == 2 else 1
    used = rows_of if rows_of is not None else steps
    if mode == 1 and rows_of is not None:
        used = used_tiles(rows_of, groups, tuning.block_m)
    tiles = places * -(-max_m // tuning.block_m) * -(-n // (64 * tuning.parts))
    grid = min(tiles, num_sms(x.device.index) * tuning.per_sm)
    options, registers = register_shares(tuning)
    launch(
        grouped_folded_kernel,
        grid,
        w_desc,
        x_desc,
        listed(steps, 64),
        out,
        factors,
        x_scale,
        rows_of if rows_of is not None else steps,
        used,
        places,
        n,
        max_m,
        k // (128 * span),
        out.stride(0) if mode == 2 else 0,
        out.stride(-2),
        factors.stride(0),
        steps.stride(0),
        steps.stride(1),
        x_scale.stride(0) if mode == 2 else 0,
        x_scale.stride(-2),
        x_scale.stride(-1),
        MODE=mode,
        X_GROUP=x_group,
        SPAN=span,
        PARTS=tuning.parts,
        BLOCK_M=tuning.block_m,
        DEPTH=tuning.depth,
        REGISTERS=registers,
        num_warps=4,
        **options,
    )
