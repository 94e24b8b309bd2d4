"""Tiles of many e4m3 tokens on Hopper whose tokens are multiplied out of registers, 64 columns at a time."""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    warpgroup_mma,
    warpgroup_mma_wait,
)

from deepinfer.kernels.triton.gemm_tiles import give_back, next_operands
from deepinfer.kernels.triton.rings import advance

__all__ = ["register_tile"]


@gluon.jit
def _start(a, w, part, never, AT: gl.constexpr):
    """Begins the product of 128 channels with 64 columns; `never` as in `gemm_tiles`."""
    b = w.slice(64 * AT, 64).permute((1, 0))
    return warpgroup_mma(a, b, part, use_acc=never, is_async=True)


@gluon.jit
def _add(acc, part, rows, f, AT: gl.constexpr, PENDING: gl.constexpr):
    """Adds a product, times the scales of its rows and of its columns."""
    scale = rows * f.slice(AT, 1).load(rows.type.layout).broadcast_to([64])
    acc += part * scale[:, None]
    # No sum may be left for later, while another product takes the registers of this one.
    return warpgroup_mma_wait(PENDING, [acc])


@gluon.jit
def register_tile(rings, bars, steps, slot, phase, never, PART: gl.constexpr, PARTS: gl.constexpr, DEPTH: gl.constexpr,
                  acc_layout: gl.constexpr):  # fmt: skip
    """One tile of 64 tokens and 256 columns.

    Tokens are read from shared memory once for all columns, and while one product is scaled another one runs.

    Returns:
        The sums of four times 64 columns, slot and phase.
    """
    _x, _w, s_ring, f_ring = rings
    a_layout: gl.constexpr = gl.DotOperandLayout(0, acc_layout, 4)
    rows: gl.constexpr = gl.SliceLayout(1, acc_layout)
    even = gl.zeros((64, 64), gl.float32, acc_layout)
    odd = even
    s0 = even
    s1 = even
    s2 = even
    s3 = even
    for _step in range(steps):
        x, w = next_operands(rings, bars, slot, phase, PART, PARTS)
        a = x.load(a_layout)
        even = _start(a, w, even, never, 0)
        odd = _start(a, w, odd, never, 1)
        scale = s_ring.index(slot * PARTS + PART).load(rows)
        f = f_ring.index(slot)
        last = scale * f.slice(3, 1).load(rows).broadcast_to([64])
        even = warpgroup_mma_wait(1, [even])
        s0 = _add(s0, even, scale, f, 0, 1)
        even = _start(a, w, even, never, 2)
        odd = warpgroup_mma_wait(1, [odd])
        s1 = _add(s1, odd, scale, f, 1, 1)
        odd = _start(a, w, odd, never, 3)
        even = warpgroup_mma_wait(1, [even])
        s2 = _add(s2, even, scale, f, 2, 1)
        odd = warpgroup_mma_wait(0, [odd])
        give_back(bars, slot)
        s3 += odd * last[:, None]
        slot, phase = advance(slot, phase, DEPTH)
    return s0, s1, s2, s3, slot, phase
