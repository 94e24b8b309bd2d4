"""Device functions on lists of tokens of a row: filling one, its cut by top-k, min-p and top-p, a draw from what is kept.

The order of a list hangs on time, and nothing on the order.
"""

from __future__ import annotations

import triton
import triton.language as tl

from deepinfer.kernels.triton.philox import chosen_word, exact_gumbel, fast_log2_exponential
from deepinfer.kernels.triton.sampling_draw import scale_of
from deepinfer.kernels.triton.sampling_keys import (
    count_search,
    id_search,
    key_of,
    mass_of,
    mass_search,
)
from deepinfer.kernels.triton.sampling_rows import noise_of

__all__ = [
    "above_nothing",
    "append",
    "cut_of_count",
    "cut_of_list",
    "cut_of_mass",
    "drawn_of_list",
]


@triton.jit
def append(listed, ids, count, to, CAPACITY: tl.constexpr):
    """Appends the listed tokens of a chunk to a list, as far as it has room, and counts all of them."""
    one = listed.to(tl.int32)
    num_listed = tl.sum(one, 0)
    if num_listed > 0:
        # One place for all of the chunk: an atomic operation for each token would take longer than the pass.
        place = tl.atomic_add(count, num_listed) + tl.cumsum(one, 0) - one
        tl.store(to + place, ids, mask=listed & (place < CAPACITY))


@triton.jit
def above_nothing(key, cut_id):
    """A cut that drops -inf, whatever it was."""
    lowest = key_of(tl.full((), float("-inf"), tl.float32)) + 1
    return tl.maximum(key, lowest), tl.where(key < lowest, 2147483647, cut_id)


@triton.jit
def _id_of_equals(ids, same, room, vocab):
    """The id up to which there are as many equal tokens as there is room for."""
    # Not all ids where all are kept: equal tokens may be missing in the list.
    cut_id = tl.max(tl.where(same, ids, -1), 0)
    if tl.sum(same.to(tl.int32), 0) > room:
        cut_id = id_search(ids, same, room, vocab)
    return cut_id


@triton.jit
def cut_of_count(ids, keys, used, k, low, high, vocab):
    """Key and id up to which k of the used tokens are kept; there are k at least, with keys in [low, high]."""
    key = count_search(keys, used, k, low, high, 32)
    room = k - tl.sum((used & (keys > key)).to(tl.int32), 0)
    return key, _id_of_equals(ids, used & (keys == key), room, vocab)


@triton.jit
def cut_of_mass(ids, keys, kept, mass, target, low, high, vocab, FEW: tl.constexpr):
    """Key and id up to which the masses of some tokens reach a target; all of them do, with keys in [low, high]."""
    key = mass_search(keys, mass, target, low, high, FEW)
    same = kept & (keys == key)
    each = tl.maximum(tl.max(tl.where(same, mass, 0), 0), 1)
    missing = target - tl.sum(tl.where(keys > key, mass, 0), 0)
    room = ((missing + each - 1) // each).to(tl.int32)
    return key, _id_of_equals(ids, same, room, vocab)


@triton.jit
def cut_of_list(
    ids, values, used, highest, temperature, k, top_p, least, vocab,
    TOP_P: tl.constexpr, DRAWN: tl.constexpr, FEW: tl.constexpr,
):  # fmt: skip
    """Key and id of the cut of a row by all filters, and what is kept of a list with all tokens that top-k can keep.

    `least` is the key of min-p. With DRAWN only what is kept is asked for. FEW says that the list has room for 256 at most.
    """
    keys = tl.where(used, key_of(values), 0).to(tl.uint32)
    high = key_of(highest)
    key = tl.zeros((), tl.uint32)
    cut_id = 2147483647
    kept = used
    count = tl.sum(used.to(tl.int32), 0)
    # The cut of a row is in the list even where all of the list is kept.
    if (k < count) | ((k == count) & (DRAWN == 0)):
        low = tl.min(tl.where(used, keys, high), 0)
        key, cut_id = cut_of_count(ids, keys, used, k, low, high, vocab)
        kept &= (keys > key) | ((keys == key) & (ids <= cut_id))
    kept &= keys >= least
    cut_id = tl.where(least > key, 2147483647, cut_id)
    key = tl.maximum(key, least)
    if TOP_P:  # noqa: SIM102 - known when it is compiled
        if top_p < 1:
            mass = tl.where(kept, mass_of(values, highest, temperature), 0)
            target = tl.maximum(tl.ceil(tl.sum(mass, 0).to(tl.float64) * top_p).to(tl.int64), 1)
            low = tl.min(tl.where(kept, keys, high), 0)
            key, cut_id = cut_of_mass(ids, keys, kept, mass, target, low, high, vocab, FEW)
            kept &= (keys > key) | ((keys == key) & (ids <= cut_id))
    return key, cut_id, kept


@triton.jit
def drawn_of_list(ids, values, kept, highest, temperature, seeds, positions, row, stream, FAST: tl.constexpr):  # fmt: skip
    """The token of the highest score in fp64 among some candidates, ties to the lowest id; -1 if there are none."""
    seed, position = noise_of(seeds, positions, row)
    scores = (values - highest) * scale_of(temperature)
    scores -= fast_log2_exponential(chosen_word(seed, position, ids, stream), FAST)
    scores = tl.where(kept, scores, float("-inf"))
    # What fp32 leaves in question, nearly always one, is judged in fp64.
    is_open = kept & (scores >= tl.max(scores, 0) - 1e-3)
    token = tl.min(tl.where(is_open, ids, 2147483647), 0)
    if tl.sum(is_open.to(tl.int32), 0) > 1:
        top = tl.full((), float("-inf"), tl.float64)
        one = token
        while one < 2147483647:
            value = tl.max(tl.where(is_open & (ids == one), values, float("-inf")), 0)
            exact = (value.to(tl.float64) - highest.to(tl.float64)) / temperature
            exact += exact_gumbel(seed, position, one, stream)
            token = tl.where(exact > top, one, token)
            top = tl.maximum(exact, top)
            one = tl.min(tl.where(is_open & (ids > one), ids, 2147483647), 0)
    return tl.where(token < 2147483647, token, -1)
