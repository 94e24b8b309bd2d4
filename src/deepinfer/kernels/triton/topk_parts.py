"""Device functions of the selection of the k largest: keys in the order of the values, search, choice, whole rows."""

from __future__ import annotations

import triton
import triton.language as tl

__all__ = [
    "append",
    "choose",
    "from_key",
    "keys_of",
    "search",
    "select_row",
    "value_of",
    "whole_row",
]


@triton.jit
def value_of(raw, BITS: tl.constexpr):
    """Bits of bf16 or fp32, as integers, to fp32."""
    if BITS == 16:
        return (raw.to(tl.int32) << 16).to(tl.float32, bitcast=True)
    else:
        return raw.to(tl.float32, bitcast=True)


@triton.jit
def keys_of(value, BITS: tl.constexpr):
    """Unsigned integers in the order of fp32 values, NaN 0 and both zeros equal; of the upper bits for bf16."""
    raw = value.to(tl.uint32, bitcast=True)
    raw = tl.where(raw == 0x80000000, 0, raw)
    key = tl.where(raw < 0x80000000, raw + 0x80000000, 0xFFFFFFFF - raw)
    key = tl.where((raw & 0x7FFFFFFF) > 0x7F800000, 0, key).to(tl.uint32)
    if BITS == 16:
        key = key >> 16
    return key


@triton.jit
def from_key(key, BITS: tl.constexpr):
    """The value of a key as fp32; NaN for key 0."""
    key = key.to(tl.uint32)
    if BITS == 16:
        raw = tl.where(key >= 0x8000, key - 0x8000, 0xFFFF - key) << 16
    else:
        raw = tl.where(key >= 0x80000000, key - 0x80000000, 0xFFFFFFFF - key)
    return raw.to(tl.uint32).to(tl.float32, bitcast=True)


