"""Drafts from a request's own text: what followed the last tokens when they occurred before."""

from __future__ import annotations

import triton
import triton.language as tl

__all__ = ["ngram_kernel"]


@triton.jit(do_not_specialize=["window", "capacity"])
def ngram_kernel(
    tokens,
    lengths,
    out,
    matched,
    window,
    capacity,
    stride,
    NUM_DRAFTS: tl.constexpr,
    MIN_N: tl.constexpr,
    MAX_N: tl.constexpr,
    BLOCK: tl.constexpr,
    WIDTH: tl.constexpr,
):
    """One row: the longest matched end wins, of equal ones the latest place."""
    row = tl.program_id(0).to(tl.int64)
    # A length outside of [0, capacity] counts as the nearer end.
    length = tl.load(lengths + row).to(tl.int64)
    length = tl.minimum(tl.maximum(length, 0), capacity).to(tl.int32)
    count = tl.minimum(length, window)
    text = tokens + row * stride + (length - count)
    best = -1
    if count > MIN_N:
        last = tl.load(text + count - 1)
        for start in range(0, count - 1, BLOCK):
            at = start + tl.arange(0, BLOCK)
            inside = at < count - 1
            goes_on = inside & (tl.load(text + at, mask=inside, other=-1) == last)
            # Most stretches of a text do not have its last token.
            if tl.max(goes_on.to(tl.int32), 0) > 0:
                n = goes_on.to(tl.int32)
                for i in tl.static_range(1, MAX_N):
                    earlier = goes_on & (at >= i)
                    own = tl.load(text + tl.maximum(count - 1 - i, 0))
                    goes_on = earlier & (tl.load(text + at - i, mask=earlier, other=-1) == own)
                    n += goes_on.to(tl.int32)
                score = tl.where(n >= MIN_N, n * 16777216 + at, -1)
                best = tl.maximum(best, tl.max(score, 0))
    i = tl.arange(0, WIDTH)
    found = tl.full([WIDTH], -1, tl.int64)
    if best >= 0:
        place = best % 16777216
        period = count - 1 - place
        found = tl.load(text + place + 1 + i % period, mask=i < NUM_DRAFTS, other=-1).to(tl.int64)
    tl.store(out + row * NUM_DRAFTS + i, found, mask=i < NUM_DRAFTS)
    tl.store(matched + row, tl.where(best >= 0, best // 16777216, 0))
