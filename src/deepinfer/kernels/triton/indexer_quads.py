"""Sums over heads as the tensor core leaves them: four lanes hold one row, and exchange until each has a sum of its own."""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

__all__ = ["head_sums", "lane_sums", "output_index", "own_sums"]

# Four values a lane, to be summed over the four lanes of a quad: lane i returns the sum of the i-th.
_QUAD_SUMS = gl.constexpr("""{
.reg .pred high, odd;
.reg .b32 lane, bit;
.reg .f32 s0, s1, k0, k1, r0, r1;
mov.u32 lane, %laneid;
and.b32 bit, lane, 2;
setp.ne.u32 high, bit, 0;
and.b32 bit, lane, 1;
setp.ne.u32 odd, bit, 0;
selp.f32 s0, $1, $3, high;
selp.f32 s1, $2, $4, high;
selp.f32 k0, $3, $1, high;
selp.f32 k1, $4, $2, high;
shfl.sync.bfly.b32 r0, s0, 2, 31, -1;
shfl.sync.bfly.b32 r1, s1, 2, 31, -1;
add.f32 k0, k0, r0;
add.f32 k1, k1, r1;
selp.f32 s0, k0, k1, odd;
selp.f32 k0, k1, k0, odd;
shfl.sync.bfly.b32 r0, s0, 1, 31, -1;
add.f32 $0, k0, r0;
}""")


@gluon.jit
def _quad_sums(a, b, c, d):
    """Sums over the four lanes of a quad, the last axis: its element i becomes the sum of the i-th argument."""
    return gl.inline_asm_elementwise(
        _QUAD_SUMS, "=f,f,f,f,f", [a, b, c, d], dtype=gl.float32, is_pure=True, pack=1
    )


@gluon.jit
def own_sums(y, QUERIES: gl.constexpr, HEADS: gl.constexpr, LAST: gl.constexpr):
    """Sums of what a thread holds: [64, columns] to [4, 2, 8, QUERIES, 4]."""
    y = y.reshape([4, 2, 8, QUERIES, HEADS // (4 * LAST), 4, LAST])
    y = y.permute((0, 1, 2, 3, 5, 4, 6)).reshape([4, 2, 8, QUERIES, 4, HEADS // 4])
    return gl.sum(y, axis=5)


@gluon.jit
def head_sums(acc, w, QUERIES: gl.constexpr, HEADS: gl.constexpr, RELU: gl.constexpr):
    """Products of 64 keys, shape [64, QUERIES * HEADS], to their weighted sums over the heads.

    RELU 0 takes the maximum with 0; 1 adds the magnitude, which another unit of the chip does, and needs halves of the
    weights; 2 does so for every other column.

    Returns tensors of shape [4, 8, 4]; `output_index` says which keys and queries they are of.
    """
    if RELU == 2:
        even, odd = gl.split(acc.reshape([64, QUERIES * HEADS // 2, 2]))
        w_even, w_odd = gl.split(w.reshape([QUERIES * HEADS // 2, 2]))
        w_even = gl.convert_layout(w_even, gl.SliceLayout(0, even.type.layout))
        w_odd = gl.convert_layout(w_odd, gl.SliceLayout(0, odd.type.layout))
        y = own_sums((even + gl.abs(even)) * (w_even * 0.5)[None, :], QUERIES, HEADS // 2, 1)
        y += own_sums(gl.maximum(odd, 0.0) * w_odd[None, :], QUERIES, HEADS // 2, 1)
    elif RELU == 1:
        y = own_sums((acc + gl.abs(acc)) * w[None, :], QUERIES, HEADS, 2)
    else:
        y = own_sums(gl.maximum(acc, 0.0) * w[None, :], QUERIES, HEADS, 2)
    return lane_sums(y, y, QUERIES)


@gluon.jit
def _four(y):
    """Sums over the lanes, the last axis, of the four queries of the axis before it."""
    even, odd = gl.split(y.reshape([4, 8, 2, 2, 4]).permute((0, 1, 4, 2, 3)))
    a, c = gl.split(even)
    b, d = gl.split(odd)
    return _quad_sums(a, b, c, d)


@gluon.jit
def lane_sums(y, z, QUERIES: gl.constexpr):
    """Sums over the last axis, the lanes that hold a row, of what `own_sums` left of 64 keys.

    Returns tensors of shape [4, 8, 4]. With one query, `z` has those of 64 more keys, and lanes are the low and the high
    eight rows of a warp, first of `y`; with two, the low rows of both queries and then the high ones; with four, lanes
    are queries, and the second tensor has the high rows; with more, so it goes on. The order of the sums is always the same.
    """
    if QUERIES == 1:
        a, b = gl.split(y.reshape([4, 2, 8, 4]).permute((0, 2, 3, 1)))
        c, d = gl.split(z.reshape([4, 2, 8, 4]).permute((0, 2, 3, 1)))
        found = (_quad_sums(a, b, c, d),)
    elif QUERIES == 2:
        even, odd = gl.split(y.permute((0, 2, 4, 1, 3)))
        a, c = gl.split(even)
        b, d = gl.split(odd)
        found = (_quad_sums(a, b, c, d),)
    elif QUERIES == 4:
        low, high = gl.split(y.permute((0, 2, 3, 4, 1)))
        found = (_four(low), _four(high))
    else:
        y = y.reshape([4, 2, 8, 2, QUERIES // 2, 4]).permute((0, 1, 2, 4, 5, 3))
        first, second = gl.split(y)
        found = lane_sums(first, first, QUERIES // 2) + lane_sums(second, second, QUERIES // 2)
    return found


@gluon.jit
def output_index(INDEX: gl.constexpr, QUERIES: gl.constexpr, layout: gl.constexpr):
    """Keys and queries of one of the tensors that `head_sums` returns, each of shape [4, 8, 4]."""
    warp = gl.arange(0, 4, layout=gl.SliceLayout(1, gl.SliceLayout(2, layout)))[:, None, None]
    row = gl.arange(0, 8, layout=gl.SliceLayout(0, gl.SliceLayout(2, layout)))[None, :, None]
    lane = gl.arange(0, 4, layout=gl.SliceLayout(0, gl.SliceLayout(1, layout)))[None, None, :]
    if QUERIES == 2:
        key = warp * 16 + row + (lane // 2) * 8
        query = lane % 2 + row * 0 + warp * 0
    else:
        key = warp * 16 + row + lane * 0 + (INDEX % 2) * 8
        query = lane + (INDEX // 2) * 4 + row * 0 + warp * 0
    return key, query
