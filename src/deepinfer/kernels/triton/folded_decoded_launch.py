"""Launch of the products of many tokens with prepared MXFP4 weights on Hopper, for arguments that were already checked."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from deepinfer.kernels.triton.descriptors import listed, matrix
from deepinfer.kernels.triton.folded_decoded import folded_decoded_kernel
from deepinfer.kernels.triton.gemm_launch import num_sms
from deepinfer.kernels.triton.launches import launch

__all__ = ["DecodedTuning", "folded_decoded"]


@dataclass(frozen=True)
class DecodedTuning:
    """Two warpgroups that multiply 64 tokens with 128 rows of weights each, and two that decode.

    Attributes:
        parts_m: How many of them lie along the tokens: 1 or 2.
        parts_n: How many along the weights: 2 or 1, the other one.
        depth: Steps in the ring of shared memory.
    """

    parts_m: int
    parts_n: int
    depth: int


def folded_decoded(
    x: Tensor,
    x_scale: Tensor,
    words: Tensor,
    steps: Tensor,
    rows_of: Tensor | None,
    out: Tensor,
    tuning: DecodedTuning,
) -> None:
    """Multiplies tokens with prepared MXFP4 weights, as `grouped_folded` does, bit for bit.

    Args:
        x: Tokens, shape [M, K] or [groups, max_m, K], e4m3, contiguous.
        x_scale: Shape [..., K / 128], fp32, any strides; or [..., K / 32], e8m0 as uint8, four of a row in a word.
        words: Shape [groups, N, K / 8], int32, contiguous.
        steps: Shape [groups, K / 128 + 1, N rounded up to 4], int32, contiguous.
        rows_of: Of the shape there; groups of rows begin at multiples of 64 `parts_m`.
        out: Shape [..., N], bf16 or fp32, last stride 1.
        tuning: Sizes of the tiles.
    """
    mode = 0 if rows_of is None else x.dim() - 1
    groups, n, k = words.shape[0], words.shape[1], 8 * words.shape[2]
    max_m = x.shape[-2]
    x_group = 128
    if x_scale.dtype == torch.uint8:
        x_group, x_scale = 32, x_scale.view(torch.int32)
    w_desc = matrix(words.view(torch.uint32).view(groups * n, k // 8), 64, 16)
    x_desc = matrix(x.view(-1, k), 64, 128)
    factors = steps.view(torch.float32).select(1, -1)
    places = groups if mode == 2 else 1
    tiles = places * -(-max_m // (64 * tuning.parts_m)) * -(-n // (128 * tuning.parts_n))
    launch(
        folded_decoded_kernel,
        min(tiles, num_sms(x.device.index)),
        w_desc,
        x_desc,
        listed(steps, 64),
        out,
        factors,
        x_scale,
        rows_of if rows_of is not None else steps,
        groups,
        n,
        max_m,
        k // 128,
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
        TM=tuning.parts_m,
        TN=tuning.parts_n,
        DEPTH=tuning.depth,
        num_warps=4,
    )
