"""Codes of e2m1 two values at a time, for chips with packed bf16 arithmetic (compute capability 9.0)."""

from __future__ import annotations

import triton
import triton.language as tl

__all__ = ["packed", "power_pairs", "quotient_pairs"]

# A code is the least of three numbers, each found by one addition that rounds to nearest even in steps of 0.5, 1 and 2:
# round(2y), round(y) + 2 and round(y / 2) + 4. They are the last bits of 64 + y, 128 + y and 256 + y.
_LEAST = tl.constexpr(
    "add.rn.bf16x2 p, a, c; add.rn.bf16x2 q, a, d; add.rn.bf16x2 r, a, e; "
    "sub.u32 q, q, 0x007E007E; sub.u32 r, r, 0x00FC00FC; min.u16x2 p, p, q; min.u16x2 p, p, r; "
    "and.b32 p, p, 0x00070007; shr.u32 s, y, 12; and.b32 s, s, 0x00080008; or.b32 p, p, s; "
    "shr.u32 s, p, 12; or.b32 $0, p, s; }"
)
_BEGIN = tl.constexpr(
    "{ .reg .b32 y, a, c, d, e, p, q, r, s, z; mov.b32 c, 0x42804280; mov.b32 d, 0x43004300; "
    "mov.b32 e, 0x43804380; mov.b32 z, 0; "
)
# Not finite times zero is a positive NaN, and the larger of a NaN and zero is zero.
_POWER = tl.constexpr(
    _BEGIN.value + "mul.rn.bf16x2 y, $1, $2; abs.bf16x2 a, y; max.bf16x2 a, a, z; " + _LEAST.value
)
_TAKEN = tl.constexpr(
    _BEGIN.value
    + "mov.b32 y, $1; abs.bf16x2 a, y; mov.b32 z, 0x40C040C0; min.bf16x2 a, a, z; "
    + _LEAST.value
)


@triton.jit
def _sticky(v, inverse):
    """Quotients of bf16 numbers and an e4m3 number, finite, as bf16 whose last bit says whether there was more.

    The product with the inverse is wrong by two units at most, and no quotient that is not a tie is nearer to one than 2^-8
    of it: rounding to 17 bits mends ties, and the last bit keeps all others from becoming one.
    """
    bits = (v * inverse).to(tl.int32, bitcast=True) + 64
    return bits | ((bits & 0xFF80) + 0xFF80)


@triton.jit
def packed(v, GROUPS: tl.constexpr, GROUP: tl.constexpr):
    """Pairs of bf16 as int32, shape [GROUPS, GROUP / 2], the even one in the low half, of fp32 values."""
    both = tl.inline_asm_elementwise(
        "cvt.rn.bf16x2.f32 $0, $3, $2; mov.b32 $1, $0;", "=r,=r,r,r", [v], dtype=tl.int32,
        is_pure=True, pack=2,
    )  # fmt: skip
    even, _ = tl.split(tl.reshape(both, [GROUPS, GROUP // 2, 2]))
    return even


@triton.jit
def power_pairs(w, inverse):
    """Bytes of codes, with rubbish above the lowest byte, of pairs times a power of two, shape [groups]."""
    half = inverse.to(tl.int32, bitcast=True)
    half = (half | ((half >> 16) & 0xFFFF))[:, None]
    return tl.inline_asm_elementwise(
        _POWER, "=r,r,r", [w, tl.broadcast_to(half, w.shape)], dtype=tl.int32, is_pure=True, pack=1
    )


@triton.jit
def quotient_pairs(w, divisor, broken):
    """As `power_pairs`, of pairs divided by e4m3 numbers, shape [groups]; zero where a group is broken."""
    inverse = tl.math.div_rn(1.0, tl.where(broken, 1.0, divisor))
    inverse = tl.where(broken, 0.0, inverse)[:, None]
    low = _sticky((w << 16).to(tl.float32, bitcast=True), inverse)
    high = _sticky((w & -65536).to(tl.float32, bitcast=True), inverse)
    both = ((low >> 16) & 0xFFFF) | (high & -65536)
    pairs = tl.inline_asm_elementwise(_TAKEN, "=r,r", [both], dtype=tl.int32, is_pure=True, pack=1)
    return pairs & tl.where(broken, 0, 0xFF)[:, None]
