"""The highest logit of each row: rows in chunks, then the best of the chunks, ties to the lowest id."""

from __future__ import annotations

import triton
import triton.language as tl

from deepinfer.kernels.triton.sampling_keys import larger
from deepinfer.kernels.triton.sampling_rows import chunk_of, is_finite, tops_of

__all__ = ["highest_of_chunk_kernel", "highest_of_row_kernel"]


@triton.jit
def highest_of_chunk_kernel(logits, tokens, tops, vocab, stride, num_chunks, BLOCK: tl.constexpr):
    """The highest logit of one chunk, NaN if one is, and its lowest id."""
    to, _, _, at, values = chunk_of(logits, vocab, stride, num_chunks, BLOCK)
    highest = tl.reduce(values, 0, larger)
    tl.store(tokens + to, tl.min(tl.where(values == highest, at, 2147483647), 0))
    tl.store(tops + to, highest)


@triton.jit
def highest_of_row_kernel(tokens, tops, out, num_chunks, CHUNKS: tl.constexpr):
    """The token of the highest logit of a row of chunks; -1 where that is not finite."""
    row = tl.program_id(0).to(tl.int64)
    c = tl.arange(0, CHUNKS)
    chunk_tops, highest = tops_of(tops, row, num_chunks, CHUNKS)
    token = tl.load(tokens + row * num_chunks + c, mask=c < num_chunks, other=2147483647)
    token = tl.min(tl.where(chunk_tops == highest, token, 2147483647), 0)
    token = tl.where(is_finite(highest), token, -1)
    tl.store(out + row, token.to(out.dtype.element_ty))
