"""Tiles of a few tokens and 64 rows of weights on Hopper, in e4m3."""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from deepinfer.kernels.triton.rings import advance

__all__ = ["ahead_tile", "fp8_tile", "power_of_byte", "powers_tile"]


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
def _promote(acc, part, row_codes, codes, AT: gl.constexpr):
    """Adds a product, times the powers of its two blocks of rows and of its columns."""
    scale = power_of_byte(row_codes, AT)[:, None] * power_of_byte(codes, AT)[None, :]
    return acc + part.reshape(acc.type.shape) * scale[:, None, :]


@gluon.jit
def _scaled_steps(w, x, row_codes, codes, acc, zero):
    """Adds the product of 128 channels, scaled for 32; `acc` is [2, 32, tokens]."""
    p0 = _start_group(w, x, zero, 0)
    p1 = _start_group(w, x, zero, 1)
    p2 = _start_group(w, x, zero, 2)
    p3 = _start_group(w, x, zero, 3)
    p0 = warpgroup_mma_wait(3, [p0])
    acc = _promote(acc, p0, row_codes, codes, 0)
    p1 = warpgroup_mma_wait(2, [p1])
    acc = _promote(acc, p1, row_codes, codes, 1)
    p2 = warpgroup_mma_wait(1, [p2])
    acc = _promote(acc, p2, row_codes, codes, 2)
    p3 = warpgroup_mma_wait(0, [p3])
    return _promote(acc, p3, row_codes, codes, 3)


@gluon.jit
def powers_tile(
    rings, bars, steps, slot, phase, PART: gl.constexpr, BLOCK_M: gl.constexpr, DEPTH: gl.constexpr, acc_layout: gl.constexpr
):  # fmt: skip
    """One tile of e4m3 weights with powers of two for 32 channels of 32 rows and of a token, four to a word."""
    w_ring, x_ring, s_ring, f_ring = rings
    full, empty = bars
    zero = gl.zeros((64, BLOCK_M), gl.float32, acc_layout)
    # A thread's rows lie in one block of 32.
    acc = zero.reshape([2, 32, BLOCK_M])
    plane: gl.constexpr = gl.SliceLayout(1, acc.type.layout)
    for _ in range(steps):
        mbarrier.wait(full.index(slot), phase)
        w = w_ring.index(slot).slice(64 * PART, 64)
        row_codes = f_ring.index(slot).slice(2 * PART, 2).load(gl.SliceLayout(1, plane))
        codes = s_ring.index(slot).load(gl.SliceLayout(0, plane))
        acc = _scaled_steps(w, x_ring.index(slot), row_codes, codes, acc, zero)
        mbarrier.arrive(empty.index(slot), count=1)
        slot, phase = advance(slot, phase, DEPTH)
    return gl.convert_layout(acc.reshape([64, BLOCK_M]), acc_layout), slot, phase


@gluon.jit
def _begin(rings, full, at, turn, part, never, PART: gl.constexpr):
    """Begins the product of 128 channels as soon as they are there.

    `never` is false, but the compiler does not know: so the product takes the registers of `part`.
    """
    mbarrier.wait(full.index(at), turn)
    w = rings[0].index(at).slice(64 * PART, 64)
    return warpgroup_mma(w, rings[1].index(at).permute((1, 0)), part, use_acc=never, is_async=True)


@gluon.jit
def _add(rings, empty, at, part, acc, PART: gl.constexpr, PENDING: gl.constexpr):
    """Adds a product that was begun before the last PENDING ones, and gives its place back."""
    columns: gl.constexpr = gl.SliceLayout(0, acc.type.layout)
    scale = rings[2].index(at).load(columns)
    scale *= rings[3].index(at).slice(PART, 1).load(columns).broadcast_to([acc.type.shape[1]])
    part = warpgroup_mma_wait(PENDING, [part])
    mbarrier.arrive(empty.index(at), count=1)
    acc += part * scale[None, :]
    # No sum may be left for later, while another product takes the registers of this one.
    return part, warpgroup_mma_wait(PENDING, [acc])


@gluon.jit
def ahead_tile(
    rings, bars, steps, slot, phase, never, PART: gl.constexpr, BLOCK_M: gl.constexpr, DEPTH: gl.constexpr,
    acc_layout: gl.constexpr,
):  # fmt: skip
    """One tile of e4m3 weights as `fp8_tile` makes it, with the next product under way while one is added."""
    full, empty = bars
    acc = gl.zeros((64, BLOCK_M), gl.float32, acc_layout)
    odd = acc
    at = slot
    even = _begin(rings, full, slot, phase, acc, never, PART)
    for _ in range((steps - 1) // 2):
        slot, phase = advance(slot, phase, DEPTH)
        odd = _begin(rings, full, slot, phase, odd, never, PART)
        even, acc = _add(rings, empty, at, even, acc, PART, 1)
        at = slot
        slot, phase = advance(slot, phase, DEPTH)
        even = _begin(rings, full, slot, phase, even, never, PART)
        odd, acc = _add(rings, empty, at, odd, acc, PART, 1)
        at = slot
    if steps % 2 == 0:
        slot, phase = advance(slot, phase, DEPTH)
        last = _begin(rings, full, slot, phase, odd, never, PART)
        _done, acc = _add(rings, empty, at, even, acc, PART, 1)
        _done, acc = _add(rings, empty, slot, last, acc, PART, 0)
    else:
        _done, acc = _add(rings, empty, at, even, acc, PART, 0)
    slot, phase = advance(slot, phase, DEPTH)
    return acc, slot, phase


@gluon.jit
def fp8_tile(
    rings,
    bars,
    steps,
    slot,
    phase,
    PART: gl.constexpr,
    SPLIT: gl.constexpr,
    BLOCK_M: gl.constexpr,
    DEPTH: gl.constexpr,
    acc_layout: gl.constexpr,
):
    """One tile of e4m3 weights with a scale for 128x128 weights and for 128 channels of a token.

    With SPLIT 2, every other step from step PART on.
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
