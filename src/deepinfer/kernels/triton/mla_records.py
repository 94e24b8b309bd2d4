"""Records of cached keys on Hopper: the work of a program, the layout of records in registers, codes to bf16.

Codes become bf16 by shifts: the fields of e4m3 and e2m1 fit into those of bf16, subnormal codes too, and one product sets
the exponent. Tiles hold 2^-32 of the values, so that the products of every scale up to 2^39 stay in range.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier

from deepinfer.kernels.triton.gluon_names import load_tile

__all__ = [
    "copy_queries",
    "decode_rows",
    "rows_layout",
    "tile_range",
    "view_memory",
]

# Called _reinterpret up to Triton 3.6; the same arguments.
view_memory = (
    getattr(gl.shared_memory_descriptor, "reinterpret", None)
    or gl.shared_memory_descriptor._reinterpret
)
"""Shared memory with another type, shape and layout."""

# Four e4m3 codes and a pair of equal bf16 factors to four bf16: s eeee mmm to s 0000eeee mmm0000.
_FP8 = gl.constexpr("""{
.reg .b32 p, q, a, b;
prmt.b32 p, $2, 0, 0x1404;
prmt.b32 q, $2, 0, 0x3424;
shr.u32 a, p, 4;
shr.u32 b, q, 4;
and.b32 a, a, 0x07F007F0;
and.b32 b, b, 0x07F007F0;
lop3.b32 a, p, a, 0x80008000, 0xEC;
lop3.b32 b, q, b, 0x80008000, 0xEC;
mul.rn.bf16x2 $0, a, $3;
mul.rn.bf16x2 $1, b, $3;
}""")
# Eight e2m1 codes and a pair of equal bf16 factors to eight bf16: s ee m to s 000000ee m000000.
_FP4 = gl.constexpr("""{
.reg .b32 w, p, q, r, t, a, b, c, d;
shl.b32 w, $4, 4;
prmt.b32 p, w, $4, 0x4400;
prmt.b32 q, w, $4, 0x5511;
prmt.b32 r, w, $4, 0x6622;
prmt.b32 t, w, $4, 0x7733;
shl.b32 a, p, 2;
shl.b32 b, q, 2;
shl.b32 c, r, 2;
shl.b32 d, t, 2;
and.b32 a, a, 0x01C001C0;
and.b32 b, b, 0x01C001C0;
and.b32 c, c, 0x01C001C0;
and.b32 d, d, 0x01C001C0;
lop3.b32 a, p, a, 0x80008000, 0xEC;
lop3.b32 b, q, b, 0x80008000, 0xEC;
lop3.b32 c, r, c, 0x80008000, 0xEC;
lop3.b32 d, t, d, 0x80008000, 0xEC;
mul.rn.bf16x2 $0, a, $5;
mul.rn.bf16x2 $1, b, $5;
mul.rn.bf16x2 $2, c, $5;
mul.rn.bf16x2 $3, d, $5;
}""")


@gluon.constexpr_function
def rows_layout(warps, keys, fp4):
    """Words of records, [keys, 16 blocks, words of a block]: a thread has whole blocks of 32 channels.

    A warp has half of the blocks of four records; so that its stores meet no bank twice, neighbours lie at two halves of
    128 bytes of output and at four records.
    """
    words = [[0, 0, 1], [0, 0, 2]] if fp4 else [[0, 0, 1], [0, 0, 2], [0, 0, 4]]
    low = 0 if warps == 4 else 1
    high = {16: 1, 32: 2, 64: 3}[keys]
    rest = [[8, 0, 0], [16, 0, 0], [32, 0, 0]]
    return gl.DistributedLinearLayout(
        words + rest[low:high],
        [[0, 1, 0], [1, 0, 0], [2, 0, 0], [0, 2, 0], [0, 4, 0]],
        [[0, 8, 0], [4, 0, 0], *rest[:low]],
        [],
        [keys, 16, 4 if fp4 else 8],
    )


@gluon.jit
def tile_range(
    unit, lengths, extra_lengths, width, extra_width, splits, tiles_a_split, heads,
    HEADS: gl.constexpr, LENGTHS: gl.constexpr, EXTRA_LENGTHS: gl.constexpr,
):  # fmt: skip
    """Row, first head, part and tiles of a unit of work: those of the first list, then those of the second."""
    split = unit % splits
    row = unit // splits
    blocks = gl.cdiv(heads, HEADS)
    head = (row % blocks) * HEADS
    row = row // blocks
    count = width
    more = extra_width
    if LENGTHS:
        count = gl.minimum(count, gl.maximum(gl.load(lengths + row), 0))
    if EXTRA_LENGTHS:
        more = gl.minimum(more, gl.maximum(gl.load(extra_lengths + row), 0))
    low = split * tiles_a_split
    high = low + tiles_a_split
    tiles = gl.cdiv(width, 64)
    first = low
    last = gl.minimum(high, gl.cdiv(count, 64))
    last = gl.maximum(last, first)
    first_more = gl.maximum(low - tiles, 0)
    last_more = gl.minimum(high - tiles, gl.cdiv(more, 64))
    last_more = gl.maximum(last_more, first_more)
    return row, head, split, count, more, first, last, first_more, last_more


@gluon.jit
def _factors(s, L: gl.constexpr, FP4: gl.constexpr):
    """Pairs of equal bf16 factors, as words, from raw scales [keys, 16]: [keys, 16, 8 or 4]."""
    KEYS: gl.constexpr = s.shape[0]
    if FP4:
        both = s.to(gl.int32)
        pair = gl.join(both & 127, (both >> 8) & 127)
        x = (pair << 20).to(gl.float32, bitcast=True) * 162259276829213363391578010288128.0
        x = x * 162259276829213363391578010288128.0
        x = gl.where(pair == 127, float("nan"), x)
        bits = x.to(gl.int32, bitcast=True)
        f = (bits & -65536) | ((bits >> 16) & 65535)
        f = gl.join(f, f).reshape([KEYS, 16, 4])
        f = gl.convert_layout(f, L, assert_trivial=True)
    else:
        e = s.to(gl.int32)
        f = (gl.minimum(e, 166) + 88) * 0x00800080
        f = gl.where(e == 255, 0x7FC07FC0, f)
        f = f.expand_dims(2).broadcast_to([KEYS, 16, 8])
    return f


@gluon.jit
def decode_rows(w, s, to, L: gl.constexpr, FP4: gl.constexpr):
    """Writes the bf16 values of raw words to 32-bit words [keys, 256] of shared memory."""
    KEYS: gl.constexpr = w.shape[0]
    f = _factors(s, L, FP4)
    if FP4:
        a, b, c, d = gl.inline_asm_elementwise(
            _FP4, "=r,=r,=r,=r,r,r", [w, f], dtype=(gl.int32, gl.int32, gl.int32, gl.int32), is_pure=True, pack=1
        )  # fmt: skip
        y = gl.join(gl.join(a, b), gl.join(c, d)).permute((0, 1, 2, 4, 3))
    else:
        a, b = gl.inline_asm_elementwise(
            _FP8, "=r,=r,r,r", [w, f], dtype=(gl.int32, gl.int32), is_pure=True, pack=1
        )
        y = gl.join(a, b)
    to.store(y.reshape([KEYS, 256]))


@gluon.jit
def copy_queries(q_desc, q_tile, q_full, q_empty, phase, at):
    """Begins to copy the queries of a unit, once those before are no longer read."""
    mbarrier.wait(q_empty, phase)
    mbarrier.expect(q_full, q_desc.block_type.nbytes)
    load_tile(q_desc, [at, 0], q_full, q_tile)