@triton.jit
def search(keys, used, k, STEPS: tl.constexpr):
    """The k-th largest of the used keys, at least to the first 2 * STEPS bits in which they differ (below it then).

    Two bits a step: what all keys have in common is skipped, and the counts of three trials are one sum.
    """
    keys = tl.where(used, keys, 0).to(tl.uint32)
    high = tl.max(keys, 0)
    low = tl.min(tl.where(used, keys, high).to(tl.uint32), 0)
    differ = (high ^ low).to(tl.float32).to(tl.int32, bitcast=True)
    # The float may be rounded up to the next power, 2^32 at most.
    steps = tl.minimum((tl.maximum((differ >> 23) - 126, 0) + 1) // 2, 16)
    kept = tl.minimum(2 * steps, 31).to(tl.uint32)
    found = tl.where(2 * steps > 31, 0, (high >> kept) << kept).to(tl.uint32)
    one = tl.full((), 1, tl.uint32)
    step = (one << (2 * tl.maximum(steps - 1, 0)).to(tl.uint32)).to(tl.uint32)
    for _ in range(0, tl.minimum(steps, STEPS)):
        first = (found + step).to(tl.uint32)
        second = (first + step).to(tl.uint32)
        third = (second + step).to(tl.uint32)
        counts = (keys >= first).to(tl.int64) + ((keys >= second).to(tl.int64) << 21)
        count = tl.sum(counts + ((keys >= third).to(tl.int64) << 42), 0)
        enough = (count & 0x1FFFFF) >= k
        found = tl.where(enough, first, found).to(tl.uint32)
        found = tl.where(((count >> 21) & 0x1FFFFF) >= k, second, found).to(tl.uint32)
        found = tl.where((count >> 42) >= k, third, found).to(tl.uint32)
        step = step >> 2
    return found


@triton.jit
def append(to, total, good, index, CAPACITY: tl.constexpr):
    """Writes the indices of the good elements behind the `total` earlier ones; returns the new total."""
    place = total + tl.cumsum(good, 0) - good
    tl.store(to + place, index, mask=(good > 0) & (place < CAPACITY))
    return total + tl.sum(good, 0)


@triton.jit
def choose(xs, to, index, inside, k, BITS: tl.constexpr):
    """Writes the k best of the elements inside, whose indices ascend."""
    keys = keys_of(value_of(tl.load(xs + index, mask=inside, other=0), BITS), BITS)
    last = search(keys, inside, k, BITS // 2)
    more = inside & (keys > last)
    same = (inside & (keys == last)).to(tl.int32)
    room = k - tl.sum(more.to(tl.int32), 0)
    chosen = (more | ((same > 0) & (tl.cumsum(same, 0) <= room))).to(tl.int32)
    place = tl.cumsum(chosen, 0) - 1
    tl.store(to + place, index, mask=chosen > 0)


@triton.jit
def whole_row(xs, to, length, k, BITS: tl.constexpr, BLOCK: tl.constexpr):
    """Writes the k best of a row, searching its keys two bits at a time; it is read once for each."""
    i = tl.arange(0, BLOCK)
    step = tl.full((), 1 << (BITS - 2), tl.uint32)
    last = tl.full((), 0, tl.uint32)
    above = 0
    for _ in range(BITS // 2):
        first = (last + step).to(tl.uint32)
        second = (first + step).to(tl.uint32)
        third = (second + step).to(tl.uint32)
        one = tl.zeros((BLOCK,), tl.int32)
        two = tl.zeros((BLOCK,), tl.int32)
        three = tl.zeros((BLOCK,), tl.int32)
        for start in range(0, length, BLOCK):
            inside = start + i < length
            # What is outside has key 0, which no trial is.
            raw = tl.load(xs + start + i, mask=inside, other=0)
            keys = tl.where(inside, keys_of(value_of(raw, BITS), BITS), 0).to(tl.uint32)
            one += (keys >= first).to(tl.int32)
            two += (keys >= second).to(tl.int32)
            three += (keys >= third).to(tl.int32)
        at_first, at_second, at_third = tl.sum(one, 0), tl.sum(two, 0), tl.sum(three, 0)
        # Keys above the found ones: those of the least trial that too few reach.
        above = tl.where(at_first < k, at_first, above)
        above = tl.where((at_first >= k) & (at_second < k), at_second, above)
        above = tl.where((at_second >= k) & (at_third < k), at_third, above)
        last = tl.where(at_first >= k, first, last)
        last = tl.where(at_second >= k, second, last)
        last = tl.where(at_third >= k, third, last).to(tl.uint32)
        step = step >> 2
    room = k - above
    done = 0
    start = 0
    while (start < length) & (done < k):
        inside = start + i < length
        keys = keys_of(value_of(tl.load(xs + start + i, mask=inside, other=0), BITS), BITS)
        same = (inside & (keys == last)).to(tl.int32)
        chosen = (inside & (keys > last)) | ((same > 0) & (tl.cumsum(same, 0) <= room))
        chosen = chosen.to(tl.int32)
        place = done + tl.cumsum(chosen, 0) - 1
        tl.store(to + place, start + i, mask=chosen > 0)
        done += tl.sum(chosen, 0)
        room -= tl.sum(same, 0)
        start += BLOCK


@triton.jit
def select_row(
    xs, to, index_at, length, k, BITS: tl.constexpr, BLOCK: tl.constexpr, GROUPS: tl.constexpr, CAPACITY: tl.constexpr,
):  # fmt: skip
    """Writes the k best of a row with more than k elements, reading it twice."""
    c = tl.arange(0, CAPACITY)
    if length <= CAPACITY:
        choose(xs, to, c, c < length, k, BITS)
    else:
        i = tl.arange(0, BLOCK)
        lowest = float("-inf")
        best = tl.full((BLOCK,), lowest, tl.float32)
        whole = length // BLOCK * BLOCK
        for start in range(0, whole, BLOCK):
            best = tl.maximum(best, value_of(tl.load(xs + start + i), BITS))
        if whole < length:
            inside = whole + i < length
            raw = tl.load(xs + whole + i, mask=inside, other=0)
            best = tl.maximum(best, tl.where(inside, value_of(raw, BITS), lowest))
        if BLOCK > GROUPS:
            best = tl.max(tl.reshape(best, (BLOCK // GROUPS, GROUPS)), 0)
        bound = search(keys_of(best, BITS), best == best, k, 8)
        least = from_key(bound, BITS)
        total = 0
        for start in range(0, whole, BLOCK):
            good = (value_of(tl.load(xs + start + i), BITS) >= least).to(tl.int32)
            total = append(index_at, total, good, start + i, CAPACITY)
        if whole < length:
            inside = whole + i < length
            raw = tl.load(xs + whole + i, mask=inside, other=0)
            good = (inside & (value_of(raw, BITS) >= least)).to(tl.int32)
            total = append(index_at, total, good, whole + i, CAPACITY)
        if (total >= k) & (total <= CAPACITY):
            tl.debug_barrier()
            inside = c < total
            choose(xs, to, tl.load(index_at + c, mask=inside, other=0), inside, k, BITS)
        else:
            whole_row(xs, to, length, k, BITS, BLOCK)
