"""Bounds of cuts from a sample of each row: what top-k keeps lies between them, most likely.

Tokens are ordered by logit, highest first, then by id. A bound is a logit and an id: it holds the tokens above the logit, and
those equal to it up to the id. The lower bound is expected to hold all that is kept, the upper one nothing else; whoever
uses them counts what they hold, and takes another way where an expectation fails.
"""

from __future__ import annotations

import triton
import triton.language as tl

from deepinfer.kernels.triton.sampling_draw import limits_of
from deepinfer.kernels.triton.sampling_keys import (
    first_bit,
    id_search,
    key_of,
    larger,
    least_kept_key,
    value_of,
)
from deepinfer.kernels.triton.sampling_list import above_nothing, append, cut_of_count
from deepinfer.kernels.triton.sampling_rows import (
    chunk_of,
    filters_of,
    is_finite,
    temperature_of,
    top_k_of,
    tops_of,
)
from deepinfer.kernels.triton.sampling_whole import cut_by_count

__all__ = ["bounds_kernel", "cut_between_kernel", "gather_kernel"]


@triton.jit
def _sample(x, vocab, SIZE: tl.constexpr):
    """Ids and logits of a sample, four neighbours from each of SIZE / 4 parts of the row; of all tokens of a short one."""
    PARTS: tl.constexpr = SIZE // 4
    part = tl.arange(0, PARTS)
    quads = (vocab + 3) // 4
    first = (part.to(tl.int64) * quads // PARTS).to(tl.int32)
    last = ((part + 1).to(tl.int64) * quads // PARTS).to(tl.int32)
    # Places inside the parts that no regular order of tokens meets.
    mixed = ((part.to(tl.uint32) * 2654435761) >> 8).to(tl.int32) & 0xFFFF
    quad = first + mixed % tl.maximum(last - first, 1)
    quad = tl.where(quads <= PARTS, part, quad)
    at = quad[:, None] * 4 + tl.arange(0, 4)[None, :]
    values = tl.load(x + at, mask=at < vocab, other=float("-inf")).to(tl.float32)
    return tl.reshape(at, (SIZE,)), tl.reshape(values, (SIZE,))


@triton.jit
def _two_of_rank(keys, first, second, low, high, steps):
    """The largest keys such that as many keys as two numbers are not below them, to the first differing bits.

    0 counts as no key.
    """
    bit, a = first_bit(low, high)
    b = a
    while (bit > 0) & (steps > 0):
        # Both numbers in one sum: a sum over the program costs more than what is added.
        both = (keys >= (a | bit)).to(tl.int32) + ((keys >= (b | bit)).to(tl.int32) << 16)
        both = tl.sum(both, 0)
        a = tl.where((both & 0xFFFF) >= first, a | bit, a)
        b = tl.where((both >> 16) >= second, b | bit, b)
        bit = bit >> 1
        steps -= 1
    return a, b


@triton.jit
def _id_at(ids, keys, key, number, otherwise, vocab):
    """The id up to which tokens with this key count so that the number is reached, where several have it."""
    same = keys == key
    found = otherwise
    count = tl.sum(same.to(tl.int32), 0)
    if count > 1:
        room = number - tl.sum((keys > key).to(tl.int32), 0)
        if (room >= 1) & (room <= count):
            found = id_search(ids, same, room, vocab)
    return found


@triton.jit
def bounds_kernel(
    logits,
    temperatures,
    top_ks,
    bounds,
    bound_ids,
    counts,
    vocab,
    stride,
    WARM: tl.constexpr,
    TOP_K: tl.constexpr,
    SIZE: tl.constexpr,
):
    """Lower and upper bound of the top-k of one row; a lower bound of -inf holds all. The counters of the row begin at 0."""
    row = tl.program_id(0).to(tl.int64)
    x = logits + row * stride
    pair = tl.arange(0, 2)
    tl.store(counts + row * 2 + pair, tl.zeros((2,), tl.int32))
    k = top_k_of(top_ks, row, vocab, TOP_K)
    k = tl.where(temperature_of(temperatures, row, WARM) <= 0, 1, k)
    lower = float("-inf")
    upper = float("-inf")
    lower_id = 2147483647
    upper_id = 2147483647
    if k < vocab:
        upper = float("inf")
        upper_id = -1
        ids, values = _sample(x, vocab, SIZE)
        sampled = tl.sum((ids < vocab).to(tl.int32), 0)
        used = (values > float("-inf")) & (values < float("inf"))
        keys = tl.where(used, key_of(values), 0).to(tl.uint32)
        high = tl.max(keys, 0)
        low = tl.min(tl.where(used, keys, high), 0)
        rest = 1.0 - sampled / (vocab * 1.0)
        rank = (k * 1.0) * (sampled / (vocab * 1.0))
        slack = 4.0 * tl.sqrt(rank * (1.0 - k * 1.0 / vocab) * rest)
        slack += tl.where(rest > 0, 2.0, 0.0)
        first = tl.ceil(rank + slack).to(tl.int32)
        second = tl.minimum(tl.floor(rank - slack), rank - 1.0).to(tl.int32)
        most = tl.sum(used.to(tl.int32), 0)
        # Bounds of a sample need no more than the first bits in which tokens differ.
        steps = tl.where(rest > 0, 20, 32)
        a, b = _two_of_rank(keys, first, second, low, high, steps)
        if (first <= most) & (high > 0):
            lower = value_of(a)
            lower_id = _id_at(ids, keys, a, first, 2147483647, vocab)
        if (second >= 1) & (second <= most):
            upper = value_of(b)
            upper_id = _id_at(ids, keys, b, second, -1, vocab)
    tl.store(bounds + row * 2 + pair, tl.where(pair == 0, lower, upper))
    tl.store(bound_ids + row * 2 + pair, tl.where(pair == 0, lower_id, upper_id))


@triton.jit
def gather_kernel(
    logits,
    bounds,
    bound_ids,
    tops,
    counts,
    found,
    vocab,
    stride,
    num_chunks,
    BLOCK: tl.constexpr,
    CAPACITY: tl.constexpr,
):
    """Appends the tokens of one chunk between the bounds to the list of the row; `counts` are those, and those above.

    Leaves the highest logit of the chunk, too.
    """
    to, row, first, at, x = chunk_of(logits, vocab, stride, num_chunks, BLOCK)
    tl.store(tops + to, tl.reduce(x, 0, larger))
    lower = limits_of(tl.load(bounds + row * 2), tl.load(bound_ids + row * 2), first, BLOCK)
    listed = x > lower
    upper = tl.load(bounds + row * 2 + 1)
    above = listed & (x > limits_of(upper, tl.load(bound_ids + row * 2 + 1), first, BLOCK))
    listed &= above == 0
    num_above = tl.sum(above.to(tl.int32), 0)
    if num_above > 0:
        tl.atomic_add(counts + row * 2 + 1, num_above)
    append(listed, at, counts + row * 2, found + row * CAPACITY, CAPACITY)


@triton.jit
def cut_between_kernel(
    logits,
    temperatures,
    top_ks,
    min_ps,
    tops,
    bounds,
    counts,
    found,
    cuts,
    cut_ids,
    vocab,
    stride,
    num_chunks,
    WARM: tl.constexpr,
    TOP_K: tl.constexpr,
    MIN_P: tl.constexpr,
    CHUNKS: tl.constexpr,
    CAPACITY: tl.constexpr,
):
    """Writes the cut of one row by top-k and min-p, which is in its list; a row that its bounds don't fit is searched as a whole.

    The cut of a row that cannot be drawn is NaN.
    """
    row = tl.program_id(0).to(tl.int64)
    x = logits + row * stride
    _, highest = tops_of(tops, row, num_chunks, CHUNKS)
    temperature, k, _, min_p, is_some = filters_of(
        temperatures, top_ks, top_ks, min_ps, row, vocab, WARM, TOP_K, False, MIN_P
    )
    is_good = is_finite(highest)
    # Nothing is kept.
    key = key_of(tl.full((), float("inf"), tl.float32))
    cut_id = -1
    if is_good & is_some:
        high = key_of(highest)
        least = tl.zeros((), tl.uint32)
        if MIN_P:
            least = least_kept_key(highest, temperature, min_p)
        key = tl.zeros((), tl.uint32)
        cut_id = 2147483647
        listed = tl.load(counts + row * 2)
        above = tl.load(counts + row * 2 + 1)
        is_all = tl.load(bounds + row * 2) == float("-inf")
        fits = (listed <= CAPACITY) & (above < k) & (is_all | (above + listed >= k))
        if (fits == 0) & (k < vocab):
            key, cut_id = cut_by_count(x, vocab, k, highest, 2048)
        elif (k < vocab) & (above + listed >= k):
            i = tl.arange(0, CAPACITY)
            used = i < listed
            ids = tl.load(found + row * CAPACITY + i, mask=used, other=0)
            values = tl.load(x + ids, mask=used, other=float("-inf")).to(tl.float32)
            keys = tl.where(used, key_of(values), 0).to(tl.uint32)
            low = tl.min(tl.where(used, keys, high), 0)
            key, cut_id = cut_of_count(ids, keys, used, k - above, low, high, vocab)
        cut_id = tl.where(least > key, 2147483647, cut_id)
        key = tl.maximum(key, least)
    key, cut_id = above_nothing(key, cut_id)
    tl.store(cuts + row, tl.where(is_good, value_of(key), float("nan")))
    tl.store(cut_ids + row, cut_id)
