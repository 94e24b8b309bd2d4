"""Pairs of bf16 as int32, the even one in the low half: their values, and groups of them as codes and scales."""

from __future__ import annotations

import triton
import triton.language as tl

from deepinfer.kernels.triton.e2m1_codes import power_pairs, quotient_pairs, twice
from deepinfer.kernels.triton.small_floats import power_scale

__all__ = ["even", "highest_of", "least", "most", "odd", "pair_codes", "pair_of", "squares"]


@triton.jit
def even(w):
    """The even values of pairs, in fp32."""
    return (w << 16).to(tl.float32, bitcast=True)


@triton.jit
def odd(w):
    """The odd values of pairs, in fp32."""
    return (w & -65536).to(tl.float32, bitcast=True)


@triton.jit
def pair_of(a, b):
    """Pairs of fp32 values, each rounded to bf16."""
    return tl.inline_asm_elementwise(
        "cvt.rn.bf16x2.f32 $0, $2, $1;", "=r,r,r", [a, b], dtype=tl.int32, is_pure=True, pack=1
    )


@triton.jit
def least(w, bound):
    """The smaller of two pairs of bf16, value by value; NaN if one is."""
    return tl.inline_asm_elementwise(
        "min.NaN.bf16x2 $0, $1, $2;", "=r,r,r", [w, bound], dtype=tl.int32, is_pure=True, pack=1
    )


@triton.jit
def most(w, bound):
    """The larger of two pairs of bf16, value by value; NaN if one is."""
    return tl.inline_asm_elementwise(
        "max.NaN.bf16x2 $0, $1, $2;", "=r,r,r", [w, bound], dtype=tl.int32, is_pure=True, pack=1
    )


@triton.jit
def _larger(a, b):
    return tl.inline_asm_elementwise(
        "max.u16x2 $0, $1, $2;", "=r,r,r", [a, b], dtype=tl.int32, is_pure=True, pack=1
    )


@triton.jit
def highest_of(w):
    """Bits of the largest magnitude of pairs along the last axis, which stays, as fp32 numbers have them; NaN is the largest."""
    both = tl.reduce(w & 0x7FFF7FFF, len(w.shape) - 1, _larger, keep_dims=True)
    return tl.maximum(both & 0x7FFF0000, both << 16)


# A thread's eight words, in two sums; seven places stay zero, and to take them in as bits costs nothing.
_SQUARES = tl.constexpr(
    "{ .reg .b32 t; .reg .f32 a, b, s, u; "
    + "".join(
        f"shl.b32 t, ${i}, 16; mov.b32 a, t; and.b32 t, ${i}, 0xFFFF0000; mov.b32 b, t; "
        + ("mul.f32 s, a, a; mul.f32 u, b, b; " if i == 8 else "fma.rn.f32 s, a, a, s; fma.rn.f32 u, b, b, u; ")
        for i in range(8, 16)
    )
    + "add.f32 $0, s, u; " + "".join(f"mov.f32 ${i}, 0f00000000; " for i in range(1, 8)) + "}"
)  # fmt: skip


@triton.jit
def _either(a, b):
    return a | b


@triton.jit
def squares(w, EIGHT: tl.constexpr):
    """Sums of squares of rows of pairs, shape [rows, groups, pairs], in fp32, in one order.

    Args:
        w: The pairs.
        EIGHT: Whether threads have eight pairs side by side.

    Returns:
        Shape [rows].
    """
    if EIGHT:
        found = tl.inline_asm_elementwise(
            _SQUARES, "=f,=f,=f,=f,=f,=f,=f,=f,r,r,r,r,r,r,r,r", [w], dtype=tl.float32, is_pure=True, pack=8
        )  # fmt: skip
        found = found.to(tl.int32, bitcast=True)
        found = tl.reshape(found, [w.shape[0], w.shape[1], w.shape[2] // 8, 8])
        found = tl.reduce(found, 3, _either).to(tl.float32, bitcast=True)
    else:
        found = tl.fma(even(w), even(w), odd(w) * odd(w))
    return tl.sum(tl.sum(found, axis=2), axis=1)


@triton.jit
def _e4m3_pairs(w, inverse):
    """Two codes of e4m3 as int16, of pairs times a power of two; the product is exact, or too small for any digit."""
    return tl.inline_asm_elementwise(
        "{ .reg .f32 a, b; .reg .b32 c, d; mul.rn.bf16x2 c, $1, $2; shl.b32 d, c, 16; mov.b32 a, d; "
        "and.b32 d, c, 0xFFFF0000; mov.b32 b, d; cvt.rn.satfinite.e4m3x2.f32 $0, b, a; }",
        "=h,r,r", [w, tl.broadcast_to(twice(inverse), w.shape)], dtype=tl.int16, is_pure=True, pack=1,
    )  # fmt: skip


@triton.jit
def _sixths(highest):
    """Codes of e4m3 nearest to a sixth of magnitudes of bf16, given by their bits as fp32, and the values of these codes.

    A sixth that is a tie has five bits, and the product with the rounded inverse of 6 rounds to it; any other is further away
    from ties than that product errs. At least 2^-9 and at most 448; any codes for what is not finite.
    """
    near = tl.maximum(highest, 0x3C400000).to(tl.float32, bitcast=True) * 0.16666667163372040
    return tl.inline_asm_elementwise(
        "{ .reg .b16 h, l; .reg .b32 t; cvt.rn.satfinite.e4m3x2.f32 h, $2, $2; cvt.u32.u16 $0, h; "
        "cvt.rn.f16x2.e4m3x2 t, h; mov.b32 {h, l}, t; cvt.f32.f16 $1, l; }",
        "=r,=f,f", [near], dtype=(tl.int32, tl.float32), is_pure=True, pack=1,
    )  # fmt: skip


@triton.jit
def pair_codes(w, FORMAT: tl.constexpr):
    """Quantises groups of pairs, which lie on the last axis.

    Args:
        w: The pairs.
        FORMAT: As in `small_floats`.

    Returns:
        Two codes of e4m3 as int16, or of e2m1 as uint8; bytes of the scales, with one on the last axis.
    """
    highest = highest_of(w)
    if FORMAT == 1:
        byte, inverse = power_scale(highest, 448.0, 1e-4)
        codes = _e4m3_pairs(w, inverse)
    elif FORMAT == 2:
        byte, inverse = power_scale(highest, 6.0, 7.052966104933725e-38)
        codes = power_pairs(w, inverse)
    else:
        broken = highest >= 0x7F800000
        byte, divisor = _sixths(highest)
        byte = tl.where(broken, 0x7F, byte)
        codes = quotient_pairs(w, divisor, broken)
    return codes, byte.to(tl.uint8)
