"""Tiles of e4m3 tokens and 64 rows of prepared MXFP4 weights on Hopper: decoding runs ahead of the tensor cores."""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from deepinfer.kernels.triton.folded_words import WIDE, decode_half, load_words, unfold
from deepinfer.kernels.triton.grouped_tiles import power_of_byte

__all__ = ["folded_tile_ahead", "small_folded_tile_ahead"]


@gluon.jit
def _following(step, steps, slot, phase, DEPTH: gl.constexpr):
    """The slot of the next step and its phase; the last step's own, which is decoded again for nothing, without a branch."""
    is_last = step == steps - 1
    wraps = slot == DEPTH - 1
    following = gl.where(is_last, slot, gl.where(wraps, 0, slot + 1))
    return following, phase ^ gl.where(is_last, 0, wraps.to(gl.int32))


@gluon.jit
def folded_tile_ahead(rings, bars, steps, slot, phase, never, PART: gl.constexpr, PARTS: gl.constexpr,
                BLOCK_M: gl.constexpr, DEPTH: gl.constexpr, acc_layout: gl.constexpr):  # fmt: skip
    """One tile in steps of 256 channels; 128 channels are decoded while those before them are multiplied."""
    w_ring, x_ring, t_ring, s_ring = rings
    full, empty = bars
    a_layout: gl.constexpr = gl.DotOperandLayout(0, acc_layout, 4)
    t_layout: gl.constexpr = gl.SliceLayout(1, gl.SliceLayout(2, WIDE))
    m_layout: gl.constexpr = gl.SliceLayout(0, acc_layout)
    acc = gl.zeros((64, BLOCK_M), gl.float32, acc_layout)
    part = acc
    last = acc
    mbarrier.wait(full.index(slot), phase)
    at = slot * PARTS + PART
    t = t_ring.index(at * 2).load(t_layout)
    a = gl.convert_layout(decode_half(w_ring.index(at), t, 0, False), a_layout)
    for step in range(steps):
        part = warpgroup_mma(
            a, x_ring.index(slot * 2).permute((1, 0)), part, use_acc=never, is_async=True
        )
        at = slot * PARTS + PART
        t = t_ring.index(at * 2 + 1).load(t_layout)
        b = gl.convert_layout(decode_half(w_ring.index(at), t, 1, False), a_layout)
        last = warpgroup_mma(
            b, x_ring.index(slot * 2 + 1).permute((1, 0)), last, use_acc=never, is_async=True
        )
        xs = s_ring.index(slot * 2).load(m_layout)
        part = warpgroup_mma_wait(1, [part])
        acc += part * xs[None, :]
        following, turn = _following(step, steps, slot, phase, DEPTH)
        mbarrier.wait(full.index(following), turn)
        at = following * PARTS + PART
        t = t_ring.index(at * 2).load(t_layout)
        a = gl.convert_layout(decode_half(w_ring.index(at), t, 0, False), a_layout)
        xs = s_ring.index(slot * 2 + 1).load(m_layout)
        last, acc = warpgroup_mma_wait(0, [last, acc])
        mbarrier.arrive(empty.index(slot), count=1)
        acc += last * xs[None, :]
        slot += 1
        if slot == DEPTH:
            slot = 0
            phase ^= 1
    return acc, slot, phase


@gluon.jit
def _quarters(w, t, HALF: gl.constexpr, acc_layout: gl.constexpr):
    """128 channels of a tile as four operands [64, 32] of e4m3."""
    a_layout: gl.constexpr = gl.DotOperandLayout(0, acc_layout, 4)
    words = load_words(w, HALF)
    a0 = unfold(words[0], t & 255, a_layout, False)
    a1 = unfold(words[1], (t >> 8) & 255, a_layout, False)
    a2 = unfold(words[2], (t >> 16) & 255, a_layout, False)
    a3 = unfold(words[3], (t >> 24) & 255, a_layout, False)
    return a0, a1, a2, a3


@gluon.jit
def _start(a, x, zero, AT: gl.constexpr):
    """Begins the product of 32 channels."""
    b = x.slice(32 * AT, 32, dim=1).permute((1, 0))
    return warpgroup_mma(a, b, zero, use_acc=False, is_async=True)


@gluon.jit
def small_folded_tile_ahead(rings, bars, steps, slot, phase, PART: gl.constexpr, PARTS: gl.constexpr,
                            BLOCK_M: gl.constexpr, DEPTH: gl.constexpr, acc_layout: gl.constexpr):  # fmt: skip
    """The same for tokens with e8m0 scales for 32 channels."""
    w_ring, x_ring, t_ring, s_ring = rings
    full, empty = bars
    t_layout: gl.constexpr = gl.SliceLayout(1, gl.SliceLayout(2, WIDE))
    m_layout: gl.constexpr = gl.SliceLayout(0, acc_layout)
    acc = gl.zeros((64, BLOCK_M), gl.float32, acc_layout)
    zero = gl.zeros((64, BLOCK_M), gl.float32, acc_layout)
    mbarrier.wait(full.index(slot), phase)
    at = slot * PARTS + PART
    t = t_ring.index(at * 2).load(t_layout)
    a0, a1, a2, a3 = _quarters(w_ring.index(at), t, 0, acc_layout)
    for step in range(steps):
        following, turn = _following(step, steps, slot, phase, DEPTH)
        for half in gl.static_range(2):
            x = x_ring.index(slot * 2 + half)
            p0 = _start(a0, x, zero, 0)
            p1 = _start(a1, x, zero, 1)
            p2 = _start(a2, x, zero, 2)
            p3 = _start(a3, x, zero, 3)
            codes = s_ring.index(slot * 2 + half).load(m_layout)
            if half == 0:
                at = slot * PARTS + PART
                t = t_ring.index(at * 2 + 1).load(t_layout)
                a0, a1, a2, a3 = _quarters(w_ring.index(at), t, 1, acc_layout)
            else:
                mbarrier.wait(full.index(following), turn)
                at = following * PARTS + PART
                t = t_ring.index(at * 2).load(t_layout)
                a0, a1, a2, a3 = _quarters(w_ring.index(at), t, 0, acc_layout)
            p0 = warpgroup_mma_wait(3, [p0])
            acc += p0 * power_of_byte(codes, 0)[None, :]
            p1 = warpgroup_mma_wait(2, [p1])
            acc += p1 * power_of_byte(codes, 1)[None, :]
            p2 = warpgroup_mma_wait(1, [p2])
            acc += p2 * power_of_byte(codes, 2)[None, :]
            p3 = warpgroup_mma_wait(0, [p3])
            if half == 1:
                mbarrier.arrive(empty.index(slot), count=1)
            acc += p3 * power_of_byte(codes, 3)[None, :]
        slot += 1
        if slot == DEPTH:
            slot = 0
            phase ^= 1
    return acc, slot, phase
