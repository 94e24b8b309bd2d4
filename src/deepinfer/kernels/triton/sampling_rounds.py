"""Draws among what top-k, top-p and min-p keep without finding the cut: a token is drawn from all, then judged.

The highest noisy score among the kept tokens is the highest of all when that one is kept, so the first round draws from
the whole row. A token is kept when the tokens before it (higher ones, or equal ones with a lower id) are fewer than k and
weigh less than top-p. Maxima and masses of small groups, which the first round leaves, answer for most rows. Where they
don't, the next round counts exactly and draws among the tokens before, of which the kept ones are a part if the token is
not.
"""

from __future__ import annotations

import triton
import triton.language as tl

from deepinfer.kernels.triton.sampling_cut import row_options
from deepinfer.kernels.triton.sampling_draw import (
    kept_values,
    noisy_block,
    scale_of,
    winner_of_chunks,
)
from deepinfer.kernels.triton.sampling_keys import (
    count_search,
    key_of,
    larger,
    least_kept_key,
    value_of,
)

__all__ = [
    "first_judge_kernel",
    "first_round_kernel",
    "floor_of",
    "next_round_kernel",
    "verdict",
]


@triton.jit(do_not_specialize=["stream"])
def first_round_kernel(
    logits,
    temperatures,
    seeds,
    positions,
    tokens,
    tops,
    groups,
    masses,
    num_open,
    vocab,
    stride,
    num_chunks,
    stream,
    WARM: tl.constexpr,
    MASS: tl.constexpr,
    FAST: tl.constexpr,
    BLOCK: tl.constexpr,
    GROUPS: tl.constexpr,
    PARTS: tl.constexpr,
):
    """One chunk of one row: its best block of four tokens, highest logit, and the maxima and masses of its groups.

    A group is four neighbours in each of PARTS places: token `w * 4 * GROUPS + 4 * g + j` of the chunk is in g.
    The counts of open rows of all rounds begin at 0.
    """
    to = tl.program_id(0).to(tl.int64)
    if to == 0:
        tl.store(num_open + tl.arange(0, 32), tl.zeros((32,), tl.int32))
    row = to // num_chunks
    first = (to % num_chunks).to(tl.int32) * BLOCK
    x = logits + row * stride
    at = first + tl.arange(0, BLOCK)
    values = tl.load(x + at, mask=at < vocab, other=float("-inf")).to(tl.float32)
    best = tl.reduce(tl.reshape(values, (PARTS, GROUPS, 4)), 0, larger)
    best = tl.reduce(best, 1, larger)
    g = tl.arange(0, GROUPS)
    tl.store(groups + to * GROUPS + g, best)
    highest = tl.reduce(best, 0, larger)
    temperature = tl.full((), 1.0, tl.float64)
    if WARM:
        temperature = tl.load(temperatures + row).to(tl.float64)
    if temperature > 0:
        if MASS:
            anchor = tl.where(highest == float("-inf"), 0.0, highest)
            mass = tl.exp2((values - anchor) * scale_of(temperature))
            part = tl.sum(tl.sum(tl.reshape(mass, (PARTS, GROUPS, 4)), 0), 1)
            tl.store(masses + to * GROUPS + g, part)
        seed = tl.load(seeds + row).to(tl.int64)
        position = tl.load(positions + row).to(tl.int64)
        token = noisy_block(
            x, values, first, vocab, highest, temperature, seed, position, stream, float("-inf"), 0,
            False, FAST, BLOCK,
        )  # fmt: skip
    else:
        token = tl.min(tl.where(values == highest, at, 2147483647), 0)
    tl.store(tokens + to, token)
    tl.store(tops + to, highest)


@triton.jit
def floor_of(highest, temperature, min_p):
    """The lowest logit that min-p keeps, -inf where it is off."""
    least = least_kept_key(highest, temperature, min_p)
    lowest = key_of(tl.full((), float("-inf"), tl.float32))
    return tl.where(least > lowest, value_of(tl.maximum(least, lowest)), float("-inf"))


