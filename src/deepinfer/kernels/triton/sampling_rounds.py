"""Draws among what top-p keeps without finding the cut: a token is drawn first, then judged.

The highest noisy score among the kept tokens is the highest of any set that holds them when that one is kept, so the first
round draws from what the lower bound of the row holds. A token is kept when the tokens before it (higher ones, or equal ones
with a lower id) weigh less than top-p. The mass of what the upper bound holds answers where many tokens are kept, maxima and
masses of small groups where few are. Where neither does, the next round weighs exactly and draws among the tokens before, of
which the kept ones are a part if the token is not.
"""

from __future__ import annotations

import triton
import triton.language as tl

from deepinfer.kernels.triton.sampling_bounds import row_options
from deepinfer.kernels.triton.sampling_draw import (
    holds,
    limit_of,
    limits_of,
    noisy_block,
    scale_of,
    winner_of_chunks,
)
from deepinfer.kernels.triton.sampling_judge import (
    bound_masses,
    group_masses,
    narrowed,
    narrower,
    verdict,
)
from deepinfer.kernels.triton.sampling_keys import larger

__all__ = ["first_judge_kernel", "first_round_kernel", "next_round_kernel"]


@triton.jit(do_not_specialize=["stream"])
def first_round_kernel(
    logits,
    temperatures,
    seeds,
    positions,
    cuts,
    cut_ids,
    bounds,
    bound_ids,
    tokens,
    tops,
    groups,
    masses,
    sums,
    num_open,
    vocab,
    stride,
    num_chunks,
    stream,
    WARM: tl.constexpr,
    CUT: tl.constexpr,
    BOUNDS: tl.constexpr,
    DRAWN: tl.constexpr,
    FAST: tl.constexpr,
    BLOCK: tl.constexpr,
    GROUPS: tl.constexpr,
    PARTS: tl.constexpr,
):
    """One chunk of one row: its best block of four tokens, highest logit, and maxima and masses of its groups and bounds.

    A group is four neighbours in each of PARTS places: token `w * 4 * GROUPS + 4 * g + j` of the chunk is in g. What the cut
    drops counts nowhere. The counts of open rows of all rounds begin at 0. Without BOUNDS there are none; without DRAWN no token is
    drawn.
    """
    to = tl.program_id(0).to(tl.int64)
    if to == 0:
        tl.store(num_open + tl.arange(0, 32), tl.zeros((32,), tl.int32))
    row = to // num_chunks
    first = (to % num_chunks).to(tl.int32) * BLOCK
    x = logits + row * stride
    at = first + tl.arange(0, BLOCK)
    values = tl.load(x + at, mask=at < vocab, other=float("-inf")).to(tl.float32)
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
    token = -1
    if temperature > 0:
        anchor = tl.where(highest == float("-inf"), 0.0, highest)
        scaled = (values - anchor) * scale_of(temperature)
        mass = tl.exp2(scaled)
        part = tl.sum(tl.sum(tl.reshape(mass, (PARTS, GROUPS, 4)), 0), 1)
        tl.store(masses + to * GROUPS + g, part)
        tl.store(sums + to * 3, tl.sum(part, 0))
        lower = float("-inf")
        lower_id = 2147483647
        if BOUNDS:
            lower = tl.load(bounds + row * 2)
            lower_id = tl.load(bound_ids + row * 2)
            inside = values > limit_of(lower, lower_id, first, BLOCK)
            tl.store(sums + to * 3 + 1, tl.sum(tl.where(inside, mass, 0.0), 0))
            upper = tl.load(bounds + row * 2 + 1)
            above = values > limit_of(upper, tl.load(bound_ids + row * 2 + 1), first, BLOCK)
            tl.store(sums + to * 3 + 2, tl.sum(tl.where(above, mass, 0.0), 0))
            scaled = tl.where(inside, scaled, float("-inf"))
        if DRAWN:
            if CUT:
                lower, lower_id = narrower(
                    lower, lower_id, tl.load(cuts + row), tl.load(cut_ids + row)
                )
            seed = tl.load(seeds + row).to(tl.int64)
            position = tl.load(positions + row).to(tl.int64)
            token = noisy_block(
                x, scaled, first, vocab, highest, temperature, seed, position, stream, lower, lower_id,
                CUT or BOUNDS, FAST, BLOCK,
            )  # fmt: skip
    elif DRAWN:
        token = tl.min(tl.where(values == highest, at, 2147483647), 0)
    if DRAWN:
        tl.store(tokens + to, token)


@triton.jit
def _append(num_open, open_rows, row):
    """Notes an open row. The order hangs on time, and nothing on the order."""
    tl.store(open_rows + tl.atomic_add(num_open, 1), row.to(tl.int32))


