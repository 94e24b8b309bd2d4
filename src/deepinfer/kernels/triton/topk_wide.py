"""The same selection as `topk_select`, with the place of every element in registers set by hand.

A thread holds eight neighbours of each block of a row; the blocks of a stretch are loaded together, and one prefix sum
places the candidates of all of them. Short rows are held whole.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from deepinfer.kernels.triton.gluon_names import block_barrier
from deepinfer.kernels.triton.topk_search import (
    before,
    choose,
    ends,
    from_key,
    keys_of,
    least_of_pairs,
    lowest_key,
    search,
    sift,
    value_of,
)

__all__ = ["select_row", "short_row", "topk_wide_kernel"]


@gluon.jit
def _add(a, b):
    return a + b


@gluon.jit
def _append(found_at, total, goods, raws, start, at, CAPACITY: gl.constexpr):
    """Writes the good elements of two blocks behind the `total` earlier ones; returns the new total."""
    BLOCK: gl.constexpr = 256 * gl.num_warps()
    packed = gl.sum(goods[0] + (goods[1] << 16), 1)
    earlier, counts = before(packed)
    for u in gl.static_range(2):
        place = gl.associative_scan(goods[u], 1, _add) - goods[u]
        place += (total + ((earlier >> (16 * u)) & 0xFFFF))[:, None]
        pair = (start + u * BLOCK + at).to(gl.int64) | (raws[u].to(gl.int64) << 32)
        gl.store(found_at + place, pair, mask=(goods[u] > 0) & (place < CAPACITY))
        total += (counts >> (16 * u)) & 0xFFFF
    return total


@gluon.jit
def short_row(xs, to, length, k, BITS: gl.constexpr, CAPACITY: gl.constexpr):
    """Writes the k best of a row with more than k and no more than CAPACITY elements."""
    WARPS: gl.constexpr = gl.num_warps()
    EACH: gl.constexpr = CAPACITY // (32 * WARPS)
    layout: gl.constexpr = gl.BlockedLayout([1, EACH], [32, 1], [WARPS, 1], [1, 0])
    c = gl.arange(0, 32 * WARPS, layout=gl.SliceLayout(1, layout))[:, None] * EACH
    c += gl.arange(0, EACH, layout=gl.SliceLayout(0, layout))[None, :]
    # Reads are masked by 16 bytes, which may end behind the row: what holds its last element is there.
    VECTOR: gl.constexpr = 128 // BITS if EACH >= 128 // BITS else EACH
    inside = c < length
    raw = gl.load(xs + c, mask=c // VECTOR * VECTOR < length, other=0)
    keys = keys_of(value_of(raw, BITS), BITS)
    low, high = ends(gl.where(inside, keys, 0x7FFFFFFF), gl.where(inside, keys, -0x80000000))
    choose(to, gl.where(inside, keys, -0x80000000), c, low, high, k)


@gluon.jit
def select_row(
    xs, to, found_at, length, k, BITS: gl.constexpr, GROUPS: gl.constexpr, CAPACITY: gl.constexpr
):
    """Writes the k best of a row with more than k elements, reading it twice."""
    WARPS: gl.constexpr = gl.num_warps()
    THREADS: gl.constexpr = 32 * WARPS
    BLOCK: gl.constexpr = 8 * THREADS
    EACH: gl.constexpr = CAPACITY // THREADS
    VECTOR: gl.constexpr = 128 // BITS
    layout: gl.constexpr = gl.BlockedLayout([1, 8], [32, 1], [WARPS, 1], [1, 0])
    at = gl.arange(0, THREADS, layout=gl.SliceLayout(1, layout))[:, None] * 8
    at += gl.arange(0, 8, layout=gl.SliceLayout(0, layout))[None, :]
    lowest = float("-inf")
    best = gl.full((THREADS, 8), lowest, gl.float32, layout)
    whole = length // (4 * BLOCK) * (4 * BLOCK)
    for start in range(0, whole, 4 * BLOCK):
        v0 = gl.load(xs + start + at)
        v1 = gl.load(xs + (start + BLOCK) + at)
        v2 = gl.load(xs + (start + 2 * BLOCK) + at)
        v3 = gl.load(xs + (start + 3 * BLOCK) + at)
        best = gl.maximum(best, gl.maximum(value_of(v0, BITS), value_of(v1, BITS)))
        best = gl.maximum(best, gl.maximum(value_of(v2, BITS), value_of(v3, BITS)))
    for start in range(whole, length, BLOCK):
        inside = start + at < length
        v0 = gl.load(xs + start + at, mask=start + at // VECTOR * VECTOR < length, other=0)
        best = gl.maximum(best, gl.where(inside, value_of(v0, BITS), lowest))
    per: gl.constexpr = GROUPS // THREADS
    groups = keys_of(gl.max(best.reshape([THREADS, per, 8 // per]), 2), BITS)
    # There are 2 * k groups at least.
    low, high = ends(least_of_pairs(groups), groups)
    bound, _, _ = search((groups,), low, high, k, k // 8)
    least = from_key(bound, BITS)
    total = gl.to_tensor(0)
    for start in range(0, whole, 4 * BLOCK):
        v0 = gl.load(xs + start + at)
        v1 = gl.load(xs + (start + BLOCK) + at)
        v2 = gl.load(xs + (start + 2 * BLOCK) + at)
        v3 = gl.load(xs + (start + 3 * BLOCK) + at)
        g0 = (value_of(v0, BITS) >= least).to(gl.int32)
        g1 = (value_of(v1, BITS) >= least).to(gl.int32)
        total = _append(found_at, total, (g0, g1), (v0, v1), start, at, CAPACITY)
        g2 = (value_of(v2, BITS) >= least).to(gl.int32)
        g3 = (value_of(v3, BITS) >= least).to(gl.int32)
        total = _append(found_at, total, (g2, g3), (v2, v3), start + 2 * BLOCK, at, CAPACITY)
    for start in range(whole, length, 2 * BLOCK):
        v0 = gl.load(xs + start + at, mask=start + at // VECTOR * VECTOR < length, other=0)
        there = start + BLOCK + at // VECTOR * VECTOR < length
        v1 = gl.load(xs + (start + BLOCK) + at, mask=there, other=0)
        g0 = ((start + at < length) & (value_of(v0, BITS) >= least)).to(gl.int32)
        g1 = ((start + BLOCK + at < length) & (value_of(v1, BITS) >= least)).to(gl.int32)
        total = _append(found_at, total, (g0, g1), (v0, v1), start, at, CAPACITY)
    block_barrier()
    if (total >= k) & (total <= CAPACITY):
        wide: gl.constexpr = gl.BlockedLayout([1, EACH], [32, 1], [WARPS, 1], [1, 0])
        c = gl.arange(0, THREADS, layout=gl.SliceLayout(1, wide))[:, None] * EACH
        c += gl.arange(0, EACH, layout=gl.SliceLayout(0, wide))[None, :]
        pair = gl.load(found_at + c, mask=c < total, other=0)
        keys = keys_of(value_of((pair >> 32).to(gl.int32), BITS), BITS)
        keys = gl.where(c < total, keys, -0x80000000)
        choose(to, keys, pair.to(gl.int32), bound, high, k)
    else:
        # Many elements equal the bound, or few are numbers.
        low = gl.where(total >= k, bound, lowest_key(BITS))
        sift(xs, found_at, (length + 7) // 8, length, to, low, high, k, BITS, 8, 8, False)


@gluon.jit(do_not_specialize=["n", "k", "fill"])
def topk_wide_kernel(
    x, lengths, out, found, n, k, fill, stride_x, stride_out,
    HAS_LENGTHS: gl.constexpr, BITS: gl.constexpr, GROUPS: gl.constexpr, CAPACITY: gl.constexpr, SHORT: gl.constexpr,
):  # fmt: skip
    """Writes the k indices of one row; `fill` behind the last one of a row with fewer than k elements.

    SHORT: no row has more than CAPACITY elements.
    """
    row = gl.program_id(0).to(gl.int64)
    to = out + row * stride_out
    xs = x + row * stride_x
    length = n
    if HAS_LENGTHS:
        length = gl.minimum(gl.maximum(gl.load(lengths + row), 0), n)
    if length <= k:
        BLOCK: gl.constexpr = 32 * gl.num_warps()
        i = gl.arange(0, BLOCK, layout=gl.BlockedLayout([1], [32], [gl.num_warps()], [0]))
        for start in range(0, k, BLOCK):
            gl.store(
                to + start + i, gl.where(start + i < length, start + i, fill), mask=start + i < k
            )
    elif SHORT:
        short_row(xs, to, length, k, BITS, CAPACITY)
    else:
        found_at = found + row * CAPACITY
        if length <= CAPACITY:
            short_row(xs, to, length, k, BITS, CAPACITY)
        else:
            select_row(xs, to, found_at, length, k, BITS, GROUPS, CAPACITY)
