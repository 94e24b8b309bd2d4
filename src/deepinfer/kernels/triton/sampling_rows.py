"""Device functions that say what a row, or a chunk of one, is: its logits, options, noise and highest logit."""

from __future__ import annotations

import triton
import triton.language as tl

from deepinfer.kernels.triton.sampling_keys import larger

__all__ = [
    "chunk_of",
    "filters_of",
    "is_finite",
    "min_p_of",
    "noise_of",
    "temperature_of",
    "top_k_of",
    "top_p_of",
    "tops_of",
]


@triton.jit
def chunk_of(logits, vocab, stride, num_chunks, BLOCK: tl.constexpr):
    """Of the program's chunk: its number among all rows', the row, the first token, ids and fp32 logits of all tokens.

    Programs are rows along the first axis of the grid and chunks along the second: no division keeps the loads waiting.
    """
    row = tl.program_id(0).to(tl.int64)
    chunk = tl.program_id(1)
    first = chunk * BLOCK
    at = first + tl.arange(0, BLOCK)
    values = tl.load(logits + row * stride + at, mask=at < vocab, other=float("-inf"))
    return row * num_chunks + chunk, row, first, at, values.to(tl.float32)


@triton.jit
def tops_of(tops, row, num_chunks, CHUNKS: tl.constexpr):
    """The highest logits of the chunks of a row, -inf behind the last, and that of the row; NaN if one is."""
    c = tl.arange(0, CHUNKS)
    chunk_tops = tl.load(tops + row * num_chunks + c, mask=c < num_chunks, other=float("-inf"))
    return chunk_tops, tl.reduce(chunk_tops, 0, larger)


@triton.jit
def is_finite(x):
    """Whether a logit is a number: neither NaN nor infinite."""
    return (x > float("-inf")) & (x < float("inf"))


@triton.jit
def temperature_of(temperatures, row, WARM: tl.constexpr):
    """The temperature of a row, fp64; 1 without WARM."""
    temperature = tl.full((), 1.0, tl.float64)
    if WARM:
        temperature = tl.load(temperatures + row).to(tl.float64)
    return temperature


@triton.jit
def top_k_of(top_ks, row, vocab, TOP_K: tl.constexpr):
    """How many tokens the top-k of a row keeps, int32; all of them without TOP_K."""
    k = vocab
    if TOP_K:
        given = tl.load(top_ks + row).to(tl.int64)
        k = tl.where((given <= 0) | (given > vocab), vocab, given).to(tl.int32)
    return k


@triton.jit
def top_p_of(top_ps, row, TOP_P: tl.constexpr):
    """The top-p of a row, fp64; 1 without TOP_P. NaN keeps the highest token alone, as 0 does."""
    top_p = tl.full((), 1.0, tl.float64)
    if TOP_P:
        top_p = tl.load(top_ps + row).to(tl.float64)
        top_p = tl.where(top_p > 0, top_p, 0.0)
    return top_p


@triton.jit
def min_p_of(min_ps, row, MIN_P: tl.constexpr):
    """The min-p of a row, fp64; 0 without MIN_P."""
    min_p = tl.full((), 0.0, tl.float64)
    if MIN_P:
        min_p = tl.load(min_ps + row).to(tl.float64)
    return min_p


@triton.jit
def filters_of(
    temperatures, top_ks, top_ps, min_ps, row, vocab,
    WARM: tl.constexpr, TOP_K: tl.constexpr, TOP_P: tl.constexpr, MIN_P: tl.constexpr,
):  # fmt: skip
    """Temperature, top-k, top-p and min-p of a row, and whether they keep anything.

    A temperature of 0 is a top-k of 1 at a temperature of 1.
    """
    temperature = temperature_of(temperatures, row, WARM)
    min_p = min_p_of(min_ps, row, MIN_P)
    is_greedy = temperature <= 0
    is_some = (temperature == temperature) & (is_greedy | (min_p <= 1))
    k = tl.where(is_greedy, 1, top_k_of(top_ks, row, vocab, TOP_K))
    top_p = tl.where(is_greedy, 1.0, top_p_of(top_ps, row, TOP_P))
    temperature = tl.where(is_greedy, 1.0, temperature)
    return temperature, k, top_p, tl.where(is_greedy, 0.0, min_p), is_some


@triton.jit
def noise_of(seeds, positions, row):
    """Seed and position of the noise of a row, int64."""
    return tl.load(seeds + row).to(tl.int64), tl.load(positions + row).to(tl.int64)
