"""Codes of e2m1 four pairs at a time, for chips with packed arithmetic of bf16 (compute capability 9.0).

A code counts steps of 0.5 up to 2, then of 1 up to 4, then of 2: it is the least of three counts of steps from where they
would begin, so the least of y / 0.5, 2 + y and 4 + y / 2, each to the nearest integer with ties to even. Added to 64, whose
last bit is worth 0.5 in bf16, a value leaves that count in the last bits of the sum, and nothing else.
"""

from __future__ import annotations

import triton
import triton.language as tl

__all__ = ["packed", "power_pairs", "quotient_pairs", "twice"]

_BEGIN = tl.constexpr(
    "{ .reg .b32 z0, z1, z2, z3, s0, s1, s2, s3, a, p, q, r, c0, c1, c2, c3, h1, h2; mov.b32 c0, 0x42804280; "
    "mov.b32 c1, 0x42824282; mov.b32 c2, 0x42844284; mov.b32 c3, 0x42874287; mov.b32 h1, 0x3F003F00; mov.b32 h2, 0x3E803E80; "
)
# Signs in S, magnitudes in a. A product with a power of two is exact; what is not finite times zero is a positive NaN.
_PRODUCT = tl.constexpr("mul.rn.bf16x2 S, WORD, FIRST; and.b32 a, S, SECOND; ")
# The inverse of an e4m3 number is the sum of two of bf16, which leaves an error of 2^-17. A quotient that is a tie has seven
# bits at most and rounds to itself; any other is 2^-8 of it away from one or more, and does not round to it.
_RATIO = tl.constexpr(
    "and.b32 S, WORD, THIRD; and.b32 a, S, 0x7FFF7FFF; mul.rn.bf16x2 p, a, SECOND; fma.rn.bf16x2 a, a, FIRST, p; "
)
_CODE = tl.constexpr(
    "add.rn.bf16x2 p, a, c0; fma.rn.bf16x2 q, a, h1, c1; fma.rn.bf16x2 r, a, h2, c2; min.u16x2 p, p, q; "
    "min.u16x2 Z, p, r; "
)
_CAPPED = tl.constexpr(_CODE.value + "min.u16x2 Z, Z, c3; ")
# Of the words z, codes are in bytes 0 and 2; of the words s, signs are the first bits of bytes 1 and 3.
_BYTES = tl.constexpr(
    "prmt.b32 p, s0, s1, 0x7351; prmt.b32 q, s2, s3, 0x7351; prmt.b32 s0, p, q, 0x5410; prmt.b32 s1, p, q, 0x7632; "
    "prmt.b32 p, z0, z1, 0x6240; prmt.b32 q, z2, z3, 0x6240; prmt.b32 z0, p, q, 0x5410; prmt.b32 z1, p, q, 0x7632; "
    "shr.u32 s0, s0, 4; shl.b32 z1, z1, 4; lop3.b32 z0, s0, z0, 0x08080808, 0xE4; "
    "lop3.b32 z1, z1, s1, 0x70707070, 0xE4; lop3.b32 $0, z0, z1, 0x0F0F0F0F, 0xE4; }"
)


def _four(first: str, last: str) -> tl.constexpr:
    """The instructions for words $1 to $4, and three operands for each of them from $5, $9 and $13 on."""
    pairs = "".join(
        (first + last)
        .replace("WORD", f"${i + 1}")
        .replace("FIRST", f"${i + 5}")
        .replace("SECOND", f"${i + 9}")
        .replace("THIRD", f"${i + 13}")
        .replace("S,", f"s{i},")
        .replace("Z", f"z{i}")
        for i in range(4)
    )
    return tl.constexpr(_BEGIN.value + pairs + _BYTES.value)


_POWER = _four(_PRODUCT.value, _CODE.value)
_QUOTIENT = _four(_RATIO.value, _CAPPED.value)


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
def twice(x):
    """Pairs of bf16 of which both are an fp32 value."""
    return tl.inline_asm_elementwise(
        "cvt.rn.bf16x2.f32 $0, $1, $1;", "=r,f", [x], dtype=tl.int32, is_pure=True, pack=1
    )


@triton.jit
def power_pairs(w, inverse):
    """Bytes of codes of pairs times powers of two, of one shape but for ones; zeros for 0 times what is not finite."""
    kept = tl.where(inverse == 0.0, 0, 0x7FFF7FFF)
    factor = tl.broadcast_to(twice(inverse), w.shape)
    return tl.inline_asm_elementwise(
        _POWER, "=r,r,r,r,r,r,r,r,r,r,r,r,r", [w, factor, tl.broadcast_to(kept, w.shape)],
        dtype=tl.uint8, is_pure=True, pack=4,
    )  # fmt: skip


@triton.jit
def quotient_pairs(w, divisor, broken):
    """As `power_pairs`, of pairs divided by e4m3 numbers; zero where a group is broken."""
    inverse = tl.inline_asm_elementwise(
        "rcp.approx.ftz.f32 $0, $1;", "=f,f", [divisor], dtype=tl.float32, is_pure=True, pack=1
    )
    inverse = tl.where(broken, 0.0, inverse)
    high = twice(inverse)
    low = twice(inverse - (high & -65536).to(tl.float32, bitcast=True))
    kept = tl.where(broken, 0, -1)
    return tl.inline_asm_elementwise(
        _QUOTIENT, "=r,r,r,r,r,r,r,r,r,r,r,r,r,r,r,r,r",
        [w, tl.broadcast_to(high, w.shape), tl.broadcast_to(low, w.shape), tl.broadcast_to(kept, w.shape)],
        dtype=tl.uint8, is_pure=True, pack=4,
    )  # fmt: skip
