"""Draws and cuts with a small top-k: the k highest of a row are among the elements of the k groups with the highest maxima.

A row is kept from its `cut` on: tokens above it, and those equal to it up to the id `cut_id`. What does not fit (hundreds of
equal logits) is searched as a whole.
"""

from __future__ import annotations

import triton
import triton.language as tl

from deepinfer.kernels.triton.philox import exact_gumbel
from deepinfer.kernels.triton.sampling_bounds import row_options
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
from deepinfer.kernels.triton.sampling_whole import best_before, cut_whole_row

__all__ = ["chunk_maxima_kernel", "few_cut_kernel", "row_cut_kernel"]


@triton.jit
def chunk_maxima_kernel(
    logits, groups, tops, vocab, stride, num_chunks, BLOCK: tl.constexpr, GROUPS: tl.constexpr
):
    """Maxima of the groups of one chunk, and of the chunk.

    A group is 32 tokens, four neighbours in each of eight places: token `w * 4 * GROUPS + 4 * g + j` of the chunk is in g.
    """
    to = tl.program_id(0).to(tl.int64)
    row = to // num_chunks
    chunk = (to % num_chunks).to(tl.int32)
    at = chunk * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(logits + row * stride + at, mask=at < vocab, other=float("-inf")).to(tl.float32)
    best = tl.reduce(tl.reshape(x, (8, GROUPS, 4)), 0, larger)
    best = tl.reduce(best, 1, larger)
    tl.store(groups + to * GROUPS + tl.arange(0, GROUPS), best)
    tl.store(tops + to, tl.reduce(best, 0, larger))


