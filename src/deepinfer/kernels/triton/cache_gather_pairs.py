"""Rows out of a paged cache as bf16, two values at a time, for chips with packed arithmetic of bf16."""

from __future__ import annotations

import triton
import triton.language as tl
from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from deepinfer.kernels.triton.e2m1_codes import twice
from deepinfer.kernels.triton.norm_pairs import lanes
from deepinfer.kernels.triton.small_floats import e4m3_values, e8m0_values

__all__ = ["cache_gather_pairs_kernel"]

_LEVELS = tl.constexpr(
    "{ .reg .b32 h0, h1, l0, l1, w, p, q, s, t; mov.b32 h0, 0x3F3F3F00; mov.b32 h1, 0x40404040; "
    "mov.b32 l0, 0xC0800000; mov.b32 l1, 0xC0804000; and.b32 w, $4, 0x77777777; "
)
# Of four codes: their high and low bytes by tables of eight, signs into the high ones, then pairs of both.
_TWO_PAIRS = tl.constexpr(
    "prmt.b32 p, h0, h1, w; prmt.b32 q, l0, l1, w; prmt.b32 s, $4, 0, CODES; shl.b32 t, s, 4; "
    "lop3.b32 s, t, s, 0x00FF00FF, 0xE4; and.b32 s, s, 0x80808080; or.b32 p, p, s; "
    "prmt.b32 s, q, p, 0x5140; mul.rn.bf16x2 FIRST, s, FACTOR; prmt.b32 s, q, p, 0x7362; mul.rn.bf16x2 SECOND, s, OTHER; "
)


def _four() -> tl.constexpr:
    """The instructions for the four bytes of $4 and factors $5 to $8."""
    text = _LEVELS.value
    for i, codes in ((0, "0x1100"), (2, "0x3322")):
        two = _TWO_PAIRS.value.replace("CODES", codes).replace("FIRST", f"${i}")
        two = two.replace("SECOND", f"${i + 1}").replace("FACTOR", f"${i + 5}")
        text += two.replace("OTHER", f"${i + 6}") + ("shr.u32 w, w, 16; " if i == 0 else "}")
    return tl.constexpr(text)


_E2M1 = _four()


@triton.jit
def _e2m1_values(codes, factor):
    """Pairs of bf16 of bytes with two codes, times a factor; the products are exact."""
    return tl.inline_asm_elementwise(
        _E2M1, "=r,=r,=r,=r,r,r,r,r,r", [codes, tl.broadcast_to(twice(factor), codes.shape)],
        dtype=tl.int32, is_pure=True, pack=4,
    )  # fmt: skip


@triton.jit
def _e4m3_pair_values(codes, factor):
    """Pairs of bf16 of two codes as int16, times a factor."""
    return tl.inline_asm_elementwise(
        "{ .reg .b32 h; .reg .b16 l, u; .reg .f32 a, b; cvt.rn.f16x2.e4m3x2 h, $1; mov.b32 {l, u}, h; cvt.f32.f16 a, l; "
        "cvt.f32.f16 b, u; mul.rn.f32 a, a, $2; mul.rn.f32 b, b, $2; cvt.rn.bf16x2.f32 $0, b, a; }",
        "=r,h,f", [codes, tl.broadcast_to(factor, codes.shape)], dtype=tl.int32, is_pure=True, pack=1,
    )  # fmt: skip


@gluon.jit(do_not_specialize=["num_rows", "num_pages"])
def cache_gather_pairs_kernel(
    codes, scales, slots, out, num_rows, num_pages, stride_codes, stride_scales, stride_out,
    CHANNELS: gl.constexpr, FORMAT: gl.constexpr, GROUP: gl.constexpr, ROW_STRIDE: gl.constexpr,
    SCALE_STRIDE: gl.constexpr, SCALES_AT: gl.constexpr, PAGE: gl.constexpr, ROWS: gl.constexpr, EACH: gl.constexpr,
):  # fmt: skip
    """As `cache_gather_kernel`, for rows of a power of two of groups whose scales are bytes.

    Args:
        codes: The cache: two codes of e4m3 as int16, or two of e2m1 as uint8.
        scales: The cache as bytes.
        slots: Slot of each row.
        out: Pairs of bf16 as int32, the even one in the low half.
        num_rows: Rows.
        num_pages: Pages.
        stride_codes: Distance of pages, in codes as above.
        stride_scales: Distance of pages, in bytes.
        stride_out: Distance of rows, in pairs.
        CHANNELS: Channels.
        FORMAT: As in `small_floats`.
        GROUP: Channels of a group.
        ROW_STRIDE: Bytes from row to row.
        SCALE_STRIDE: Bytes from scales to scales.
        SCALES_AT: Where a page's scales begin.
        PAGE: Rows of a page.
        ROWS: Rows of a program.
        EACH: Pairs of a thread side by side.
    """
    PAIRS: gl.constexpr = GROUP // 2
    SPAN: gl.constexpr = CHANNELS // GROUP
    BYTES: gl.constexpr = 2 if FORMAT == 1 else 1
    layout: gl.constexpr = lanes(EACH, SPAN, PAIRS, gl.num_warps())
    row_layout: gl.constexpr = gl.SliceLayout(1, gl.SliceLayout(2, layout))
    group = gl.arange(0, SPAN, layout=gl.SliceLayout(0, gl.SliceLayout(2, layout)))[None, :]
    c = gl.arange(0, PAIRS, layout=gl.SliceLayout(0, gl.SliceLayout(1, layout)))[None, None, :]
    at = (group * PAIRS)[:, :, None] + c
    r = (gl.program_id(0) * ROWS + gl.arange(0, ROWS, layout=row_layout)).to(gl.int64)
    inside = r < num_rows
    slot = gl.load(slots + r, mask=inside, other=-1).to(gl.int64)
    page = slot // PAGE
    known = (slot >= 0) & (page < num_pages)
    page = gl.where(known, page, 0)
    row = gl.where(known, slot % PAGE, 0)
    # What is not read is zeros times a scale of code 0: +0.
    start = scales + (page * stride_scales + row * SCALE_STRIDE + SCALES_AT)[:, None] + group
    byte = gl.load(start, mask=known[:, None] & (group < SPAN), other=0)
    start = codes + (page * stride_codes + row * (ROW_STRIDE // BYTES))[:, None][:, :, None] + at
    word = gl.load(start, mask=known[:, None][:, :, None] & (c < PAIRS), other=0)
    if FORMAT == 1:
        w = _e4m3_pair_values(word, e8m0_values(byte)[:, :, None])
    elif FORMAT == 2:
        w = _e2m1_values(word, e8m0_values(byte)[:, :, None])
    else:
        w = _e2m1_values(word, e4m3_values(byte, False)[:, :, None])
    to = out + (r * stride_out)[:, None][:, :, None] + at
    gl.store(to, w, mask=inside[:, None][:, :, None] & (c < PAIRS))
