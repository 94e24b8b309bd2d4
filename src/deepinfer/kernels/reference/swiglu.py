"""SwiGLU of the two halves of a row, alone or with a cast, in plain torch."""

from __future__ import annotations

import math
from typing import Literal

import torch
from torch import Tensor

from deepinfer.kernels.reference.cast import (
    decode_ue8m0,
    per_token_cast_to_fp4,
    per_token_cast_to_fp8,
)

__all__ = ["CastFormat", "cast_rows", "silu_and_mul", "silu_and_mul_quant"]

CastFormat = Literal["fp8", "mxfp4", "nvfp4"]


def cast_rows(
    x: Tensor, format: CastFormat, group: int, scale_dtype: torch.dtype = torch.float8_e8m0fnu
) -> tuple[Tensor, Tensor]:
    """Casts rows, shape [..., channels], to codes and scales of a format; see `deepinfer.kernels.quant`."""
    if format == "fp8":
        q, scale = per_token_cast_to_fp8(x, group)
        return q, scale if scale_dtype == torch.float8_e8m0fnu else decode_ue8m0(scale)
    return per_token_cast_to_fp4(x, 32 if format == "mxfp4" else 16)


def silu_and_mul(x: Tensor, weights: Tensor | None = None, limit: float | None = None) -> Tensor:
    """`silu(min(gate, limit)) * clamp(up, -limit, limit)` in fp32, times a weight a row.

    Args:
        x: Gates, then values: shape [..., 2 * channels], any float dtype.
        weights: Shape [...], fp32, or None.
        limit: Clamp of both; the gate has no lower limit. None for no clamp.

    Returns:
        Shape [..., channels], contiguous, in the dtype of `x`.
    """
    gate, up = x.float().chunk(2, -1)
    if limit is not None and math.isfinite(limit):
        gate, up = gate.clamp(max=limit), up.clamp(-limit, limit)
    result = torch.nn.functional.silu(gate) * up
    if weights is not None:
        result = result * weights.unsqueeze(-1)
    return result.to(x.dtype)


def silu_and_mul_quant(
    x: Tensor,
    weights: Tensor | None = None,
    limit: float | None = None,
    format: CastFormat = "fp8",
    group: int = 32,
    scale_dtype: torch.dtype = torch.float8_e8m0fnu,
) -> tuple[Tensor, Tensor]:
    """`silu_and_mul` and a cast of its result; see `deepinfer.kernels.quant.silu_and_mul_quant`."""
    return cast_rows(silu_and_mul(x, weights, limit), format, group, scale_dtype)
