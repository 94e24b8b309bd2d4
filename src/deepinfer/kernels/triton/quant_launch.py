"""Launches of the casts, for arguments that were already checked."""

from __future__ import annotations

import math
import struct

import torch
from torch import Tensor

from deepinfer.kernels import contract
from deepinfer.kernels.configs import rows as configs
from deepinfer.kernels.triton.launches import cdiv, launch
from deepinfer.kernels.triton.quant_casts import (
    cast_back_kernel,
    cast_blocks_kernel,
    cast_groups_kernel,
)
from deepinfer.kernels.triton.small_floats import E2M1_E4M3, E2M1_E8M0, E4M3_E8M0
from deepinfer.kernels.triton.swiglu_cast import swiglu_cast_kernel

__all__ = [
    "cast_back",
    "cast_blocks",
    "cast_groups",
    "hardware_level",
    "has_hardware_fp8",
    "swiglu_cast",
]


def hardware_level(x: Tensor) -> int:
    """What the chip of a tensor has: 1 for conversions of e4m3, 2 for packed bf16 arithmetic as well, else 0."""
    if contract.interpreted() or not x.is_cuda:
        return 0
    capability = contract.capability(x.device)
    return 2 if capability >= (9, 0) else 1 if capability >= (8, 9) else 0


def has_hardware_fp8(x: Tensor) -> bool:
    """Whether the chip of a tensor converts e4m3."""
    return hardware_level(x) > 0


def _in_pairs(x: Tensor) -> bool:
    """Whether bf16 can be read two at a time, on a chip that computes with pairs."""
    aligned = x.data_ptr() % 4 == 0 and x.stride(0) % 2 == 0
    paired = x.dtype == torch.bfloat16 and hardware_level(x) == 2 and contract.has_gluon()
    return paired and aligned


def _pair_of(limit: float) -> int:
    """A positive number as a pair of bf16, cut to its digits."""
    return (struct.unpack("<i", struct.pack("<f", limit))[0] >> 16) * 0x10001


def _kind_of(limit: float) -> int:
    """0 for no limit, 2 for a positive number of bf16, else 1."""
    if not math.isfinite(limit):
        return 0
    bits = struct.unpack("<I", struct.pack("<f", limit))[0]
    return 1 if bits & 0x8000FFFF else 2


def cast_groups(
    x: Tensor,
    q: Tensor,
    scale: Tensor,
    format: int,
    group: int,
    tuning: tuple[int, ...] | None = None,
) -> None:
    """Quantises groups of rows.

    Args:
        x: Shape [rows, channels], last stride 1.
        q: Codes, shape [rows, channels] or half of them, uint8, contiguous.
        scale: Shape [rows, groups], uint8 or fp32, contiguous.
        format: As in `small_floats`.
        group: Channels of a group, a power of two.
        tuning: Groups a program, and warps; two values at a time also pairs of a thread. None for those of the table.
    """
    if format != E4M3_E8M0 and _in_pairs(x):
        from deepinfer.kernels.triton.fp4_pairs import cast_pairs_kernel

        groups, warps, each = (*tuning, 4)[:3] if tuning else configs.pairs(group)
        launch(
            cast_pairs_kernel, cdiv(scale.numel(), groups),
            x.view(torch.int32), q, scale, scale.numel(), x.stride(0) // 2, CHANNELS=x.shape[1],
            POWER=format == E2M1_E8M0, GROUPS=groups, GROUP=group, EACH=each, num_warps=warps,
            enable_fp_fusion=False,
        )  # fmt: skip
        return
    groups, warps = tuning[:2] if tuning else configs.groups(group)
    launch(
        cast_groups_kernel, cdiv(scale.numel(), groups),
        x, q, scale, scale.numel(), x.stride(0), CHANNELS=x.shape[1], FORMAT=format,
        SCALE_FP32=scale.dtype == torch.float32, HARDWARE=hardware_level(x), GROUPS=groups,
        GROUP=group, num_warps=warps, enable_fp_fusion=False,
    )  # fmt: skip


