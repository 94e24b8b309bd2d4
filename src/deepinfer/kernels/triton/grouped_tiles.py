"""Tiles of a few tokens and 64 rows of weights on Hopper, in e4m3 or in packed e2m1 that is decoded in registers."""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)

__all__ = ["fp8_tile", "mxfp4_tile", "power_of_byte"]

# A register of eight e2m1 codes to two of four e4m3 codes, the even and the odd ones, each 2^-6 of its value: a code's
# bits s ee m become the byte s 00 ee m 00, which also holds for zero and the subnormal 0.5.
_DECODE = gl.constexpr("""{
.reg .b32 a, b, c;
shl.b32 a, $2, 4;
shl.b32 b, $2, 2;
shr.u32 c, $2, 2;
lop3.b32 a, a, b, 0x80808080, 0xE4;
lop3.b32 c, $2, c, 0x80808080, 0xE4;
and.b32 $0, a, 0x9C9C9C9C;
and.b32 $1, c, 0x9C9C9C9C;
}""")


@gluon.jit
def power_of_byte(codes, AT: gl.constexpr):
    """Byte AT of each word, e8m0, as fp32; 0 for byte 0."""
    return (((codes >> (8 * AT)) & 255) << 23).to(gl.float32, bitcast=True)


@gluon.jit
def _start_group(w, x, zero, AT: gl.constexpr):
    """Begins the product of 32 channels of e4m3."""
    b = x.slice(32 * AT, 32, dim=1).permute((1, 0))
    return warpgroup_mma(w.slice(32 * AT, 32, dim=1), b, zero, use_acc=False, is_async=True)


@gluon.jit
def _scaled_steps(w, x, row_codes, codes, acc, zero):
    """Adds the product of 128 channels, scaled for 32."""
    p0 = _start_group(w, x, zero, 0)
    p1 = _start_group(w, x, zero, 1)
    p2 = _start_group(w, x, zero, 2)
    p3 = _start_group(w, x, zero, 3)
    p0 = warpgroup_mma_wait(3, [p0])
    acc += p0 * power_of_byte(row_codes, 0)[:, None] * power_of_byte(codes, 0)[None, :]
    p1 = warpgroup_mma_wait(2, [p1])
    acc += p1 * power_of_byte(row_codes, 1)[:, None] * power_of_byte(codes, 1)[None, :]
    p2 = warpgroup_mma_wait(1, [p2])
    acc += p2 * power_of_byte(row_codes, 2)[:, None] * power_of_byte(codes, 2)[None, :]
    p3 = warpgroup_mma_wait(0, [p3])
    return acc + p3 * power_of_byte(row_codes, 3)[:, None] * power_of_byte(codes, 3)[None, :]


