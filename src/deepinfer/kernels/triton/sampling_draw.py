"""The highest logit, or the highest sum of logit and noise, of each row: rows in chunks, then the best of the chunks.

Chunks are fixed by the vocabulary, and what is kept of one is exact, so neither their number nor the batch changes the
outcome. Noise is made in fp32 first; the tokens that this leaves in question, usually one a chunk, are judged in fp64.
"""

from __future__ import annotations

import triton
import triton.language as tl

from deepinfer.kernels.triton.philox import exact_gumbel, fast_log2_exponential, token_words

__all__ = ["best_of_chunks_kernel", "best_token_kernel", "drawn_chunk"]


@triton.jit
def _larger(a, b):
    return tl.maximum(a, b, propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def drawn_chunk(
    x, values, at, seed, position, stream, temperature, FAST: tl.constexpr, BLOCK: tl.constexpr
):  # fmt: skip
    """The token of the highest `value / temperature + noise` of a chunk, its noise, and the chunk's highest value.

    `x` is the row, and `values` what it has at the tokens `at`, -inf where a token does not count. A temperature of 0
    takes the highest value. The token is -1 where nothing is finite.
    """
    highest = tl.reduce(values, 0, _larger)
    token = -1
    noise = tl.zeros((), tl.float64)
    if temperature > 0:
        anchor = tl.where(highest == float("-inf"), 0.0, highest)
        quarter = tl.arange(0, BLOCK // 4) + tl.min(at, 0) // 4
        w0, w1, w2, w3 = token_words(seed, position, quarter, stream)
        words = tl.join(tl.join(w0, w2), tl.join(w1, w3)).reshape(BLOCK)
        factor = (1.4426950408889634 / temperature).to(tl.float32)
        # Times log2(e), like the noise.
        scores = (values - anchor) * factor - fast_log2_exponential(words, FAST)
        open_ = scores >= tl.max(scores, 0) - 1e-3
        left = tl.where(highest > float("-inf"), tl.sum(open_.to(tl.int32), 0), 0)
        best = tl.full((), float("-inf"), tl.float64)
        last = -1
        while left > 0:
            last = tl.min(tl.where(open_ & (at > last), at, 2147483647), 0)
            own = exact_gumbel(seed, position, last, stream)
            value = tl.load(x + last).to(tl.float64) - anchor.to(tl.float64)
            score = value / temperature.to(tl.float64) + own
            is_better = score > best
            token = tl.where(is_better, last, token)
            noise = tl.where(is_better, own, noise)
            best = tl.where(is_better, score, best)
            left -= 1
    else:
        first = tl.min(tl.where(values == highest, at, 2147483647), 0)
        token = tl.where(highest > float("-inf"), first, -1)
    return token, noise, highest


@triton.jit
def best_token_kernel(
    logits,
    temperatures,
    seeds,
    positions,
    cuts,
    cut_ids,
    tokens,
    noises,
    tops,
    vocab,
    stride,
    num_chunks,
    stream,
    DRAWN: tl.constexpr,
    WARM: tl.constexpr,
    CUT: tl.constexpr,
    FAST: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """One chunk of one row: its best token, the noise of that, and its highest logit."""
    to = tl.program_id(0).to(tl.int64)
    row = to // num_chunks
    chunk = (to % num_chunks).to(tl.int32)
    needed = True
    if CUT:
        cut_id = tl.load(cut_ids + row)
        needed = cut_id >= -1
    if needed:
        x = logits + row * stride
        at = chunk * BLOCK + tl.arange(0, BLOCK)
        inside = at < vocab
        values = tl.load(x + at, mask=inside, other=float("-inf")).to(tl.float32)
        if CUT:
            cut = tl.load(cuts + row)
            # NaN goes through, so that it is seen.
            out = (values < cut) | ((values == cut) & (at > cut_id))
            values = tl.where(out, float("-inf"), values)
        if DRAWN:
            temperature = tl.full((), 1.0, tl.float64)
            if WARM:
                temperature = tl.load(temperatures + row).to(tl.float64)
            seed = tl.load(seeds + row).to(tl.int64)
            position = tl.load(positions + row).to(tl.int64)
            token, noise, highest = drawn_chunk(
                x, values, at, seed, position, stream, temperature, FAST, BLOCK
            )
            tl.store(noises + to, noise)
        else:
            highest = tl.reduce(values, 0, _larger)
            token = tl.min(tl.where(values == highest, at, 2147483647), 0)
        tl.store(tokens + to, token)
        tl.store(tops + to, highest)


@triton.jit
def best_of_chunks_kernel(
    logits,
    temperatures,
    cut_ids,
    tokens,
    noises,
    tops,
    out,
    stride,
    num_chunks,
    DRAWN: tl.constexpr,
    WARM: tl.constexpr,
    CUT: tl.constexpr,
    CHUNKS: tl.constexpr,
):
    """The best token of a row of chunks, ties to the lowest; -1 where the highest logit is not finite."""
    row = tl.program_id(0).to(tl.int64)
    needed = True
    if CUT:
        needed = tl.load(cut_ids + row) >= -1
    if needed:
        c = tl.arange(0, CHUNKS)
        inside = c < num_chunks
        tops_row = tl.load(tops + row * num_chunks + c, mask=inside, other=float("-inf"))
        token = tl.load(tokens + row * num_chunks + c, mask=inside, other=-1)
        highest = tl.reduce(tops_row, 0, _larger)
        good = (highest > float("-inf")) & (highest < float("inf"))
        temperature = tl.full((), 0.0, tl.float64)
        if DRAWN:
            temperature += 1.0
            if WARM:
                temperature = tl.load(temperatures + row).to(tl.float64)
        usable = inside & (token >= 0) & (tops_row > float("-inf"))
        if temperature > 0:
            value = tl.load(logits + row * stride + token, mask=usable, other=0.0)
            value = value.to(tl.float32).to(tl.float64) - highest.to(tl.float64)
            score = value / temperature
            score += tl.load(noises + row * num_chunks + c, mask=inside, other=0.0)
            score = tl.where(usable, score, float("-inf"))
            best = tl.max(score, 0)
            token = tl.where(usable & (score == best), token, 2147483647)
        else:
            token = tl.where(usable & (tops_row == highest), token, 2147483647)
        tl.store(out + row, tl.where(good, tl.min(token, 0), -1).to(out.dtype.element_ty))
