"""Selection of the k largest of every row, ties to the lowest index, in ascending order of the index.

One program a row. The maxima of G >= k disjoint groups of the row bound the k-th largest value from below; what is not
below the bound is gathered in the order of the index, usually little more than k elements, and the exact k-th key is
found among it bit by bit. Rows on which the bound says too little (many equal elements) are searched as a whole.
"""

from __future__ import annotations

import triton
import triton.language as tl

__all__ = ["topk_select_kernel"]


@triton.jit
def _keys(x, BITS: tl.constexpr):
    """Integers in the order of the values, NaN lowest and both zeros equal; never negative."""
    if BITS == 16:
        raw = x.to(tl.int32) & 0xFFFF
        raw = tl.where(raw == 0x8000, 0, raw)
        key = tl.where(raw < 0x8000, raw + 0x8000, 0xFFFF - raw)
        key = tl.where((raw & 0x7FFF) > 0x7F80, 0, key)
    else:
        raw = x.to(tl.int64) & 0xFFFFFFFF
        raw = tl.where(raw == 0x80000000, 0, raw)
        key = tl.where(raw < 0x80000000, raw + 0x80000000, 0xFFFFFFFF - raw)
        key = tl.where((raw & 0x7FFFFFFF) > 0x7F800000, 0, key)
    return key


@triton.jit
def _search(keys, used, k, BITS: tl.constexpr):
    """The k-th largest of the used keys, bit by bit from the top; 0 if there are fewer."""
    found = tl.zeros((), dtype=keys.dtype)
    one = tl.full((), 1, dtype=keys.dtype)
    for i in range(BITS):
        trial = found | (one << (BITS - 1 - i))
        count = tl.sum((used & (keys >= trial)).to(tl.int32), 0)
        found = tl.where(count >= k, trial, found)
    return found


@triton.jit
def _value(x, BITS: tl.constexpr):
    if BITS == 16:
        return (x.to(tl.int32) << 16).to(tl.float32, bitcast=True)
    else:
        return x.to(tl.float32, bitcast=True)


@triton.jit
def _from_key(key, BITS: tl.constexpr):
    """The value of a key; NaN for key 0."""
    if BITS == 16:
        raw = tl.where(key >= 0x8000, key - 0x8000, 0xFFFF - key)
        return (raw << 16).to(tl.float32, bitcast=True)
    else:
        raw = tl.where(key >= 0x80000000, key - 0x80000000, 0xFFFFFFFF - key)
        return raw.to(tl.int32).to(tl.float32, bitcast=True)


@triton.jit
def _append(to, total, good, index, CAPACITY: tl.constexpr):
    """Writes the indices of the good elements behind the `total` earlier ones; returns the new total."""
    place = total + tl.cumsum(good, 0) - good
    tl.store(to + place, index, mask=(good > 0) & (place < CAPACITY))
    return total + tl.sum(good, 0)


