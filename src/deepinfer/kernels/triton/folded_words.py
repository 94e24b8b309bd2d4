"""Words of prepared MXFP4 weights in registers of Hopper: eight codes to eight e4m3 bytes of a tensor core operand."""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

__all__ = ["WIDE", "decode_half", "load_words", "unfold"]

# $2: eight codes, the magnitudes of the first four in the low half; their signs are the high bits of the bytes, those of
# the last four stand four bits below. $6: the e4m3 byte of 0.5 at this step. $0, $1: four e4m3 bytes each.
_UNFOLD = gl.constexpr("""{
.reg .b32 lo, hi, m, n, s;
mad.lo.u32 lo, $6, 0x01010100, 0x0C080000;
mad.lo.u32 hi, $6, 0x01010101, 0x1C181410;
and.b32 m, $2, 0x77777777;
shr.u32 n, m, 16;
shl.b32 s, $2, 4;
prmt.b32 m, lo, hi, m;
prmt.b32 n, lo, hi, n;
lop3.b32 $0, $2, 0x80808080, m, 0xEA;
lop3.b32 $1, s, 0x80808080, n, 0xEA;
}""")

# Rows, words of a group and codes of half a word, as the tensor core wants the left operand of [64, 32] in registers.
WIDE = gl.constexpr(
    gl.DistributedLinearLayout(
        [[0, 0, 1], [0, 0, 2], [8, 0, 0]],
        [[0, 1, 0], [0, 2, 0], [1, 0, 0], [2, 0, 0], [4, 0, 0]],
        [[16, 0, 0], [32, 0, 0]],
        [],
        [64, 4, 4],
    )
)


@gluon.jit
def unfold(words, steps, a_layout: gl.constexpr):
    """Words of eight codes [64, 4] and the byte of 0.5 of each row to an operand [64, 32] of e4m3."""
    words = gl.convert_layout(words, gl.SliceLayout(2, WIDE), assert_trivial=True)
    words = words.expand_dims(2).broadcast_to([64, 4, 4])
    steps = steps.expand_dims(1).expand_dims(2).broadcast_to([64, 4, 4])
    low, high = gl.inline_asm_elementwise(
        _UNFOLD, "=r,=r,r,r,r,r,r,r,r,r", [words, steps], dtype=(gl.uint8, gl.uint8), is_pure=True, pack=4
    )  # fmt: skip
    a = gl.join(low, high).permute((0, 3, 1, 2)).reshape([64, 32])
    return gl.convert_layout(a.to(gl.float8e4nv, bitcast=True), a_layout, assert_trivial=True)


@gluon.jit
def load_words(w, HALF: gl.constexpr):
    """The words [64, 4] of each group of 32 of 128 channels of a tile in shared memory."""
    layout: gl.constexpr = gl.DistributedLinearLayout(
        [[0, 1], [0, 2], [8, 0]],
        [[0, 4], [0, 8], [1, 0], [2, 0], [4, 0]],
        [[16, 0], [32, 0]],
        [],
        [64, 16],
    )
    p = w.slice(16 * HALF, 16, dim=1).load(layout)
    even, odd = gl.split(p.reshape([64, 4, 2, 2]))
    w0, w2 = gl.split(even)
    w1, w3 = gl.split(odd)
    return w0, w1, w2, w3


@gluon.jit
def decode_half(w, t, HALF: gl.constexpr):
    """128 channels of a tile as e4m3, [64, 128], in registers."""
    a_layout: gl.constexpr = gl.DotOperandLayout(
        0, gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 64, 32]), 4
    )
    words = load_words(w, HALF)
    a0 = unfold(words[0], t & 255, a_layout)
    a1 = unfold(words[1], (t >> 8) & 255, a_layout)
    a2 = unfold(words[2], (t >> 16) & 255, a_layout)
    a3 = unfold(words[3], (t >> 24) & 255, a_layout)
    low = gl.join(a0, a1).permute((0, 2, 1)).reshape([64, 64])
    high = gl.join(a2, a3).permute((0, 2, 1)).reshape([64, 64])
    return gl.join(low, high).permute((0, 2, 1)).reshape([64, 128])