@triton.jit
def _cut_candidates(
    ids, values, used, highest, temperature, k, top_p, least, vocab, FEW: tl.constexpr
):  # fmt: skip
    """Cuts a row of which all that top-k can keep is here; returns key, id, and the kept candidates."""
    keys = key_of(values)
    high = key_of(highest)
    low = tl.min(tl.where(used, keys, high), 0)
    count = tl.sum(used.to(tl.int32), 0)
    few = tl.minimum(k, count)
    key = count_search(keys, used, few, low, high, 32)
    room = few - tl.sum((used & (keys > key)).to(tl.int32), 0)
    same = used & (keys == key)
    cut_id = 2147483647
    if tl.sum(same.to(tl.int32), 0) > room:
        cut_id = id_search(ids, same, room, vocab)
    kept = used & ((keys > key) | ((keys == key) & (ids <= cut_id))) & (keys >= least)
    if top_p < 1:
        mass = tl.where(kept, mass_of(values, highest, temperature), 0)
        target = tl.maximum(tl.ceil(tl.sum(mass, 0).to(tl.float64) * top_p).to(tl.int64), 1)
        top = key
        key = mass_search(keys, mass, target, tl.maximum(key, least), high, FEW)
        same = kept & (keys == key)
        each = tl.maximum(tl.max(tl.where(same, mass, 0), 0), 1)
        missing = target - tl.sum(tl.where(keys > key, mass, 0), 0)
        room = ((missing + each - 1) // each).to(tl.int32)
        # Among the equals of the k-th logit no more than top-k keeps.
        cut_id = tl.where(key > top, 2147483647, cut_id)
        if tl.sum(same.to(tl.int32), 0) > room:
            cut_id = id_search(ids, same, room, vocab)
        kept &= (keys > key) | ((keys == key) & (ids <= cut_id))
    else:
        cut_id = tl.where(least > key, 2147483647, cut_id)
        key = tl.where(least > key, least, key)
    return key, cut_id, kept


@triton.jit
def _drawn_candidate(
    ids, values, kept, highest, temperature, seeds, positions, row, stream
):  # fmt: skip
    """The token of the highest score in fp64 among some candidates."""
    seed = tl.load(seeds + row).to(tl.int64)
    position = tl.load(positions + row).to(tl.int64)
    score = (values.to(tl.float64) - highest.to(tl.float64)) / temperature
    score += exact_gumbel(seed, position, ids, stream)
    score = tl.where(kept, score, float("-inf"))
    token = tl.min(tl.where(kept & (score == tl.max(score, 0)), ids, 2147483647), 0)
    return tl.where(token < 2147483647, token, -1)


@triton.jit(do_not_specialize=["stream"])
def row_cut_kernel(
    logits,
    temperatures,
    top_ks,
    top_ps,
    min_ps,
    seeds,
    positions,
    groups,
    tops,
    scratch,
    cuts,
    cut_ids,
    out,
    vocab,
    stride,
    num_chunks,
    stream,
    WARM: tl.constexpr,
    TOP_P: tl.constexpr,
    MIN_P: tl.constexpr,
    SAMPLE: tl.constexpr,
    CHUNKS: tl.constexpr,
    BLOCK: tl.constexpr,
    GROUPS: tl.constexpr,
    ALL_GROUPS: tl.constexpr,
    MOST_K: tl.constexpr,
    CAPACITY: tl.constexpr,
    SPAN: tl.constexpr,
    STEPS: tl.constexpr,
    FAST: tl.constexpr,
):
    """Cuts one row, or leaves its few candidates to `few_cut_kernel`, which `cut_id` -3 says.

    With SAMPLE the token is drawn in every row, which `cut_id` -2 says.
    """
    row = tl.program_id(0).to(tl.int64)
    x = logits + row * stride
    c = tl.arange(0, CHUNKS)
    chunk_tops = tl.load(tops + row * num_chunks + c, mask=c < num_chunks, other=float("-inf"))
    highest = tl.reduce(chunk_tops, 0, larger)
    temperature, k, top_p, min_p = row_options(
        temperatures, top_ks, top_ps, min_ps, row, vocab, WARM, True, TOP_P, MIN_P
    )
    is_greedy = temperature <= 0
    temperature = tl.where(is_greedy, 1.0, temperature)
    is_good = (highest > float("-inf")) & (highest < float("inf"))
    least = tl.zeros((), tl.uint32)
    if MIN_P:
        least = least_kept_key(highest, temperature, min_p)
    # The state: the key and the id of the cut, whether both are found, and the row's token if it is drawn here.
    key = tl.zeros((), tl.uint32)
    cut_id = 2147483647
    done = (is_good == 0) | ((k >= vocab) & (top_p >= 1))
    if done:
        key = least
    token = -2
    if is_greedy & is_good:
        # The first of the highest logits alone.
        first = tl.min(tl.where(chunk_tops == highest, c, CHUNKS), 0)
        at = first * BLOCK + tl.arange(0, BLOCK)
        values = tl.load(x + at, mask=at < vocab, other=float("-inf")).to(tl.float32)
        key = key_of(highest)
        cut_id = tl.min(tl.where(values == highest, at, 2147483647), 0)
        token = cut_id
        done = True
    is_none = temperature != temperature
    if MIN_P:
        is_none |= (is_greedy == 0) & ((min_p <= 1) == 0)
    if is_none & is_good:
        # NaN, or no share at all: nothing is kept.
        key = key_of(tl.full((), float("inf"), tl.float32))
        token = -1
        done = True
    mine = scratch + row * (MOST_K + CAPACITY + 1)
    few = 0
    bound = tl.zeros((), tl.uint32)
    if (done == 0) & (k <= MOST_K // 2):
        g = tl.arange(0, ALL_GROUPS)
        num_groups = num_chunks * GROUPS
        maxima = tl.load(groups + row * num_groups + g, mask=g < num_groups, other=float("-inf"))
        is_group = maxima > float("-inf")
        group_keys = key_of(maxima)
        high = key_of(highest)
        low = tl.min(tl.where(is_group, group_keys, high), 0)
        bound = count_search(group_keys, is_group, k, low, high, STEPS)
        # With fewer groups than k their maxima bound nothing.
        bound = tl.where(tl.sum(is_group.to(tl.int32), 0) >= k, bound, 0).to(tl.uint32)
        chosen = (is_group & (group_keys >= bound)).to(tl.int32)
        num_chosen = tl.sum(chosen, 0)
        if num_chosen <= MOST_K:
            tl.store(mine + tl.cumsum(chosen, 0) - 1, g, mask=chosen > 0)
            tl.debug_barrier()
            total = 0
            e = tl.arange(0, SPAN)
            for start in range(0, num_chosen, SPAN // 32):
                which = start + (e >> 5)
                group = tl.load(mine + which, mask=which < num_chosen, other=0)
                at = (group // GROUPS) * BLOCK + ((e >> 2) & 7) * (4 * GROUPS)
                at += (group % GROUPS) * 4 + (e & 3)
                inside = (which < num_chosen) & (at < vocab)
                values = tl.load(x + at, mask=inside, other=float("-inf")).to(tl.float32)
                good = inside & (values > float("-inf")) & (key_of(values) >= bound)
                good = good.to(tl.int32)
                place = total + tl.cumsum(good, 0) - 1
                tl.store(mine + MOST_K + place, at, mask=(good > 0) & (place < CAPACITY))
                total += tl.sum(good, 0)
            if total <= 256:
                few = 1
                done = True
                tl.store(mine + (MOST_K + CAPACITY), total)
            else:
                tl.debug_barrier()
                if total <= CAPACITY:
                    i = tl.arange(0, CAPACITY)
                    used = i < total
                    ids = tl.load(mine + MOST_K + i, mask=used, other=0)
                    values = tl.load(x + ids, mask=used, other=float("-inf")).to(tl.float32)
                    key, cut_id, kept = _cut_candidates(
                        ids, values, used, highest, temperature, k, top_p, least, vocab, False
                    )
                    done = True
                    if SAMPLE:
                        token = _drawn_candidate(
                            ids, values, kept, highest, temperature, seeds, positions, row, stream
                        )  # fmt: skip
    if done == 0:
        key, cut_id = cut_whole_row(x, vocab, highest, temperature, k, top_p, least, TOP_P, 2048)
    lowest = key_of(tl.full((), float("-inf"), tl.float32)) + 1
    cut_id = tl.where(key < lowest, 2147483647, cut_id)
    key = tl.maximum(key, lowest)
    if SAMPLE:
        if is_good == 0:
            token = -1
        if (token < -1) & (few == 0):
            seed = tl.load(seeds + row).to(tl.int64)
            position = tl.load(positions + row).to(tl.int64)
            token = best_before(
                x,
                vocab,
                value_of(key),
                cut_id,
                highest,
                temperature,
                seed,
                position,
                stream,
                FAST,
                2048,
            )
            token = tl.where(token < vocab, token, -1)
        if token >= -1:
            cut_id = -2
            tl.store(out + row, token.to(out.dtype.element_ty))
    tl.store(cuts + row, tl.where(is_good, value_of(key), float("nan")))
    tl.store(cut_ids + row, tl.where(few == 1, -3, cut_id))


@triton.jit(do_not_specialize=["stream"])
def few_cut_kernel(
    logits,
    temperatures,
    top_ks,
    top_ps,
    min_ps,
    seeds,
    positions,
    tops,
    scratch,
    cuts,
    cut_ids,
    out,
    vocab,
    stride,
    num_chunks,
    stream,
    WARM: tl.constexpr,
    TOP_P: tl.constexpr,
    MIN_P: tl.constexpr,
    SAMPLE: tl.constexpr,
    CHUNKS: tl.constexpr,
    MOST_K: tl.constexpr,
    CAPACITY: tl.constexpr,
):
    """Cuts a row of few candidates, by one warp, whose sums need no barrier; other rows were cut before."""
    row = tl.program_id(0).to(tl.int64)
    if tl.load(cut_ids + row) == -3:
        x = logits + row * stride
        c = tl.arange(0, CHUNKS)
        chunk_tops = tl.load(tops + row * num_chunks + c, mask=c < num_chunks, other=float("-inf"))
        highest = tl.max(chunk_tops, 0)
        temperature, k, top_p, min_p = row_options(
            temperatures, top_ks, top_ps, min_ps, row, vocab, WARM, True, TOP_P, MIN_P
        )
        least = tl.zeros((), tl.uint32)
        if MIN_P:
            least = least_kept_key(highest, temperature, min_p)
        mine = scratch + row * (MOST_K + CAPACITY + 1) + MOST_K
        i = tl.arange(0, 256)
        used = i < tl.load(mine + CAPACITY)
        ids = tl.load(mine + i, mask=used, other=0)
        values = tl.load(x + ids, mask=used, other=float("-inf")).to(tl.float32)
        key, cut_id, kept = _cut_candidates(
            ids, values, used, highest, temperature, k, top_p, least, vocab, True
        )
        if SAMPLE:
            token = _drawn_candidate(
                ids, values, kept, highest, temperature, seeds, positions, row, stream
            )
            cut_id = -2
            tl.store(out + row, token.to(out.dtype.element_ty))
        tl.store(cuts + row, value_of(key))
        tl.store(cut_ids + row, cut_id)
