"""Coupled verification: what each row of logits is drawn with, and how far the drafts are what was drawn."""

from __future__ import annotations

import triton
import triton.language as tl

__all__ = [
    "coupled_accept_kernel",
    "first_row",
    "length_of",
    "row_options_kernel",
    "verified_length",
]


@triton.jit
def length_of(lengths, request, DRAFTS: tl.constexpr):
    """Drafts of a request; what lies outside of [0, DRAFTS] counts as the nearer end."""
    length = tl.load(lengths + request).to(tl.int64)
    return tl.minimum(tl.maximum(length, 0), DRAFTS).to(tl.int32)


@triton.jit
def first_row(lengths, request, DRAFTS: tl.constexpr, REQUESTS: tl.constexpr):
    """First row of a request in the flat logits: every request before it has a row more than drafts."""
    total = tl.zeros((), tl.int64)
    for start in range(0, request, REQUESTS):
        i = start + tl.arange(0, REQUESTS)
        length = tl.load(lengths + i, mask=i < request, other=0).to(tl.int64)
        length = tl.minimum(tl.maximum(length, 0), DRAFTS)
        total += tl.sum(tl.where(i < request, length + 1, 0), 0)
    return total


@triton.jit
def verified_length(tokens, length, DRAFTS: tl.constexpr, WIDTH: tl.constexpr):
    """Drafts of a row before its first negative one, `length` at most."""
    j = tl.arange(0, WIDTH)
    token = tl.load(tokens + j, mask=j < DRAFTS, other=-1)
    return tl.minimum(length, tl.min(tl.where(token < 0, j, WIDTH), 0))


@triton.jit
def row_options_kernel(
    lengths,
    temperatures,
    seeds,
    positions,
    row_temperatures,
    row_seeds,
    row_positions,
    num_rows,
    WARM: tl.constexpr,
    DRAFTS: tl.constexpr,
    WIDTH: tl.constexpr,
    REQUESTS: tl.constexpr,
):
    """Writes the options of the rows of one request."""
    request = tl.program_id(0)
    length = length_of(lengths, request, DRAFTS)
    j = tl.arange(0, WIDTH)
    row = first_row(lengths, request, DRAFTS, REQUESTS) + j
    inside = (j <= length) & (row < num_rows)
    zero = tl.zeros([WIDTH], tl.int64)
    tl.store(row_seeds + row, tl.load(seeds + request).to(tl.int64) + zero, mask=inside)
    tl.store(row_positions + row, tl.load(positions + request).to(tl.int64) + j, mask=inside)
    if WARM:
        temperature = tl.load(temperatures + request).to(tl.float64)
        tl.store(row_temperatures + row, temperature + zero.to(tl.float64), mask=inside)


@triton.jit
def coupled_accept_kernel(
    own,
    drafts,
    lengths,
    out,
    num_accepted,
    stride_drafts,
    num_rows,
    DRAFTS: tl.constexpr,
    WIDTH: tl.constexpr,
    REQUESTS: tl.constexpr,
):
    """Drafts of one request stay as far as they are the target's own tokens; one more of these follows."""
    request = tl.program_id(0)
    mine = drafts + request.to(tl.int64) * stride_drafts
    length = length_of(lengths, request, DRAFTS)
    verified = verified_length(mine, length, DRAFTS, WIDTH)
    j = tl.arange(0, WIDTH)
    row = first_row(lengths, request, DRAFTS, REQUESTS) + j
    token = tl.load(own + row, mask=(j <= length) & (row < num_rows), other=-1)
    draft = tl.load(mine + j, mask=j < DRAFTS, other=-1)
    agrees = (j < verified) & (draft == token)
    accepted = tl.min(tl.where(agrees, WIDTH, j), 0)
    to = out + request.to(tl.int64) * (DRAFTS + 1) + j
    tl.store(to, tl.where(j <= accepted, token, -1), mask=j <= DRAFTS)
    tl.store(num_accepted + request, accepted.to(tl.int64))
