"""Prepared MXFP4 weights on Hopper, decoded while the tensor cores are at those before them."""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from deepinfer.kernels.triton.folded_words import WIDE, load_words

__all__ = ["left_operand", "next_weights"]

# `_UNFOLD` of `folded_words` in two parts: the magnitudes of four codes as e4m3 bytes, twice; and with their signs.
_MAGNITUDES = gl.constexpr("""{
.reg .b32 lo, hi, m, n;
mad.lo.u32 lo, $3, 0x01010100, 0x0C080000;
mad.lo.u32 hi, $3, 0x01010101, 0x1C181410;
and.b32 m, $2, 0x77777777;
shr.u32 n, m, 16;
prmt.b32 $0, lo, hi, m;
prmt.b32 $1, lo, hi, n;
}""")
_SIGNS = gl.constexpr("""{
.reg .b32 s;
shl.b32 s, $2, 4;
lop3.b32 $0, $2, 0x80808080, $3, 0xEA;
lop3.b32 $1, s, 0x80808080, $4, 0xEA;
}""")


@gluon.jit
def _magnitudes(words, steps):
    """Two words of four magnitudes for each word of eight codes, and the codes."""
    steps = steps.expand_dims(1).broadcast_to([64, 4])
    words = gl.convert_layout(words, gl.SliceLayout(2, WIDE), assert_trivial=True)
    low, high = gl.inline_asm_elementwise(
        _MAGNITUDES, "=r,=r,r,r", [words, steps], dtype=(gl.int32, gl.int32), is_pure=True, pack=1
    )
    return words, low, high


@gluon.jit
def next_weights(w_ring, t_ring, slot, PART: gl.constexpr):
    """64 rows of weights and 128 channels, decoded but for their signs, as words.

    The signs come when no product is in flight: the assembler begins the next product only after the present one if the
    operand in registers is made meanwhile.
    """
    words = load_words(w_ring.index(2 * slot + PART), 0)
    t = t_ring.index(2 * slot + PART).load(gl.SliceLayout(1, gl.SliceLayout(2, WIDE)))
    w0, l0, h0 = _magnitudes(words[0], t & 255)
    w1, l1, h1 = _magnitudes(words[1], (t >> 8) & 255)
    w2, l2, h2 = _magnitudes(words[2], (t >> 16) & 255)
    w3, l3, h3 = _magnitudes(words[3], (t >> 24) & 255)
    return w0, l0, h0, w1, l1, h1, w2, l2, h2, w3, l3, h3


@gluon.jit
def _bytes(word):
    """The four bytes of each word."""
    four = word.expand_dims(2).broadcast_to([64, 4, 4])
    return gl.inline_asm_elementwise(
        "mov.b32 $0, $1;", "=r,r,r,r,r", [four], dtype=gl.uint8, is_pure=True, pack=4
    )


@gluon.jit
def _group(words, low, high):
    """32 channels of e4m3, [64, 32]."""
    low, high = gl.inline_asm_elementwise(
        _SIGNS, "=r,=r,r,r,r", [words, low, high], dtype=(gl.int32, gl.int32), is_pure=True, pack=1
    )
    a = gl.join(_bytes(low), _bytes(high)).permute((0, 3, 1, 2)).reshape([64, 32])
    a_layout: gl.constexpr = gl.DotOperandLayout(
        0, gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 64, 32]), 4
    )
    return gl.convert_layout(a.to(gl.float8e4nv, bitcast=True), a_layout, assert_trivial=True)


@gluon.jit
def left_operand(words, acc_layout: gl.constexpr):
    """64 rows of weights and 128 channels as the left operand."""
    w0, l0, h0, w1, l1, h1, w2, l2, h2, w3, l3, h3 = words
    low = gl.join(_group(w0, l0, h0), _group(w1, l1, h1)).permute((0, 2, 1)).reshape([64, 64])
    high = gl.join(_group(w2, l2, h2), _group(w3, l3, h3)).permute((0, 2, 1)).reshape([64, 64])
    a = gl.join(low, high).permute((0, 2, 1)).reshape([64, 128])
    return gl.convert_layout(a, gl.DotOperandLayout(0, acc_layout, 4))
