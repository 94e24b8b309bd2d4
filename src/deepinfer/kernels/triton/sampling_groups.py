"""Draws and cuts with a small top-k: the k highest of a row are among the elements of the k groups with the highest maxima.

A row is kept from its `cut` on: tokens above it, and those equal to it up to the id `cut_id`. What does not fit (hundreds of
equal logits) is searched as a whole.
"""

from __future__ import annotations

import triton
import triton.language as tl

from deepinfer.kernels.triton.sampling_keys import (
    count_search,
    key_of,
    larger,
    least_kept_key,
    value_of,
)
from deepinfer.kernels.triton.sampling_list import above_nothing, cut_of_list, drawn_of_list
from deepinfer.kernels.triton.sampling_rows import (
    chunk_of,
    filters_of,
    is_finite,
    noise_of,
    tops_of,
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
    to, _, _, _, values = chunk_of(logits, vocab, stride, num_chunks, BLOCK)
    best = tl.reduce(tl.reduce(tl.reshape(values, (8, GROUPS, 4)), 0, larger), 1, larger)
    tl.store(groups + to * GROUPS + tl.arange(0, GROUPS), best)
    tl.store(tops + to, tl.reduce(best, 0, larger))


@triton.jit
def _listed(
    x, groups, mine, vocab, num_chunks, k, highest,
    BLOCK: tl.constexpr, GROUPS: tl.constexpr, ALL_GROUPS: tl.constexpr, MOST_K: tl.constexpr,
    CAPACITY: tl.constexpr, SPAN: tl.constexpr, STEPS: tl.constexpr,
):  # fmt: skip
    """Lists the tokens from the k-th highest maximum of a group on behind MOST_K places; how many, -1 for too many groups."""
    g = tl.arange(0, ALL_GROUPS)
    num_groups = num_chunks * GROUPS
    maxima = tl.load(groups + g, mask=g < num_groups, other=float("-inf"))
    is_group = maxima > float("-inf")
    group_keys = key_of(maxima)
    high = key_of(highest)
    low = tl.min(tl.where(is_group, group_keys, high), 0)
    bound = count_search(group_keys, is_group, k, low, high, STEPS)
    # With fewer groups than k their maxima bound nothing.
    bound = tl.where(tl.sum(is_group.to(tl.int32), 0) >= k, bound, 0).to(tl.uint32)
    chosen = (is_group & (group_keys >= bound)).to(tl.int32)
    num_chosen = tl.sum(chosen, 0)
    total = num_chosen * 0 - 1
    if num_chosen <= MOST_K:
        total = num_chosen * 0
        tl.store(mine + tl.cumsum(chosen, 0) - 1, g, mask=chosen > 0)
        tl.debug_barrier()
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
    return total


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
    DRAWN: tl.constexpr,
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

    With DRAWN the token is drawn in every row, which `cut_id` -2 says.
    """
    row = tl.program_id(0).to(tl.int64)
    x = logits + row * stride
    c = tl.arange(0, CHUNKS)
    chunk_tops, highest = tops_of(tops, row, num_chunks, CHUNKS)
    temperature, k, top_p, min_p, is_some = filters_of(
        temperatures, top_ks, top_ps, min_ps, row, vocab, WARM, True, TOP_P, MIN_P
    )
    is_good = is_finite(highest)
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
    if is_good & (k == 1):
        # The first of the highest logits alone.
        first = tl.min(tl.where(chunk_tops == highest, c, CHUNKS), 0)
        at = first * BLOCK + tl.arange(0, BLOCK)
        values = tl.load(x + at, mask=at < vocab, other=float("-inf")).to(tl.float32)
        key = key_of(highest)
        cut_id = tl.min(tl.where(values == highest, at, 2147483647), 0)
        token = cut_id
        done = True
    if is_good & (is_some == 0):
        key = key_of(tl.full((), float("inf"), tl.float32))
        token = -1
        done = True
    mine = scratch + row * (MOST_K + CAPACITY + 1)
    few = 0
    if (done == 0) & (k <= MOST_K // 2):
        total = _listed(
            x, groups + row * num_chunks * GROUPS, mine, vocab, num_chunks, k, highest,
            BLOCK, GROUPS, ALL_GROUPS, MOST_K, CAPACITY, SPAN, STEPS,
        )  # fmt: skip
        if (total >= 0) & (total <= 256):
            few = 1
            done = True
            tl.store(mine + (MOST_K + CAPACITY), total)
        if (total > 256) & (total <= CAPACITY):
            tl.debug_barrier()
            i = tl.arange(0, CAPACITY)
            ids = tl.load(mine + MOST_K + i, mask=i < total, other=0)
            values = tl.load(x + ids, mask=i < total, other=float("-inf")).to(tl.float32)
            key, cut_id, kept = cut_of_list(
                ids,
                values,
                i < total,
                highest,
                temperature,
                k,
                top_p,
                least,
                vocab,
                TOP_P,
                DRAWN,
                False,
            )
            done = True
            if DRAWN:
                token = drawn_of_list(
                    ids, values, kept, highest, temperature, seeds, positions, row, stream, FAST
                )
    if done == 0:
        key, cut_id = cut_whole_row(x, vocab, highest, temperature, k, top_p, least, TOP_P, 2048)
    key, cut_id = above_nothing(key, cut_id)
    if DRAWN:
        if is_good == 0:
            token = -1
        if (token < -1) & (few == 0):
            seed, position = noise_of(seeds, positions, row)
            token = best_before(
                x, vocab, value_of(key), cut_id, highest, temperature, seed, position, stream, FAST, 2048
            )  # fmt: skip
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
    DRAWN: tl.constexpr,
    CHUNKS: tl.constexpr,
    MOST_K: tl.constexpr,
    CAPACITY: tl.constexpr,
    FAST: tl.constexpr,
):
    """Cuts a row of few candidates, by one warp, whose sums need no barrier; other rows were cut before."""
    row = tl.program_id(0).to(tl.int64)
    if tl.load(cut_ids + row) == -3:
        x = logits + row * stride
        _, highest = tops_of(tops, row, num_chunks, CHUNKS)
        temperature, k, top_p, min_p, _ = filters_of(
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
        key, cut_id, kept = cut_of_list(
            ids, values, used, highest, temperature, k, top_p, least, vocab, TOP_P, DRAWN, True
        )
        if DRAWN:
            token = drawn_of_list(
                ids, values, kept, highest, temperature, seeds, positions, row, stream, FAST
            )
            cut_id = -2
            tl.store(out + row, token.to(out.dtype.element_ty))
        tl.store(cuts + row, value_of(key))
        tl.store(cut_ids + row, cut_id)