@triton.jit
def verdict(
    count, mass, own, total, least_total, k, vocab, top_p, TOP_P: tl.constexpr
):  # fmt: skip
    """Whether a token is kept for sure, and whether it is dropped for sure.

    `count` tokens with the mass `mass` are before it, its own mass is `own`; what top-k keeps has a mass from
    `least_total` to `total`. Masses are fp32 sums: what is within their error is left open.
    """
    is_out = count >= k
    is_in = is_out == 0
    if TOP_P:
        # NaN counts as 0, as in the reference.
        share = tl.where(top_p > 0, top_p, 0.0).to(tl.float32)
        slack = total * 2e-5
        least = tl.where(k < vocab, tl.maximum(least_total, mass + own), total)
        restricted = (top_p >= 1) == 0
        is_in &= (restricted == 0) | (mass < share * least - slack)
        is_out |= restricted & (mass > share * total + slack)
    first = count == 0
    return is_in | first, is_out & (first == 0)


@triton.jit
def _append(num_open, open_rows, row):
    """Notes an open row. The order hangs on time, and nothing on the order."""
    tl.store(open_rows + tl.atomic_add(num_open, 1), row.to(tl.int32))


@triton.jit(do_not_specialize=["stream"])
def first_judge_kernel(
    logits,
    temperatures,
    top_ks,
    top_ps,
    min_ps,
    seeds,
    positions,
    tokens,
    tops,
    groups,
    masses,
    cuts,
    cut_ids,
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
    TOP_K: tl.constexpr,
    TOP_P: tl.constexpr,
    MIN_P: tl.constexpr,
    CHUNKS: tl.constexpr,
    GROUPS: tl.constexpr,
    ALL_GROUPS: tl.constexpr,
    SIZE: tl.constexpr,
):
    """Judges the token drawn from a whole row by the maxima and masses of groups.

    Leaves the cut above which the next round looks: a logit, and the last id at it, -2 when the token is written. `waiting`
    is the token that is still to be judged, -1 if none; `facts` are the highest logit, the mass of all tokens, a mass that
    top-k keeps at least, and the lowest logit that min-p keeps.
    """
    row = tl.program_id(0).to(tl.int64)
    x = logits + row * stride
    c = tl.arange(0, CHUNKS)
    chunk_tops = tl.load(tops + row * num_chunks + c, mask=c < num_chunks, other=float("-inf"))
    blocks = tl.load(tokens + row * num_chunks + c, mask=c < num_chunks, other=-1)
    highest = tl.reduce(chunk_tops, 0, larger)
    is_good = (highest > float("-inf")) & (highest < float("inf"))
    temperature, k, top_p, min_p = row_options(
        temperatures, top_ks, top_ps, min_ps, row, vocab, WARM, TOP_K, TOP_P, MIN_P
    )
    token = -1
    cut = float("-inf")
    cut_id = -2
    wait = -1
    total = 0.0
    least_total = 0.0
    floor = float("-inf")
    is_open = is_good & (temperature > 0)
    if MIN_P:
        is_open &= min_p <= 1
    if is_good & (temperature <= 0):
        token = tl.min(tl.where(chunk_tops == highest, blocks, 2147483647), 0)
    if is_open:
        seed = tl.load(seeds + row).to(tl.int64)
        position = tl.load(positions + row).to(tl.int64)
        usable = (blocks >= 0) & (chunk_tops > float("-inf"))
        wait = winner_of_chunks(
            x, blocks, usable, vocab, highest, temperature, seed, position, stream, cut, 0, False
        )
        value = tl.load(x + wait).to(tl.float32)
        if MIN_P:
            floor = floor_of(highest, temperature, min_p)
        is_out = value < floor
        is_in = is_out == 0
        bound = float("-inf")
        num_groups = num_chunks * GROUPS
        g = tl.arange(0, ALL_GROUPS)
        if TOP_K or TOP_P:
            best = tl.load(groups + row * num_groups + g, mask=g < num_groups, other=float("-inf"))
            some = best > float("-inf")
        if TOP_P:
            factor = scale_of(temperature)
            part = tl.load(masses + row * num_groups + g, mask=some, other=0.0)
            top = tl.load(tops + row * num_chunks + g // GROUPS, mask=some, other=float("-inf"))
            part *= tl.exp2((top - highest) * factor)
            total = tl.sum(part, 0)
            least_total = total
        if TOP_K:  # noqa: SIM102 - known when it is compiled
            if k < vocab:
                # The tokens before it are in the groups whose maxima are not below it.
                is_in &= SIZE * tl.sum((some & (best >= value)).to(tl.int32), 0) <= k
                is_out |= tl.sum((some & (best > value)).to(tl.int32), 0) >= k
                keys = key_of(best)
                high = key_of(highest)
                low = tl.min(tl.where(some, keys, high), 0)
                if is_in == 0:  # noqa: SIM102 - of tensors
                    if tl.sum(some.to(tl.int32), 0) >= k:
                        bound = value_of(count_search(keys, some, k, low, high, 32))
                if TOP_P:
                    # Fewer than k / SIZE groups have at most k tokens, so top-k keeps their mass at least.
                    few = count_search(keys, some, tl.maximum(k // SIZE, 1), low, high, 32)
                    least_total = tl.sum(tl.where(some & (keys > few), part, 0.0), 0)
        if TOP_P:
            if MIN_P:
                # The mass of all holds what min-p drops.
                least_total = tl.where(min_p > 0, 0.0, least_total)
            own = tl.exp2((value - highest) * factor)
            least_total = tl.maximum(least_total, 1.0)
            reach = tl.sum(tl.where(best >= value, part, 0.0), 0) - own
            share = tl.where(top_p > 0, top_p, 0.0).to(tl.float32)
            is_in &= (top_p >= 1) | (reach < share * least_total - total * 2e-5)
        if is_in & (is_out == 0):
            token = wait
        else:
            cut = value
            cut_id = wait - 1
            if is_out:
                wait = -1
                cut_id = tl.where(tl.maximum(floor, bound) > cut, 2147483647, cut_id)
                cut = tl.maximum(cut, tl.maximum(floor, bound))
    tl.store(arrived + row, 0)
    tl.store(cuts + row, cut)
    tl.store(cut_ids + row, cut_id)
    tl.store(waiting + row, wait)
    tl.store(facts + row * 4, highest)
    tl.store(facts + row * 4 + 1, total)
    tl.store(facts + row * 4 + 2, least_total)
    tl.store(facts + row * 4 + 3, floor)
    if cut_id == -2:
        tl.store(out + row, token.to(out.dtype.element_ty))
    else:
        _append(num_open, open_rows, row)


@triton.jit
def _judge(
    x, row, cut, cut_id, temperature, top_ks, top_ps, min_ps, seed, position, tokens, tops, counts, sums,
    cuts, cut_ids, waiting, facts, num_open, open_rows, out, vocab, num_chunks, stream,
    TOP_K: tl.constexpr, TOP_P: tl.constexpr, MIN_P: tl.constexpr, CHUNKS: tl.constexpr,
):  # fmt: skip
    """Judges the waiting token of an open row; a dropped one gives its place to the best of the tokens before it."""
    c = tl.arange(0, CHUNKS)
    inside = c < num_chunks
    at = row * num_chunks + c
    _, k, top_p, _ = row_options(
        top_ps, top_ks, top_ps, min_ps, row, vocab, False, TOP_K, TOP_P, False
    )
    wait = tl.load(waiting + row)
    highest = tl.load(facts + row * 4)
    # Other programs of this launch wrote these: not from the cache of this processor.
    count = tl.sum(tl.load(counts + at, mask=inside, other=0, cache_modifier=".cg"), 0)
    mass = tl.sum(tl.load(sums + at * 2, mask=inside, other=0.0, cache_modifier=".cg"), 0)
    total = tl.load(facts + row * 4 + 1)
    if MIN_P:
        kept = tl.load(sums + at * 2 + 1, mask=inside, other=0.0, cache_modifier=".cg")
        total = tl.sum(kept, 0)
        tl.store(facts + row * 4 + 1, total)
    is_in = False
    is_out = True
    if wait >= 0:
        own = tl.exp2((cut - highest) * scale_of(temperature))
        least = tl.load(facts + row * 4 + 2)
        is_in, is_out = verdict(count, mass, own, total, least, k, vocab, top_p, TOP_P)
    if is_in:
        tl.store(out + row, wait.to(out.dtype.element_ty))
        tl.store(cut_ids + row, -2)
    else:
        _append(num_open, open_rows, row)
    if is_out:
        chunk_tops = tl.load(tops + at, mask=inside, other=float("-inf"), cache_modifier=".cg")
        blocks = tl.load(tokens + at, mask=inside, other=-1, cache_modifier=".cg")
        usable = (blocks >= 0) & (chunk_tops > float("-inf"))
        token = winner_of_chunks(
            x, blocks, usable, vocab, highest, temperature, seed, position, stream, cut, cut_id, True
        )  # fmt: skip
        token = tl.minimum(token, vocab - 1)
        tl.store(cuts + row, tl.load(x + token).to(tl.float32))
        tl.store(cut_ids + row, token - 1)
        tl.store(waiting + row, token)


@triton.jit(do_not_specialize=["stream"])
def next_round_kernel(
    logits,
    temperatures,
    top_ks,
    top_ps,
    min_ps,
    seeds,
    positions,
    cuts,
    cut_ids,
    waiting,
    facts,
    num_open,
    open_rows,
    still_open,
    still_open_rows,
    arrived,
    tokens,
    tops,
    counts,
    sums,
    out,
    vocab,
    stride,
    num_chunks,
    stream,
    WARM: tl.constexpr,
    TOP_K: tl.constexpr,
    TOP_P: tl.constexpr,
    MIN_P: tl.constexpr,
    FAST: tl.constexpr,
    CHUNKS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Chunks of open rows: count, mass and best block of the tokens above the cut, and the mass that min-p keeps.

    The program that ends the last chunk of a row judges the row.
    """
    num_items = tl.load(num_open) * num_chunks
    for item in range(tl.program_id(0), num_items, tl.num_programs(0)):
        row = tl.load(open_rows + item // num_chunks).to(tl.int64)
        chunk = item % num_chunks
        to = row * num_chunks + chunk
        cut = tl.load(cuts + row)
        cut_id = tl.load(cut_ids + row)
        first = chunk * BLOCK
        x = logits + row * stride
        at = first + tl.arange(0, BLOCK)
        raw = tl.load(x + at, mask=at < vocab, other=float("-inf")).to(tl.float32)
        values = kept_values(raw, at, cut, cut_id, True)
        temperature = tl.full((), 1.0, tl.float64)
        if WARM:
            temperature = tl.load(temperatures + row).to(tl.float64)
        factor = scale_of(temperature)
        anchor = tl.load(facts + row * 4)
        tl.store(counts + to, tl.sum((values > float("-inf")).to(tl.int32), 0))
        tl.store(sums + to * 2, tl.sum(tl.exp2((values - anchor) * factor), 0))
        if MIN_P:
            floor = tl.load(facts + row * 4 + 3)
            kept = tl.where(raw >= floor, tl.exp2((raw - anchor) * factor), 0.0)
            tl.store(sums + to * 2 + 1, tl.sum(kept, 0))
        highest = tl.max(values, 0)
        seed = tl.load(seeds + row).to(tl.int64)
        position = tl.load(positions + row).to(tl.int64)
        token = noisy_block(
            x, values, first, vocab, highest, temperature, seed, position, stream, cut, cut_id,
            True, FAST, BLOCK,
        )  # fmt: skip
        tl.store(tokens + to, token)
        tl.store(tops + to, highest)
        # All threads have stored before one of them tells.
        tl.debug_barrier()
        if tl.atomic_add(arrived + row, 1) == num_chunks - 1:
            tl.store(arrived + row, 0)
            _judge(
                x, row, cut, cut_id, temperature, top_ks, top_ps, min_ps, seed, position, tokens,
                tops, counts, sums, cuts, cut_ids, waiting, facts, still_open, still_open_rows, out,
                vocab, num_chunks, stream, TOP_K, TOP_P, MIN_P, CHUNKS,
            )  # fmt: skip