@triton.jit(do_not_specialize=["n", "k", "fill"])
def topk_select_kernel(
    x,
    lengths,
    out,
    scratch_index,
    n,
    k,
    fill,
    stride_x,
    stride_out,
    HAS_LENGTHS: tl.constexpr,
    BITS: tl.constexpr,
    BLOCK: tl.constexpr,
    GROUPS: tl.constexpr,
    CAPACITY: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """Writes the k indices of one row; `fill` behind the last one of a row with fewer than k elements."""
    row = tl.program_id(0).to(tl.int64)
    xs = x + row * stride_x
    to = out + row * stride_out
    length = n
    if HAS_LENGTHS:
        length = tl.minimum(tl.maximum(tl.load(lengths + row), 0), n)
    if length <= k:
        for start in range(0, k, BLOCK_K):
            i = start + tl.arange(0, BLOCK_K)
            tl.store(to + i, tl.where(i < length, i, fill), mask=i < k)
    else:
        index_at = scratch_index + row * CAPACITY
        c = tl.arange(0, CAPACITY)
        total = length
        if length <= CAPACITY:
            inside = c < length
            keys = _keys(tl.load(xs + c, mask=inside, other=0), BITS)
            index = c
        else:
            i = tl.arange(0, BLOCK)
            best = tl.full((BLOCK,), float("-inf"), tl.float32)
            whole = length // BLOCK * BLOCK
            for start in range(0, whole, BLOCK):
                best = tl.maximum(best, _value(tl.load(xs + start + i), BITS))
            if whole < length:
                inside = whole + i < length
                raw = tl.load(xs + whole + i, mask=inside, other=0)
                best = tl.maximum(best, tl.where(inside, _value(raw, BITS), float("-inf")))
            if BLOCK > GROUPS:
                best = tl.max(tl.reshape(best, (BLOCK // GROUPS, GROUPS)), 0)
            best_bits = best.to(tl.int32, bitcast=True)
            best_keys = _keys(best_bits >> 16, BITS) if BITS == 16 else _keys(best_bits, BITS)
            bound = _search(best_keys, best_keys >= 0, k, BITS)
            least = _from_key(bound, BITS)
            total = 0
            for start in range(0, whole, BLOCK):
                good = (_value(tl.load(xs + start + i), BITS) >= least).to(tl.int32)
                total = _append(index_at, total, good, start + i, CAPACITY)
            if whole < length:
                inside = whole + i < length
                raw = tl.load(xs + whole + i, mask=inside, other=0)
                good = (inside & (_value(raw, BITS) >= least)).to(tl.int32)
                total = _append(index_at, total, good, whole + i, CAPACITY)
            tl.debug_barrier()
            inside = c < tl.minimum(total, CAPACITY)
            index = tl.load(index_at + c, mask=inside, other=0)
            keys = _keys(tl.load(xs + index, mask=inside, other=0), BITS)
        if (total >= k) & (total <= CAPACITY):
            last = _search(keys, inside, k, BITS)
            more = inside & (keys > last)
            same = (inside & (keys == last)).to(tl.int32)
            room = k - tl.sum(more.to(tl.int32), 0)
            chosen = (more | ((same > 0) & (tl.cumsum(same, 0) <= room))).to(tl.int32)
            place = tl.cumsum(chosen, 0) - 1
            tl.store(to + place, index, mask=chosen > 0)
        else:
            # The whole row, bit by bit.
            i = tl.arange(0, BLOCK)
            one = tl.full((), 1, dtype=keys.dtype)
            last = tl.zeros((), dtype=keys.dtype)
            for b in range(BITS):
                trial = last | (one << (BITS - 1 - b))
                count = 0
                for start in range(0, length, BLOCK):
                    inside_row = start + i < length
                    row_keys = _keys(tl.load(xs + start + i, mask=inside_row, other=0), BITS)
                    count += tl.sum((inside_row & (row_keys >= trial)).to(tl.int32), 0)
                last = tl.where(count >= k, trial, last)
            count = 0
            for start in range(0, length, BLOCK):
                inside_row = start + i < length
                row_keys = _keys(tl.load(xs + start + i, mask=inside_row, other=0), BITS)
                count += tl.sum((inside_row & (row_keys > last)).to(tl.int32), 0)
            room = k - count
            done = 0
            for start in range(0, length, BLOCK):
                inside_row = start + i < length
                row_keys = _keys(tl.load(xs + start + i, mask=inside_row, other=0), BITS)
                same = (inside_row & (row_keys == last)).to(tl.int32)
                chosen = (
                    (inside_row & (row_keys > last)) | ((same > 0) & (tl.cumsum(same, 0) <= room))
                ).to(tl.int32)
                place = done + tl.cumsum(chosen, 0) - 1
                tl.store(to + place, start + i, mask=chosen > 0)
                done += tl.sum(chosen, 0)
                room -= tl.sum(same, 0)
