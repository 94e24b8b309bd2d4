"""Tiles of many e4m3 tokens on Hopper whose tokens are read into registers while those before are multiplied."""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    mbarrier,
    warpgroup_mma_wait,
)

from deepinfer.kernels.triton.gemm_tiles import give_back, next_operands
from deepinfer.kernels.triton.gemm_tiles_register import add_product, start_product
from deepinfer.kernels.triton.mla_records import view_memory
from deepinfer.kernels.triton.rings import advance

__all__ = ["ahead_register_tile"]

# Rows, words of four channels and bytes of a word, as the tensor core wants the left operand of [64, 128] in registers.
_BYTES = gl.constexpr(
    gl.DistributedLinearLayout(
        [[0, 0, 1], [0, 0, 2], [8, 0, 0], [0, 4, 0], [0, 8, 0], [0, 16, 0]],
        [[0, 1, 0], [0, 2, 0], [1, 0, 0], [2, 0, 0], [4, 0, 0]],
        [[16, 0, 0], [32, 0, 0]],
        [],
        [64, 32, 4],
    )
)
_WORDS = gl.constexpr(gl.SliceLayout(2, _BYTES))


@gluon.jit
def _next_tokens(rings, bars, slot, phase, PART: gl.constexpr, PARTS: gl.constexpr):
    """64 tokens as words of four channels in registers, as soon as they are there."""
    x, _w = next_operands(rings, bars, slot, phase, PART, PARTS)
    words: gl.constexpr = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=32)
    return view_memory(x, gl.int32, [64, 32], words).load(_WORDS)


@gluon.jit
def _settled(words, zero, a_layout: gl.constexpr):
    """Words of tokens as an operand in registers; `zero` is 0, but hides from the assembler that they are there already.

    The assembler lets a product begin only after those before have ended if its operand was made while they ran.
    """
    four = words.expand_dims(2).broadcast_to([64, 32, 4])
    a = gl.inline_asm_elementwise(
        "lop3.b32 $0, $1, 0xFFFFFFFF, $5, 0xEA;", "=r,r,r,r,r,r,r,r,r", [four, zero], dtype=gl.uint8, is_pure=True, pack=4
    )  # fmt: skip
    a = a.reshape([64, 128]).to(gl.float8e4nv, bitcast=True)
    return gl.convert_layout(a, a_layout, assert_trivial=True)


@gluon.jit
def ahead_register_tile(rings, bars, steps, slot, phase, never, PART: gl.constexpr, PARTS: gl.constexpr, DEPTH: gl.constexpr,
                        acc_layout: gl.constexpr):  # fmt: skip
    """One tile of 64 tokens and 256 columns; the sums are those of `register_tile`, bit for bit.

    The tokens of the next step are read while the last product of this one runs, so that the next products begin as soon as
    it is added.

    Returns:
        The sums of four times 64 columns, slot and phase.
    """
    _x, w_ring, s_ring, f_ring = rings
    a_layout: gl.constexpr = gl.DotOperandLayout(0, acc_layout, 4)
    rows: gl.constexpr = gl.SliceLayout(1, acc_layout)
    row = gl.arange(0, 64, layout=gl.SliceLayout(1, gl.SliceLayout(2, _BYTES)))
    zero = (row * never.to(gl.int32)).expand_dims(1).expand_dims(2).broadcast_to([64, 32, 4])
    even = gl.zeros((64, 64), gl.float32, acc_layout)
    odd = even
    s0 = even
    s1 = even
    s2 = even
    s3 = even
    before = slot
    words = _next_tokens(rings, bars, slot, phase, PART, PARTS)
    for step in range(steps):
        w = w_ring.index(slot)
        a = _settled(words, zero, a_layout)
        even = start_product(a, w, even, never, 0)
        odd = start_product(a, w, odd, never, 1)
        mbarrier.arrive(bars[1].index(before), count=1, pred=step > 0)
        scale = s_ring.index(slot * PARTS + PART).load(rows)
        f = f_ring.index(slot)
        last = scale * f.slice(3, 1).load(rows).broadcast_to([64])
        even = warpgroup_mma_wait(1, [even])
        s0 = add_product(s0, even, scale, f, 0, 1)
        even = start_product(a, w, even, never, 2)
        odd = warpgroup_mma_wait(1, [odd])
        s1 = add_product(s1, odd, scale, f, 1, 1)
        odd = start_product(a, w, odd, never, 3)
        even = warpgroup_mma_wait(1, [even])
        s2 = add_product(s2, even, scale, f, 2, 1)
        before = slot
        slot, phase = advance(slot, phase, DEPTH)
        if step + 1 < steps:
            words = _next_tokens(rings, bars, slot, phase, PART, PARTS)
        odd = warpgroup_mma_wait(0, [odd])
        s3 += odd * last[:, None]
    give_back(bars, before)
    return s0, s1, s2, s3, slot, phase
