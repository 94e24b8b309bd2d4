"""Tiles of many e4m3 tokens on Hopper whose scales, and those of the weights, are powers of two for 32 channels."""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    warpgroup_mma,
    warpgroup_mma_wait,
)

from deepinfer.kernels.triton.gemm_tiles import give_back, next_operands, operands
from deepinfer.kernels.triton.grouped_tiles import power_of_byte
from deepinfer.kernels.triton.rings import advance

__all__ = ["small_groups_tile"]


@gluon.jit
def _start(x, w, part, never, AT: gl.constexpr):
    """Begins the product of 32 channels; `never` as in `gemm_tiles`."""
    b = w.slice(32 * AT, 32, dim=1).permute((1, 0))
    return warpgroup_mma(x.slice(32 * AT, 32, dim=1), b, part, use_acc=never, is_async=True)


@gluon.jit
def _powers(codes, AT: gl.constexpr, SPREAD: gl.constexpr):
    """The powers of 32 channels: of words, or of four values that are powers already."""
    return codes[AT] if SPREAD else power_of_byte(codes, AT)


@gluon.jit
def _promote(acc, part, rows, columns, AT: gl.constexpr, SPREAD: gl.constexpr, PENDING: gl.constexpr):  # fmt: skip
    """Adds a product, times the powers of its rows and of its blocks of columns."""
    scale = _powers(rows, AT, SPREAD)[:, None] * _powers(columns, AT, SPREAD)[None, :]
    acc += part.reshape(acc.type.shape) * scale[:, :, None]
    # No sum may be left for later, while another product takes the registers of this one.
    return warpgroup_mma_wait(PENDING, [acc])


@gluon.jit
def _row_powers(s, layout: gl.constexpr):
    """Four powers of each of 64 rows, which lie side by side."""
    # Rows are dealt to threads as those of a product are; a thread's eight powers come in two reads.
    dealt: gl.constexpr = gl.DistributedLinearLayout(
        [[1], [2], [32]], [[0], [0], [4], [8], [16]], [[64], [128]], [], [256]
    )
    even, odd = gl.split(s.load(dealt).reshape([64, 2, 2]))
    first, third = gl.split(even)
    second, fourth = gl.split(odd)
    return (
        gl.convert_layout(first, layout),
        gl.convert_layout(second, layout),
        gl.convert_layout(third, layout),
        gl.convert_layout(fourth, layout),
    )


@gluon.jit
def _scales(rings, slot, PART: gl.constexpr, PARTS: gl.constexpr, BLOCKS: gl.constexpr, SPREAD: gl.constexpr,
            plane: gl.constexpr):  # fmt: skip
    """Powers of 64 rows and of some blocks of columns, for 128 channels."""
    s, f = rings[2].index(slot * PARTS + PART), rings[3].index(slot)
    if SPREAD:
        rows = _row_powers(s, gl.SliceLayout(1, plane))
        columns = (
            f.slice(0, BLOCKS).load(gl.SliceLayout(0, plane)),
            f.slice(4, BLOCKS).load(gl.SliceLayout(0, plane)),
            f.slice(8, BLOCKS).load(gl.SliceLayout(0, plane)),
            f.slice(12, BLOCKS).load(gl.SliceLayout(0, plane)),
        )
    else:
        rows = s.load(gl.SliceLayout(1, plane))
        columns = f.slice(0, BLOCKS).load(gl.SliceLayout(0, plane))
    return rows, columns


@gluon.jit
def small_groups_tile(rings, bars, steps, slot, phase, never, PART: gl.constexpr, PARTS: gl.constexpr, COLUMNS: gl.constexpr,
                      DEPTH: gl.constexpr, SPREAD: gl.constexpr, acc_layout: gl.constexpr):  # fmt: skip
    """One tile of 64 tokens and COLUMNS rows of weights; one product is always under way, from step to step.

    Powers of two come as words of four bytes, or with SPREAD as fp32 values.

    Returns:
        Sums [64, COLUMNS], slot and phase.
    """
    zero = gl.zeros((64, COLUMNS), gl.float32, acc_layout)
    acc = zero.reshape([64, COLUMNS // 32, 32])
    plane: gl.constexpr = gl.SliceLayout(2, acc.type.layout)
    x, w = next_operands(rings, bars, slot, phase, PART, PARTS)
    part = _start(x, w, zero, never, 0)
    other = zero
    for _step in range(steps - 1):
        x, w = operands(rings, slot, PART, PARTS)
        other = _start(x, w, other, never, 1)
        rows, columns = _scales(rings, slot, PART, PARTS, COLUMNS // 32, SPREAD, plane)
        part = warpgroup_mma_wait(1, [part])
        acc = _promote(acc, part, rows, columns, 0, SPREAD, 1)
        part = _start(x, w, part, never, 2)
        other = warpgroup_mma_wait(1, [other])
        acc = _promote(acc, other, rows, columns, 1, SPREAD, 1)
        other = _start(x, w, other, never, 3)
        used = slot
        slot, phase = advance(slot, phase, DEPTH)
        part = warpgroup_mma_wait(1, [part])
        acc = _promote(acc, part, rows, columns, 2, SPREAD, 1)
        x, w = next_operands(rings, bars, slot, phase, PART, PARTS)
        part = _start(x, w, part, never, 0)
        other = warpgroup_mma_wait(1, [other])
        give_back(bars, used)
        acc = _promote(acc, other, rows, columns, 3, SPREAD, 1)
    x, w = operands(rings, slot, PART, PARTS)
    last = _start(x, w, other, never, 1)
    rows, columns = _scales(rings, slot, PART, PARTS, COLUMNS // 32, SPREAD, plane)
    part = warpgroup_mma_wait(1, [part])
    acc = _promote(acc, part, rows, columns, 0, SPREAD, 1)
    part = _start(x, w, part, never, 2)
    last = warpgroup_mma_wait(1, [last])
    acc = _promote(acc, last, rows, columns, 1, SPREAD, 1)
    last = _start(x, w, last, never, 3)
    part = warpgroup_mma_wait(1, [part])
    acc = _promote(acc, part, rows, columns, 2, SPREAD, 1)
    last = warpgroup_mma_wait(0, [last])
    give_back(bars, slot)
    acc = _promote(acc, last, rows, columns, 3, SPREAD, 0)
    slot, phase = advance(slot, phase, DEPTH)
    return gl.convert_layout(acc.reshape([64, COLUMNS]), acc_layout), slot, phase
