"""Device functions: rows of values to codes and scales of the cache formats, and back.

Everything is integer and fp32 arithmetic with the results of the casts of the reference, bit for bit, and on a chip without
a division.
"""

from __future__ import annotations

import triton
import triton.language as tl

__all__ = [
    "decode_e2m1",
    "decode_e4m3",
    "decode_e8m0",
    "encode_e2m1",
    "encode_e4m3",
    "magnitude_bits",
    "power_of_two_scale",
    "quotients",
    "scale_e4m3",
]


@triton.jit
def magnitude_bits(v):
    """Bits of |v|, which are in the order of the values; NaN is above infinity."""
    return v.to(tl.int32, bitcast=True) & 0x7FFFFFFF


@triton.jit
def power_of_two_scale(most, BITS: tl.constexpr):
    """Exponent byte of the scale of a group, from the bits of its largest magnitude; 255 if that is not finite."""
    if BITS == 8:
        # 448 is 1.75 * 2^8: a larger mantissa needs the next power; the least magnitude is 1e-4.
        bits = (tl.maximum(most, 0x38D1B717) + 0x1FFFFF) >> 23
        byte = bits - 8
    else:
        # 6 is 1.5 * 2^2; the least magnitude is 6 * 2^-126.
        bits = (tl.maximum(most, 0x01C00000) + 0x3FFFFF) >> 23
        byte = bits - 2
    return tl.where(most >= 0x7F800000, 255, byte)


@triton.jit
def decode_e8m0(byte):
    """2^(byte - 127) as fp32; NaN for 255."""
    bits = tl.where(byte == 0, 0x00400000, byte << 23)
    return tl.where(byte == 255, 0x7FC00000, bits).to(tl.float32, bitcast=True)


@triton.jit
def inverse_e8m0(byte):
    """2^(127 - byte) as fp32 for bytes of scales, which are in [1, 253]; 0 for 255."""
    return tl.where(byte == 255, 0, (254 - byte) << 23).to(tl.float32, bitcast=True)


@triton.jit
def scale_e4m3(most, FUSED: tl.constexpr):
    """A sixth of a magnitude, at least 2^-9 and at most 448, rounded to e4m3: its byte, and as fp32; NaN if not finite."""
    broken = most >= 0x7F800000
    a = tl.maximum(most, 0x3C400000).to(tl.float32, bitcast=True)
    if FUSED:
        # A quotient to nearest: a product with the inverse, corrected once by its remainder.
        s = a * 0.16666667163372040
        s = tl.fma(tl.fma(s, -6.0, a), 0.16666667163372040, s)
    else:
        s = tl.math.div_rn(a, 6.0)
    byte = encode_e4m3(tl.minimum(s, 448.0), False)
    byte = tl.where(broken, 0x7F, byte)
    return byte, decode_e4m3(byte, False)


@triton.jit
def quotients(v, factor, FUSED: tl.constexpr):
    """Quotients to nearest by scales that `scale_e4m3` made."""
    if FUSED:
        bits = factor.to(tl.int32, bitcast=True)
        # The inverse of eight to fifteen eighths, each to nearest, then of the power of two, which is exact.
        low = tl.where((bits & 0x200000) != 0, 0.8, 1.0)
        low = tl.where((bits & 0x100000) != 0, tl.where((bits & 0x200000) != 0, 8 / 11, 8 / 9), low)
        high = tl.where((bits & 0x200000) != 0, 4 / 7, 2 / 3)
        high = tl.where(
            (bits & 0x100000) != 0, tl.where((bits & 0x200000) != 0, 8 / 15, 8 / 13), high
        )
        inverse = tl.where((bits & 0x400000) != 0, high, low)
        inverse *= ((254 << 23) - (bits & 0x7F800000)).to(tl.float32, bitcast=True)
        # Of the magnitude, because the correction loses the sign of zero.
        size = tl.abs(v)
        y = size * inverse
        y = tl.fma(tl.fma(-y, factor, size), inverse, y).to(tl.int32, bitcast=True)
        return (y | (v.to(tl.int32, bitcast=True) & -0x80000000)).to(tl.float32, bitcast=True)
    else:
        return tl.math.div_rn(v, factor)


@triton.jit
def encode_e4m3(v, NATIVE: tl.constexpr):
    """Bytes of fp32 values of magnitude 448 at most, to nearest, ties to even; NaN is 0x7F."""
    if NATIVE:
        return v.to(tl.float8e4nv).to(tl.uint8, bitcast=True)
    else:
        bits = v.to(tl.int32, bitcast=True)
        size = bits & 0x7FFFFFFF
        # Adding 2^14 leaves multiples of 2^-9 in the last bits of the sum.
        small = (size.to(tl.float32, bitcast=True) + 16384.0).to(tl.int32, bitcast=True) & 0xF
        large = ((size + 0x7FFFF + ((size >> 20) & 1)) >> 20) - 960
        byte = tl.where(size < 0x3C800000, small, large)
        byte = tl.where(size > 0x7F800000, 0x7F, byte)
        return (byte | ((bits >> 24) & 0x80)).to(tl.uint8)


@triton.jit
def decode_e4m3(byte, NATIVE: tl.constexpr):
    """Values of e4m3 bytes as fp32."""
    if NATIVE:
        return byte.to(tl.uint8).to(tl.float8e4nv, bitcast=True).to(tl.float32)
    else:
        b = byte.to(tl.int32)
        value = ((b & 0x7F) << 20).to(tl.float32, bitcast=True) * 1.329227995784916e36
        value = tl.where((b & 0x7F) == 0x7F, float("nan"), value)
        # The sign by its bit: 0 less 0 would be +0.
        sign = (b & 0x80) << 24
        return (value.to(tl.int32, bitcast=True) | sign).to(tl.float32, bitcast=True)


@triton.jit
def encode_e2m1(y):
    """Codes of fp32 values, clamped to 6, to nearest, ties to even; any code for NaN."""
    bits = y.to(tl.int32, bitcast=True)
    size = tl.minimum((bits & 0x7FFFFFFF).to(tl.float32, bitcast=True), 6.0)
    # The last bits of the sum count steps of 0.5, 1 or 2 and hold the code.
    offset = tl.where(size < 2.0, 4194304.0, tl.where(size < 4.0, 8388610.0, 16777224.0))
    code = (size + offset).to(tl.int32, bitcast=True) & 7
    return code | ((bits >> 28) & 8)


@triton.jit
def decode_e2m1(code):
    """Values of e2m1 codes as fp32."""
    size = code & 7
    bits = tl.where(size > 1, (size + 252) << 22, size * 0x3F000000)
    return (bits | ((code & 8) << 28)).to(tl.float32, bitcast=True)
