"""Launch of the portable matrix product, for arguments that were already checked."""

from __future__ import annotations

import os

import torch
from torch import Tensor

from deepinfer.kernels.triton.gemm_portable import gemm_portable_kernel
from deepinfer.kernels.triton.launches import cdiv

__all__ = ["gemm_portable"]


def gemm_portable(
    x: Tensor,
    x_scale: Tensor | None,
    weight: Tensor,
    w_scale: Tensor | None,
    out: Tensor,
    mode: int,
    rows_of: Tensor,
    sizes: tuple[int, ...],
) -> None:
    """Multiplies tokens with weights.

    Args:
        x: Tokens, shape [places, M, K], last stride 1.
        x_scale: Shape [places, M, ceil(K / 32 or 128)], fp32 or e8m0, or None.
        weight: Shape [groups, N, K], or [groups, N, K / 2] uint8 of packed e2m1; last stride 1.
        w_scale: Shape [groups, ceil(N / 1, 32 or 128), ceil(K / 32 or 128)], fp32 or e8m0, last stride 1, or None.
        out: Shape [places, M, N], last stride 1.
        mode: 0: one place, one group. 1: one place, `rows_of` is the group of each row. 2: a place for each group,
            `rows_of` is its number of rows.
        rows_of: Shape [M] or [places], int32, see `mode`; any tensor for mode 0.
        sizes: Tokens and rows of weights of a tile, warps, stages.
    """
    places, m, k_x = x.shape
    groups, n, _ = weight.shape
    packed = weight.dtype == torch.uint8
    block_m, block_n, warps, stages = sizes
    scaled = x_scale is not None and w_scale is not None
    interpreted = os.environ.get("TRITON_INTERPRET") == "1"
    xs = x_scale if x_scale is not None else out
    ws = w_scale if w_scale is not None else out
    x_group = 32 if scaled and xs.shape[-1] == -(-k_x // 32) else 128
    w_group = 32 if scaled and ws.shape[-1] == -(-k_x // 32) else 128
    w_rows = next(r for r in (1, 32, 128) if ws.shape[-2] == -(-n // r)) if scaled else 1
    block_k = min(x_group, w_group) if scaled else 64
    # Triton has no e4m3 below compute capability 8.9, and its interpreter does not know NaN: bytes are decoded by hand.
    widen = x.dtype == torch.float8_e4m3fn and (
        interpreted or (x.is_cuda and torch.cuda.get_device_capability(x.device) < (8, 9))
    )
    if widen:
        x = x.view(torch.uint8)
        weight = weight.view(torch.uint8)
    grid = (cdiv(n, block_n), cdiv(m, block_m), places)
    gemm_portable_kernel[grid](
        x,
        xs.view(torch.uint8) if xs.itemsize == 1 else xs,
        weight,
        ws.view(torch.uint8) if ws.itemsize == 1 else ws,
        out,
        rows_of,
        m,
        n,
        k_x,
        groups,
        x.stride(0),
        x.stride(1),
        weight.stride(0),
        weight.stride(1),
        out.stride(0),
        out.stride(1),
        xs.stride(0),
        xs.stride(1),
        xs.stride(2),
        ws.stride(0),
        ws.stride(1),
        MODE=mode,
        SCALED=scaled,
        X_GROUP=x_group,
        W_ROWS=w_rows,
        W_GROUP=w_group,
        X_E8M0=xs.itemsize == 1,
        W_E8M0=ws.itemsize == 1,
        PACKED=packed,
        WIDEN=widen,
        BLOCK_M=block_m,
        BLOCK_N=block_n,
        BLOCK_K=block_k,
        NUM_STAGES=stages,
        num_warps=warps,
    )
