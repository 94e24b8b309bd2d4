"""Bounds of cuts from a sample of each row: what top-k keeps lies between them, most likely.

Tokens are ordered by logit, highest first, then by id. A bound is a logit and an id: it holds the tokens above the logit, and
those equal to it up to the id. The lower bound is expected to hold all that is kept, the upper one nothing else; whoever
uses them counts what they hold, and takes another way where an expectation fails.
"""

from __future__ import annotations

import triton
import triton.language as tl

from deepinfer.kernels.triton.sampling_keys import first_bit, id_search, key_of, value_of

__all__ = ["bounds_kernel", "row_options"]


@triton.jit
def row_options(
    temperatures, top_ks, top_ps, min_ps, row, vocab,
    WARM: tl.constexpr, TOP_K: tl.constexpr, TOP_P: tl.constexpr, MIN_P: tl.constexpr,
):  # fmt: skip
    """Temperature, top-k, top-p and min-p of a row; fp64 but for the second."""
    temperature = tl.full((), 1.0, tl.float64)
    if WARM:
        temperature = tl.load(temperatures + row).to(tl.float64)
    k = vocab
    if TOP_K:
        given = tl.load(top_ks + row).to(tl.int64)
        k = tl.where((given <= 0) | (given > vocab), vocab, given).to(tl.int32)
    top_p = tl.full((), 1.0, tl.float64)
    if TOP_P:
        top_p = tl.load(top_ps + row).to(tl.float64)
        # NaN keeps the highest alone, as in the reference.
        top_p = tl.where(top_p > 0, top_p, 0.0)
    min_p = tl.full((), 0.0, tl.float64)
    if MIN_P:
        min_p = tl.load(min_ps + row).to(tl.float64)
    return temperature, k, top_p, min_p


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
    temperature, k, _, _ = row_options(
        temperatures, top_ks, top_ks, top_ks, row, vocab, WARM, TOP_K, False, False
    )
    k = tl.where(temperature <= 0, 1, k)
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
