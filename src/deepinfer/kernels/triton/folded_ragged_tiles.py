"""Tiles of some tokens and 64 rows of prepared MXFP4 weights on Hopper, which are decoded one step ahead."""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from deepinfer.kernels.triton.folded_ahead import left_operand, next_weights
from deepinfer.kernels.triton.rings import advance

__all__ = ["ragged_tile"]


@gluon.jit
def _begin(
    a, rings, slot, parts, never, WIDTH: gl.constexpr, MORE: gl.constexpr, more_layout: gl.constexpr
):
    """Begins the products of 128 channels; `never` is false, but hides from the compiler that `parts` are not needed."""
    _w, x_ring, more_ring, _t, _s, _after = rings
    part, rest = parts
    x = x_ring.index(slot)
    part = warpgroup_mma(a, x.slice(0, WIDTH).permute((1, 0)), part, use_acc=never, is_async=True)
    if MORE > 0:
        b = gl.convert_layout(a, gl.DotOperandLayout(0, more_layout, 4), assert_trivial=True)
        y = x.slice(64, MORE) if WIDTH == 64 else more_ring.index(slot).slice(0, MORE)
        rest = warpgroup_mma(b, y.permute((1, 0)), rest, use_acc=never, is_async=True)
    return part, rest


@gluon.jit
def _add(rings, slot, sums, parts, WIDTH: gl.constexpr, MORE: gl.constexpr, acc_layout: gl.constexpr,
         more_layout: gl.constexpr):  # fmt: skip
    """Waits for products and adds them up with the scales of the tokens."""
    _w, _x, _more, _t, s_ring, after_ring = rings
    acc, more = sums
    part, rest = parts
    s = s_ring.index(slot)
    if MORE == 0:
        scale = s.slice(0, WIDTH).load(gl.SliceLayout(0, acc_layout))
        part = warpgroup_mma_wait(0, [part])
        acc += part * scale[None, :]
    else:
        after = s.slice(64, MORE) if WIDTH == 64 else after_ring.index(slot).slice(0, MORE)
        if WIDTH + MORE > 128:  # the registers do not hold the scales meanwhile
            part, rest = warpgroup_mma_wait(0, [part, rest])
        scale = s.slice(0, WIDTH).load(gl.SliceLayout(0, acc_layout))
        other = after.load(gl.SliceLayout(0, more_layout))
        if WIDTH + MORE <= 128:
            part, rest = warpgroup_mma_wait(0, [part, rest])
        acc += part * scale[None, :]
        more += rest * other[None, :]
    return (acc, more), (part, rest)


@gluon.jit
def _store(
    acc, factor, out, stride_om, m0, n0, rows, N, WIDTH: gl.constexpr, acc_layout: gl.constexpr
):
    """Writes the sums of 64 rows of weights and some tokens; no data leave their warp before."""
    to_layout: gl.constexpr = gl.BlockedLayout([8, 1], [2, 16], [4, 1], [0, 1])
    acc *= gl.convert_layout(factor, gl.SliceLayout(1, acc_layout), assert_trivial=True)[:, None]
    y = gl.convert_layout(acc.to(out.dtype.element_ty), to_layout)
    i = gl.arange(0, WIDTH, layout=gl.SliceLayout(0, to_layout))
    no = n0 + gl.arange(0, 64, layout=gl.SliceLayout(1, to_layout))
    at = out + (m0 + i).to(gl.int64)[None, :] * stride_om + no[:, None]
    gl.store(at, y, mask=(i < rows)[None, :] & (no < N)[:, None])


@gluon.jit
def _step(rings, bars, words, slot, phase, sums, parts, never, WIDTH: gl.constexpr, MORE: gl.constexpr, PART: gl.constexpr,
          DEPTH: gl.constexpr, acc_layout: gl.constexpr, more_layout: gl.constexpr):  # fmt: skip
    """Multiplies a step, whose weights are decoded, and decodes the next while the tensor cores are at it."""
    full, empty = bars
    at = slot
    slot, phase = advance(slot, phase, DEPTH)
    mbarrier.wait(full.index(slot), phase)
    a = left_operand(words, acc_layout)
    parts = _begin(a, rings, at, parts, never, WIDTH, MORE, more_layout)
    words = next_weights(rings[0], rings[3], slot, PART)
    sums, parts = _add(rings, at, sums, parts, WIDTH, MORE, acc_layout, more_layout)
    mbarrier.arrive(empty.index(at), count=1)
    return words, slot, phase, sums, parts


@gluon.jit
def ragged_tile(
    given, place, slot, phase, WIDTH: gl.constexpr, MORE: gl.constexpr, PART: gl.constexpr, DEPTH: gl.constexpr
):  # fmt: skip
    """One tile of WIDTH tokens and MORE others behind them.

    Args:
        given: What the kernel's warpgroups have.
        place: First token, first row of weights, tokens that are used, and the factors of the group's rows.
        slot: Place in the ring.
        phase: Of its barriers.
        WIDTH: 64 or 128.
        MORE: 0, 16 or 32.
        PART: Of the two warpgroups.
        DEPTH: Places of the ring.

    Returns:
        Slot and phase.
    """
    out, _factors, _layout, _tiles, rings, bars, sizes, strides = given
    m, n, rows, factors = place
    full, empty = bars
    _M, N, steps = sizes
    never = N < 0
    acc_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, WIDTH, 32])
    more_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, MORE or 32, 32])
    row = n + gl.arange(0, 64, layout=gl.SliceLayout(1, acc_layout))
    factor = gl.load(factors + gl.minimum(row, N - 1))
    acc = gl.zeros((64, WIDTH), gl.float32, acc_layout)
    more = gl.zeros((64, MORE or 32), gl.float32, more_layout)
    sums = (acc, more)
    parts = (acc, more)
    mbarrier.wait(full.index(slot), phase)
    words = next_weights(rings[0], rings[3], slot, PART)
    for _ in range(steps - 1):
        words, slot, phase, sums, parts = _step(
            rings, bars, words, slot, phase, sums, parts, never, WIDTH, MORE, PART, DEPTH, acc_layout, more_layout
        )  # fmt: skip
    a = left_operand(words, acc_layout)
    parts = _begin(a, rings, slot, parts, never, WIDTH, MORE, more_layout)
    sums, parts = _add(rings, slot, sums, parts, WIDTH, MORE, acc_layout, more_layout)
    mbarrier.arrive(empty.index(slot), count=1)
    slot, phase = advance(slot, phase, DEPTH)
    _store(sums[0], factor, out, strides[0], m, n, rows, N, WIDTH, acc_layout)
    if MORE > 0:
        _store(sums[1], factor, out, strides[0], m + WIDTH, n, rows - WIDTH, N, MORE, more_layout)
    return slot, phase
