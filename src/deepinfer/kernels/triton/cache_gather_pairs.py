"""Rows of e2m1 out of a paged cache as bf16, eight values at a time, for chips with packed arithmetic of bf16.

Bytes of the numbers of bf16 come from tables that two registers hold; a product with the scale, which bf16 keeps exactly, is the
value.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

__all__ = ["cache_gather_pairs_kernel"]

# Eight codes of the word $4, the first in its lowest bits: leading bytes h, following bytes l, signs by the bits 3 and 7 of bytes.
_VALUES = gl.constexpr(
    "{ .reg .b32 t, u, s, h0, h1, l0, l1, x, y, a, b; and.b32 t, $4, 0x77777777; shr.u32 u, t, 16; shl.b32 s, $4, 4; "
    "mov.b32 a, 0x3F3F3F00; mov.b32 b, 0x40404040; prmt.b32 h0, a, b, t; prmt.b32 h1, a, b, u; "
    "mov.b32 a, 0xC0800000; mov.b32 b, 0xC0804000; prmt.b32 l0, a, b, t; prmt.b32 l1, a, b, u; "
    "prmt.b32 x, s, $4, 0x5140; prmt.b32 y, s, $4, 0x7362; "
    "lop3.b32 h0, x, 0x80808080, h0, 0xEA; lop3.b32 h1, y, 0x80808080, h1, 0xEA; "
    "prmt.b32 x, l0, h0, 0x5140; prmt.b32 y, l0, h0, 0x7362; prmt.b32 a, l1, h1, 0x5140; prmt.b32 b, l1, h1, 0x7362; "
    "mul.rn.bf16x2 $0, x, $5; mul.rn.bf16x2 $1, y, $5; mul.rn.bf16x2 $2, a, $5; mul.rn.bf16x2 $3, b, $5; }"
)


@gluon.jit
def _scales(byte, E4M3: gl.constexpr):
    """Pairs of bf16 of which both are the value of a scale's byte."""
    if E4M3:
        factor = gl.inline_asm_elementwise(
            "{ .reg .b16 h, l; .reg .b32 t; .reg .f32 f; cvt.u16.u32 h, $1; cvt.rn.f16x2.e4m3x2 t, h; mov.b32 {h, l}, t; "
            "cvt.f32.f16 f, h; cvt.rn.bf16x2.f32 $0, f, f; }",
            "=r,r", [byte], dtype=gl.int32, is_pure=True, pack=1,
        )  # fmt: skip
    else:
        one = gl.where(byte == 0, 0x40, gl.where(byte == 255, 0x7FC0, byte << 7))
        factor = one | (one << 16)
    return factor


@gluon.jit(do_not_specialize=["num_rows", "num_pages"])
def cache_gather_pairs_kernel(
    words, scales, slots, out, num_rows, num_pages, stride_words, stride_scales, stride_out,
    CHANNELS: gl.constexpr, GROUP: gl.constexpr, E4M3: gl.constexpr, ROW_STRIDE: gl.constexpr,
    SCALE_STRIDE: gl.constexpr, SCALES_AT: gl.constexpr, PAGE: gl.constexpr, ROWS: gl.constexpr,
):  # fmt: skip
    """As `cache_gather_kernel`.

    Args:
        words: The cache as int32: eight codes each.
        scales: The cache as bytes.
        slots: As there.
        out: Pairs of bf16 as int32.
        num_rows: Rows.
        num_pages: Pages.
        stride_words: Distance of pages, in words.
        stride_scales: Distance of pages, in bytes.
        stride_out: Distance of rows, in pairs.
        CHANNELS: Channels, a power of two.
        GROUP: Channels of a group.
        E4M3: Whether scales are e4m3; else e8m0.
        ROW_STRIDE: Bytes from row to row.
        SCALE_STRIDE: Bytes from scales to scales.
        SCALES_AT: Where a page's scales begin.
        PAGE: Rows of a page.
        ROWS: Rows of a program.
    """
    WORDS: gl.constexpr = CHANNELS // 8
    WIDE: gl.constexpr = min(32, WORDS)
    layout: gl.constexpr = gl.BlockedLayout([1, 1], [32 // WIDE, WIDE], [gl.num_warps(), 1], [1, 0])
    first = gl.program_id(0).to(gl.int64) * ROWS
    r = first + gl.arange(0, ROWS, layout=gl.SliceLayout(1, layout))
    slot = gl.load(slots + r, mask=r < num_rows, other=-1).to(gl.int64)
    # Quotients of powers of two are shifts without a sign; pages of one row keep it.
    slot = slot.to(gl.uint64)
    page = (slot // PAGE).to(gl.int64)
    known = (page >= 0) & (page < num_pages)
    page = gl.where(known, page, 0)
    row = gl.where(known, (slot % PAGE).to(gl.int64), 0)
    n = gl.arange(0, WORDS, layout=gl.SliceLayout(0, layout))[None, :]
    known = known[:, None] & (n < WORDS)
    code = gl.load(
        words + (page * stride_words + row * (ROW_STRIDE // 4))[:, None] + n, mask=known, other=0
    )
    at = (page * stride_scales + row * SCALE_STRIDE + SCALES_AT)[:, None] + n // (GROUP // 8)
    byte = gl.load(scales + at, mask=known, other=0).to(gl.int32)
    a, b, c, d = gl.inline_asm_elementwise(
        _VALUES, "=r,=r,=r,=r,r,r", [code, _scales(byte, E4M3)],
        dtype=(gl.int32, gl.int32, gl.int32, gl.int32), is_pure=True, pack=1,
    )  # fmt: skip
    pairs = gl.join(gl.join(a, c), gl.join(b, d)).reshape([ROWS, 4 * WORDS])
    r = first + gl.arange(0, ROWS, layout=gl.SliceLayout(1, pairs.type.layout))
    n = gl.arange(0, 4 * WORDS, layout=gl.SliceLayout(0, pairs.type.layout))[None, :]
    gl.store(
        out + (r * stride_out)[:, None] + n, pairs, mask=(r < num_rows)[:, None] & (n < 4 * WORDS)
    )
