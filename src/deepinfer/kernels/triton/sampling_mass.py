"""The exact cut by top-p: bounds from a sample and from groups, integer masses of all, and a search between the bounds."""

from __future__ import annotations

import triton
import triton.language as tl

from deepinfer.kernels.triton.sampling_bounds import row_options
from deepinfer.kernels.triton.sampling_draw import limit_of, limits_of, scale_of
from deepinfer.kernels.triton.sampling_judge import bound_masses, group_masses, narrowed
from deepinfer.kernels.triton.sampling_keys import key_of, larger, mass_of, value_of
from deepinfer.kernels.triton.sampling_list import above_nothing, append, cut_of_mass
from deepinfer.kernels.triton.sampling_whole import cut_by_mass

__all__ = [
    "chunk_masses_kernel",
    "mass_bounds_kernel",
    "mass_finish_kernel",
    "mass_gather_kernel",
]


@triton.jit
def chunk_masses_kernel(
    logits,
    temperatures,
    cuts,
    cut_ids,
    bounds,
    bound_ids,
    tops,
    groups,
    masses,
    sums,
    vocab,
    stride,
    num_chunks,
    WARM: tl.constexpr,
    CUT: tl.constexpr,
    BLOCK: tl.constexpr,
    GROUPS: tl.constexpr,
    PARTS: tl.constexpr,
):
    """One chunk of one row: its highest logit, and maxima and masses of its groups and bounds.

    A group is four neighbours in each of PARTS places: token `w * 4 * GROUPS + 4 * g + j` of the chunk is in g. What the cut
    drops counts nowhere.
    """
    to = tl.program_id(0).to(tl.int64)
    row = to // num_chunks
    first = (to % num_chunks).to(tl.int32) * BLOCK
    at = first + tl.arange(0, BLOCK)
    values = tl.load(logits + row * stride + at, mask=at < vocab, other=float("-inf")).to(
        tl.float32
    )
    if CUT:
        limits = limits_of(tl.load(cuts + row), tl.load(cut_ids + row), first, BLOCK)
        values = tl.where(values <= limits, float("-inf"), values)
    best = tl.reduce(tl.reshape(values, (PARTS, GROUPS, 4)), 0, larger)
    best = tl.reduce(best, 1, larger)
    g = tl.arange(0, GROUPS)
    tl.store(groups + to * GROUPS + g, best)
    highest = tl.reduce(best, 0, larger)
    tl.store(tops + to, highest)
    temperature = tl.full((), 1.0, tl.float64)
    if WARM:
        temperature = tl.load(temperatures + row).to(tl.float64)
    if temperature > 0:
        anchor = tl.where(highest == float("-inf"), 0.0, highest)
        mass = tl.exp2((values - anchor) * scale_of(temperature))
        part = tl.sum(tl.sum(tl.reshape(mass, (PARTS, GROUPS, 4)), 0), 1)
        tl.store(masses + to * GROUPS + g, part)
        tl.store(sums + to * 3, tl.sum(part, 0))
        inside = values > limit_of(
            tl.load(bounds + row * 2), tl.load(bound_ids + row * 2), first, BLOCK
        )
        tl.store(sums + to * 3 + 1, tl.sum(tl.where(inside, mass, 0.0), 0))
        upper = tl.load(bounds + row * 2 + 1)
        above = values > limit_of(upper, tl.load(bound_ids + row * 2 + 1), first, BLOCK)
        tl.store(sums + to * 3 + 2, tl.sum(tl.where(above, mass, 0.0), 0))


@triton.jit
def mass_bounds_kernel(
    temperatures,
    top_ps,
    cuts,
    cut_ids,
    bounds,
    bound_ids,
    tops,
    groups,
    masses,
    sums,
    highests,
    vocab,
    num_chunks,
    WARM: tl.constexpr,
    CUT: tl.constexpr,
    CHUNKS: tl.constexpr,
    GROUPS: tl.constexpr,
    ALL_GROUPS: tl.constexpr,
):
    """Narrows the bounds of one row by the maxima and masses of its groups; leaves its highest logit."""
    row = tl.program_id(0).to(tl.int64)
    c = tl.arange(0, CHUNKS)
    chunk_tops = tl.load(tops + row * num_chunks + c, mask=c < num_chunks, other=float("-inf"))
    highest = tl.reduce(chunk_tops, 0, larger)
    tl.store(highests + row, highest)
    temperature, _, top_p, _ = row_options(
        temperatures, top_ps, top_ps, top_ps, row, vocab, WARM, False, True, False
    )
    is_good = (highest > float("-inf")) & (highest < float("inf"))
    if is_good & (temperature > 0) & (top_p < 1):
        factor = scale_of(temperature)
        total, in_lower, in_upper = bound_masses(
            chunk_tops, sums, row, num_chunks, highest, factor, True, CHUNKS
        )
        best, part = group_masses(
            tops, groups, masses, row, num_chunks, highest, factor, GROUPS, ALL_GROUPS
        )
        end, end_id, upper, upper_id = narrowed(
            bounds, bound_ids, cuts, cut_ids, row, best, part, total, in_lower, in_upper, highest, factor,
            top_p, CUT,
        )  # fmt: skip
        tl.store(bounds + row * 2, end)
        tl.store(bounds + row * 2 + 1, upper)
        tl.store(bound_ids + row * 2, end_id)
        tl.store(bound_ids + row * 2 + 1, upper_id)