@triton.jit(do_not_specialize=["stream"])
def first_judge_kernel(
    logits,
    temperatures,
    top_ps,
    seeds,
    positions,
    cuts,
    cut_ids,
    bounds,
    bound_ids,
    tokens,
    tops,
    groups,
    masses,
    sums,
    ends,
    end_ids,
    waiting,
    facts,
    num_open,
    open_rows,
    arrived,
    out,
    vocab,
    stride,
    num_chunks,
    stream,
    WARM: tl.constexpr,
    CUT: tl.constexpr,
    BOUNDS: tl.constexpr,
    CHUNKS: tl.constexpr,
    GROUPS: tl.constexpr,
    ALL_GROUPS: tl.constexpr,
):
    """Judges the token drawn from a row by the masses that its bounds hold, and by maxima and masses of groups.

    Leaves the end up to which the next round looks: a logit, and the last id at it, -2 when the token is written. `waiting`
    is the token that is still to be judged, -1 if none; `facts` are the highest logit and the mass of all tokens. The upper
    bound is replaced by one that holds kept tokens only, as far as groups or a sample tell.
    """
    row = tl.program_id(0).to(tl.int64)
    x = logits + row * stride
    c = tl.arange(0, CHUNKS)
    at = row * num_chunks + c
    chunk_tops = tl.load(tops + at, mask=c < num_chunks, other=float("-inf"))
    blocks = tl.load(tokens + at, mask=c < num_chunks, other=-1)
    highest = tl.reduce(chunk_tops, 0, larger)
    is_good = (highest > float("-inf")) & (highest < float("inf"))
    temperature, _, top_p, _ = row_options(
        temperatures, top_ps, top_ps, top_ps, row, vocab, WARM, False, True, False
    )
    token = -1
    end = float("-inf")
    end_id = -2
    wait = -1
    total = 0.0
    upper = float("inf")
    upper_id = -1
    if is_good & (temperature <= 0):
        token = tl.min(tl.where(chunk_tops == highest, blocks, 2147483647), 0)
    if is_good & (temperature > 0):
        seed = tl.load(seeds + row).to(tl.int64)
        position = tl.load(positions + row).to(tl.int64)
        lower = float("-inf")
        lower_id = 2147483647
        is_all = True
        if BOUNDS:
            lower = tl.load(bounds + row * 2)
            lower_id = tl.load(bound_ids + row * 2)
            is_all = lower == float("-inf")
            upper = tl.load(bounds + row * 2 + 1)
            upper_id = tl.load(bound_ids + row * 2 + 1)
        if CUT:
            lower, lower_id = narrower(lower, lower_id, tl.load(cuts + row), tl.load(cut_ids + row))
        usable = (blocks >= 0) & (chunk_tops > float("-inf"))
        wait = winner_of_chunks(
            x, blocks, usable, vocab, highest, temperature, seed, position, stream, lower, lower_id,
            CUT or BOUNDS,
        )  # fmt: skip
        value = tl.load(x + wait, mask=wait < vocab, other=float("-inf")).to(tl.float32)
        factor = scale_of(temperature)
        total, in_lower, in_upper = bound_masses(
            chunk_tops, sums, row, num_chunks, highest, factor, BOUNDS, CHUNKS
        )
        target = top_p.to(tl.float32) * total
        slack = total * 2e-5
        is_wide = is_all | (in_lower >= target + slack)
        is_wide &= wait < vocab
        is_in = (in_upper < target - slack) & holds(value, wait, upper, upper_id)
        is_in = is_wide & (is_in | (top_p >= 1))
        if is_in == 0:
            best, part = group_masses(
                tops, groups, masses, row, num_chunks, highest, factor, GROUPS, ALL_GROUPS
            )
            reach = tl.sum(tl.where(best >= value, part, 0.0), 0)
            reach -= tl.exp2((value - highest) * factor)
            is_in = is_wide & (reach < target - slack)
            if is_in == 0:
                if BOUNDS:
                    end, end_id, upper, upper_id = narrowed(
                        bounds, bound_ids, cuts, cut_ids, row, best, part, total, in_lower, in_upper,
                        highest, factor, top_p, CUT,
                    )  # fmt: skip
                    # What is behind the end is dropped for sure.
                    if is_wide & holds(value, wait, end, end_id):
                        end = value
                        end_id = wait - 1
                    else:
                        wait = wait * 0 - 1
                else:
                    end = value
                    end_id = wait - 1
        if is_in:
            token = wait
    tl.store(arrived + row, 0)
    tl.store(ends + row, end)
    tl.store(end_ids + row, end_id)
    tl.store(waiting + row, wait)
    tl.store(facts + row * 2, highest)
    tl.store(facts + row * 2 + 1, total)
    if end_id == -2:
        tl.store(out + row, token.to(out.dtype.element_ty))
    else:
        tl.store(bounds + row * 2 + 1, upper)
        tl.store(bound_ids + row * 2 + 1, upper_id)
        _append(num_open, open_rows, row)


