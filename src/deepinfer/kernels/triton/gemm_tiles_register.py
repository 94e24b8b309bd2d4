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
def _start(a, w_ring, slot, part, never, AT: gl.constexpr, COLUMNS: gl.constexpr):
    """Begins the product of 128 channels with 64 columns; `never` as in `gemm_tiles`."""
    w = w_ring.index(slot).slice(64 * AT, 64) if COLUMNS == 256 else w_ring.index(slot * 3 + AT)
    return warpgroup_mma(a, w.permute((1, 0)), part, use_acc=never, is_async=True)


@gluon.jit
def _add(acc, part, rows, f, AT: gl.constexpr, PENDING: gl.constexpr):
    """Adds a product, times the scales of its rows and of its columns."""
    scale = rows * f.slice(AT, 1).load(rows.type.layout).broadcast_to([64])
    acc += part * scale[:, None]
    # No sum may be left for later, while another product takes the registers of this one.
    return warpgroup_mma_wait(PENDING, [acc])


@gluon.jit
def register_tile(rings, bars, steps, slot, phase, never, PART: gl.constexpr, PARTS: gl.constexpr, COLUMNS: gl.constexpr,
                  DEPTH: gl.constexpr, acc_layout: gl.constexpr):  # fmt: skip
    """One tile of 64 tokens and 192 or 256 columns; the sums are those of `scaled_tile`, bit for bit.

    Tokens are read from shared memory once for all columns, and while one product is scaled another one runs.

    Returns:
        The sums of three or four times 64 columns (zeros for the fourth of three), slot and phase.
    """
    _x, w_ring, s_ring, f_ring = rings
    a_layout: gl.constexpr = gl.DotOperandLayout(0, acc_layout, 4)
    rows: gl.constexpr = gl.SliceLayout(1, acc_layout)
    even = gl.zeros((64, 64), gl.float32, acc_layout)
    odd = even
    s0 = even
    s1 = even
    s2 = even
    s3 = even
    for _step in range(steps):
        x, _w = next_operands(rings, bars, slot, phase, PART, PARTS)
        a = x.load(a_layout)
        even = _start(a, w_ring, slot, even, never, 0, COLUMNS)
        odd = _start(a, w_ring, slot, odd, never, 1, COLUMNS)
        scale = s_ring.index(slot * PARTS + PART).load(rows)
        f = f_ring.index(slot)
        last = scale * f.slice(COLUMNS // 64 - 1, 1).load(rows).broadcast_to([64])
        even = warpgroup_mma_wait(1, [even])
        s0 = _add(s0, even, scale, f, 0, 1)
        even = _start(a, w_ring, slot, even, never, 2, COLUMNS)
        odd = warpgroup_mma_wait(1, [odd])
        s1 = _add(s1, odd, scale, f, 1, 1)
        if COLUMNS == 256:
            odd = _start(a, w_ring, slot, odd, never, 3, COLUMNS)
            even = warpgroup_mma_wait(1, [even])
            s2 = _add(s2, even, scale, f, 2, 1)
            odd = warpgroup_mma_wait(0, [odd])
            give_back(bars, slot)
            s3 += odd * last[:, None]
        else:
            even = warpgroup_mma_wait(0, [even])
            give_back(bars, slot)
            s2 += even * last[:, None]
        slot, phase = advance(slot, phase, DEPTH)
    return s0, s1, s2, s3, slot, phase
