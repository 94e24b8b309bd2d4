"""Tiles of many e4m3 tokens on Hopper whose tokens are multiplied out of registers, 64 columns at a time."""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)

__all__ = ["register_tile"]


@gluon.jit
def _start(a, w, part, never, AT: gl.constexpr):
    """Begins the product of 128 channels with 64 columns; `never` as in `gemm_tiles`."""
    b = w.slice(64 * AT, 64).permute((1, 0))
    return warpgroup_mma(a, b, part, use_acc=never, is_async=True)


@gluon.jit
def register_tile(
    x_ring,
    w_ring,
    s_ring,
    f_ring,
    full,
    empty,
    steps,
    slot,
    phase,
    never,
    PART: gl.constexpr,
    PARTS: gl.constexpr,
    DEPTH: gl.constexpr,
    acc_layout: gl.constexpr,
):
    """One tile of 64 tokens and 256 columns; the sums are those of `scaled_tile`, bit for bit.

    Tokens are read from shared memory once for all columns, and while one product is scaled another one runs.

    Returns:
        The sums of four times 64 columns, slot and phase.
    """
    a_layout: gl.constexpr = gl.DotOperandLayout(0, acc_layout, 4)
    rows: gl.constexpr = gl.SliceLayout(1, acc_layout)
    even = gl.zeros((64, 64), gl.float32, acc_layout)
    odd = even
    s0 = even
    s1 = even
    s2 = even
    s3 = even
    for _step in range(steps):
        mbarrier.wait(full.index(slot), phase)
        w = w_ring.index(slot)
        a = x_ring.index(slot * PARTS + PART).load(a_layout)
        even = _start(a, w, even, never, 0)
        odd = _start(a, w, odd, never, 1)
        scale = s_ring.index(slot * PARTS + PART).load(rows)
        f = f_ring.index(slot)
        low = scale * f.slice(0, 1).load(rows).broadcast_to([64])
        high = scale * f.slice(1, 1).load(rows).broadcast_to([64])
        even = warpgroup_mma_wait(1, [even])
        s0 += even * low[:, None]
        # No sum may be left for later, while another product takes the registers of this one.
        s0 = warpgroup_mma_wait(1, [s0])
        even = _start(a, w, even, never, 2)
        odd = warpgroup_mma_wait(1, [odd])
        s1 += odd * low[:, None]
        s1 = warpgroup_mma_wait(1, [s1])
        odd = _start(a, w, odd, never, 3)
        even = warpgroup_mma_wait(1, [even])
        s2 += even * high[:, None]
        odd = warpgroup_mma_wait(0, [odd])
        mbarrier.arrive(empty.index(slot), count=1)
        s3 += odd * high[:, None]
        slot += 1
        if slot == DEPTH:
            slot = 0
            phase ^= 1
    return s0, s1, s2, s3, slot, phase
