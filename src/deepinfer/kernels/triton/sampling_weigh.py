"""Weighs what is before the tokens in question of open rows, which says whether top-p, or top-k, keeps them."""

from __future__ import annotations

import triton
import triton.language as tl

from deepinfer.kernels.triton.sampling_draw import limit_of, scale_of
from deepinfer.kernels.triton.sampling_judge import append_open, verdict
from deepinfer.kernels.triton.sampling_rows import temperature_of

__all__ = ["weigh_kernel"]


@triton.jit
def _add_four(a, b, c, d, e, f, g, h):
    return a + e, b + f, c + g, d + h


@triton.jit
def _level(x, levels, level: tl.constexpr):
    """Id and logit of a level; a logit of +inf, which nothing is before, if there is none."""
    token = tl.load(levels + level)
    value = tl.load(x + tl.maximum(token, 0)).to(tl.float32)
    return token, tl.where(token >= 0, value, float("inf"))


@triton.jit
def _weight(values, mass, value, token, first, BLOCK: tl.constexpr):
    """The mass of the tokens before one, in BLOCK / 8 parts."""
    # Its equals elsewhere are before it or not, all of a block; in its own block they are looked at one by one.
    before = tl.where(values > limit_of(value, token - 1, first, BLOCK), mass, 0.0)
    parts = tl.sum(tl.sum(tl.reshape(before, (2, BLOCK // 8, 4)), 0), 1)
    if (first <= token) & (token < first + BLOCK):
        at = first + tl.arange(0, BLOCK)
        same = tl.where((values == value) & (at < token), mass, 0.0)
        parts += tl.sum(tl.sum(tl.reshape(same, (2, BLOCK // 8, 4)), 0), 1)
    return parts


@triton.jit
def _settle_levels(
    x, row, levels, ends, end_ids, waiting, facts, sums, num_open, open_rows, out,
    num_chunks, FIRST: tl.constexpr, CHUNKS: tl.constexpr,
):  # fmt: skip
    """The first level that is not dropped is the token; a row that this leaves open is noted."""
    c = tl.arange(0, CHUNKS)
    limit = tl.load(facts + row * 4 + 1)
    slack = tl.load(facts + row * 4 + 2)
    # The last level that was looked at, and whether it is kept, or dropped.
    last = tl.load(levels + row * 8 + FIRST)
    is_in = last < 0
    is_out = last >= 0
    for level in tl.static_range(4):
        token = tl.load(levels + row * 8 + FIRST + level)
        if is_out & (token >= 0):
            last = token
            # Other programs of this launch wrote these: not from the cache of this processor.
            at = (row * num_chunks + c) * 4 + level
            parts = tl.load(sums + at, mask=c < num_chunks, other=0.0, cache_modifier=".cg")
            is_in, is_out = verdict(tl.sum(parts, 0), limit, slack)
    if is_in:
        tl.store(out + row, last.to(out.dtype.element_ty))
        tl.store(end_ids + row, -2)
    else:
        # All of them dropped: the token is before the last.
        tl.store(ends + row, tl.load(x + last).to(tl.float32))
        tl.store(end_ids + row, last - 1)
        tl.store(waiting + row, tl.where(is_out, -1, last))
        if FIRST == 0:  # noqa: SIM102 - known when it is compiled
            if is_out & (tl.load(levels + row * 8 + 4) >= 0):
                append_open(num_open, open_rows, row)


@triton.jit
def weigh_kernel(
    logits,
    temperatures,
    levels,
    ends,
    end_ids,
    waiting,
    facts,
    num_open,
    open_rows,
    still_open,
    still_open_rows,
    arrived,
    sums,
    out,
    vocab,
    stride,
    num_chunks,
    WARM: tl.constexpr,
    RANK: tl.constexpr,
    FIRST: tl.constexpr,
    CHUNKS: tl.constexpr,
    BLOCK: tl.constexpr,
    SPAN: tl.constexpr,
):
    """Chunks of open rows, SPAN blocks each: the masses of the tokens before each of four levels, from the FIRST on.

    The program that ends the last chunk of a row chooses among the levels.
    """
    num_items = tl.load(num_open) * num_chunks
    for item in range(tl.program_id(0), num_items, tl.num_programs(0)):
        row = tl.load(open_rows + item // num_chunks).to(tl.int64)
        chunk = item % num_chunks
        x = logits + row * stride
        first = chunk * BLOCK * SPAN
        at = first + tl.arange(0, BLOCK)
        ahead = tl.load(x + at, mask=at < vocab, other=float("-inf"))
        temperature = temperature_of(temperatures, row, WARM)
        factor = scale_of(temperature)
        highest = tl.load(facts + row * 4)
        mine = levels + row * 8 + FIRST
        token0, value0 = _level(x, mine, 0)
        token1, value1 = _level(x, mine, 1)
        token2, value2 = _level(x, mine, 2)
        token3, value3 = _level(x, mine, 3)
        sum0 = tl.zeros((BLOCK // 8,), tl.float32)
        sum1 = sum0
        sum2 = sum0
        sum3 = sum0
        for part in range(SPAN):
            values = ahead.to(tl.float32)
            if part + 1 < SPAN:
                # The next block is on its way while this one is weighed.
                next_at = at + (part + 1) * BLOCK
                ahead = tl.load(x + next_at, mask=next_at < vocab, other=float("-inf"))
            mass = tl.full((BLOCK,), 1.0, tl.float32)
            if RANK == 0:
                mass = tl.exp2((values - highest) * factor)
            start = first + part * BLOCK
            sum0 += _weight(values, mass, value0, token0, start, BLOCK)
            sum1 += _weight(values, mass, value1, token1, start, BLOCK)
            sum2 += _weight(values, mass, value2, token2, start, BLOCK)
            sum3 += _weight(values, mass, value3, token3, start, BLOCK)
        to = sums + (row * num_chunks + chunk) * 4
        # One exchange between the threads for all four.
        sum0, sum1, sum2, sum3 = tl.reduce((sum0, sum1, sum2, sum3), 0, _add_four)
        tl.store(to, sum0)
        tl.store(to + 1, sum1)
        tl.store(to + 2, sum2)
        tl.store(to + 3, sum3)
        # All threads have stored before one of them tells.
        tl.debug_barrier()
        if tl.atomic_add(arrived + row, 1) == num_chunks - 1:
            tl.store(arrived + row, 0)
            _settle_levels(
                x, row, levels, ends, end_ids, waiting, facts, sums, still_open, still_open_rows,
                out, num_chunks, FIRST, CHUNKS,
            )  # fmt: skip
