"""Draws with a top-k up to thousands: one pass for what selection needs and for NaN, then a program a row draws from the selected.

The selection is that of `topk`; it does not look at NaN, of which one makes a row that is not drawn.
"""

from __future__ import annotations

import triton
import triton.language as tl

from deepinfer.kernels.triton.sampling_keys import larger, least_kept_key, value_of
from deepinfer.kernels.triton.sampling_list import above_nothing, cut_of_list, drawn_of_list
from deepinfer.kernels.triton.sampling_rows import (
    chunk_of,
    filters_of,
    is_finite,
    noise_of,
    tops_of,
)
from deepinfer.kernels.triton.sampling_whole import best_before, cut_whole_row

__all__ = ["chunk_top_kernel", "draw_selected_kernel", "neighbour_maxima_kernel"]


@triton.jit
def chunk_top_kernel(logits, tops, vocab, stride, num_chunks, BLOCK: tl.constexpr):
    """The highest logit of one chunk; NaN if one is."""
    to, _, _, _, values = chunk_of(logits, vocab, stride, num_chunks, BLOCK)
    tl.store(tops + to, tl.reduce(values, 0, larger))


@triton.jit
def neighbour_maxima_kernel(
    logits, maxima, tops, vocab, stride, stride_maxima, num_chunks, BLOCK: tl.constexpr, GROUP: tl.constexpr
):  # fmt: skip
    """Maxima of groups of neighbours of one chunk, as the selection takes them, and the highest logit, NaN if one is.

    Of NaN and a number the number is the maximum of a group.
    """
    to, row, first, _, values = chunk_of(logits, vocab, stride, num_chunks, BLOCK)
    neighbours = tl.reshape(values, (BLOCK // GROUP, GROUP))
    tl.store(tops + to, tl.reduce(tl.reduce(neighbours, 1, larger), 0, larger))
    best = tl.max(neighbours, 1).to(maxima.dtype.element_ty)
    place = first // GROUP + tl.arange(0, BLOCK // GROUP)
    tl.store(maxima + row * stride_maxima + place, best)


@triton.jit(do_not_specialize=["stream"])
def draw_selected_kernel(
    logits,
    temperatures,
    top_ks,
    top_ps,
    min_ps,
    seeds,
    positions,
    tops,
    selected,
    out,
    vocab,
    stride,
    num_chunks,
    stream,
    width,
    WARM: tl.constexpr,
    TOP_P: tl.constexpr,
    MIN_P: tl.constexpr,
    FAST: tl.constexpr,
    CHUNKS: tl.constexpr,
    CAPACITY: tl.constexpr,
):
    """Draws the token of one row among its `width` highest, -1 for none, as far as its own filters keep them.

    A row with a larger top-k is searched as a whole.
    """
    row = tl.program_id(0).to(tl.int64)
    x = logits + row * stride
    _, highest = tops_of(tops, row, num_chunks, CHUNKS)
    temperature, k, top_p, min_p, is_some = filters_of(
        temperatures, top_ks, top_ps, min_ps, row, vocab, WARM, True, TOP_P, MIN_P
    )
    token = -1
    if is_finite(highest) & is_some:
        least = tl.zeros((), tl.uint32)
        if MIN_P:
            least = least_kept_key(highest, temperature, min_p)
        if (k <= width) | (width >= vocab):
            i = tl.arange(0, CAPACITY)
            ids = tl.load(selected + row * width + i, mask=i < width, other=-1)
            values = tl.load(x + ids, mask=ids >= 0, other=float("-inf")).to(tl.float32)
            _key, _id, kept = cut_of_list(
                ids, values, values > float("-inf"), highest, temperature, k, top_p, least, vocab, TOP_P, True, False
            )  # fmt: skip
            token = drawn_of_list(
                ids, values, kept, highest, temperature, seeds, positions, row, stream, FAST
            )
        else:
            key, cut_id = cut_whole_row(
                x, vocab, highest, temperature, k, top_p, least, TOP_P, 2048
            )
            key, cut_id = above_nothing(key, cut_id)
            seed, position = noise_of(seeds, positions, row)
            token = best_before(
                x, vocab, value_of(key), cut_id, highest, temperature, seed, position, stream, FAST, 2048
            )  # fmt: skip
            token = tl.where(token < vocab, token, -1)
    tl.store(out + row, token.to(out.dtype.element_ty))
