"""MXFP4 keys in shared memory to e4m3 operands in registers, and queries in the order of channels that this gives."""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from deepinfer.kernels.triton.folded_words import WIDE

__all__ = ["fold", "key_words", "largest_power", "powers", "split_channels", "spread"]

# $2: eight codes s ee m. $0: those of the low halves of its bytes as s 00 ee m 00, which is e4m3 times 2^-6; $1: the others.
_SPREAD = gl.constexpr("""{
.reg .b32 s, t;
shl.b32 s, $2, 2;
and.b32 t, s, 0x1C1C1C1C;
shl.b32 s, $2, 4;
lop3.b32 $0, s, 0x80808080, t, 0xEA;
shr.u32 s, $2, 2;
and.b32 t, s, 0x1C1C1C1C;
lop3.b32 $1, $2, 0x80808080, t, 0xEA;
}""")

# $2: eight codes; $6: how many powers of two their scale is below the key's largest. $0 and $1: four e4m3 bytes each, 2^6
# times as large as the codes are in units of the largest; a table of eight bytes has the magnitudes. From 12 on: zeros.
_FOLD = gl.constexpr("""{
.reg .b32 b, w, lo, hi, m, n, s, t;
.reg .pred p;
setp.lt.s32 p, $6, 12;
selp.b32 w, $2, 0, p;
mad.lo.s32 b, $6, -8, 96;
mad.lo.s32 lo, b, 0x01010100, 0x0C080000;
mad.lo.s32 hi, b, 0x01010101, 0x1C181410;
and.b32 m, w, 0x77777777;
shr.u32 n, m, 16;
prmt.b32 m, lo, hi, m;
prmt.b32 n, lo, hi, n;
shl.b32 b, w, 4;
prmt.b32 s, b, w, 0x5140;
prmt.b32 t, b, w, 0x7362;
lop3.b32 $0, s, 0x80808080, m, 0xEA;
lop3.b32 $1, t, 0x80808080, n, 0xEA;
}""")


@gluon.jit
def key_words(tile):
    """Words of eight codes, [64, 4], of each group of 32 channels; of a tile of words [64, 16] in shared memory."""
    layout: gl.constexpr = gl.DistributedLinearLayout(
        [[0, 4], [0, 8], [8, 0]],
        [[0, 1], [0, 2], [1, 0], [2, 0], [4, 0]],
        [[16, 0], [32, 0]],
        [],
        [64, 16],
    )
    even, odd = gl.split(tile.load(layout).reshape([64, 2, 2, 4]).permute((0, 3, 1, 2)))
    w0, w2 = gl.split(even)
    w1, w3 = gl.split(odd)
    return w0, w1, w2, w3


@gluon.jit
def spread(words, a_layout: gl.constexpr):
    """Words of eight codes [64, 4] to an operand [64, 32] of e4m3, 2^-6 times the codes: even channels, then odd ones."""
    words = gl.convert_layout(words, gl.SliceLayout(2, WIDE), assert_trivial=True)
    words = words.expand_dims(2).broadcast_to([64, 4, 4])
    low, high = gl.inline_asm_elementwise(
        _SPREAD, "=r,=r,r,r,r,r", [words], dtype=(gl.uint8, gl.uint8), is_pure=True, pack=4
    )
    a = gl.join(low, high).permute((0, 3, 1, 2)).reshape([64, 32])
    return gl.convert_layout(a.to(gl.float8e4nv, bitcast=True), a_layout, assert_trivial=True)


@gluon.jit
def powers(scales):
    """Four e8m0 bytes of a word to fp32: exponents, so 0 for 2^-127 and infinite for NaN."""
    p0 = ((scales << 23) & 0x7F800000).to(gl.float32, bitcast=True)
    p1 = ((scales << 15) & 0x7F800000).to(gl.float32, bitcast=True)
    p2 = ((scales << 7) & 0x7F800000).to(gl.float32, bitcast=True)
    p3 = ((scales >> 1) & 0x7F800000).to(gl.float32, bitcast=True)
    return p0, p1, p2, p3


@gluon.jit
def _largest(scales):
    """The largest of four bytes."""
    low = gl.maximum(scales & 255, (scales >> 8) & 255)
    return gl.maximum(low, gl.maximum((scales >> 16) & 255, (scales >> 24) & 255))


@gluon.jit
def largest_power(scales):
    """The largest of four e8m0 bytes of a word as fp32; as in `powers`."""
    return (_largest(scales) << 23).to(gl.float32, bitcast=True)


@gluon.jit
def fold(words, scales, a_layout: gl.constexpr):
    """Four groups of words of eight codes [64, 4] to an operand [64, 128] of e4m3, with a scale in each.

    It is 2^6 times the key in units of its largest scale; groups with a scale 2^-12 times as large, or less, are zeros.
    """
    most = _largest(scales)
    a0 = _folded(words[0], most - (scales & 255))
    a1 = _folded(words[1], most - ((scales >> 8) & 255))
    a2 = _folded(words[2], most - ((scales >> 16) & 255))
    a3 = _folded(words[3], most - ((scales >> 24) & 255))
    low = gl.join(a0, a1).permute((0, 2, 1)).reshape([64, 64])
    high = gl.join(a2, a3).permute((0, 2, 1)).reshape([64, 64])
    a = gl.join(low, high).permute((0, 2, 1)).reshape([64, 128])
    return gl.convert_layout(a.to(gl.float8e4nv, bitcast=True), a_layout, assert_trivial=True)


@gluon.jit
def _folded(words, below):
    words = gl.convert_layout(words, gl.SliceLayout(2, WIDE), assert_trivial=True)
    words = words.expand_dims(2).broadcast_to([64, 4, 4])
    below = below.expand_dims(1).expand_dims(2).broadcast_to([64, 4, 4])
    low, high = gl.inline_asm_elementwise(
        _FOLD, "=r,=r,r,r,r,r,r,r,r,r", [words, below], dtype=(gl.uint8, gl.uint8), is_pure=True, pack=4
    )  # fmt: skip
    return gl.join(low, high).permute((0, 3, 1, 2)).reshape([64, 32])


@gluon.jit
def split_channels(q, ROWS: gl.constexpr, FOLDED: gl.constexpr):
    """Queries [ROWS, 128] in the order of channels of `spread`, or of `fold`: of each eight the first four come first."""
    if FOLDED:
        q = q.reshape([ROWS, 4, 4, 2, 4]).permute((0, 1, 3, 2, 4)).reshape([ROWS, 128])
    else:
        q = q.reshape([ROWS, 4, 16, 2]).permute((0, 1, 3, 2)).reshape([ROWS, 128])
    return q
