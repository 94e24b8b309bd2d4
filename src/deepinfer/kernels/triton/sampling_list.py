"""Cuts by top-k and min-p, and draws among them: the tokens between two bounds in one list a row, and what is exact among these.

The order of a list hangs on time, and nothing on the order.
"""

from __future__ import annotations

import triton
import triton.language as tl

from deepinfer.kernels.triton.philox import chosen_word, exact_gumbel, fast_log2_exponential
from deepinfer.kernels.triton.sampling_bounds import row_options
from deepinfer.kernels.triton.sampling_draw import limits_of, scale_of
from deepinfer.kernels.triton.sampling_keys import (
    count_search,
    id_search,
    key_of,
    larger,
    least_kept_key,
    mass_of,
    mass_search,
    value_of,
)
from deepinfer.kernels.triton.sampling_whole import best_before, cut_by_count, cut_whole_row

__all__ = [
    "above_nothing",
    "append",
    "cut_of_mass",
    "finish_kernel",
    "gather_kernel",
    "neighbour_maxima_kernel",
]


@triton.jit
def neighbour_maxima_kernel(
    logits, maxima, tops, vocab, stride, stride_maxima, num_chunks, BLOCK: tl.constexpr, GROUP: tl.constexpr
):  # fmt: skip
    """Maxima of groups of neighbours of one chunk for the selection of `topk`, and the highest logit, NaN if one is.

    Of NaN and a number the number is the maximum of a group.
    """
    to = tl.program_id(0).to(tl.int64)
    row = to // num_chunks
    first = (to % num_chunks).to(tl.int32) * BLOCK
    at = first + tl.arange(0, BLOCK)
    x = tl.load(logits + row * stride + at, mask=at < vocab, other=float("-inf")).to(tl.float32)
    best = tl.max(tl.reshape(x, (BLOCK // GROUP, GROUP)), 1)
    tl.store(
        tops + to,
        tl.reduce(tl.reduce(tl.reshape(x, (BLOCK // GROUP, GROUP)), 1, larger), 0, larger),
    )
    g = tl.arange(0, BLOCK // GROUP)
    tl.store(maxima + row * stride_maxima + first // GROUP + g, best.to(maxima.dtype.element_ty))


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
    to = tl.program_id(0).to(tl.int64)
    row = to // num_chunks
    first = (to % num_chunks).to(tl.int32) * BLOCK
    at = first + tl.arange(0, BLOCK)
    x = tl.load(logits + row * stride + at, mask=at < vocab, other=float("-inf")).to(tl.float32)
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
def _drawn_of_list(ids, values, kept, highest, temperature, seeds, positions, row, stream, FAST: tl.constexpr):  # fmt: skip
    """The token of the highest score in fp64 among some candidates, ties to the lowest id; -1 if there are none."""
    seed = tl.load(seeds + row).to(tl.int64)
    position = tl.load(positions + row).to(tl.int64)
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


@triton.jit
def _count_cut(ids, keys, used, k, high, vocab):
    """Key and id up to which k of the used tokens are kept; there are k at least."""
    low = tl.min(tl.where(used, keys, high), 0)
    key = count_search(keys, used, k, low, high, 32)
    room = k - tl.sum((used & (keys > key)).to(tl.int32), 0)
    same = used & (keys == key)
    # Not none at all where all are kept: equal tokens may be missing here.
    cut_id = tl.max(tl.where(same, ids, -1), 0)
    if tl.sum(same.to(tl.int32), 0) > room:
        cut_id = id_search(ids, same, room, vocab)
    return key, cut_id


@triton.jit
def cut_of_mass(ids, keys, kept, mass, target, low, high, vocab):
    """Key and id up to which the masses of some tokens reach a target; all of them do."""
    key = mass_search(keys, mass, target, low, high, False)
    same = kept & (keys == key)
    each = tl.maximum(tl.max(tl.where(same, mass, 0), 0), 1)
    missing = target - tl.sum(tl.where(keys > key, mass, 0), 0)
    room = ((missing + each - 1) // each).to(tl.int32)
    # Not none at all where all are kept: equal tokens may be missing here.
    cut_id = tl.max(tl.where(same, ids, -1), 0)
    if tl.sum(same.to(tl.int32), 0) > room:
        cut_id = id_search(ids, same, room, vocab)
    return key, cut_id


@triton.jit(do_not_specialize=["stream"])
def finish_kernel(
    logits,
    temperatures,
    top_ks,
    top_ps,
    min_ps,
    seeds,
    positions,
    tops,
    bounds,
    counts,
    found,
    cuts,
    cut_ids,
    out,
    vocab,
    stride,
    num_chunks,
    stream,
    width,
    WARM: tl.constexpr,
    TOP_K: tl.constexpr,
    TOP_P: tl.constexpr,
    MIN_P: tl.constexpr,
    DRAWN: tl.constexpr,
    FAST: tl.constexpr,
    CHUNKS: tl.constexpr,
    CAPACITY: tl.constexpr,
):
    """Cuts one row by top-k and min-p in its list: writes the cut, or with DRAWN the token, drawn after top-p.

    With DRAWN the list is of the `width` highest tokens, -1 for none. A row that its bounds don't fit is searched as a whole.
    The cut of a row that cannot be drawn is NaN.
    """
    row = tl.program_id(0).to(tl.int64)
    x = logits + row * stride
    c = tl.arange(0, CHUNKS)
    chunk_tops = tl.load(tops + row * num_chunks + c, mask=c < num_chunks, other=float("-inf"))
    highest = tl.reduce(chunk_tops, 0, larger)
    temperature, k, top_p, min_p = row_options(
        temperatures, top_ks, top_ps, min_ps, row, vocab, WARM, TOP_K, TOP_P, MIN_P
    )
    is_greedy = temperature <= 0
    is_good = (highest > float("-inf")) & (highest < float("inf"))
    is_some = temperature == temperature
    if MIN_P:
        is_some &= is_greedy | (min_p <= 1)
    key = key_of(tl.full((), float("inf"), tl.float32))
    cut_id = -1
    token = -1
    if is_good & is_some:
        temperature = tl.where(is_greedy, 1.0, temperature)
        k = tl.where(is_greedy, 1, k)
        top_p = tl.where(is_greedy, 1.0, top_p)
        high = key_of(highest)
        least = tl.zeros((), tl.uint32)
        if MIN_P:
            least = least_kept_key(highest, temperature, tl.where(is_greedy, 0.0, min_p))
        key = tl.zeros((), tl.uint32)
        cut_id = 2147483647
        i = tl.arange(0, CAPACITY)
        if DRAWN:
            if (k <= width) | (width >= vocab):
                used = i < width
                ids = tl.load(found + row * width + i, mask=used, other=-1)
                values = tl.load(x + ids, mask=ids >= 0, other=float("-inf")).to(tl.float32)
                used = values > float("-inf")
                keys = tl.where(used, key_of(values), 0).to(tl.uint32)
                kept = used
                if k < tl.sum(used.to(tl.int32), 0):
                    key, cut_id = _count_cut(ids, keys, used, k, high, vocab)
                    kept &= (keys > key) | ((keys == key) & (ids <= cut_id))
                kept &= keys >= least
                if TOP_P:  # noqa: SIM102 - known when it is compiled
                    if top_p < 1:
                        mass = tl.where(kept, mass_of(values, highest, temperature), 0)
                        target = tl.ceil(tl.sum(mass, 0).to(tl.float64) * top_p).to(tl.int64)
                        low = tl.min(tl.where(kept, keys, high), 0)
                        key, cut_id = cut_of_mass(
                            ids, keys, kept, mass, tl.maximum(target, 1), low, high, vocab
                        )
                        kept &= (keys > key) | ((keys == key) & (ids <= cut_id))
                token = _drawn_of_list(
                    ids, values, kept, highest, temperature, seeds, positions, row, stream, FAST
                )
            else:
                key, cut_id = cut_whole_row(
                    x, vocab, highest, temperature, k, top_p, least, TOP_P, 2048
                )
                key, cut_id = above_nothing(key, cut_id)
                seed = tl.load(seeds + row).to(tl.int64)
                position = tl.load(positions + row).to(tl.int64)
                token = best_before(
                    x, vocab, value_of(key), cut_id, highest, temperature, seed, position, stream,
                    FAST, 2048,
                )  # fmt: skip
                token = tl.where(token < vocab, token, -1)
        else:
            listed = tl.load(counts + row * 2)
            above = tl.load(counts + row * 2 + 1)
            is_all = tl.load(bounds + row * 2) == float("-inf")
            fits = (listed <= CAPACITY) & (above < k) & (is_all | (above + listed >= k))
            if (fits == 0) & (k < vocab):
                key, cut_id = cut_by_count(x, vocab, k, highest, 2048)
            elif (k < vocab) & (above + listed >= k):
                used = i < listed
                ids = tl.load(found + row * CAPACITY + i, mask=used, other=0)
                values = tl.load(x + ids, mask=used, other=float("-inf")).to(tl.float32)
                keys = tl.where(used, key_of(values), 0).to(tl.uint32)
                key, cut_id = _count_cut(ids, keys, used, k - above, high, vocab)
            if least > key:
                key = least
                cut_id = cut_id * 0 + 2147483647
    if DRAWN:
        tl.store(out + row, token.to(out.dtype.element_ty))
    else:
        key, cut_id = above_nothing(key, cut_id)
        tl.store(cuts + row, tl.where(is_good, value_of(key), float("nan")))
        tl.store(cut_ids + row, cut_id)
