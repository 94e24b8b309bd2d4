"""The same selection as `topk_select`, with the place of every element in registers set by hand.

A thread holds eight neighbours of each block of a row; the blocks of a stretch are loaded together, and one prefix sum
places the candidates of all of them.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from deepinfer.kernels.triton.gluon_names import block_barrier

__all__ = ["select_row", "topk_wide_kernel", "whole_row"]


@gluon.jit
def _add(a, b):
    return a + b


@gluon.jit
def _before(counts):
    """Sum of the counts of all threads before each one."""
    flat: gl.constexpr = gl.BlockedLayout([1], [32], [gl.num_warps()], [0])
    own = gl.convert_layout(counts, flat)
    return gl.convert_layout(gl.associative_scan(own, 0, _add) - own, counts.type.layout)


@gluon.jit
def _keys(raw, BITS: gl.constexpr):
    """Integers in the order of the values, NaN lowest and both zeros equal; never negative."""
    if BITS == 16:
        raw = raw.to(gl.int32) & 0xFFFF
        raw = gl.where(raw == 0x8000, 0, raw)
        key = gl.where(raw < 0x8000, raw + 0x8000, 0xFFFF - raw)
        key = gl.where((raw & 0x7FFF) > 0x7F80, 0, key)
    else:
        raw = raw.to(gl.int64) & 0xFFFFFFFF
        raw = gl.where(raw == 0x80000000, 0, raw)
        key = gl.where(raw < 0x80000000, raw + 0x80000000, 0xFFFFFFFF - raw)
        key = gl.where((raw & 0x7FFFFFFF) > 0x7F800000, 0, key)
    return key


@gluon.jit
def _value(raw, BITS: gl.constexpr):
    if BITS == 16:
        value = (raw.to(gl.int32) << 16).to(gl.float32, bitcast=True)
    else:
        value = raw.to(gl.float32, bitcast=True)
    return value


@gluon.jit
def _from_key(key, BITS: gl.constexpr):
    """The value of a key; NaN for key 0."""
    if BITS == 16:
        raw = gl.where(key >= 0x8000, key - 0x8000, 0xFFFF - key) << 16
    else:
        raw = gl.where(key >= 0x80000000, key - 0x80000000, 0xFFFFFFFF - key).to(gl.int32)
    return raw.to(gl.float32, bitcast=True)


@gluon.jit
def _search(keys, k, BITS: gl.constexpr, LOW: gl.constexpr):
    """The k-th largest key but for its LOW last bits; keys that do not count are -1. 0 if there are fewer."""
    found = gl.to_tensor(0).to(keys.dtype)
    for i in range(BITS - LOW):
        trial = found | (gl.to_tensor(1).to(keys.dtype) << (BITS - 1 - i))
        count = gl.sum(gl.ravel((keys >= trial).to(gl.int32)), 0)
        found = gl.where(count >= k, trial, found)
    return found


@gluon.jit
def _append(index_at, total, goods, starts, at, CAPACITY: gl.constexpr):
    """Writes the indices of the good elements of two blocks behind the `total` earlier ones; returns the new total."""
    count = gl.sum(goods[0], 1).to(gl.int64) + (gl.sum(goods[1], 1).to(gl.int64) << 32)
    before = _before(count)
    all_counts = gl.sum(count, 0)
    for u in gl.static_range(2):
        good = goods[u]
        place = gl.associative_scan(good, 1, _add) - good
        place += (total + ((before >> (32 * u)) & 0xFFFFFFFF).to(gl.int32))[:, None]
        gl.store(index_at + place, starts[u] + at, mask=(good > 0) & (place < CAPACITY))
        total += ((all_counts >> (32 * u)) & 0xFFFFFFFF).to(gl.int32)
    return total


@gluon.jit
def whole_row(xs, to, length, k, BITS: gl.constexpr):
    """Writes the k best of a row, searching its keys bit by bit."""
    WARPS: gl.constexpr = gl.num_warps()
    THREADS: gl.constexpr = 32 * WARPS
    BLOCK: gl.constexpr = 8 * THREADS
    layout: gl.constexpr = gl.BlockedLayout([1, 8], [32, 1], [WARPS, 1], [1, 0])
    at = gl.arange(0, THREADS, layout=gl.SliceLayout(1, layout))[:, None] * 8
    at += gl.arange(0, 8, layout=gl.SliceLayout(0, layout))[None, :]
    wide: gl.constexpr = gl.int32 if BITS == 16 else gl.int64
    last = gl.to_tensor(0).to(wide)
    for b in range(BITS):
        trial = last | (gl.to_tensor(1).to(wide) << (BITS - 1 - b))
        count = 0
        for start in range(0, length, BLOCK):
            inside = start + at < length
            row_keys = _keys(gl.load(xs + start + at, mask=inside, other=0), BITS)
            count += gl.sum(gl.ravel((inside & (row_keys >= trial)).to(gl.int32)), 0)
        last = gl.where(count >= k, trial, last)
    count = 0
    for start in range(0, length, BLOCK):
        inside = start + at < length
        row_keys = _keys(gl.load(xs + start + at, mask=inside, other=0), BITS)
        count += gl.sum(gl.ravel((inside & (row_keys > last)).to(gl.int32)), 0)
    room = k - count
    done = 0
    for start in range(0, length, BLOCK):
        inside = start + at < length
        row_keys = _keys(gl.load(xs + start + at, mask=inside, other=0), BITS)
        same = (inside & (row_keys == last)).to(gl.int32)
        mine = gl.sum(same, 1)
        rank = _before(mine)[:, None] + gl.associative_scan(same, 1, _add)
        more = (inside & (row_keys > last)).to(gl.int32)
        chosen = more | (same & (rank <= room).to(gl.int32))
        mine_chosen = gl.sum(chosen, 1)
        place = (done + _before(mine_chosen))[:, None]
        place += gl.associative_scan(chosen, 1, _add) - 1
        gl.store(to + place, start + at, mask=chosen > 0)
        done += gl.sum(mine_chosen, 0)
        room -= gl.sum(mine, 0)


@gluon.jit
def select_row(
    xs, to, index_at, length, k, BITS: gl.constexpr, GROUPS: gl.constexpr, CAPACITY: gl.constexpr
):
    """Writes the k best of a row with more than k elements, reading it twice."""
    WARPS: gl.constexpr = gl.num_warps()
    THREADS: gl.constexpr = 32 * WARPS
    BLOCK: gl.constexpr = 8 * THREADS
    EACH: gl.constexpr = CAPACITY // THREADS if CAPACITY > THREADS else 1
    layout: gl.constexpr = gl.BlockedLayout([1, 8], [32, 1], [WARPS, 1], [1, 0])
    flat: gl.constexpr = gl.BlockedLayout([EACH], [32], [WARPS], [0])
    c = gl.arange(0, CAPACITY, layout=flat)
    at = gl.arange(0, THREADS, layout=gl.SliceLayout(1, layout))[:, None] * 8
    at += gl.arange(0, 8, layout=gl.SliceLayout(0, layout))[None, :]
    lowest = float("-inf")
    total = length
    if length <= CAPACITY:
        index = c
        keys = _keys(gl.load(xs + c, mask=c < length, other=0), BITS)
    else:
        best = gl.full((THREADS, 8), lowest, gl.float32, layout)
        whole = length // (4 * BLOCK) * (4 * BLOCK)
        for start in range(0, whole, 4 * BLOCK):
            v0 = gl.load(xs + start + at)
            v1 = gl.load(xs + (start + BLOCK) + at)
            v2 = gl.load(xs + (start + 2 * BLOCK) + at)
            v3 = gl.load(xs + (start + 3 * BLOCK) + at)
            best = gl.maximum(best, gl.maximum(_value(v0, BITS), _value(v1, BITS)))
            best = gl.maximum(best, gl.maximum(_value(v2, BITS), _value(v3, BITS)))
        for start in range(whole, length, BLOCK):
            inside = start + at < length
            v0 = gl.load(xs + start + at, mask=inside, other=0)
            best = gl.maximum(best, gl.where(inside, _value(v0, BITS), lowest))
        per: gl.constexpr = GROUPS // THREADS
        groups = gl.max(best.reshape([THREADS, per, 8 // per]), 2)
        bits = groups.to(gl.int32, bitcast=True)
        if BITS == 16:
            bits = bits >> 16
        bound = _search(_keys(bits, BITS), k, BITS, 2 if BITS == 16 else 14)
        least = _from_key(bound, BITS)
        total = 0
        for start in range(0, whole, 4 * BLOCK):
            v0 = gl.load(xs + start + at)
            v1 = gl.load(xs + (start + BLOCK) + at)
            v2 = gl.load(xs + (start + 2 * BLOCK) + at)
            v3 = gl.load(xs + (start + 3 * BLOCK) + at)
            g0 = (_value(v0, BITS) >= least).to(gl.int32)
            g1 = (_value(v1, BITS) >= least).to(gl.int32)
            total = _append(index_at, total, (g0, g1), (start, start + BLOCK), at, CAPACITY)
            g2 = (_value(v2, BITS) >= least).to(gl.int32)
            g3 = (_value(v3, BITS) >= least).to(gl.int32)
            total = _append(
                index_at, total, (g2, g3), (start + 2 * BLOCK, start + 3 * BLOCK), at, CAPACITY
            )
        for start in range(whole, length, 2 * BLOCK):
            in0 = start + at < length
            in1 = start + BLOCK + at < length
            v0 = gl.load(xs + start + at, mask=in0, other=0)
            v1 = gl.load(xs + (start + BLOCK) + at, mask=in1, other=0)
            g0 = (in0 & (_value(v0, BITS) >= least)).to(gl.int32)
            g1 = (in1 & (_value(v1, BITS) >= least)).to(gl.int32)
            total = _append(index_at, total, (g0, g1), (start, start + BLOCK), at, CAPACITY)
        block_barrier()
        inside = c < gl.minimum(total, CAPACITY)
        index = gl.load(index_at + c, mask=inside, other=0)
        keys = _keys(gl.load(xs + index, mask=inside, other=0), BITS)
    if (total >= k) & (total <= CAPACITY):
        inside = c < total
        keys = gl.where(inside, keys, -1)
        last = _search(keys, k, BITS, 0)
        more = (keys > last).to(gl.int32)
        same = (inside & (keys == last)).to(gl.int32)
        room = k - gl.sum(more, 0)
        chosen = more | (same & (gl.associative_scan(same, 0, _add) <= room).to(gl.int32))
        place = gl.associative_scan(chosen, 0, _add) - 1
        gl.store(to + place, index, mask=chosen > 0)
    else:
        whole_row(xs, to, length, k, BITS)


@gluon.jit(do_not_specialize=["n", "k", "fill"])
def topk_wide_kernel(
    x, lengths, out, scratch_index, n, k, fill, stride_x, stride_out,
    HAS_LENGTHS: gl.constexpr, BITS: gl.constexpr, GROUPS: gl.constexpr, CAPACITY: gl.constexpr,
):  # fmt: skip
    """Writes the k indices of one row; `fill` behind the last one of a row with fewer than k elements."""
    row = gl.program_id(0).to(gl.int64)
    to = out + row * stride_out
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
    else:
        select_row(
            x + row * stride_x,
            to,
            scratch_index + row * CAPACITY,
            length,
            k,
            BITS,
            GROUPS,
            CAPACITY,
        )
