"""Log probabilities: sums of exponentials and ranks by chunks, then of the row."""

from __future__ import annotations

import triton
import triton.language as tl

from deepinfer.kernels.triton.sampling_keys import key_of, larger

__all__ = ["chunk_logsum", "logprob_chunk_kernel", "logprob_row_kernel", "logsum_of_chunks"]


@triton.jit
def chunk_logsum(values):
    """The highest of a chunk's values and the sum of exp(value - highest), 0 where nothing is finite."""
    highest = tl.reduce(values, 0, larger)
    anchor = tl.where(highest == float("-inf"), 0.0, highest)
    return highest, tl.sum(tl.exp(values - anchor), 0)


@triton.jit
def logsum_of_chunks(tops, sums, row, num_chunks, CHUNKS: tl.constexpr):
    """Log of the sum of exponentials of a row, fp64."""
    c = tl.arange(0, CHUNKS)
    inside = c < num_chunks
    top = tl.load(tops + row * num_chunks + c, mask=inside, other=float("-inf"))
    part = tl.load(sums + row * num_chunks + c, mask=inside, other=0.0).to(tl.float64)
    highest = tl.reduce(top, 0, larger).to(tl.float64)
    return highest + tl.log(tl.sum(part * tl.exp(top.to(tl.float64) - highest), 0))


@triton.jit
def logprob_chunk_kernel(
    logits, tokens, tops, sums, counts, vocab, stride, num_chunks, BLOCK: tl.constexpr
):  # fmt: skip
    """Highest logit, sum of exponentials, and how many tokens of one chunk rank before the row's token."""
    to = tl.program_id(0).to(tl.int64)
    row = to // num_chunks
    at = (to % num_chunks).to(tl.int32) * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(logits + row * stride + at, mask=at < vocab, other=float("-inf")).to(tl.float32)
    highest, total = chunk_logsum(x)
    token = tl.load(tokens + row)
    is_token = (token >= 0) & (token < vocab)
    chosen = tl.load(logits + row * stride + tl.where(is_token, token, 0)).to(tl.float32)
    before = (x > chosen) | ((x == chosen) & (at < token))
    tl.store(tops + to, highest)
    tl.store(sums + to, total)
    tl.store(counts + to, tl.sum(before.to(tl.int32), 0))


@triton.jit
def logprob_row_kernel(
    logits,
    tokens,
    tops,
    sums,
    counts,
    found_ids,
    logprobs,
    ranks,
    best_ids,
    best_logprobs,
    vocab,
    stride,
    num_chunks,
    num_top,
    CHUNKS: tl.constexpr,
    TOP: tl.constexpr,
    SORT: tl.constexpr,
):
    """Log probabilities of a row's token and of its likeliest ones, and the token's rank."""
    row = tl.program_id(0).to(tl.int64)
    total = logsum_of_chunks(tops, sums, row, num_chunks, CHUNKS)
    c = tl.arange(0, CHUNKS)
    rank = 1 + tl.sum(tl.load(counts + row * num_chunks + c, mask=c < num_chunks, other=0), 0)
    token = tl.load(tokens + row)
    is_token = (token >= 0) & (token < vocab)
    x = tl.load(logits + row * stride + tl.where(is_token, token, 0)).to(tl.float32)
    value = tl.minimum(x.to(tl.float64) - total, 0.0, propagate_nan=tl.PropagateNan.ALL)
    nan = tl.full((), float("nan"), tl.float64)
    tl.store(logprobs + row, tl.where(is_token, value, nan).to(tl.float32))
    tl.store(ranks + row, tl.where(is_token, rank, 0).to(ranks.dtype.element_ty))
    if TOP > 0:
        t = tl.arange(0, TOP)
        ids = tl.load(found_ids + row * num_top + t, mask=t < num_top, other=-1)
        some = (t < num_top) & (ids >= 0)
        values = tl.load(logits + row * stride + ids, mask=some, other=float("-inf")).to(tl.float32)
        place = t
        if SORT:
            # How many of them go before it: no two have the same place.
            keys = tl.where(some, key_of(values).to(tl.int64) + 1, 0)
            before = keys[None, :] > keys[:, None]
            same = keys[None, :] == keys[:, None]
            before |= same & ((ids[None, :] < ids[:, None]) & some[:, None])
            before |= same & (some[:, None] == 0) & (t[None, :] < t[:, None])
            place = tl.sum(before.to(tl.int32), 1)
        best = tl.minimum(values.to(tl.float64) - total, 0.0, propagate_nan=tl.PropagateNan.ALL)
        best = tl.where(some, best.to(tl.float32), float("-inf"))
        tl.store(best_logprobs + row * num_top + place, best, mask=t < num_top)
        tl.store(best_ids + row * num_top + place, ids, mask=t < num_top)
