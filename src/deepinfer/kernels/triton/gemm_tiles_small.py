"""Tiles of many e4m3 tokens on Hopper whose scales, and those of the weights, are powers of two for 32 channels."""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from deepinfer.kernels.triton.grouped_tiles import power_of_byte

__all__ = ["small_groups_tile"]


@gluon.jit
def _quarters(x):
    """The blocks of 32 columns of [64, 128]; no register moves."""
    even, odd = gl.split(x.reshape([64, 2, 2, 32]).permute((0, 3, 1, 2)))
    a, c = gl.split(even)
    b, d = gl.split(odd)
    return a, b, c, d


@gluon.jit
def _start(x, w, part, never, AT: gl.constexpr):
    """Begins the product of 32 channels; `never` as in `gemm_tiles`."""
    b = w.slice(32 * AT, 32, dim=1).permute((1, 0))
    return warpgroup_mma(x.slice(32 * AT, 32, dim=1), b, part, use_acc=never, is_async=True)


@gluon.jit
def _promote(sums, part, row_codes, codes, AT: gl.constexpr):
    """Adds a product, times the powers of its rows and of its blocks of columns."""
    s0, s1, s2, s3 = sums
    p0, p1, p2, p3 = _quarters(part)
    c0, c1, c2, c3 = codes
    xs = power_of_byte(row_codes, AT)
    s0 += p0 * (xs * power_of_byte(c0, AT))[:, None]
    s1 += p1 * (xs * power_of_byte(c1, AT))[:, None]
    s2 += p2 * (xs * power_of_byte(c2, AT))[:, None]
    s3 += p3 * (xs * power_of_byte(c3, AT))[:, None]
    # No sum may be left for later, while another product takes the registers of this one.
    return warpgroup_mma_wait(1, [s0, s1, s2, s3])


@gluon.jit
def small_groups_tile(
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
    """One tile of 64 tokens and 128 rows of weights.

    Returns:
        Sums [64, 128], slot and phase.
    """
    part = gl.zeros((64, 128), gl.float32, acc_layout)
    other = part
    s0, s1, s2, s3 = _quarters(part)
    rows: gl.constexpr = gl.SliceLayout(1, s0.type.layout)
    for _step in range(steps):
        mbarrier.wait(full.index(slot), phase)
        x, w = x_ring.index(slot * PARTS + PART), w_ring.index(slot)
        part = _start(x, w, part, never, 0)
        other = _start(x, w, other, never, 1)
        row_codes = s_ring.index(slot * PARTS + PART).load(rows)
        f = f_ring.index(slot)
        codes = (
            f.slice(0, 1).load(rows).broadcast_to([64]),
            f.slice(1, 1).load(rows).broadcast_to([64]),
            f.slice(2, 1).load(rows).broadcast_to([64]),
            f.slice(3, 1).load(rows).broadcast_to([64]),
        )
        part = warpgroup_mma_wait(1, [part])
        s0, s1, s2, s3 = _promote((s0, s1, s2, s3), part, row_codes, codes, 0)
        part = _start(x, w, part, never, 2)
        other = warpgroup_mma_wait(1, [other])
        s0, s1, s2, s3 = _promote((s0, s1, s2, s3), other, row_codes, codes, 1)
        other = _start(x, w, other, never, 3)
        part = warpgroup_mma_wait(1, [part])
        s0, s1, s2, s3 = _promote((s0, s1, s2, s3), part, row_codes, codes, 2)
        other = warpgroup_mma_wait(0, [other])
        mbarrier.arrive(empty.index(slot), count=1)
        s0, s1, s2, s3 = _promote((s0, s1, s2, s3), other, row_codes, codes, 3)
        slot += 1
        if slot == DEPTH:
            slot = 0
            phase ^= 1
    sums = gl.join(gl.join(s0, s2), gl.join(s1, s3)).permute((0, 2, 3, 1)).reshape([64, 128])
    return gl.convert_layout(sums, acc_layout), slot, phase
