"""Device functions of draws: what a cut or a bound holds, scores in fp64, and the best of a chunk in fp32.

Noise is made in fp32 first; the blocks of four tokens that this leaves in question, nearly always one a chunk, are judged in
fp64.
"""

from __future__ import annotations

import triton
import triton.language as tl

from deepinfer.kernels.triton.philox import exact_gumbel, fast_log2_exponential, token_words
from deepinfer.kernels.triton.sampling_keys import key_of, value_of

__all__ = [
    "exact_scores",
    "kept_values",
    "limit_of",
    "limits_of",
    "noisy_block",
    "scale_of",
]


@triton.jit
def kept_values(values, at, cut, cut_id, CUT: tl.constexpr):
    """The values with -inf at what a cut drops; NaN goes through, so that it is seen."""
    if CUT:
        out = (values < cut) | ((values == cut) & (at > cut_id))
        values = tl.where(out, float("-inf"), values)
    return values


@triton.jit
def limit_of(bound, bound_id, first, BLOCK: tl.constexpr):
    """The logit that tokens of a chunk must exceed to be held by a bound whose id is the last of a chunk."""
    # Both zeros have one key, behind which that of -0 belongs to no value: the next lower one is another.
    lower = key_of(bound) - tl.where(bound == 0.0, 2, 1)
    under = tl.where(bound > float("-inf"), value_of(lower.to(tl.uint32)), bound)
    return tl.where(first + BLOCK - 1 <= bound_id, under, bound)


@triton.jit
def limits_of(bound, bound_id, first, BLOCK: tl.constexpr):
    """The logit that each token of a chunk must exceed to be held by a bound: one comparison for each instead of three."""
    limits = tl.zeros((BLOCK,), tl.float32) + limit_of(bound, bound_id, first, BLOCK)
    if (first <= bound_id) & (first + BLOCK - 1 > bound_id):
        under = limit_of(bound, bound_id, first - BLOCK, BLOCK)
        limits = tl.where(first + tl.arange(0, BLOCK) <= bound_id, under, bound)
    return limits


@triton.jit
def scale_of(temperature):
    """log2(e) / temperature in fp32, finite."""
    return tl.minimum(1.4426950408889634 / temperature.to(tl.float32), 3e38)


@triton.jit
def exact_scores(x, at, inside, highest, temperature, seed, position, stream, cut, cut_id, CUT: tl.constexpr):  # fmt: skip
    """Scores of some tokens in fp64, -inf where a token does not count."""
    values = tl.load(x + at, mask=inside, other=float("-inf")).to(tl.float32)
    values = kept_values(values, at, cut, cut_id, CUT)
    scores = (values.to(tl.float64) - highest.to(tl.float64)) / temperature
    scores += exact_gumbel(seed, position, at, stream)
    return tl.where(values > float("-inf"), scores, float("-inf"))


@triton.jit
def noisy_block(
    x, scaled, first, vocab, highest, temperature, seed, position, stream, cut, cut_id,
    CUT: tl.constexpr, FAST: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """The block of four tokens in which the highest `value / temperature + noise` of a chunk is; -1 if there is none.

    `scaled` are `value - highest` times `scale_of(temperature)`, from token `first` on, -inf where a token does not count;
    `highest` is any logit that none is above, or that of the row.
    """
    quarter = tl.arange(0, BLOCK // 4) + first // 4
    w0, w1, w2, w3 = token_words(seed, position, quarter, stream)
    words = tl.join(tl.join(w0, w2), tl.join(w1, w3)).reshape(BLOCK)
    # Times log2(e), like the noise.
    scores = scaled - fast_log2_exponential(words, FAST)
    best = tl.max(scores.reshape(BLOCK // 4, 4), 1)
    peak = tl.max(best, 0)
    is_open = best >= peak - 1e-3
    found = tl.min(tl.where(is_open, quarter, 2147483647), 0)
    is_good = (highest > float("-inf")) & (highest < float("inf")) & (peak > float("-inf"))
    if is_good & (tl.sum(is_open.to(tl.int32), 0) > 1):
        top = tl.full((), float("-inf"), tl.float64)
        block = found
        while block < 2147483647:
            at = block * 4 + tl.arange(0, 4)
            exact = exact_scores(
                x, at, at < vocab, highest, temperature, seed, position, stream, cut, cut_id, CUT
            )
            own = tl.max(exact, 0)
            found = tl.where(own > top, block, found)
            top = tl.maximum(own, top)
            block = tl.min(tl.where(is_open & (quarter > block), quarter, 2147483647), 0)
    return tl.where(is_good, tl.minimum(found, vocab // 4), -1)
