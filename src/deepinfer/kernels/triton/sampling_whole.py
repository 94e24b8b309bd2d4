"""The cut of a row by passes over all of it: slow, for rows that the fast ways cannot serve."""

from __future__ import annotations

import triton
import triton.language as tl

from deepinfer.kernels.triton.philox import exact_gumbel
from deepinfer.kernels.triton.sampling_keys import key_of, mass_of

__all__ = ["cut_whole_row", "draw_whole_row"]


@triton.jit
def _sums(
    x, vocab, low, cut_id, highest, temperature, least, MASS: tl.constexpr, BLOCK: tl.constexpr
):
    """Sum, over tokens above the key `low` or equal to it with an id up to `cut_id`, of 1 or of their mass."""
    total = tl.zeros((), tl.int64)
    for start in range(0, vocab, BLOCK):
        at = start + tl.arange(0, BLOCK)
        values = tl.load(x + at, mask=at < vocab, other=float("-inf")).to(tl.float32)
        keys = key_of(values)
        good = (values > float("-inf")) & (keys >= least)
        good &= (keys > low) | ((keys == low) & (at <= cut_id))
        if MASS:
            part = tl.where(good, mass_of(values, highest, temperature), 0)
        else:
            part = good.to(tl.int64)
        total += tl.sum(part, 0)
    return total


@triton.jit
def _id_of(x, vocab, key, room, BLOCK: tl.constexpr):
    """Id of the `room`-th token with this key; the highest id if there are no more than that."""
    found = 2147483647
    seen = 0
    for start in range(0, vocab, BLOCK):
        at = start + tl.arange(0, BLOCK)
        values = tl.load(x + at, mask=at < vocab, other=float("-inf")).to(tl.float32)
        same = ((key_of(values) == key) & (at < vocab)).to(tl.int32)
        count = tl.sum(same, 0)
        if (seen < room) & (seen + count >= room):
            place = seen + tl.cumsum(same, 0)
            found = tl.min(tl.where((same > 0) & (place == room), at, 2147483647), 0)
        seen += count
    return found


@triton.jit
def cut_whole_row(
    x, vocab, highest, temperature, k, top_p, least,
    TOP_K: tl.constexpr, TOP_P: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Key and id of the cut of a row."""
    all_ids = 2147483647
    none = tl.zeros((), tl.uint32)
    key = none
    cut_id = all_ids
    if TOP_K:  # noqa: SIM102 - known when it is compiled
        if k < vocab:
            bit = tl.full((), 0x80000000, tl.uint32)
            for _ in range(32):
                trial = key | bit
                count = _sums(x, vocab, trial, all_ids, highest, temperature, none, False, BLOCK)
                key = tl.where(count >= k, trial, key)
                bit = bit >> 1
            if key > 0:
                more = _sums(x, vocab, key, -1, highest, temperature, none, False, BLOCK)
                cut_id = _id_of(x, vocab, key, (k - more).to(tl.int32), BLOCK)
    if TOP_P:
        if top_p < 1:
            top_key = key
            top_id = cut_id
            total = _sums(x, vocab, top_key, top_id, highest, temperature, least, True, BLOCK)
            target = tl.maximum(tl.ceil(total.to(tl.float64) * top_p).to(tl.int64), 1)
            key = none
            bit = tl.full((), 0x80000000, tl.uint32)
            for _ in range(32):
                trial = key | bit
                # Below the cut of top-k nothing is added, so no key below it is found.
                low = tl.maximum(trial, top_key)
                until = tl.where(trial > top_key, all_ids, top_id)
                sum_ = _sums(x, vocab, low, until, highest, temperature, least, True, BLOCK)
                key = tl.where(sum_ >= target, trial, key)
                bit = bit >> 1
            before = _sums(x, vocab, key, -1, highest, temperature, least, True, BLOCK)
            same = _sums(x, vocab, key, all_ids, highest, temperature, least, True, BLOCK) - before
            count = _sums(x, vocab, key, all_ids, highest, temperature, least, False, BLOCK)
            count -= _sums(x, vocab, key, -1, highest, temperature, least, False, BLOCK)
            each = tl.maximum(same // tl.maximum(count, 1), 1)
            room = (target - before + each - 1) // each
            cut_id = _id_of(x, vocab, key, room.to(tl.int32), BLOCK)
        else:
            cut_id = tl.where(least > key, all_ids, cut_id)
            key = tl.maximum(least, key)
    else:
        cut_id = tl.where(least > key, all_ids, cut_id)
        key = tl.maximum(least, key)
    return key, cut_id


@triton.jit
def draw_whole_row(
    x, vocab, key, cut_id, highest, temperature, seeds, positions, row, stream, BLOCK: tl.constexpr
):  # fmt: skip
    """The token of the highest score in fp64 among what the cut of a row keeps."""
    seed = tl.load(seeds + row).to(tl.int64)
    position = tl.load(positions + row).to(tl.int64)
    best = tl.full((), float("-inf"), tl.float64)
    token = -1
    for start in range(0, vocab, BLOCK):
        at = start + tl.arange(0, BLOCK)
        values = tl.load(x + at, mask=at < vocab, other=float("-inf")).to(tl.float32)
        keys = key_of(values)
        kept = (keys > key) | ((keys == key) & (at <= cut_id))
        score = (values.to(tl.float64) - highest.to(tl.float64)) / temperature
        score += exact_gumbel(seed, position, at, stream)
        score = tl.where(kept & (values > float("-inf")), score, float("-inf"))
        top = tl.max(score, 0)
        first = tl.min(tl.where(score == top, at, 2147483647), 0)
        token = tl.where(top > best, first, token)
        best = tl.maximum(top, best)
    return token
