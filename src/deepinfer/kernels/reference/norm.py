"""RMS norm, alone, after an addition, or before rotation and a cast, in plain torch."""

from __future__ import annotations

import torch
from torch import Tensor

from deepinfer.kernels.reference.rope import apply_rope
from deepinfer.kernels.reference.swiglu import CastFormat, cast_rows

__all__ = ["fused_add_rms_norm", "rms_norm", "rms_norm_rope_quant"]


def rms_norm(x: Tensor, weight: Tensor, eps: float = 1e-6) -> Tensor:
    """`x * rsqrt(mean(x^2) + eps) * weight` over the last axis, in fp32, then in the dtype of `x`.

    Args:
        x: Shape [..., channels], any float dtype.
        weight: Gains, shape [channels], any float dtype.
        eps: Added to the mean square.

    Returns:
        Same shape and dtype as `x`.
    """
    wide = x.float()
    scale = torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
    return (wide * scale * weight.float()).to(x.dtype)


def fused_add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor, eps: float = 1e-6) -> None:
    """Adds `x` to `residual` in place, rounded to its dtype, and norms the sum into `x`.

    Args:
        x: Shape [..., channels].
        residual: Same shape and dtype.
        weight: Gains, shape [channels].
        eps: Added to the mean square.
    """
    residual.copy_(residual.float() + x.float())
    x.copy_(rms_norm(residual, weight, eps))


def rms_norm_rope_quant(
    x: Tensor,
    weight: Tensor | None,
    eps: float = 1e-6,
    phases: Tensor | None = None,
    positions: Tensor | None = None,
    format: CastFormat = "fp8",
) -> tuple[Tensor, Tensor]:
    """Norm, rotation of the last channels and cast; see `deepinfer.kernels.norm.rms_norm_rope_quant`."""
    result = x if weight is None else rms_norm(x, weight, eps)
    if phases is not None:
        result = apply_rope(result, phases, positions)
    return cast_rows(result, format, 32)
