"""Device functions that round groups of values to small float formats and back."""

from __future__ import annotations

import triton
import triton.language as tl

__all__ = ["FORMATS", "nearest_even", "round_groups"]

FORMATS = {"none": 0, "fp8": 1, "mxfp4": 2, "nvfp4": 3}


@triton.jit
def power_below(x):
    """The power of two of each value's exponent; 0 for subnormal values."""
    return (x.to(tl.int32, bitcast=True) & 0x7F800000).to(tl.float32, bitcast=True)


@triton.jit
def power_above(x):
    """The smallest power of two that is not below each positive value."""
    bits = (x.to(tl.int32, bitcast=True) + 0x007FFFFF) & 0x7F800000
    return bits.to(tl.float32, bitcast=True)


@triton.jit
def nearest_even(x):
    """The nearest integer, ties to even, for |x| below 2^22."""
    return (x + 12582912.0) - 12582912.0


@triton.jit
def round_groups(v, FORMAT: tl.constexpr):
    """Rounds fp32 values, shape [groups, group], with one scale a group; see the reference for the formats."""
    if FORMAT == 0:
        return v
    highest = tl.max(tl.abs(v), axis=1, keep_dims=True)
    # tl.max drops NaN, and a fault has to show in the whole group.
    broken = tl.sum((v != v).to(tl.int32), axis=1, keep_dims=True) > 0
    highest = tl.where(broken, float("inf"), highest)
    if FORMAT == 1:
        scale = power_above(tl.math.div_rn(tl.maximum(highest, 1e-4), 448.0))
        step = tl.maximum(power_below(v), scale * 0.015625) * 0.125
        return nearest_even(tl.math.div_rn(v, step)) * step
    if FORMAT == 2:
        scale = power_above(tl.math.div_rn(tl.maximum(highest, 7.052966104933725e-38), 6.0))
        step = tl.maximum(power_below(v), scale) * 0.5
        return nearest_even(tl.math.div_rn(v, step)) * step
    scale = tl.minimum(tl.math.div_rn(tl.maximum(highest, 0.01171875), 6.0), 448.0)
    step = tl.maximum(power_below(scale), 0.015625) * 0.125
    scale = nearest_even(tl.math.div_rn(scale, step)) * step
    scale = tl.where(highest == float("inf"), float("nan"), scale)
    y = tl.math.div_rn(v, scale)
    y = tl.minimum(tl.maximum(y, -6.0), 6.0)
    step = tl.maximum(power_below(y), 1.0) * 0.5
    return tl.where(highest == float("inf"), float("nan"), nearest_even(y / step) * step * scale)
