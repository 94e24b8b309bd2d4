"""Changes of logits: cuts as -inf, token bitmasks, penalties."""

from __future__ import annotations

import triton
import triton.language as tl

__all__ = ["apply_cut_kernel", "penalty_kernel", "token_bitmask_kernel"]


@triton.jit
def apply_cut_kernel(logits, cuts, cut_ids, out, vocab, stride, stride_out, BLOCK: tl.constexpr):
    """Writes one chunk of a row, with -inf at what its cut drops; a row with a cut of NaN as it is."""
    row = tl.program_id(0).to(tl.int64)
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = at < vocab
    x = tl.load(logits + row * stride + at, mask=inside, other=0.0)
    cut = tl.load(cuts + row)
    value = x.to(tl.float32)
    dropped = (value < cut) | ((value == cut) & (at > tl.load(cut_ids + row)))
    low = tl.full((BLOCK,), float("-inf"), x.dtype)
    tl.store(out + row * stride_out + at, tl.where(dropped, low, x), mask=inside)


@triton.jit(do_not_specialize=["num_rows"])
def token_bitmask_kernel(
    logits,
    bitmask,
    rows,
    num_rows,
    columns,
    width,
    stride_row,
    stride_column,
    stride_mask_row,
    stride_mask_word,
    num_chunks,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Writes -inf where a bit is 0, and behind the bitmask; a chunk that is kept is not touched, nor a row behind the last."""
    to = tl.program_id(0).to(tl.int64)
    k = to // num_chunks
    row = k
    if ROWS:
        row = tl.load(rows + k).to(tl.int64)
    if (row >= 0) & (row < num_rows):
        first = (to % num_chunks) * BLOCK
        mask = bitmask + k * stride_mask_row
        index = first // 32 + tl.arange(0, BLOCK // 32)
        words = tl.load(mask + index * stride_mask_word, mask=index * 32 < width, other=0)
        at = first + tl.arange(0, BLOCK)
        address = logits + row * stride_row + at * stride_column
        low = tl.full((BLOCK,), float("-inf"), logits.dtype.element_ty)
        if tl.max((words != 0).to(tl.int32), 0) == 0:
            tl.store(address, low, mask=at < columns)
        elif (tl.max((words != -1).to(tl.int32), 0) == 1) | (first + BLOCK > width):
            word = tl.load(mask + (at >> 5) * stride_mask_word, mask=at < width, other=0)
            kept = ((word >> (at & 31).to(tl.int32)) & 1) == 1
            x = tl.load(address, mask=at < columns, other=0.0)
            tl.store(address, tl.where(kept, x, low), mask=at < columns)


@triton.jit(do_not_specialize=["num_prompt", "num_output"])
def penalty_kernel(
    logits,
    prompt,
    output,
    seen,
    presence,
    frequency,
    repetition,
    num_prompt,
    num_output,
    vocab,
    stride,
    stride_prompt,
    stride_output,
    num_blocks,
    PHASE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """The places of one block of a row's tokens, prompt before output, in one of three launches.

    0 clears the entries of these tokens in `seen`, shape [rows, vocab], of which no other is looked at; 1 counts the
    output's and marks the prompt's; in 2 whoever takes an entry first changes the logit, and leaves 0 behind.
    """
    to = tl.program_id(0).to(tl.int64)
    row = to // num_blocks
    length = num_prompt + num_output
    i = (to % num_blocks).to(tl.int32) * BLOCK + tl.arange(0, BLOCK)
    is_prompt = i < num_prompt
    early = tl.load(prompt + row * stride_prompt + i, mask=is_prompt, other=-1)
    late = tl.load(
        output + row * stride_output + i - num_prompt,
        mask=(i >= num_prompt) & (i < length),
        other=-1,
    )
    # Not cut to 32 bits before the test: an id behind them is none.
    token = tl.where(is_prompt, early.to(tl.int64), late.to(tl.int64))
    inside = (token >= 0) & (token < vocab)
    token = tl.where(inside, token, 0)
    entry = seen + row * vocab + token
    if PHASE == 0:
        tl.store(entry, tl.zeros((BLOCK,), tl.int32), mask=inside)
    elif PHASE == 1:
        tl.atomic_add(entry, tl.full((BLOCK,), 1, tl.int32), mask=inside & (is_prompt == 0))
        tl.atomic_or(entry, tl.full((BLOCK,), 0x40000000, tl.int32), mask=inside & is_prompt)
    else:
        found = tl.atomic_xchg(entry, tl.zeros((BLOCK,), tl.int32), mask=inside)
        is_first = inside & (found != 0)
        count = found & 0x3FFFFFFF
        factor = tl.load(repetition + row).to(tl.float32)
        address = logits + row * stride + token
        x = tl.load(address, mask=is_first, other=0.0).to(tl.float32)
        y = tl.where(x > 0, tl.math.div_rn(x, factor), x * factor)
        y = tl.where(factor == 1.0, x, y)
        each = tl.load(frequency + row).to(tl.float32)
        once = tl.load(presence + row).to(tl.float32)
        # Not contracted: product and sum are rounded one by one, as in the reference.
        y = tl.where(count > 0, y - (count.to(tl.float32) * each + once), y)
        tl.store(address, y.to(logits.dtype.element_ty), mask=is_first)
