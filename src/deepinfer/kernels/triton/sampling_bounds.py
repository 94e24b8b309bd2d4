"""Bounds of cuts from a sample of each row: what top-k or top-p keeps lies between them, most likely.

Tokens are ordered by logit, highest first, then by id. A bound is a logit and an id: it holds the tokens above the logit, and
those equal to it up to the id. The lower bound is expected to hold all that is kept, the upper one nothing else; whoever
uses them counts or weighs what they hold, and takes another way where an expectation fails.
"""

from __future__ import annotations

import triton
import triton.language as tl

from deepinfer.kernels.triton.sampling_draw import kept_values, scale_of
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
def _add_two(a, b, c, d):
    return a + c, b + d


@triton.jit
def _two_of_weight(keys, weights, first, second, low, high, steps, MASS: tl.constexpr):
    """The largest keys such that the weights of them and of all larger ones reach two targets, to the first differing bits.

    0 counts as no key. Without MASS weights are 1, and both sums are one.
    """
    bit, a = first_bit(low, high)
    b = a
    while (bit > 0) & (steps > 0):
        if MASS:
            at_a, at_b = tl.reduce(
                (tl.where(keys >= (a | bit), weights, 0), tl.where(keys >= (b | bit), weights, 0)),
                0,
                _add_two,
            )
        else:
            both = (keys >= (a | bit)).to(tl.int32) + ((keys >= (b | bit)).to(tl.int32) << 16)
            both = tl.sum(both, 0)
            at_a = both & 0xFFFF
            at_b = both >> 16
        a = tl.where(at_a >= first, a | bit, a)
        b = tl.where(at_b >= second, b | bit, b)
        bit = bit >> 1
        steps -= 1
    return a, b


@triton.jit
def _id_at(ids, keys, weights, key, target, otherwise, vocab):
    """The id up to which tokens with this key count so that the target is reached, where several have it."""
    same = keys == key
    found = otherwise
    count = tl.sum(same.to(tl.int32), 0)
    if count > 1:
        missing = target - tl.sum(tl.where(keys > key, weights, 0), 0)
        each = tl.maximum(tl.max(tl.where(same, weights, 0), 0), 1)
        room = (missing + each - 1) // each
        if (room >= 1) & (room <= count):
            found = id_search(ids, same, room, vocab)
    return found


@triton.jit
def bounds_kernel(
    logits,
    temperatures,
    top_ks,
    top_ps,
    cuts,
    cut_ids,
    bounds,
    bound_ids,
    counts,
    vocab,
    stride,
    WARM: tl.constexpr,
    TOP_K: tl.constexpr,
    TOP_P: tl.constexpr,
    CUT: tl.constexpr,
    SIZE: tl.constexpr,
    ALIGN: tl.constexpr,
):
    """Lower and upper bound of one row: of its top-k, or with TOP_P of its top-p among what its cut keeps.

    A lower bound of -inf holds all. Ids are those of the last of ALIGN tokens,
    such that the lower bound holds more, and the upper one less. The counters of the row and those of open rows begin at 0.
    """
    row = tl.program_id(0).to(tl.int64)
    x = logits + row * stride
    pair = tl.arange(0, 2)
    tl.store(counts + row * 2 + pair, tl.zeros((2,), tl.int32))
    temperature, k, top_p, _ = row_options(
        temperatures, top_ks, top_ps, top_ps, row, vocab, WARM, TOP_K, TOP_P, False
    )
    k = tl.where(temperature <= 0, 1, k)
    lower = float("-inf")
    upper = float("-inf")
    lower_id = 2147483647
    upper_id = 2147483647
    restricted = (temperature > 0) & (top_p < 1) if TOP_P else k < vocab
    if restricted:
        upper = float("inf")
        upper_id = -1
        ids, values = _sample(x, vocab, SIZE)
        sampled = tl.sum((ids < vocab).to(tl.int32), 0)
        if CUT:
            cut_id = tl.load(cut_ids + row)
            values = kept_values(values, ids, tl.load(cuts + row), cut_id, True)
        used = (values > float("-inf")) & (values < float("inf"))
        keys = tl.where(used, key_of(values), 0).to(tl.uint32)
        high = tl.max(keys, 0)
        low = tl.min(tl.where(used, keys, high), 0)
        rest = 1.0 - sampled / (vocab * 1.0)
        if TOP_P:
            top = value_of(high)
            mass = tl.where(used, tl.exp2((values - top) * scale_of(temperature)), 0.0)
            UNIT: tl.constexpr = 1073741824.0 / SIZE
            weights = (mass * UNIT).to(tl.int32)
            total = tl.sum(mass, 0)
            share = top_p.to(tl.float32)
            # The error of a share of the whole row, taken from a sample of so few tokens that count.
            few = tl.maximum(tl.sum(mass * mass, 0) / (total * total), 1e-9)
            slack = 2.5 * tl.sqrt(share * (1.0 - share) * few * rest) + 2e-4
            first = ((share + slack) * total * UNIT).to(tl.int64)
            second = ((share - slack) * total * UNIT).to(tl.int64)
            most = tl.sum(weights, 0).to(tl.int64)
        else:
            weights = used.to(tl.int32)
            rank = (k * 1.0) * (sampled / (vocab * 1.0))
            slack = 4.0 * tl.sqrt(rank * (1.0 - k * 1.0 / vocab) * rest)
            slack += tl.where(rest > 0, 2.0, 0.0)
            first = tl.ceil(rank + slack).to(tl.int64)
            second = tl.minimum(tl.floor(rank - slack), rank - 1.0).to(tl.int64)
            most = tl.sum(weights, 0).to(tl.int64)
        # Bounds of a sample need no more than the first bits in which tokens differ.
        steps = tl.where(rest > 0, 20, 32)
        a, b = _two_of_weight(keys, weights, first, second, low, high, steps, TOP_P)
        if (first <= most) & (high > 0):
            lower = value_of(a)
            lower_id = _id_at(ids, keys, weights, a, first, 2147483647, vocab) | (ALIGN - 1)
        if (second >= 1) & (second <= most):
            upper = value_of(b)
            upper_id = _id_at(ids, keys, weights, b, second, -1, vocab)
            upper_id = (upper_id + 1) // ALIGN * ALIGN - 1
    tl.store(bounds + row * 2 + pair, tl.where(pair == 0, lower, upper))
    tl.store(bound_ids + row * 2 + pair, tl.where(pair == 0, lower_id, upper_id))
