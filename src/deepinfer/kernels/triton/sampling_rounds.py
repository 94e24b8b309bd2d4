"""Rounds of open rows: a token is drawn among those before an end, and judged in the next round by what is before it.

A row of which all marked tokens were dropped, or none was marked, is drawn in this way. The kept tokens are a part of those
before a dropped one. A round weighs exactly what is before the waiting token, and draws among just that.
"""

from __future__ import annotations

import triton
import triton.language as tl

from deepinfer.kernels.triton.sampling_draw import (
    limits_of,
    noisy_block,
    scale_of,
    winner_of_chunks,
)
from deepinfer.kernels.triton.sampling_judge import verdict

__all__ = ["append_open", "next_round_kernel"]


@triton.jit
def append_open(num_open, open_rows, row):
    """Notes an open row. The order hangs on time, and nothing on the order."""
    tl.store(open_rows + tl.atomic_add(num_open, 1), row.to(tl.int32))


@triton.jit
def _judge(
    x, row, end, end_id, temperature, seed, position, tokens, sums, ends,
    end_ids, waiting, facts, num_open, open_rows, out, vocab, num_chunks, stream, CHUNKS: tl.constexpr,
):  # fmt: skip
    """Judges the waiting token of an open row; a dropped one gives its place to the best of the tokens before it."""
    c = tl.arange(0, CHUNKS)
    inside = c < num_chunks
    at = row * num_chunks + c
    wait = tl.load(waiting + row)
    token = wait
    highest = tl.load(facts + row * 4)
    # Other programs of this launch wrote these: not from the cache of this processor.
    mass = tl.sum(tl.load(sums + at, mask=inside, other=0.0, cache_modifier=".cg"), 0)
    is_in, is_out = verdict(mass, tl.load(facts + row * 4 + 1), tl.load(facts + row * 4 + 2))
    is_in &= wait >= 0
    is_out |= wait < 0
    if is_out:
        blocks = tl.load(tokens + at, mask=inside, other=-1, cache_modifier=".cg")
        token = winner_of_chunks(
            x, blocks, blocks >= 0, vocab, highest, temperature, seed, position, stream, end, end_id, True
        )  # fmt: skip
        token = tl.minimum(token, vocab - 1)
        value = tl.load(x + token).to(tl.float32)
        tl.store(ends + row, value)
        tl.store(end_ids + row, token - 1)
        tl.store(waiting + row, token)
    if is_in:
        tl.store(out + row, token.to(out.dtype.element_ty))
        tl.debug_barrier()
        tl.store(end_ids + row, -2)
    else:
        append_open(num_open, open_rows, row)


@triton.jit(do_not_specialize=["stream"])
def next_round_kernel(
    logits,
    temperatures,
    seeds,
    positions,
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
    RANK: tl.constexpr,
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
        highest = tl.load(facts + row * 4)
        scaled = (values - highest) * scale_of(temperature)
        scaled = tl.where(values <= limits, float("-inf"), scaled)
        if RANK:
            tl.store(sums + to, tl.sum(tl.where(scaled > float("-inf"), 1.0, 0.0), 0))
        else:
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
                x, row, end, end_id, temperature, seed, position, tokens,
                sums, ends, end_ids, waiting, facts, still_open, still_open_rows, out, vocab,
                num_chunks, stream, CHUNKS,
            )  # fmt: skip
