"""Rounding of DeepSeek-V4.1 in plain torch: FP8 (e4m3), MXFP4 and the 16-group FP4 of the KV pools.

Each function quantises groups along the last axis and gives the dequantised values back: what the caches and the
quantised linear layers of the model compute with. The casts to bytes are in `deepinfer.kernels.reference.cast`.

All of them compute in fp32 and round to nearest, ties to even. Scales are powers of two (e8m0) except for the
16-group FP4, whose scale is an e4m3 number. A group that holds a NaN or an infinity comes out as NaN as a whole,
so that a fault shows instead of turning into finite values.

Source: the formulas of the DeepSeek-V4.1 report and reference; MX formats of the OCP Microscaling specification.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from deepinfer.core.errors import ShapeError
from deepinfer.kernels import contract

__all__ = ["FP4_MAX", "FP8_MAX", "ceil_to_ue8m0", "round_fp8", "round_mxfp4", "round_nvfp4"]

FP8_MAX = 448.0
FP4_MAX = 6.0
_EXPONENT_BITS = 0x7F800000
_MANTISSA_BITS = 0x007FFFFF


def ceil_to_ue8m0(x: Tensor) -> Tensor:
    """The smallest power of two that is not below each value.

    Works on the exponent bits: a logarithm would be one step off next to a power of two.

    Args:
        x: Positive values, any shape, fp32, in [2^-126, 2^127] or infinite.

    Returns:
        Powers of two, same shape, fp32; infinity for infinity.

    Raises:
        ShapeError: `x` has another dtype.
    """
    contract.check_dtype("x", x, torch.float32)
    bits = (x.view(torch.int32) + _MANTISSA_BITS) & _EXPONENT_BITS
    return bits.view(torch.float32)


def round_fp8(x: Tensor, group: int = 32) -> Tensor:
    """Quantises to e4m3 with one power-of-two scale a group, and back.

    With a = max(|x|, 1e-4) over the group, the scale is 2^ceil(log2(a / 448)).

    Args:
        x: Values, shape [..., channels], any float dtype; channels divisible by `group`.
        group: Channels that share a scale.

    Returns:
        The rounded values, same shape and dtype as `x`; NaN throughout a group with a NaN or an infinity.

    Raises:
        ShapeError: `x` are no floats or a number without axes, or `channels` is not a multiple of `group`, or that is below 1.
    """
    _check(x, group)
    g = split_groups(x, group)
    step = _quantum(g, fp8_scale(g), min_exponent=-6, mantissa_bits=3)
    return ((g / step).round_() * step).reshape(x.shape).to(x.dtype)


def round_mxfp4(x: Tensor) -> Tensor:
    """Quantises to e2m1 with one power-of-two scale per 32 channels, and back.

    With a = max(|x|, 6 * 2^-126) over the group, the scale is 2^ceil(log2(a / 6)).

    Args:
        x: Values, shape [..., channels], any float dtype; channels divisible by 32.

    Returns:
        The rounded values, same shape and dtype as `x`; NaN throughout a group with a NaN or an infinity.

    Raises:
        ShapeError: `x` are no floats or a number without axes, or `channels` is not a multiple of 32.
    """
    _check(x)
    g = split_groups(x, 32)
    step = _quantum(g, mxfp4_scale(g), min_exponent=0, mantissa_bits=1)
    return ((g / step).round_() * step).reshape(x.shape).to(x.dtype)


def round_nvfp4(x: Tensor) -> Tensor:
    """Quantises to e2m1 with one e4m3 scale per 16 channels (no global scale), and back.

    With a = max(|x|, 6 * 2^-9) over the group, the scale is a / 6 rounded to e4m3. A scale above 448 saturates, so
    values above 2688 come out as 2688.

    Args:
        x: Values, shape [..., channels], any float dtype; channels divisible by 16.

    Returns:
        The rounded values, same shape and dtype as `x`; NaN throughout a group with a NaN or an infinity.

    Raises:
        ShapeError: `x` are no floats or a number without axes, or `channels` is not a multiple of 16.
    """
    _check(x)
    g = split_groups(x, 16)
    scale = nvfp4_scale(g)
    return (round_to_fp4_grid(g / scale) * scale).reshape(x.shape).to(x.dtype)


def _check(x: Tensor, group: int = 1) -> None:
    contract.check_floats("x", x)
    contract.check_sizes("group", group)


def split_groups(x: Tensor, group: int) -> Tensor:
    """Views the last axis as groups, in fp32: [..., channels] to [..., channels / group, group]."""
    channels = x.shape[-1]
    if channels % group:
        raise ShapeError(
            f"x has {channels} channels; groups of {group} need a multiple of {group}. "
            f"Pad the last axis or choose another group.",
            argument="x",
            expected=f"[..., multiple of {group}]",
            found=tuple(x.shape),
        )
    return x.float().unflatten(-1, (channels // group, group))


def fp8_scale(g: Tensor) -> Tensor:
    """Power-of-two scale of each e4m3 group, shape [..., 1]; infinite for a group that is not finite."""
    a = g.abs().amax(-1, keepdim=True).clamp_min_(1e-4)
    return ceil_to_ue8m0(a.nan_to_num_(math.inf, math.inf).div_(FP8_MAX))


def mxfp4_scale(g: Tensor) -> Tensor:
    """Power-of-two scale of each e2m1 group, shape [..., 1]; infinite for a group that is not finite."""
    a = g.abs().amax(-1, keepdim=True).clamp_min_(FP4_MAX * 2.0**-126)
    return ceil_to_ue8m0(a.nan_to_num_(math.inf, math.inf).div_(FP4_MAX))


def nvfp4_scale(g: Tensor) -> Tensor:
    """Scale of each 16-channel group as an e4m3 number in fp32, shape [..., 1]; NaN for a group that is not finite."""
    a = g.abs().amax(-1, keepdim=True).clamp_min_(FP4_MAX * 2.0**-9)
    scale = a.nan_to_num_(math.nan, math.nan).div_(FP4_MAX).clamp_max_(FP8_MAX)
    return scale.to(torch.float8_e4m3fn).float()


def round_to_fp4_grid(y: Tensor) -> Tensor:
    """Rounds fp32 values to {0, .5, 1, 1.5, 2, 3, 4, 6} with sign, ties to the even code, clamped to +-6."""
    y = y.clamp(-FP4_MAX, FP4_MAX)
    step = (y.view(torch.int32) & _EXPONENT_BITS).view(torch.float32).clamp_min_(1.0).mul_(0.5)
    return (y / step).round_() * step


def _quantum(g: Tensor, scale: Tensor, *, min_exponent: int, mantissa_bits: int) -> Tensor:
    """Distance between neighbours of each value in a small float format times a power-of-two scale."""
    exponent = (g.view(torch.int32) & _EXPONENT_BITS).view(torch.float32)
    return torch.maximum(exponent, scale * 2.0**min_exponent).mul_(2.0**-mantissa_bits)