@triton.jit
def mass_gather_kernel(
    logits,
    temperatures,
    top_ps,
    cuts,
    cut_ids,
    bounds,
    bound_ids,
    highests,
    exact,
    counts,
    found,
    vocab,
    stride,
    num_chunks,
    WARM: tl.constexpr,
    CUT: tl.constexpr,
    BLOCK: tl.constexpr,
    CAPACITY: tl.constexpr,
):
    """Integer masses of one chunk, all and above the bounds; appends the tokens between the bounds to the list of the row."""
    to = tl.program_id(0).to(tl.int64)
    row = to // num_chunks
    highest = tl.load(highests + row)
    temperature, _, top_p, _ = row_options(
        temperatures, top_ps, top_ps, top_ps, row, vocab, WARM, False, True, False
    )
    is_good = (highest > float("-inf")) & (highest < float("inf"))
    if is_good & (temperature > 0) & (top_p < 1):
        first = (to % num_chunks).to(tl.int32) * BLOCK
        at = first + tl.arange(0, BLOCK)
        x = tl.load(logits + row * stride + at, mask=at < vocab, other=float("-inf")).to(tl.float32)
        if CUT:
            limits = limits_of(tl.load(cuts + row), tl.load(cut_ids + row), first, BLOCK)
            x = tl.where(x <= limits, float("-inf"), x)
        mass = tl.where(x > float("-inf"), mass_of(x, highest, temperature), 0)
        upper = tl.load(bounds + row * 2 + 1)
        above = x > limits_of(upper, tl.load(bound_ids + row * 2 + 1), first, BLOCK)
        tl.store(exact + to * 2, tl.sum(mass, 0))
        tl.store(exact + to * 2 + 1, tl.sum(tl.where(above, mass, 0), 0))
        lower = tl.load(bounds + row * 2)
        listed = x > limits_of(lower, tl.load(bound_ids + row * 2), first, BLOCK)
        listed &= above == 0
        append(listed, at, counts + row * 2, found + row * CAPACITY, CAPACITY)


@triton.jit
def mass_finish_kernel(
    logits,
    temperatures,
    top_ps,
    highests,
    exact,
    counts,
    found,
    cuts,
    cut_ids,
    vocab,
    stride,
    num_chunks,
    WARM: tl.constexpr,
    CUT: tl.constexpr,
    CHUNKS: tl.constexpr,
    CAPACITY: tl.constexpr,
):
    """Writes the cut of one row by top-p over that of the other filters; a row that its bounds don't fit is searched as a whole.

    The cut of a row that cannot be drawn is NaN.
    """
    row = tl.program_id(0).to(tl.int64)
    highest = tl.load(highests + row)
    temperature, _, top_p, _ = row_options(
        temperatures, top_ps, top_ps, top_ps, row, vocab, WARM, False, True, False
    )
    is_good = (highest > float("-inf")) & (highest < float("inf"))
    if is_good & (temperature > 0) & (top_p < 1):
        key = tl.zeros((), tl.uint32)
        cut_id = 2147483647
        if CUT:
            key = key_of(tl.load(cuts + row))
            cut_id = tl.load(cut_ids + row)
        c = tl.arange(0, CHUNKS)
        sums = exact + (row * num_chunks + c) * 2
        total = tl.sum(tl.load(sums, mask=c < num_chunks, other=0), 0)
        above = tl.sum(tl.load(sums + 1, mask=c < num_chunks, other=0), 0)
        target = tl.maximum(tl.ceil(total.to(tl.float64) * top_p).to(tl.int64), 1)
        listed = tl.load(counts + row * 2)
        fits = (listed <= CAPACITY) & (above < target)
        if fits:
            i = tl.arange(0, CAPACITY)
            used = i < listed
            ids = tl.load(found + row * CAPACITY + i, mask=used, other=0)
            values = tl.load(logits + row * stride + ids, mask=used, other=float("-inf")).to(
                tl.float32
            )
            mass = tl.where(used, mass_of(values, highest, temperature), 0)
            fits = above + tl.sum(mass, 0) >= target
            if fits:
                keys = tl.where(used, key_of(values), 0).to(tl.uint32)
                high = tl.max(keys, 0)
                low = tl.min(tl.where(used, keys, high), 0)
                key, cut_id = cut_of_mass(ids, keys, used, mass, target - above, low, high, vocab)
        if fits == 0:
            least = tl.zeros((), tl.uint32)
            key, cut_id = cut_by_mass(
                x=logits + row * stride, vocab=vocab, key=key, cut_id=cut_id, highest=highest,
                temperature=temperature, top_p=top_p, least=least, BLOCK=2048,
            )  # fmt: skip
        key, cut_id = above_nothing(key, cut_id)
        tl.store(cuts + row, value_of(key))
        tl.store(cut_ids + row, cut_id)
    elif CUT == 0:
        tl.store(cuts + row, tl.where(is_good, float("-inf"), float("nan")))
        tl.store(cut_ids + row, 2147483647)
