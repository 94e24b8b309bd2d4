"""Tiles of a few tokens and 64 rows of weights on Hopper, in e4m3."""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)

__all__ = ["fp8_tile", "power_of_byte"]


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