@triton.jit
def _judge(
    x, row, end, end_id, temperature, top_ps, seed, position, bounds, bound_ids, tokens, sums, ends,
    end_ids, waiting, facts, num_open, open_rows, out, vocab, num_chunks, stream, CHUNKS: tl.constexpr,
):  # fmt: skip
    """Judges the waiting token of an open row; a dropped one gives its place to the best of the tokens before it."""
    c = tl.arange(0, CHUNKS)
    inside = c < num_chunks
    at = row * num_chunks + c
    _, _, top_p, _ = row_options(
        top_ps, top_ps, top_ps, top_ps, row, vocab, False, False, True, False
    )
    wait = tl.load(waiting + row)
    token = wait
    highest = tl.load(facts + row * 2)
    # Other programs of this launch wrote these: not from the cache of this processor.
    mass = tl.sum(tl.load(sums + at, mask=inside, other=0.0, cache_modifier=".cg"), 0)
    is_in, is_out = verdict(mass, tl.load(facts + row * 2 + 1), top_p)
    is_in &= wait >= 0
    is_out |= wait < 0
    if is_out:
        blocks = tl.load(tokens + at, mask=inside, other=-1, cache_modifier=".cg")
        token = winner_of_chunks(
            x, blocks, blocks >= 0, vocab, highest, temperature, seed, position, stream, end, end_id, True
        )  # fmt: skip
        token = tl.minimum(token, vocab - 1)
        value = tl.load(x + token).to(tl.float32)
        upper = tl.load(bounds + row * 2 + 1)
        is_in = holds(value, token, upper, tl.load(bound_ids + row * 2 + 1))
        tl.store(ends + row, value)
        tl.store(end_ids + row, token - 1)
        tl.store(waiting + row, token)
    if is_in:
        tl.store(out + row, token.to(out.dtype.element_ty))
        tl.debug_barrier()
        tl.store(end_ids + row, -2)
    else:
        _append(num_open, open_rows, row)


@triton.jit(do_not_specialize=["stream"])
def next_round_kernel(
    logits,
    temperatures,
    top_ps,
    seeds,
    positions,
    bounds,
    bound_ids,
    ends,
    end_ids,
    waiting,
    facts,
    num_open,
    open_rows,
    still_open,
    still_open_rows,
    arrived,
    tokens,
    sums,
    out,
    vocab,
    stride,
    num_chunks,
    stream,
    WARM: tl.constexpr,
    FAST: tl.constexpr,
    CHUNKS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Chunks of open rows: mass and best block of the tokens before the end.

    The program that ends the last chunk of a row judges the row.
    """
    num_items = tl.load(num_open) * num_chunks
    for item in range(tl.program_id(0), num_items, tl.num_programs(0)):
        row = tl.load(open_rows + item // num_chunks).to(tl.int64)
        chunk = item % num_chunks
        to = row * num_chunks + chunk
        end = tl.load(ends + row)
        end_id = tl.load(end_ids + row)
        first = chunk * BLOCK
        x = logits + row * stride
        at = first + tl.arange(0, BLOCK)
        values = tl.load(x + at, mask=at < vocab, other=float("-inf")).to(tl.float32)
        limits = limits_of(end, end_id, first, BLOCK)
        temperature = tl.full((), 1.0, tl.float64)
        if WARM:
            temperature = tl.load(temperatures + row).to(tl.float64)
        highest = tl.load(facts + row * 2)
        scaled = (values - highest) * scale_of(temperature)
        scaled = tl.where(values <= limits, float("-inf"), scaled)
        tl.store(sums + to, tl.sum(tl.exp2(scaled), 0))
        seed = tl.load(seeds + row).to(tl.int64)
        position = tl.load(positions + row).to(tl.int64)
        top = tl.max(scaled, 0)
        token = top.to(tl.int32) * 0 - 1
        if top > float("-inf"):
            token = noisy_block(
                x, scaled, first, vocab, highest, temperature, seed, position, stream, end, end_id,
                True, FAST, BLOCK,
            )  # fmt: skip
        tl.store(tokens + to, token)
        # All threads have stored before one of them tells.
        tl.debug_barrier()
        if tl.atomic_add(arrived + row, 1) == num_chunks - 1:
            tl.store(arrived + row, 0)
            _judge(
                x, row, end, end_id, temperature, top_ps, seed, position, bounds, bound_ids, tokens,
                sums, ends, end_ids, waiting, facts, still_open, still_open_rows, out, vocab,
                num_chunks, stream, CHUNKS,
            )  # fmt: skip
