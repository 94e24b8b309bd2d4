"""Launch of the products of many tokens by groups with prepared MXFP4 weights on Hopper, in tiles of several widths."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from deepinfer.kernels.triton.descriptors import listed, matrix
from deepinfer.kernels.triton.folded_ragged import folded_ragged_kernel
from deepinfer.kernels.triton.gemm_launch import num_sms
from deepinfer.kernels.triton.grouped_list import ragged_tiles_kernel
from deepinfer.kernels.triton.launches import launch

__all__ = ["RaggedTuning", "folded_ragged", "ragged_tiles"]


@dataclass(frozen=True)
class RaggedTuning:
    """Two warpgroups that decode and multiply 64 rows of weights each.

    Attributes:
        depth: Steps in the ring of shared memory.
    """

    depth: int


def ragged_tiles(layout: Tensor, groups: int) -> Tensor:
    """Number of tiles, and of each 256 times its block of 128 rows, plus the rows that are used: up to 160.

    Args:
        layout: Group of each row, shape [M], int32; none that is not in 0 to `groups` - 1. Each group begins at a multiple
            of 128, and none of its rows lies behind another of none.
        groups: Number of groups.

    Returns:
        Shape [tiles + 1], int32; what lies behind the last is not written.
    """
    found = layout.new_empty(-(-layout.shape[0] // 128) + 1)
    launch(ragged_tiles_kernel, 1, layout, found, layout.shape[0], groups, BLOCK=512, num_warps=16)
    return found


def folded_ragged(
    x: Tensor,
    x_scale: Tensor,
    words: Tensor,
    steps: Tensor,
    layout: Tensor,
    out: Tensor,
    tuning: RaggedTuning,
) -> None:
    """Multiplies each token with the prepared MXFP4 weights of its group, as `grouped_folded` does, bit for bit.

    Args:
        x: Tokens, shape [M, K], e4m3, contiguous.
        x_scale: Shape [M, K / 128], fp32, any strides.
        words: Shape [groups, N, K / 8], int32, contiguous.
        steps: Shape [groups, K / 128 + 1, N rounded up to 4], int32, contiguous.
        layout: Group of each row, shape [M], int32, as in `ragged_tiles`.
        out: Shape [M, N], bf16 or fp32, last stride 1; rows of no group are left alone.
        tuning: Sizes.
    """
    groups, n, k = words.shape[0], words.shape[1], 8 * words.shape[2]
    m = x.shape[0]
    tiles = ragged_tiles(layout, groups)
    factors = steps.view(torch.float32).select(1, -1)
    most = (tiles.shape[0] - 1) * -(-n // 128)
    launch(
        folded_ragged_kernel,
        min(most, num_sms(x.device.index)),
        matrix(words.view(torch.uint32).view(groups * n, k // 8), 64, 16),
        matrix(x, 128, 128),
        matrix(x, 64, 128),
        matrix(x, 32, 128),
        listed(steps, 64),
        out,
        factors,
        x_scale,
        layout,
        tiles,
        m,
        n,
        k // 128,
        out.stride(0),
        factors.stride(0),
        steps.stride(0),
        steps.stride(1),
        x_scale.stride(0),
        x_scale.stride(1),
        DEPTH=tuning.depth,
        num_warps=4,
    )
