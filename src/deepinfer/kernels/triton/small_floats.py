"""Device functions that turn groups of fp32 values into the bytes of small float formats, and back."""

from __future__ import annotations

import triton
import triton.language as tl

from deepinfer.kernels.triton.e2m1_codes import packed, power_pairs, quotient_pairs

__all__ = ["E2M1_E4M3", "E2M1_E8M0", "E4M3_E8M0", "e4m3_values", "e8m0_values", "magnitudes", "write_groups"]  # fmt: skip

E4M3_E8M0 = 1
"""e4m3 values, one power-of-two scale a group."""
E2M1_E8M0 = 2
"""e2m1 values in pairs, one power-of-two scale a group: MXFP4."""
E2M1_E4M3 = 3
"""e2m1 values in pairs, one e4m3 scale a group."""


@triton.jit
def magnitudes(v):
    """Bits of |v|: integers in the order of the values, with infinity and then NaN as the largest."""
    return v.to(tl.int32, bitcast=True) & 0x7FFFFFFF


@triton.jit
def e4m3_codes(y, HARDWARE: tl.constexpr):
    """Bytes of values of at most 448, to nearest, ties to even; 0x7F for NaN."""
    if HARDWARE:
        return y.to(tl.float8e4nv).to(tl.uint8, bitcast=True)
    bits = y.to(tl.int32, bitcast=True)
    size = bits & 0x7FFFFFFF
    normal = ((size + 0x7FFFF + ((size >> 20) & 1)) >> 20) - (120 << 3)
    # Below 2^-6 the steps are 2^-9, which is the last bit of numbers near 2^14.
    small = (tl.abs(y) + 16384.0).to(tl.int32, bitcast=True) - 0x46800000
    code = tl.where(size < 0x3C800000, small, normal) | ((bits >> 24) & 0x80)
    return tl.where(size > 0x7F800000, 0x7F, code).to(tl.uint8)


@triton.jit
def e4m3_values(codes, HARDWARE: tl.constexpr):
    """Values of bytes, in fp32."""
    if HARDWARE:
        return codes.to(tl.float8e4nv, bitcast=True).to(tl.float32)
    wide = codes.to(tl.int32)
    bits = ((wide & 0x7F) << 20) | ((wide & 0x80) << 24)
    value = bits.to(tl.float32, bitcast=True) * 1.329227995784916e36  # 2^120
    return tl.where((wide & 0x7F) == 0x7F, float("nan"), value)


@triton.jit
def e8m0_values(codes):
    """Values of bytes, in fp32: 2^(byte - 127), NaN for 255."""
    wide = codes.to(tl.int32)
    bits = tl.where(wide == 0, 0x00400000, tl.where(wide == 255, 0x7FC00000, wide << 23))
    return bits.to(tl.float32, bitcast=True)


@triton.jit
def e2m1_bits(y, NARROW: tl.constexpr):
    """Codes of values of at most 6, ties to the even code: three bits from bit 22 up, the sign in bit 31; 0 for NaN.

    NARROW: every value is a multiple of 2^-23, or no nearer to a tie than that.
    """
    y = tl.where(y != y, 0.0, y)
    bits = y.to(tl.int32, bitcast=True)
    if NARROW:
        # Times 2^-126 the codes are the leading bits of the fp32 number, zero and 0.5 included.
        bits = (y * 1.1754943508222875e-38).to(tl.int32, bitcast=True)
        return bits + 0x1FFFFF + ((bits >> 22) & 1)
    size = bits & 0x7FFFFFFF
    normal = size + 0x1FFFFF + ((size >> 22) & 1) - (126 << 23)
    # Below 1 the steps are 0.5, which is the last bit of numbers near 2^22.
    small = (tl.abs(y) + 4194304.0).to(tl.int32, bitcast=True) - 0x4A800000
    return tl.where(size < 0x3F800000, small << 22, normal) | (bits & -0x80000000)


