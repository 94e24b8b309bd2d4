"""Cuts and draws of one row by passes over all of it in one program, for rows that the fast ways cannot serve."""

from __future__ import annotations

import triton
import triton.language as tl

from deepinfer.kernels.triton.sampling_draw import exact_scores, kept_values, noisy_block, scale_of
from deepinfer.kernels.triton.sampling_keys import first_bit, key_of, mass_of, value_of

__all__ = ["best_before", "cut_at_mass", "cut_by_count", "cut_whole_row", "exact_mass"]


@triton.jit
def _block(x, vocab, start, BLOCK: tl.constexpr):
    at = start + tl.arange(0, BLOCK)
    return at, tl.load(x + at, mask=at < vocab, other=float("-inf")).to(tl.float32)


@triton.jit
def exact_mass(x, vocab, low, cut_id, highest, temperature, least, BLOCK: tl.constexpr):
    """Integer mass of tokens above the key `low`, or equal to it with an id up to `cut_id`, from the key `least` on."""
    total = tl.zeros((BLOCK,), tl.int64)
    # At the highest key only ids up to the last one count.
    end = tl.where((low == key_of(highest)) & (cut_id < vocab), cut_id + 1, vocab)
    for start in range(0, end, BLOCK):
        at, values = _block(x, vocab, start, BLOCK)
        keys = key_of(values)
        good = (values > float("-inf")) & (keys >= least)
        good &= (keys > low) | ((keys == low) & (at <= cut_id))
        total += tl.where(good, mass_of(values, highest, temperature), 0)
    return tl.sum(total, 0)


@triton.jit
def _id_of(x, vocab, key, room, BLOCK: tl.constexpr):
    """Id of the `room`-th token with this key; the highest id if there are no more than that."""
    found = 2147483647
    seen = 0
    start = 0
    while (start < vocab) & (seen < room):
        at, values = _block(x, vocab, start, BLOCK)
        same = ((key_of(values) == key) & (at < vocab)).to(tl.int32)
        count = tl.sum(same, 0)
        if seen + count >= room:
            place = seen + tl.cumsum(same, 0)
            found = tl.min(tl.where((same > 0) & (place == room), at, 2147483647), 0)
        seen += count
        start += BLOCK
    return found


@triton.jit
def _kth_of_row(x, vocab, k, low, high, BLOCK: tl.constexpr):
    """The k-th largest key of a row and how many of its equals are among the k; 0 where fewer than k are finite.

    The k-th key lies in [low, high], of which no token is above `high`. Three bits a pass are settled.
    """
    bins = tl.arange(0, 8)
    prefix = tl.zeros((), tl.int64)
    left = k
    shift = 30
    enough = True
    while (shift >= 0) & enough:
        # 33 bits, so that eleven digits of three bits are all of them.
        lowest = (low.to(tl.int64) << 1) >> shift
        top = (high.to(tl.int64) << 1) >> shift
        if lowest == top:
            prefix = top
        else:
            total = tl.zeros((8,), tl.int32)
            for far in range(0, vocab, 255 * BLOCK):
                # Eight counts of eight bits.
                packed = tl.zeros((BLOCK,), tl.int64)
                for start in range(far, tl.minimum(far + 255 * BLOCK, vocab), BLOCK):
                    _, values = _block(x, vocab, start, BLOCK)
                    keys = key_of(values).to(tl.int64) << 1
                    same = (values > float("-inf")) & ((keys >> (shift + 3)) == prefix)
                    one = tl.full((BLOCK,), 1, tl.int64) << (((keys >> shift) & 7) * 8)
                    packed += tl.where(same, one, 0)
                fields = (packed[:, None] >> (bins[None, :] * 8).to(tl.int64)) & 255
                total += tl.sum(fields.to(tl.int32), 0)
            reached = tl.sum(tl.where(bins[None, :] >= bins[:, None], total[None, :], 0), 1)
            digit = tl.max(tl.where(reached >= left, bins, -1), 0)
            enough = digit >= 0
            left -= tl.sum(tl.where(bins > digit, total, 0), 0)
            prefix = prefix * 8 + tl.maximum(digit, 0)
        shift -= 3
    key = tl.where(enough, prefix >> 1, 0).to(tl.uint32)
    return key, tl.where(enough, left, 2147483647)


