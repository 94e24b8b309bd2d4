"""The exact cut by top-p: bounds from groups, narrowed by passes, integer masses of all, and a search between the bounds.

A bound is a logit and an id: it holds the tokens above the logit, and those equal to it up to the id. The lower bound holds
all that is kept, and the upper one nothing else.
"""

from __future__ import annotations

import triton
import triton.language as tl

from deepinfer.kernels.triton.sampling_draw import limits_of, scale_of
from deepinfer.kernels.triton.sampling_judge import group_bounds, group_masses, limit_of_row
from deepinfer.kernels.triton.sampling_keys import key_of, larger, mass_of, value_of
from deepinfer.kernels.triton.sampling_list import above_nothing, append, cut_of_mass
from deepinfer.kernels.triton.sampling_rows import (
    chunk_of,
    is_finite,
    temperature_of,
    top_p_of,
    tops_of,
)
from deepinfer.kernels.triton.sampling_whole import cut_at_mass

__all__ = [
    "chunk_masses_kernel",
    "mass_bounds_kernel",
    "mass_finish_kernel",
    "mass_gather_kernel",
    "narrow_kernel",
]


@triton.jit
def chunk_masses_kernel(
    logits,
    temperatures,
    cuts,
    cut_ids,
    tops,
    sums,
    groups,
    masses,
    vocab,
    stride,
    num_chunks,
    WARM: tl.constexpr,
    CUT: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """One chunk of one row: its highest logit and mass, and maxima and masses of its groups of 16, as of `marks_kernel`."""
    GROUPS: tl.constexpr = BLOCK // 16
    to, row, first, _, values = chunk_of(logits, vocab, stride, num_chunks, BLOCK)
    if CUT:
        limits = limits_of(tl.load(cuts + row), tl.load(cut_ids + row), first, BLOCK)
        values = tl.where(values <= limits, float("-inf"), values)
    g = tl.arange(0, GROUPS)
    best = tl.reduce(tl.reduce(tl.reshape(values, (4, GROUPS, 4)), 0, larger), 1, larger)
    highest = tl.reduce(best, 0, larger)
    tl.store(groups + to * GROUPS + g, best)
    tl.store(tops + to, highest)
    temperature = temperature_of(temperatures, row, WARM)
    if temperature > 0:
        anchor = tl.where(highest == float("-inf"), 0.0, highest)
        mass = tl.exp2((values - anchor) * scale_of(temperature))
        part = tl.sum(tl.sum(tl.reshape(mass, (4, GROUPS, 4)), 0), 1)
        tl.store(masses + to * GROUPS + g, part)
        tl.store(sums + to, tl.sum(part, 0))


@triton.jit
def mass_bounds_kernel(
    temperatures,
    top_ps,
    cuts,
    cut_ids,
    tops,
    sums,
    groups,
    masses,
    bounds,
    bound_ids,
    highests,
    facts,
    counts,
    arrived,
    vocab,
    num_chunks,
    WARM: tl.constexpr,
    CUT: tl.constexpr,
    CHUNKS: tl.constexpr,
    GROUPS: tl.constexpr,
):
    """Bounds of one row from the maxima and masses of its groups; its highest logit; counters at 0.

    `facts` are that logit, NaN for a row without a cut by top-p, what may be before a kept token, and the error of that.
    """
    row = tl.program_id(0).to(tl.int64)
    c = tl.arange(0, CHUNKS)
    chunk_tops, highest = tops_of(tops, row, num_chunks, CHUNKS)
    tl.store(highests + row, highest)
    tl.store(counts + row * 2 + tl.arange(0, 2), tl.zeros((2,), tl.int32))
    tl.store(arrived + row, 0)
    tl.store(facts + row * 4, float("nan"))
    temperature = temperature_of(temperatures, row, WARM)
    top_p = top_p_of(top_ps, row, True)
    is_good = is_finite(highest)
    if is_good & (temperature > 0) & (top_p < 1):
        factor = scale_of(temperature)
        some = chunk_tops > float("-inf")
        parts = tl.load(sums + row * num_chunks + c, mask=some, other=0.0)
        total = tl.sum(parts * tl.exp2((chunk_tops - highest) * factor), 0)
        limit, slack = limit_of_row(top_ps, row, total, vocab, False)
        best, part = group_masses(
            tops, groups, masses, row, num_chunks, highest, factor, GROUPS, CHUNKS * GROUPS
        )
        lower, upper = group_bounds(best, part, highest, factor, limit, slack)
        lower_id = 2147483647
        if CUT:
            cut = tl.load(cuts + row)
            cut_id = tl.load(cut_ids + row)
            lower_id = tl.where(cut >= lower, cut_id, lower_id)
            lower = tl.maximum(cut, lower)
        tl.store(bounds + row * 2, lower)
        tl.store(bounds + row * 2 + 1, upper)
        tl.store(bound_ids + row * 2, lower_id)
        tl.store(bound_ids + row * 2 + 1, -1)
        tl.store(facts + row * 4, highest)
        tl.store(facts + row * 4 + 1, limit)
        tl.store(facts + row * 4 + 2, slack)


@triton.jit
def _step(lower, upper, highest, temperature, j):
    """The j-th of eight steps from the lower to the upper bound; where masses are 0 nothing is looked for."""
    least = (highest.to(tl.float64) - 31.0 * temperature).to(tl.float32)
    start = tl.maximum(tl.maximum(lower, least), -3e38)
    return start + (upper - start) * (j * 0.125)


@triton.jit
def narrow_kernel(
    logits,
    temperatures,
    bounds,
    bound_ids,
    facts,
    arrived,
    sums,
    vocab,
    stride,
    num_chunks,
    WARM: tl.constexpr,
    CHUNKS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Weighs what is above seven logits between the bounds of a row; the program of its last chunk narrows them."""
    to, row, _, _, values = chunk_of(logits, vocab, stride, num_chunks, BLOCK)
    highest = tl.load(facts + row * 4)
    if highest == highest:
        temperature = temperature_of(temperatures, row, WARM)
        mass = tl.exp2((values - highest) * scale_of(temperature))
        lower = tl.load(bounds + row * 2)
        upper = tl.load(bounds + row * 2 + 1)
        for j in tl.static_range(1, 8):
            above = values > _step(lower, upper, highest, temperature, j)
            tl.store(sums + to * 8 + j, tl.sum(tl.where(above, mass, 0.0), 0))
        # All threads have stored before one of them tells.
        tl.debug_barrier()
        if tl.atomic_add(arrived + row, 1) == num_chunks - 1:
            tl.store(arrived + row, 0)
            limit = tl.load(facts + row * 4 + 1)
            slack = tl.load(facts + row * 4 + 2)
            c = tl.arange(0, CHUNKS)
            all_kept = upper
            none_kept = lower
            none_id = tl.load(bound_ids + row * 2)
            for j in tl.static_range(1, 8):
                place = (row * num_chunks + c) * 8 + j
                # Other programs of this launch wrote these: not from the cache of this processor.
                parts = tl.load(sums + place, mask=c < num_chunks, other=0.0, cache_modifier=".cg")
                weight = tl.sum(parts, 0)
                step = _step(lower, upper, highest, temperature, j)
                all_kept = tl.where(weight < limit - slack, tl.minimum(all_kept, step), all_kept)
                is_out = (weight > limit + slack) & (step >= none_kept)
                none_kept = tl.where(is_out, step, none_kept)
                none_id = tl.where(is_out, -1, none_id)
            tl.store(bounds + row * 2, none_kept)
            tl.store(bounds + row * 2 + 1, all_kept)
            tl.store(bound_ids + row * 2, none_id)


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
    to, row, first, at, x = chunk_of(logits, vocab, stride, num_chunks, BLOCK)
    highest = tl.load(highests + row)
    temperature = temperature_of(temperatures, row, WARM)
    top_p = top_p_of(top_ps, row, True)
    is_good = is_finite(highest)
    if is_good & (temperature > 0) & (top_p < 1):
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
    bounds,
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
    temperature = temperature_of(temperatures, row, WARM)
    top_p = top_p_of(top_ps, row, True)
    is_good = is_finite(highest)
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
                key, cut_id = cut_of_mass(
                    ids, keys, used, mass, target - above, low, high, vocab, False
                )
        if fits == 0:
            # Too many tokens between the bounds, as equal ones may be.
            none = tl.zeros((), tl.uint32)
            low = tl.where(listed > CAPACITY, key_of(tl.load(bounds + row * 2)), none)
            high = key_of(tl.where(above < target, tl.load(bounds + row * 2 + 1), highest))
            key, cut_id = cut_at_mass(
                logits + row * stride, vocab, target, key, cut_id, low, high, highest, temperature, none, 2048
            )  # fmt: skip
        key, cut_id = above_nothing(key, cut_id)
        tl.store(cuts + row, value_of(key))
        tl.store(cut_ids + row, cut_id)
    elif CUT == 0:
        tl.store(cuts + row, tl.where(is_good, float("-inf"), float("nan")))
        tl.store(cut_ids + row, 2147483647)