@triton.jit
def e2m1_pairs(bits, GROUPS: tl.constexpr, GROUP: tl.constexpr):
    """Bytes of pairs of codes as `e2m1_bits` gives them, the even one in the low half; shape [GROUPS, GROUP / 2]."""
    low, high = tl.split(tl.reshape(bits, [GROUPS, GROUP // 2, 2]))
    low = ((low >> 22) & 7) | ((low >> 28) & 8)
    return low | ((high >> 18) & 0x70) | ((high >> 24) & 0x80)


@triton.jit
def e2m1_values(codes):
    """Values of codes 0 to 15, in fp32."""
    bits = ((codes & 7) << 22) | ((codes & 8) << 28)
    return bits.to(tl.float32, bitcast=True) * 8.507059173023462e37  # 2^126


@triton.jit
def through(v, kind, HARDWARE: tl.constexpr):
    """fp32 values rounded to another dtype, in fp32."""
    if HARDWARE and kind == tl.bfloat16:
        # Two at a time: a conversion of one value takes eight times as long.
        low = tl.inline_asm_elementwise(
            "{ .reg .b32 p; cvt.rn.bf16x2.f32 p, $3, $2; shl.b32 $0, p, 16; and.b32 $1, p, 0xffff0000; }",
            "=r,=r,r,r", [v], dtype=tl.int32, is_pure=True, pack=2,
        )  # fmt: skip
        return low.to(tl.float32, bitcast=True)
    return v.to(kind).to(tl.float32)


@triton.jit
def power_scale(highest, MOST: tl.constexpr, FLOOR: tl.constexpr):
    """Exponent byte of the smallest power of two that is at least highest / MOST, and its inverse.

    Takes the bits of the largest magnitude. A group that is not finite has byte 255 and inverse 0. MOST is 448 or 6: 1.75
    or 1.5 times a power of two, and the exponent is one more for numbers whose leading digits are above these.
    """
    broken = highest >= 0x7F800000
    SHIFT: tl.constexpr = 8 if MOST == 448.0 else 2
    BELOW: tl.constexpr = 0x1FFFFF if MOST == 448.0 else 0x3FFFFF
    # The bits of the smallest largest magnitude that counts.
    LEAST: tl.constexpr = 0x38D1B717 if FLOOR == 1e-4 else 0x01C00000
    exponent = ((tl.maximum(highest, LEAST) + BELOW) >> 23) - SHIFT
    inverse = tl.where(broken, 0, (254 - exponent) << 23).to(tl.float32, bitcast=True)
    return tl.where(broken, 255, exponent), inverse


@triton.jit
def e4m3_scale(highest, HARDWARE: tl.constexpr):
    """Byte of the e4m3 number nearest to highest / 6, at most 448; 0x7F when the group is not finite."""
    broken = highest >= 0x7F800000
    size = tl.maximum(tl.where(broken, 0, highest).to(tl.float32, bitcast=True), 0.01171875)
    if HARDWARE:
        # A product with the inverse, corrected by its exact remainder.
        near = size * 0.16666667163372040
        near = tl.fma(tl.fma(-near, 6.0, size), 0.16666667163372040, near)
    else:
        near = tl.math.div_rn(size, 6.0)
    code = e4m3_codes(tl.minimum(near, 448.0), HARDWARE)
    return tl.where(broken, 0x7F, code).to(tl.uint8)


@triton.jit
def quotients(v, divisor, HARDWARE: tl.constexpr):
    """Quotients by e4m3 divisors, rounded to fp32; these have shape [groups, 1]."""
    if HARDWARE:
        # A product with the inverse, corrected by its exact remainder.
        inverse = tl.math.div_rn(1.0, divisor)
        near = v * inverse
        return tl.fma(tl.fma(-near, divisor, v), inverse, near)
    return tl.math.div_rn(v, divisor)


@triton.jit
def write_groups(
    v, q, scale, there, inside, FORMAT: tl.constexpr, SCALE_FP32: tl.constexpr,
    HARDWARE: tl.constexpr, NARROW: tl.constexpr, GROUPS: tl.constexpr, GROUP: tl.constexpr,
):  # fmt: skip
    """Quantises groups of fp32 values, shape [GROUPS, GROUP], and stores codes and scales.

    Args:
        v: The values, zero outside.
        q: Where the codes of each group go, shape [GROUPS].
        scale: Where its scale goes, shape [GROUPS].
        there: Which groups there are, shape [GROUPS].
        inside: Which values there are, shape [GROUPS, GROUP].
        FORMAT: See the constants of this module.
        SCALE_FP32: Whether power-of-two scales are stored as fp32; else as one byte.
        HARDWARE: What the chip has: 1 for conversions of e4m3, 2 for packed bf16 arithmetic as well, else 0.
        NARROW: Whether the values are those of bf16; more leading bits need more care.
        GROUPS: Groups.
        GROUP: Values of a group.
    """
    highest = tl.max(magnitudes(v), axis=1)
    if FORMAT == 1:
        exponent, inverse = power_scale(highest, 448.0, 1e-4)
        if SCALE_FP32:
            bits = tl.where(exponent == 255, 0x7FC00000, exponent << 23)
            tl.store(scale, bits.to(tl.float32, bitcast=True), mask=there)
        else:
            tl.store(scale, exponent.to(tl.uint8), mask=there)
        codes = e4m3_codes(v * inverse[:, None], HARDWARE)
        tl.store(q[:, None] + tl.arange(0, GROUP)[None, :], codes, mask=inside)
    else:
        # What the chip can do: 2 is packed bf16 arithmetic as well, and values of bf16 go two at a time.
        IN_PAIRS: tl.constexpr = HARDWARE == 2 and NARROW
        if FORMAT == 2:
            exponent, inverse = power_scale(highest, 6.0, 7.052966104933725e-38)
            tl.store(scale, exponent.to(tl.uint8), mask=there)
            if IN_PAIRS:
                pairs = power_pairs(packed(v, GROUPS, GROUP), inverse[:, None])
            else:
                bits = e2m1_bits(v * inverse[:, None], NARROW)
                pairs = e2m1_pairs(bits, GROUPS, GROUP)
        else:
            byte = e4m3_scale(highest, HARDWARE)
            tl.store(scale, byte, mask=there)
            divisor = e4m3_values(byte, False)
            if IN_PAIRS:
                broken = byte == 0x7F
                pairs = quotient_pairs(packed(v, GROUPS, GROUP), divisor[:, None], broken[:, None])
            else:
                # Of the magnitude, because the correction of a quotient loses the sign of zero.
                y = quotients(tl.abs(v), divisor[:, None], HARDWARE)
                y = tl.minimum(y, 6.0, propagate_nan=tl.PropagateNan.ALL).to(tl.int32, bitcast=True)
                y = y | (v.to(tl.int32, bitcast=True) & -0x80000000)
                bits = e2m1_bits(y.to(tl.float32, bitcast=True), NARROW)
                pairs = e2m1_pairs(bits, GROUPS, GROUP)
        to = q[:, None] + tl.arange(0, GROUP // 2)[None, :]
        tl.store(to, pairs.to(tl.uint8), mask=there[:, None])