@gluon.jit
def fp8_tile(
    rings,
    bars,
    steps,
    slot,
    phase,
    GROUP: gl.constexpr,
    PART: gl.constexpr,
    SPLIT: gl.constexpr,
    BLOCK_M: gl.constexpr,
    DEPTH: gl.constexpr,
    acc_layout: gl.constexpr,
):
    """One tile of e4m3 weights; with SPLIT 2, every other step from step PART on.

    GROUP 128: a scale for 128x128 weights and for 128 channels of a token. GROUP 32: powers of two for 32 channels of a
    row and of a token, four to a word.
    """
    w_ring, x_ring, s_ring, f_ring = rings
    full, empty = bars
    ROWS: gl.constexpr = PART if SPLIT == 1 else 0
    FIRST: gl.constexpr = 0 if SPLIT == 1 else PART
    columns: gl.constexpr = gl.SliceLayout(0, acc_layout)
    acc = gl.zeros((64, BLOCK_M), gl.float32, acc_layout)
    zero = gl.zeros((64, BLOCK_M), gl.float32, acc_layout)
    after = slot + steps
    at = slot + FIRST
    turn = phase ^ (at // DEPTH)
    at = at % DEPTH
    for _ in range((steps - FIRST + SPLIT - 1) // SPLIT):
        mbarrier.wait(full.index(at), turn)
        w = w_ring.index(at).slice(64 * ROWS, 64)
        if GROUP == 32:
            row_codes = f_ring.index(at).slice(64 * ROWS, 64).load(gl.SliceLayout(1, acc_layout))
            codes = s_ring.index(at).load(columns)
            acc = _scaled_steps(w, x_ring.index(at), row_codes, codes, acc, zero)
            mbarrier.arrive(empty.index(at), count=1)
        else:
            part = warpgroup_mma(
                w, x_ring.index(at).permute((1, 0)), zero, use_acc=False, is_async=True
            )
            scale = s_ring.index(at).load(columns)
            scale *= f_ring.index(at).slice(ROWS, 1).load(columns).broadcast_to([BLOCK_M])
            part = warpgroup_mma_wait(0, [part])
            mbarrier.arrive(empty.index(at), count=1)
            acc += part * scale[None, :]
        at += SPLIT
        if at >= DEPTH:
            at -= DEPTH
            turn ^= 1
    return acc, after % DEPTH, phase ^ ((after // DEPTH) & 1)


@gluon.jit
def _decode(p, a_layout: gl.constexpr):
    """Words of eight e2m1 codes, [64, 4], to an operand [64, 32] of e4m3: sixteen even channels, then the odd ones."""
    wide: gl.constexpr = gl.DistributedLinearLayout(
        [[0, 0, 1], [0, 0, 2], [8, 0, 0]],
        [[0, 1, 0], [0, 2, 0], [1, 0, 0], [2, 0, 0], [4, 0, 0]],
        [[16, 0, 0], [32, 0, 0]],
        [],
        [64, 4, 4],
    )
    words = gl.convert_layout(p, gl.SliceLayout(2, wide), assert_trivial=True)
    words = words.expand_dims(2).broadcast_to([64, 4, 4])
    low, high = gl.inline_asm_elementwise(
        _DECODE, "=r,=r,r,r,r,r", [words], dtype=(gl.uint8, gl.uint8), is_pure=True, pack=4
    )
    a = gl.join(low, high).permute((0, 3, 1, 2)).reshape([64, 32])
    return gl.convert_layout(a.to(gl.float8e4nv, bitcast=True), a_layout, assert_trivial=True)


@gluon.jit
def _start(packed, x, at, zero, a_layout: gl.constexpr):
    """Begins the product of 32 channels."""
    a = _decode(packed, a_layout)
    b = x.slice(32 * at, 32, dim=1).permute((1, 0))
    return warpgroup_mma(a, b, zero, use_acc=False, is_async=True)


@gluon.jit
def mxfp4_tile(
    rings,
    bars,
    w_scale,
    wo,
    steps,
    slot,
    phase,
    PART: gl.constexpr,
    SPAN: gl.constexpr,
    BLOCK_M: gl.constexpr,
    DEPTH: gl.constexpr,
    acc_layout: gl.constexpr,
):
    """One tile of packed e2m1 weights with an e8m0 scale per 32 channels; a step is 128 or 256 channels."""
    w_ring, x_ring, s_ring, _ = rings
    full, empty = bars
    a_layout: gl.constexpr = gl.DotOperandLayout(0, acc_layout, 4)
    load_layout: gl.constexpr = gl.DistributedLinearLayout(
        [[8, 0], [0, 4], [0, 8]],
        [[0, 1], [0, 2], [1, 0], [2, 0], [4, 0]],
        [[16, 0], [32, 0]],
        [],
        [64, 16],
    )
    acc = gl.zeros((64, BLOCK_M), gl.float32, acc_layout)
    zero = gl.zeros((64, BLOCK_M), gl.float32, acc_layout)
    ahead = gl.load(w_scale + wo)
    for step in range(steps):
        mbarrier.wait(full.index(slot), phase)
        for half in gl.static_range(SPAN):
            codes = ahead
            p = (
                w_ring.index(slot)
                .slice(64 * PART, 64)
                .slice(16 * half, 16, dim=1)
                .load(load_layout)
            )
            at = step * SPAN + half
            ahead = gl.load(w_scale + gl.minimum(at + 1, steps * SPAN - 1) + wo)
            xs = (
                s_ring.index(slot * SPAN + half)
                .slice(0, BLOCK_M)
                .load(gl.SliceLayout(0, acc_layout))
            )
            p0, p1 = gl.split(p.reshape([64, 2, 8]).permute((0, 2, 1)))
            b0, b1 = gl.split(p0.reshape([64, 2, 4]).permute((0, 2, 1)))
            b2, b3 = gl.split(p1.reshape([64, 2, 4]).permute((0, 2, 1)))
            packed = (b0, b1, b2, b3)
            x = x_ring.index(slot * SPAN + half)
            inner = zero
            before = _start(packed[0], x, 0, zero, a_layout)
            for i in gl.static_range(4):
                now = before
                if i < 3:
                    before = _start(packed[i + 1], x, i + 1, zero, a_layout)
                    now = warpgroup_mma_wait(1, [now])
                else:
                    now = warpgroup_mma_wait(0, [now])
                s = (((codes >> (8 * i)) & 255) << 23).to(gl.float32, bitcast=True)
                if i == 0:
                    inner = now * s[:, None]
                else:
                    inner += now * s[:, None]
            if half == SPAN - 1:
                mbarrier.arrive(empty.index(slot), count=1)
            acc += inner * xs[None, :]
        slot += 1
        if slot == DEPTH:
            slot = 0
            phase ^= 1
    return acc, slot, phase
