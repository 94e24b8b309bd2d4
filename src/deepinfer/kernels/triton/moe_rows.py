"""Rows of tokens to the places of their experts and back."""

from __future__ import annotations

import triton
import triton.language as tl

__all__ = ["expand_kernel", "reduce_kernel"]


@triton.jit(do_not_specialize=["num_places"])
def expand_kernel(
    x,
    scale,
    topk_weights,
    places,
    num_places,
    out,
    out_scale,
    out_weights,
    stride_x,
    stride_scale,
    stride_out,
    stride_out_scale,
    SCALED: tl.constexpr,
    WEIGHTED: tl.constexpr,
    CHANNELS: tl.constexpr,
    SCALES: tl.constexpr,
    TOPK: tl.constexpr,
    BLOCK: tl.constexpr,
    SCALE_BLOCK: tl.constexpr,
):
    """Copies one block of channels of one token to each of its places; the first block brings scales and weights.

    A place below 0 or behind the last is none.
    """
    parts: tl.constexpr = (CHANNELS + BLOCK - 1) // BLOCK
    program = tl.program_id(0).to(tl.int64)
    token = program // parts
    part = program % parts
    c = part * BLOCK + tl.arange(0, BLOCK)
    row = tl.load(x + token * stride_x + c, mask=c < CHANNELS)
    for k in tl.static_range(TOPK):
        place = tl.load(places + token * TOPK + k).to(tl.int64)
        if (place >= 0) & (place < num_places):
            tl.store(out + place * stride_out + c, row, mask=c < CHANNELS)
    if part == 0:
        if SCALED:
            s = tl.arange(0, SCALE_BLOCK)
            factors = tl.load(scale + token * stride_scale + s, mask=s < SCALES)
            for k in tl.static_range(TOPK):
                place = tl.load(places + token * TOPK + k).to(tl.int64)
                if (place >= 0) & (place < num_places):
                    tl.store(out_scale + place * stride_out_scale + s, factors, mask=s < SCALES)
        if WEIGHTED:
            for k in tl.static_range(TOPK):
                place = tl.load(places + token * TOPK + k).to(tl.int64)
                weight = tl.load(topk_weights + token * TOPK + k)
                if (place >= 0) & (place < num_places):
                    tl.store(out_weights + place, weight)


@triton.jit(do_not_specialize=["num_places"])
def reduce_kernel(
    y,
    topk_weights,
    places,
    num_places,
    added,
    out,
    stride_y,
    stride_added,
    stride_out,
    WEIGHTED: tl.constexpr,
    ADDED: tl.constexpr,
    CHANNELS: tl.constexpr,
    TOPK: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Sums the rows of one token in the order of its choices, one block of channels, in fp32; places as above."""
    parts: tl.constexpr = (CHANNELS + BLOCK - 1) // BLOCK
    program = tl.program_id(0).to(tl.int64)
    token = program // parts
    c = (program % parts) * BLOCK + tl.arange(0, BLOCK)
    total = tl.zeros([BLOCK], tl.float32)
    for k in tl.static_range(TOPK):
        place = tl.load(places + token * TOPK + k).to(tl.int64)
        there = (place >= 0) & (place < num_places)
        inside = (c < CHANNELS) & there
        row = tl.load(y + place * stride_y + c, mask=inside, other=0.0).to(tl.float32)
        if WEIGHTED:
            # A skipped choice adds nothing, whatever its weight.
            weight = tl.load(topk_weights + token * TOPK + k)
            row = tl.where(there, row * weight, 0.0)
        total += row
    if ADDED:
        total += tl.load(added + token * stride_added + c, mask=c < CHANNELS, other=0.0).to(tl.float32)  # fmt: skip
    tl.store(out + token * stride_out + c, total.to(out.dtype.element_ty), mask=c < CHANNELS)
