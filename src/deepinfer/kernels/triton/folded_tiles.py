"""Tiles of e4m3 tokens and 64 rows of prepared MXFP4 weights on Hopper, decoded in registers."""

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
from deepinfer.kernels.triton.rings import advance

__all__ = ["folded_tile"]


@gluon.jit
def _group(words, t, x, part, add, AT: gl.constexpr, acc_layout: gl.constexpr):
    """Begins the product of 32 channels, added to `part` if `add`."""
    a_layout: gl.constexpr = gl.DotOperandLayout(0, acc_layout, 4)
    a = unfold(words, (t >> (8 * AT)) & 255, a_layout)
    b = x.slice(32 * AT, 32, dim=1).permute((1, 0))
    return warpgroup_mma(a, b, part, use_acc=add, is_async=True)


@gluon.jit
def _block(w, t, x, part, never, HALF: gl.constexpr, acc_layout: gl.constexpr):
    """Begins the product of 128 channels, decoded before; `never` is false, but hides from the compiler that `part` is not needed."""
    a = gl.convert_layout(decode_half(w, t, HALF), gl.DotOperandLayout(0, acc_layout, 4))
    return warpgroup_mma(a, x.permute((1, 0)), part, use_acc=never, is_async=True)


@gluon.jit
def _scaled_block(
    w, t, x, codes, acc, HALF: gl.constexpr, BLOCK_M: gl.constexpr, acc_layout: gl.constexpr,
):  # fmt: skip
    """Adds the product of 128 channels, whose tokens have a scale for 32."""
    words = load_words(w, HALF)
    zero = gl.zeros((64, BLOCK_M), gl.float32, acc_layout)
    p0 = _group(words[0], t, x, zero, False, 0, acc_layout)
    p1 = _group(words[1], t, x, zero, False, 1, acc_layout)
    if BLOCK_M > 32:  # two products at a time are as many as the registers hold
        p0 = warpgroup_mma_wait(1, [p0])
        acc += p0 * power_of_byte(codes, 0)[None, :]
        acc = warpgroup_mma_wait(1, [acc])
        p2 = _group(words[2], t, x, zero, False, 2, acc_layout)
        p1 = warpgroup_mma_wait(1, [p1])
        acc += p1 * power_of_byte(codes, 1)[None, :]
        acc = warpgroup_mma_wait(1, [acc])
        p3 = _group(words[3], t, x, zero, False, 3, acc_layout)
    else:
        p2 = _group(words[2], t, x, zero, False, 2, acc_layout)
        p3 = _group(words[3], t, x, zero, False, 3, acc_layout)
        p0 = warpgroup_mma_wait(3, [p0])
        acc += p0 * power_of_byte(codes, 0)[None, :]
        p1 = warpgroup_mma_wait(2, [p1])
        acc += p1 * power_of_byte(codes, 1)[None, :]
    p2 = warpgroup_mma_wait(1, [p2])
    acc += p2 * power_of_byte(codes, 2)[None, :]
    p3 = warpgroup_mma_wait(0, [p3])
    return acc + p3 * power_of_byte(codes, 3)[None, :]


@gluon.jit
def folded_tile(rings, bars, steps, slot, phase, never, X_GROUP: gl.constexpr, SPAN: gl.constexpr, PART: gl.constexpr,
          PARTS: gl.constexpr, BLOCK_M: gl.constexpr, DEPTH: gl.constexpr, acc_layout: gl.constexpr):  # fmt: skip
    """One tile; a step is 128 or 256 channels."""
    w_ring, x_ring, t_ring, s_ring = rings
    full, empty = bars
    t_layout: gl.constexpr = gl.SliceLayout(1, gl.SliceLayout(2, WIDE))
    m_layout: gl.constexpr = gl.SliceLayout(0, acc_layout)
    acc = gl.zeros((64, BLOCK_M), gl.float32, acc_layout)
    part = acc
    last = acc
    for _ in range(steps):
        mbarrier.wait(full.index(slot), phase)
        w = w_ring.index(slot * PARTS + PART)
        at = (slot * PARTS + PART) * SPAN
        if X_GROUP == 32:
            for half in gl.static_range(SPAN):
                t = t_ring.index(at + half).load(t_layout)
                codes = s_ring.index(slot * SPAN + half).load(m_layout)
                x = x_ring.index(slot * SPAN + half)
                acc = _scaled_block(w, t, x, codes, acc, half, BLOCK_M, acc_layout)
            mbarrier.arrive(empty.index(slot), count=1)
        else:
            t = t_ring.index(at).load(t_layout)
            part = _block(w, t, x_ring.index(slot * SPAN), part, never, 0, acc_layout)
            xs = s_ring.index(slot * SPAN).load(m_layout)
            if SPAN == 2:
                t = t_ring.index(at + 1).load(t_layout)
                last = _block(w, t, x_ring.index(slot * SPAN + 1), last, never, 1, acc_layout)
                part = warpgroup_mma_wait(1, [part])
                acc += part * xs[None, :]
                xs = s_ring.index(slot * SPAN + 1).load(m_layout)
                last = warpgroup_mma_wait(0, [last])
                mbarrier.arrive(empty.index(slot), count=1)
                acc += last * xs[None, :]
            else:
                part = warpgroup_mma_wait(0, [part])
                mbarrier.arrive(empty.index(slot), count=1)
                acc += part * xs[None, :]
        slot, phase = advance(slot, phase, DEPTH)
    return acc, slot, phase
