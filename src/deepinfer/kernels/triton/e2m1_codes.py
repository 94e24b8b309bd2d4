"""Codes of e2m1 four pairs at a time, for chips with packed arithmetic of bf16 (compute capability 9.0).

A code counts steps of 0.5 up to 2, then of 1 up to 4, then of 2: it is the least of three counts of steps from where they
would begin, so the least of y / 0.5, 2 + y and 4 + y / 2, each to the nearest integer with ties to even. Added to 64, whose
last bit is worth 0.5 in bf16, a value leaves that count in the last bits of the sum, and nothing else.

A word then holds the sign and the code of the odd value in bits 31 and 16 to 18, of the even one in bits 15 and 0 to 2. Times
1 + 2^12 + 2^24 all of them meet in its last byte, in the order of the format: no two of the summands share a bit.
"""

from __future__ import annotations

import triton
import triton.language as tl

__all__ = ["packed", "power_pairs", "quotient_pairs", "twice"]

_BEGIN = tl.constexpr(
    "{ .reg .b32 a0, a1, a2, a3, s, p, q, r, c0, c1, c2, h1, h2, m, k; "
    "mov.b32 c0, 0x42804280; mov.b32 c1, 0x42824282; mov.b32 c2, 0x42844284; mov.b32 h1, 0x3F003F00; mov.b32 h2, 0x3E803E80; "
    "mov.b32 m, 0x01001001; mov.b32 k, 0x3957BD80; "
)
_LEAST = tl.constexpr(
    "add.rn.bf16x2 p, r, c0; fma.rn.bf16x2 q, r, h1, c1; fma.rn.bf16x2 r, r, h2, c2; min.u16x2 p, p, q; min.u16x2 p, p, r; "
)
# The sign into the word; k takes 64 away, times m.
_PLACED = tl.constexpr("p, 0xEA; mad.lo.u32 aI, p, m, k; ")
# A product with a power of two is exact; what is not finite times zero is a positive NaN.
_PRODUCT = tl.constexpr(
    "mul.rn.bf16x2 s, WORD, FIRST; and.b32 r, s, SECOND; " + _LEAST.value + "lop3.b32 p, s, 0x80008000, " + _PLACED.value
)  # fmt: skip
# The inverse of an e4m3 number is the sum of two of bf16, which leaves an error of 2^-17. A quotient that is a tie has seven
# bits at most and rounds to itself; any other is 2^-8 of it away from one or more, and does not round to it.
_RATIO = tl.constexpr(
    "and.b32 s, WORD, 0x7FFF7FFF; mul.rn.bf16x2 p, s, SECOND; fma.rn.bf16x2 r, s, FIRST, p; "
    + _LEAST.value + "min.u16x2 p, p, THIRD; lop3.b32 p, WORD, FOURTH, " + _PLACED.value
)  # fmt: skip
_BYTES = tl.constexpr(
    "prmt.b32 a0, a0, a1, 0x0073; prmt.b32 a2, a2, a3, 0x0073; prmt.b32 $0, a0, a2, 0x5410; }"
)


def _four(text: str) -> tl.constexpr:
    """The instructions for words $1 to $4, and up to four operands for each of them from $5, $9, $13 and $17 on."""
    words = "".join(
        text.replace("WORD", f"${i + 1}")
        .replace("FIRST", f"${i + 5}")
        .replace("SECOND", f"${i + 9}")
        .replace("THIRD", f"${i + 13}")
        .replace("FOURTH", f"${i + 17}")
        .replace("aI", f"a{i}")
        for i in range(4)
    )
    return tl.constexpr(_BEGIN.value + words + _BYTES.value)


_POWER = _four(_PRODUCT.value)
_QUOTIENT = _four(_RATIO.value)


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
    high = twice(inverse)
    low = twice(inverse - (high & -65536).to(tl.float32, bitcast=True))
    most = tl.where(broken, 0x42804280, 0x42874287)
    signs = tl.where(broken, 0, -2147450880)
    return tl.inline_asm_elementwise(
        _QUOTIENT, "=r,r,r,r,r,r,r,r,r,r,r,r,r,r,r,r,r,r,r,r,r",
        [w, tl.broadcast_to(high, w.shape), tl.broadcast_to(low, w.shape), tl.broadcast_to(most, w.shape),
         tl.broadcast_to(signs, w.shape)],
        dtype=tl.uint8, is_pure=True, pack=4,
    )  # fmt: skip