def cast_blocks(
    w: Tensor,
    q: Tensor,
    scale: Tensor,
    rows: int,
    columns: int,
    tuning: tuple[int, int] | None = None,
) -> None:
    """Quantises blocks of weights to e4m3.

    Args:
        w: Shape [batch, N, K], last stride 1.
        q: Shape [batch, N, K], uint8, contiguous.
        scale: Shape [batch, ceil(N / rows), ceil(K / columns)], uint8 or fp32, contiguous.
        rows: Rows of a block, a power of two.
        columns: Columns of a block, a power of two.
        tuning: Blocks side by side, and warps; None for those of the table.
    """
    side, warps = tuning or configs.blocks(rows, columns)
    batch, n, k = w.shape
    programs = batch * cdiv(n, rows) * cdiv(cdiv(k, columns), side)
    launch(
        cast_blocks_kernel, programs,
        w, q, scale, w.stride(0), w.stride(1), N=n, K=k, SCALE_FP32=scale.dtype == torch.float32,
        HARDWARE=hardware_level(w), ROWS=rows, COLUMNS=columns, SIDE=side, num_warps=warps,
        enable_fp_fusion=False,
    )  # fmt: skip


def cast_back(
    q: Tensor, scale: Tensor, out: Tensor, packed: bool, kind: int, rows: int, columns: int, n: int,
    tuning: tuple[int, int] | None = None,
) -> None:  # fmt: skip
    """Dequantises rows.

    Args:
        q: Shape [rows, K] or half of it, uint8, last stride 1.
        scale: Shape [blocks], one a block of `rows` rows and `columns` columns, uint8 or fp32, contiguous.
        out: Shape [rows, K], contiguous.
        packed: Whether codes are pairs of e2m1; else e4m3.
        kind: 0 for fp32 scales, 1 for e8m0, 2 for e4m3.
        rows: Rows of a block.
        columns: Columns of a block, a power of two.
        n: Rows of a matrix; `q` holds one or more of them.
        tuning: Groups a program, and warps; None for those of the table.
    """
    groups, warps = tuning or configs.cast_back(columns)
    count, k = out.shape
    total = count * cdiv(k, columns)
    launch(
        cast_back_kernel, cdiv(total, groups),
        q, scale, out, total, q.stride(0), N=n, K=k, PACKED=packed, SCALE=kind,
        HARDWARE=hardware_level(q), ROWS=rows, GROUPS=groups, GROUP=columns, num_warps=warps,
        enable_fp_fusion=False,
    )  # fmt: skip


def swiglu_cast(
    x: Tensor, weights: Tensor | None, limit: float, q: Tensor, scale: Tensor, format: int, group: int,
    tuning: tuple[int, ...] | None = None, pairs: bool = True,
) -> None:  # fmt: skip
    """SwiGLU of rows, and its cast.

    Args:
        x: Gates, then values: shape [rows, 2 * channels], last stride 1.
        weights: Shape [rows], fp32, contiguous, or None.
        limit: Of the clamp; infinite for none.
        q: Codes as in `cast_groups`, or with format 0 values, shape [rows, channels], contiguous.
        scale: Shape [rows, groups], uint8 or fp32, contiguous; not touched with format 0.
        format: As in `small_floats`, or 0 for no cast.
        group: Channels of a group, a power of two.
        tuning: Groups a program, warps, how exact the steps are (1 fast, 2 as torch), and pairs of a thread when two values go
            at a time, as they can to e2m1; None for those of the table.
        pairs: Whether two values may go at a time where they can.
    """
    small = format in (E2M1_E8M0, E2M1_E4M3)
    sizes = tuning or configs.swiglu(group, 4 if small else 8)
    groups, warps, mode, each = (*sizes, 8)[:4]
    if contract.interpreted():
        mode = 0
    channels = x.shape[1] // 2
    total = x.shape[0] * (channels // group)
    if pairs and each and small and _in_pairs(x):
        from deepinfer.kernels.triton.swiglu_pairs import swiglu_pairs_kernel

        launch(
            swiglu_pairs_kernel, cdiv(total, groups),
            x.view(torch.int32), x if weights is None else weights,
            q, scale, total, x.stride(0) // 2, limit,
            _pair_of(limit), CHANNELS=channels, HAS_LIMIT=_kind_of(limit), HAS_WEIGHTS=weights is not None,
            MODE=mode, FORMAT=format, GROUPS=groups, GROUP=group, EACH=each, num_warps=warps,
            enable_fp_fusion=False,
        )  # fmt: skip
        return
    launch(
        swiglu_cast_kernel, cdiv(total, groups),
        x, x if weights is None else weights, q, scale, total, x.stride(0), limit,
        CHANNELS=channels, HAS_LIMIT=math.isfinite(limit), HAS_WEIGHTS=weights is not None,
        MODE=mode, FORMAT=format, SCALE_FP32=scale.dtype == torch.float32,
        HARDWARE=hardware_level(x), GROUPS=groups, GROUP=group, num_warps=warps,
        enable_fp_fusion=False,
    )  # fmt: skip
