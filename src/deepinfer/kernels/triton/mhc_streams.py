"""Hyper-connections, element by element of four streams: behind a sublayer, and their weighted sum."""

from __future__ import annotations

import triton
import triton.language as tl

__all__ = ["mhc_head_kernel", "mhc_post_kernel"]


@triton.jit
def _stream(x, i, x_stream, c, inside, EVICT: tl.constexpr):
    at = x + i * x_stream + c
    return tl.load(at, mask=inside, other=0.0, eviction_policy=EVICT).to(tl.float32)


@triton.jit
def mhc_post_kernel(
    streams, output, post, mix, out, x_token, x_stream, o_token, CHANNELS: tl.constexpr,
    BLOCK: tl.constexpr, EVICT: tl.constexpr,
):  # fmt: skip
    """Stream j becomes post[j] * output + sum over i of mix[i, j] * stream i, for a piece of a token."""
    # Pieces of a token are neighbours, so that programs that run together read what lies together.
    PIECES: tl.constexpr = (CHANNELS + BLOCK - 1) // BLOCK
    token = (tl.program_id(0) // PIECES).to(tl.int64)
    c = tl.program_id(0) % PIECES * BLOCK + tl.arange(0, BLOCK)
    inside = c < CHANNELS
    kind = out.dtype.element_ty
    o = _stream(output + token * o_token, 0, 0, c, inside, EVICT)
    x = streams + token * x_token
    a = _stream(x, 0, x_stream, c, inside, EVICT)
    b = _stream(x, 1, x_stream, c, inside, EVICT)
    d = _stream(x, 2, x_stream, c, inside, EVICT)
    e = _stream(x, 3, x_stream, c, inside, EVICT)
    k = mix + token * 16
    for j in tl.static_range(4):
        v = tl.load(post + token * 4 + j) * o
        v += tl.load(k + j) * a
        v += tl.load(k + 4 + j) * b
        v += tl.load(k + 8 + j) * d
        v += tl.load(k + 12 + j) * e
        tl.store(out + (token * 4 + j) * CHANNELS + c, v.to(kind), mask=inside)


@triton.jit
def mhc_head_kernel(
    streams, pre, out, x_token, x_stream, CHANNELS: tl.constexpr, BLOCK: tl.constexpr,
    EVICT: tl.constexpr,
):  # fmt: skip
    """The sum of a token's streams with its weights, for a piece of its channels."""
    # Pieces of a token are neighbours, so that programs that run together read what lies together.
    PIECES: tl.constexpr = (CHANNELS + BLOCK - 1) // BLOCK
    token = (tl.program_id(0) // PIECES).to(tl.int64)
    c = tl.program_id(0) % PIECES * BLOCK + tl.arange(0, BLOCK)
    inside = c < CHANNELS
    x = streams + token * x_token
    a = _stream(x, 0, x_stream, c, inside, EVICT)
    b = _stream(x, 1, x_stream, c, inside, EVICT)
    d = _stream(x, 2, x_stream, c, inside, EVICT)
    e = _stream(x, 3, x_stream, c, inside, EVICT)
    w = pre + token * 4
    v = tl.load(w) * a + tl.load(w + 1) * b + tl.load(w + 2) * d + tl.load(w + 3) * e
    tl.store(out + token * CHANNELS + c, v.to(out.dtype.element_ty), mask=inside)
