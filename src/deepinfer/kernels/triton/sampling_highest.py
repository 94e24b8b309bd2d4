"""The highest logit of each row: rows in chunks, then the best of the chunks; or one program a row. Ties to the lowest id."""

from __future__ import annotations

import triton
import triton.language as tl

from deepinfer.kernels.triton.sampling_keys import larger

__all__ = ["highest_of_chunk_kernel", "highest_of_row_kernel", "highest_of_whole_row_kernel"]


@triton.jit
def highest_of_chunk_kernel(logits, tokens, tops, vocab, stride, num_chunks, BLOCK: tl.constexpr):
    """The highest logit of one chunk, NaN if one is, and its lowest id."""
    to = tl.program_id(0).to(tl.int64)
    row = to // num_chunks
    at = (to % num_chunks).to(tl.int32) * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(logits + row * stride + at, mask=at < vocab, other=float("-inf")).to(tl.float32)
    highest = tl.reduce(x, 0, larger)
    tl.store(tokens + to, tl.min(tl.where(x == highest, at, 2147483647), 0))
    tl.store(tops + to, highest)


@triton.jit
def highest_of_row_kernel(tokens, tops, out, num_chunks, CHUNKS: tl.constexpr):
    """The token of the highest logit of a row of chunks; -1 where that is not finite."""
    row = tl.program_id(0).to(tl.int64)
    c = tl.arange(0, CHUNKS)
    inside = c < num_chunks
    top = tl.load(tops + row * num_chunks + c, mask=inside, other=float("-inf"))
    token = tl.load(tokens + row * num_chunks + c, mask=inside, other=2147483647)
    highest = tl.reduce(top, 0, larger)
    token = tl.min(tl.where(top == highest, token, 2147483647), 0)
    good = (highest > float("-inf")) & (highest < float("inf"))
    tl.store(out + row, tl.where(good, token, -1).to(out.dtype.element_ty))


@triton.jit
def highest_of_whole_row_kernel(
    logits, out, vocab, stride, BLOCK: tl.constexpr, STAGES: tl.constexpr
):
    """The token of the highest logit of one row, by one program; -1 where that is not finite.

    Each place of a block keeps its highest logit and the block it is in, so the passes need no sum over the program.
    """
    row = tl.program_id(0).to(tl.int64)
    x = logits + row * stride
    i = tl.arange(0, BLOCK)
    best = tl.full((BLOCK,), float("-inf"), tl.float32)
    found = tl.zeros((BLOCK,), tl.int32)
    for start in tl.range(0, vocab, BLOCK, num_stages=STAGES):
        at = start + i
        values = tl.load(x + at, mask=at < vocab, other=float("-inf")).to(tl.float32)
        # A NaN is not left again, and equals later are not taken.
        more = (values > best) | (values != values)
        best = tl.where(more, values, best)
        found = tl.where(more, start, found)
    highest = tl.reduce(best, 0, larger)
    token = tl.min(tl.where(best == highest, found + i, 2147483647), 0)
    good = (highest > float("-inf")) & (highest < float("inf"))
    tl.store(out + row, tl.where(good, token, -1).to(out.dtype.element_ty))
