"""The narrow bracket of logits in which top-p cuts rows without top-k, and the tokens inside it."""

from __future__ import annotations

import triton
import triton.language as tl

from deepinfer.kernels.triton.sampling_keys import key_of, larger, least_kept_key, mass_of

__all__ = ["bracket_mass_kernel", "bracket_tokens_kernel"]


@triton.jit
def _row_facts(temperatures, top_ks, top_ps, min_ps, tops, row, vocab, num_chunks,
               WARM: tl.constexpr, TOP_K: tl.constexpr, MIN_P: tl.constexpr, CHUNKS: tl.constexpr):  # fmt: skip
    """Whether the row needs a bracket, its highest logit, temperature, top-p and least key that min-p keeps."""
    c = tl.arange(0, CHUNKS)
    chunk_tops = tl.load(tops + row * num_chunks + c, mask=c < num_chunks, other=float("-inf"))
    highest = tl.reduce(chunk_tops, 0, larger)
    temperature = tl.full((), 1.0, tl.float64)
    if WARM:
        temperature = tl.load(temperatures + row).to(tl.float64)
    top_p = tl.load(top_ps + row).to(tl.float64)
    needed = (highest > float("-inf")) & (highest < float("inf")) & (top_p < 1) & (temperature > 0)
    if TOP_K:
        k = tl.load(top_ks + row)
        needed &= (k <= 0) | (k >= vocab)
    least = tl.zeros((), tl.uint32)
    if MIN_P:
        min_p = tl.load(min_ps + row).to(tl.float64)
        least = least_kept_key(highest, tl.where(temperature > 0, temperature, 1.0), min_p)
    return needed, highest, temperature, top_p, least


@triton.jit
def _narrowed(sums, row, num_chunks, thresholds, top_p, low, high, CHUNKS: tl.constexpr):
    """The bracket that the masses above 15 thresholds leave; the 16th sum is that of the row."""
    j = tl.arange(0, 16)
    c = tl.arange(0, CHUNKS)
    at = (row * num_chunks + c[:, None]) * 16 + j[None, :]
    parts = tl.load(sums + at, mask=(c < num_chunks)[:, None], other=0.0)
    mass = tl.sum(parts, 0)
    total = tl.sum(tl.where(j == 15, mass, 0.0), 0)
    target = total * top_p.to(tl.float32)
    # fp32 sums: what is within a ten-thousandth of the target stays inside.
    reached = tl.where((mass >= target * 1.0001) & (j < 15), thresholds, float("-inf"))
    missed = tl.where((mass < target * 0.9999) & (j < 15), thresholds, float("inf"))
    return tl.maximum(low, tl.max(reached, 0)), tl.minimum(high, tl.min(missed, 0))


@triton.jit
def _coarse(highest, temperature, j):
    return highest - (j + 1).to(tl.float32) * 2.0 * temperature.to(tl.float32)


@triton.jit
def _fine(low, high, highest, temperature, j):
    top = tl.minimum(high, highest)
    end = tl.maximum(low, highest - 40.0 * temperature.to(tl.float32))
    return end + (top - end) * ((15 - j).to(tl.float32) * 0.0625)


@triton.jit
def bracket_mass_kernel(
    logits,
    temperatures,
    top_ks,
    top_ps,
    min_ps,
    tops,
    coarse,
    sums,
    vocab,
    stride,
    num_chunks,
    WARM: tl.constexpr,
    TOP_K: tl.constexpr,
    MIN_P: tl.constexpr,
    CHUNKS: tl.constexpr,
    BLOCK: tl.constexpr,
    FINE: tl.constexpr,
):
    """Masses of one chunk above 15 thresholds, and all of it: coarse thresholds, or fine ones in the coarse bracket."""
    to = tl.program_id(0).to(tl.int64)
    row = to // num_chunks
    chunk = (to % num_chunks).to(tl.int32)
    needed, highest, temperature, top_p, least = _row_facts(
        temperatures, top_ks, top_ps, min_ps, tops, row, vocab, num_chunks, WARM, TOP_K, MIN_P, CHUNKS
    )  # fmt: skip
    if needed:
        j = tl.arange(0, 16)
        thresholds = _coarse(highest, temperature, j)
        if FINE:
            low, high = _narrowed(
                coarse, row, num_chunks, thresholds, top_p, float("-inf"), float("inf"), CHUNKS
            )
            thresholds = _fine(low, high, highest, temperature, j)
        at = chunk * BLOCK + tl.arange(0, BLOCK)
        inside = at < vocab
        x = tl.load(logits + row * stride + at, mask=inside, other=float("-inf")).to(tl.float32)
        factor = (1.4426950408889634 / temperature).to(tl.float32)
        mass = tl.exp2((x - highest) * factor)
        mass = tl.where((x > float("-inf")) & (key_of(x) >= least), mass, 0.0)
        out = tl.where(j == 15, tl.sum(mass, 0), 0.0)
        for i in tl.static_range(15):
            threshold = tl.sum(tl.where(j == i, thresholds, 0.0), 0)
            out = tl.where(j == i, tl.sum(tl.where(x >= threshold, mass, 0.0), 0), out)
        tl.store(sums + to * 16 + j, out)


@triton.jit
def bracket_tokens_kernel(
    logits,
    temperatures,
    top_ks,
    top_ps,
    min_ps,
    tops,
    coarse,
    fine,
    exact,
    found_ids,
    found_counts,
    vocab,
    stride,
    num_chunks,
    WARM: tl.constexpr,
    TOP_K: tl.constexpr,
    MIN_P: tl.constexpr,
    CHUNKS: tl.constexpr,
    BLOCK: tl.constexpr,
    EACH: tl.constexpr,
):
    """Integer masses of one chunk, all of it and above the bracket, and its tokens inside the bracket."""
    to = tl.program_id(0).to(tl.int64)
    row = to // num_chunks
    chunk = (to % num_chunks).to(tl.int32)
    needed, highest, temperature, top_p, least = _row_facts(
        temperatures, top_ks, top_ps, min_ps, tops, row, vocab, num_chunks, WARM, TOP_K, MIN_P, CHUNKS
    )  # fmt: skip
    if needed:
        j = tl.arange(0, 16)
        thresholds = _coarse(highest, temperature, j)
        low, high = _narrowed(
            coarse, row, num_chunks, thresholds, top_p, float("-inf"), float("inf"), CHUNKS
        )
        thresholds = _fine(low, high, highest, temperature, j)
        low, high = _narrowed(fine, row, num_chunks, thresholds, top_p, low, high, CHUNKS)
        i = tl.arange(0, BLOCK)
        at = chunk * BLOCK + i
        x = tl.load(logits + row * stride + at, mask=at < vocab, other=float("-inf")).to(tl.float32)
        good = (x > float("-inf")) & (key_of(x) >= least)
        mass = tl.where(good, mass_of(x, highest, temperature), 0)
        tl.store(exact + to * 2, tl.sum(mass, 0))
        tl.store(exact + to * 2 + 1, tl.sum(tl.where(x >= high, mass, 0), 0))
        within = (good & (x >= low) & (x < high)).to(tl.int32)
        place = tl.cumsum(within, 0) - 1
        tl.store(found_ids + to * EACH + place, at, mask=(within > 0) & (place < EACH))
        tl.store(found_counts + to, tl.sum(within, 0))