@triton.jit
def _mass_search(
    x, vocab, target, top_key, top_id, low, high, highest, temperature, least, BLOCK: tl.constexpr
):
    """The largest key in [low, high] such that the kept masses of it and all larger ones reach the target; two bits a pass."""
    # A mass is 0 from exp(-30) on.
    lowest = key_of((highest.to(tl.float64) - 31.0 * temperature).to(tl.float32))
    low = tl.minimum(tl.maximum(tl.maximum(tl.maximum(top_key, least), lowest), low), high)
    bit, found = first_bit(low, high)
    while bit > 0:
        half = bit >> 1
        both = tl.zeros((BLOCK,), tl.int64)
        upper = tl.zeros((BLOCK,), tl.int64)
        lower = tl.zeros((BLOCK,), tl.int64)
        for start in range(0, vocab, BLOCK):
            at, values = _block(x, vocab, start, BLOCK)
            keys = key_of(values)
            good = (values > float("-inf")) & (keys >= least)
            good &= (keys > top_key) | ((keys == top_key) & (at <= top_id))
            mass = tl.where(good, mass_of(values, highest, temperature), 0)
            both += tl.where(keys >= (found | bit | half), mass, 0)
            upper += tl.where(keys >= (found | bit), mass, 0)
            lower += tl.where(keys >= (found | half), mass, 0)
        low_found = tl.where(tl.sum(lower, 0) >= target, found | half, found)
        high_found = tl.where(tl.sum(both, 0) >= target, found | bit | half, found | bit)
        found = tl.where(tl.sum(upper, 0) >= target, high_found, low_found)
        bit = half >> 1
    return found


@triton.jit
def cut_by_count(x, vocab, k, highest, BLOCK: tl.constexpr):
    """Key and id up to which a row has k tokens; key 0 where fewer are finite."""
    key, room = _kth_of_row(x, vocab, k, tl.zeros((), tl.uint32), key_of(highest), BLOCK)
    cut_id = 2147483647
    if key > 0:
        cut_id = _id_of(x, vocab, key, room, BLOCK)
    return key, cut_id


@triton.jit
def cut_at_mass(
    x, vocab, target, key, cut_id, low, high, highest, temperature, least, BLOCK: tl.constexpr
):  # fmt: skip
    """Key, in [low, high], and id up to which the tokens that a cut, and a least key, leave reach a mass."""
    key = _mass_search(x, vocab, target, key, cut_id, low, high, highest, temperature, least, BLOCK)
    before = exact_mass(x, vocab, key, -1, highest, temperature, least, BLOCK)
    each = tl.maximum(mass_of(value_of(key), highest, temperature), 1)
    room = tl.minimum((target - before + each - 1) // each, 2147483647).to(tl.int32)
    return key, _id_of(x, vocab, key, room, BLOCK)


@triton.jit
def cut_whole_row(
    x, vocab, highest, temperature, k, top_p, least, TOP_P: tl.constexpr, BLOCK: tl.constexpr
):  # fmt: skip
    """Key and id of the cut of a row by all filters."""
    key = tl.zeros((), tl.uint32)
    cut_id = 2147483647
    if k < vocab:
        key, cut_id = cut_by_count(x, vocab, k, highest, BLOCK)
    restricted = False
    if TOP_P:
        restricted = top_p < 1
    if restricted:
        total = exact_mass(x, vocab, key, cut_id, highest, temperature, least, BLOCK)
        target = tl.maximum(tl.ceil(total.to(tl.float64) * top_p).to(tl.int64), 1)
        none = tl.zeros((), tl.uint32)
        key, cut_id = cut_at_mass(
            x, vocab, target, key, cut_id, none, key_of(highest), highest, temperature, least, BLOCK
        )
    else:
        cut_id = tl.where(least > key, 2147483647, cut_id)
        key = tl.maximum(key, least)
    return key, cut_id


@triton.jit
def best_before(
    x, vocab, cut, cut_id, highest, temperature, seed, position, stream,
    FAST: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """The token of the highest score in fp64 above a cut: a logit, and the last id that counts at it."""
    best = tl.full((), float("-inf"), tl.float64)
    token = 2147483647
    # At the highest logit only ids up to that of the cut are left.
    end = tl.where((cut == highest) & (cut_id < vocab), cut_id + 1, vocab)
    start = 0
    while start < end:
        at, values = _block(x, vocab, start, BLOCK)
        values = kept_values(values, at, cut, cut_id, True)
        top = tl.max(values, 0)
        if top > float("-inf"):
            found = noisy_block(
                x, (values - top) * scale_of(temperature), start, vocab, top, temperature, seed, position, stream, cut, cut_id,
                True, FAST, BLOCK,
            )  # fmt: skip
            four = found * 4 + tl.arange(0, 4)
            scores = exact_scores(
                x,
                four,
                four < vocab,
                highest,
                temperature,
                seed,
                position,
                stream,
                cut,
                cut_id,
                True,
            )
            score = tl.max(scores, 0)
            first = tl.min(tl.where((scores == score) & (four < vocab), four, 2147483647), 0)
            token = tl.where(score > best, first, token)
            best = tl.maximum(score, best)
        start += BLOCK
    return token
