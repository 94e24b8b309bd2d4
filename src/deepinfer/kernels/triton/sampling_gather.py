"""Draws with a middling top-k: a bound from the maxima of groups, the tokens from it on in one list a row, the cut among these.

Every k-th highest logit is at least the k-th highest maximum. The order of a list hangs on time, and nothing on the order.
"""

from __future__ import annotations

import triton
import triton.language as tl

from deepinfer.kernels.triton.sampling_cut import cut_candidates, drawn_candidate, row_options
from deepinfer.kernels.triton.sampling_keys import count_search, key_of, larger, least_kept_key
from deepinfer.kernels.triton.sampling_whole import cut_whole_row, draw_whole_row

__all__ = ["bound_kernel", "finish_kernel", "gather_kernel"]


@triton.jit
def bound_kernel(
    groups,
    tops,
    temperatures,
    top_ks,
    bounds,
    counts,
    vocab,
    num_chunks,
    WARM: tl.constexpr,
    CHUNKS: tl.constexpr,
    GROUPS: tl.constexpr,
    ALL_GROUPS: tl.constexpr,
):
    """A key that the k-th largest of a row is not below; the largest of all where nothing can be drawn."""
    row = tl.program_id(0).to(tl.int64)
    c = tl.arange(0, CHUNKS)
    chunk_tops = tl.load(tops + row * num_chunks + c, mask=c < num_chunks, other=float("-inf"))
    highest = tl.reduce(chunk_tops, 0, larger)
    temperature, k, _, _ = row_options(
        temperatures, top_ks, temperatures, temperatures, row, vocab, WARM, True, False, False
    )
    k = tl.where(temperature <= 0, 1, k)
    g = tl.arange(0, ALL_GROUPS)
    num_groups = num_chunks * GROUPS
    maxima = tl.load(groups + row * num_groups + g, mask=g < num_groups, other=float("-inf"))
    some = maxima > float("-inf")
    keys = key_of(maxima)
    high = key_of(highest)
    low = tl.min(tl.where(some, keys, high), 0)
    bound = count_search(keys, some, k, low, high, 32)
    bound = tl.where(tl.sum(some.to(tl.int32), 0) >= k, bound, 0)
    is_good = (highest > float("-inf")) & (highest < float("inf"))
    bound = tl.where(is_good, bound, 0xFFFFFFFF).to(tl.uint32)
    tl.store(bounds + row, bound.to(tl.int32, bitcast=True))
    tl.store(counts + row, 0)


@triton.jit
def gather_kernel(
    logits,
    tops,
    bounds,
    counts,
    found,
    vocab,
    stride,
    num_chunks,
    BLOCK: tl.constexpr,
    CAPACITY: tl.constexpr,
):
    """Appends the tokens of one chunk from the bound on to the list of the row."""
    to = tl.program_id(0).to(tl.int64)
    row = to // num_chunks
    bound = tl.load(bounds + row).to(tl.uint32, bitcast=True)
    top = tl.load(tops + to)
    if (top > float("-inf")) & (key_of(top) >= bound):
        at = (to % num_chunks).to(tl.int32) * BLOCK + tl.arange(0, BLOCK)
        x = tl.load(logits + row * stride + at, mask=at < vocab, other=float("-inf")).to(tl.float32)
        good = (x > float("-inf")) & (key_of(x) >= bound)
        # Few are: each takes a place of its own.
        one = tl.full((BLOCK,), 1, tl.int32)
        place = tl.atomic_add(counts + row + tl.zeros((BLOCK,), tl.int32), one, mask=good)
        tl.store(found + row * CAPACITY + place, at, mask=good & (place < CAPACITY))


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
    out,
    vocab,
    stride,
    num_chunks,
    stream,
    WARM: tl.constexpr,
    TOP_P: tl.constexpr,
    MIN_P: tl.constexpr,
    FAST: tl.constexpr,
    CHUNKS: tl.constexpr,
    CAPACITY: tl.constexpr,
):
    """Cuts the list of one row and draws; a row with more tokens than the list holds is searched as a whole."""
    row = tl.program_id(0).to(tl.int64)
    x = logits + row * stride
    c = tl.arange(0, CHUNKS)
    chunk_tops = tl.load(tops + row * num_chunks + c, mask=c < num_chunks, other=float("-inf"))
    highest = tl.reduce(chunk_tops, 0, larger)
    temperature, k, top_p, min_p = row_options(
        temperatures, top_ks, top_ps, min_ps, row, vocab, WARM, True, TOP_P, MIN_P
    )
    is_greedy = temperature <= 0
    is_good = (highest > float("-inf")) & (highest < float("inf")) & (temperature == temperature)
    if MIN_P:
        is_good &= is_greedy | (min_p <= 1)
    token = -1
    if is_good:
        temperature = tl.where(is_greedy, 1.0, temperature)
        k = tl.where(is_greedy, 1, k)
        top_p = tl.where(is_greedy, 1.0, top_p)
        least = tl.zeros((), tl.uint32)
        if MIN_P:
            least = least_kept_key(highest, temperature, tl.where(is_greedy, 0.0, min_p))
        total = tl.load(counts + row)
        if total <= CAPACITY:
            i = tl.arange(0, CAPACITY)
            used = i < total
            ids = tl.load(found + row * CAPACITY + i, mask=used, other=0)
            values = tl.load(x + ids, mask=used, other=float("-inf")).to(tl.float32)
            _, _, kept = cut_candidates(
                ids, values, used, highest, temperature, k, top_p, least, False
            )
            token = drawn_candidate(
                ids, values, kept, highest, temperature, seeds, positions, row, stream
            )
        else:
            bound = tl.load(bounds + row).to(tl.uint32, bitcast=True)
            key, cut_id = cut_whole_row(
                x, vocab, highest, temperature, k, bound, top_p, least, True, TOP_P, 2048
            )
            lowest = key_of(tl.full((), float("-inf"), tl.float32)) + 1
            cut_id = tl.where(key < lowest, 2147483647, cut_id)
            token = draw_whole_row(
                x, vocab, tl.maximum(key, lowest), cut_id, highest, temperature, seeds, positions,
                row, stream, FAST, 2048,
            )  # fmt: skip
            token = tl.where(token < vocab, token, -1)
    tl.store(out + row, token.to(out.dtype.element_ty))
