"""Codes of e2m1 four pairs at a time, for chips with packed arithmetic of half-wide numbers (compute capability 9.0)."""

from __future__ import annotations

import triton
import triton.language as tl

__all__ = ["packed", "power_pairs", "quotient_pairs"]

# Times 2^-14 the codes are the leading bits of an fp16 number, zero and 0.5 included: three bits from bit 9 up. Bits below
# them round to nearest, ties to even, as integers. Pairs z0 to z3 come out as the bytes of $0.
_BEGIN = tl.constexpr(
    "{ .reg .b32 z0, z1, z2, z3, s, p, q; .reg .f32 a, b; .reg .b32 c; mov.b32 c, BOUND; "
)
_PAIR = tl.constexpr(
    "shl.b32 s, WORD, 16; mov.b32 a, s; and.b32 s, WORD, 0xFFFF0000; mov.b32 b, s; mul.rn.f32 a, a, FACTOR; "
    "mul.rn.f32 b, b, FACTOR; cvt.rn.f16x2.f32 Z, b, a; CLAMP.xorsign.abs.f16x2 Z, Z, c; "
    "shr.u32 s, Z, 9; and.b32 s, s, 0x00010001; add.u32 Z, Z, s; add.u32 Z, Z, 0x00FF00FF; "
)
_BYTES = tl.constexpr(
    "prmt.b32 p, z0, z1, 0x7351; prmt.b32 q, z2, z3, 0x7351; prmt.b32 s, p, q, 0x5410; "
    "prmt.b32 p, p, q, 0x7632; shr.u32 q, s, 1; and.b32 q, q, 0x07070707; shr.u32 s, s, 4; "
    "and.b32 s, s, 0x08080808; or.b32 q, q, s; and.b32 s, p, 0x80808080; or.b32 q, q, s; "
    "shl.b32 p, p, 3; and.b32 p, p, 0x70707070; or.b32 $0, p, q; }"
)


def _four(clamp: str, bound: str) -> tl.constexpr:
    """The instructions for words $1 to $4 and factors $5 to $8."""
    pairs = "".join(
        _PAIR.value.replace("WORD", f"${i + 1}")
        .replace("FACTOR", f"${i + 5}")
        .replace("Z", f"z{i}")
        for i in range(4)
    )
    return tl.constexpr((_BEGIN.value + pairs).replace("CLAMP", clamp).replace("BOUND", bound) + _BYTES.value)  # fmt: skip


# Not finite times zero is a positive NaN, and the larger of a NaN and zero is zero.
_POWER = _four("max", "0")
# A quotient by an e4m3 number that is no tie is 2^-8 of it away from one or more, as a tie has seven bits at most: so
# neither the inverse, which may be wrong in its last bits, nor fp16 takes it there. 6 is the largest.
_QUOTIENT = _four("min", "0x0E000E00")


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
    """Bytes of codes of pairs times powers of two, of one shape but for ones."""
    return tl.inline_asm_elementwise(
        _POWER, "=r,r,r,r,r,f,f,f,f", [w, tl.broadcast_to(inverse * 0.00006103515625, w.shape)],
        dtype=tl.uint8, is_pure=True, pack=4,
    )  # fmt: skip


@triton.jit
def quotient_pairs(w, divisor, broken):
    """As `power_pairs`, of pairs divided by e4m3 numbers; zero where a group is broken."""
    inverse = tl.inline_asm_elementwise(
        "rcp.approx.ftz.f32 $0, $1;", "=f,f", [divisor], dtype=tl.float32, is_pure=True, pack=1
    )
    kept = w & tl.where(broken, 0, -1)
    inverse = tl.where(broken, 0.0, inverse * 0.00006103515625)
    return tl.inline_asm_elementwise(
        _QUOTIENT, "=r,r,r,r,r,f,f,f,f", [kept, tl.broadcast_to(inverse, w.shape)], dtype=tl.uint8,
        is_pure=True, pack=4,
    )  # fmt: skip
