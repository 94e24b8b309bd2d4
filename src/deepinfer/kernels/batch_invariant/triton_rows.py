"""Row kernels in Triton: one program a row or a fixed piece of one, tiles that hang on the row's width alone."""

from __future__ import annotations

import triton
import triton.language as tl

__all__ = [
    "log_softmax_kernel",
    "mix_streams_kernel",
    "rms_norm_kernel",
    "row_sum_kernel",
    "sinkhorn_kernel",
]


@triton.jit
def _sum_of_row(row, width, SQUARES: tl.constexpr, BLOCK: tl.constexpr):
    """Sum of the values, or of their squares, of one row."""
    at = tl.arange(0, BLOCK)
    total = tl.zeros((BLOCK,), dtype=tl.float32)
    for start in range(0, width, BLOCK):
        v = tl.load(row + start + at, mask=start + at < width, other=0.0).to(tl.float32)
        total += v * v if SQUARES else v
    return tl.sum(total, 0)


@triton.jit
def row_sum_kernel(x, out, width, stride, factor, SQUARES: tl.constexpr, BLOCK: tl.constexpr):
    """`out[row] = factor * sum(x[row])`, or of the squares."""
    row = tl.program_id(0)
    total = _sum_of_row(x + row.to(tl.int64) * stride, width, SQUARES, BLOCK)
    tl.store(out + row, total * factor)


@triton.jit
def rms_norm_kernel(x, weight, out, width, stride, eps, BLOCK: tl.constexpr):
    """Root-mean-square norm of a row."""
    row = tl.program_id(0).to(tl.int64)
    square = _sum_of_row(x + row * stride, width, True, BLOCK)
    scale = 1.0 / tl.sqrt(square / width + eps)
    at = tl.arange(0, BLOCK)
    for start in range(0, width, BLOCK):
        inside = start + at < width
        v = tl.load(x + row * stride + start + at, mask=inside, other=0.0).to(tl.float32)
        w = tl.load(weight + start + at, mask=inside, other=0.0).to(tl.float32)
        tl.store(
            out + row * width + start + at, (v * scale * w).to(out.dtype.element_ty), mask=inside
        )


@triton.jit
def log_softmax_kernel(x, out, width, stride, BLOCK: tl.constexpr):
    """Logarithm of the softmax of a row."""
    row = tl.program_id(0).to(tl.int64)
    at = tl.arange(0, BLOCK)
    top = tl.full((BLOCK,), float("-inf"), dtype=tl.float32)
    for start in range(0, width, BLOCK):
        inside = start + at < width
        v = tl.load(x + row * stride + start + at, mask=inside, other=float("-inf"))
        top = tl.maximum(top, v.to(tl.float32))
    largest = tl.max(top, 0)
    total = tl.zeros((BLOCK,), dtype=tl.float32)
    for start in range(0, width, BLOCK):
        inside = start + at < width
        v = tl.load(x + row * stride + start + at, mask=inside, other=float("-inf"))
        total += tl.exp(v.to(tl.float32) - largest)
    shift = largest + tl.log(tl.sum(total, 0))
    for start in range(0, width, BLOCK):
        inside = start + at < width
        v = tl.load(x + row * stride + start + at, mask=inside, other=0.0)
        tl.store(out + row * width + start + at, v.to(tl.float32) - shift, mask=inside)


@triton.jit(do_not_specialize=["num_tokens"])
def sinkhorn_kernel(
    scores, out, num_tokens, iterations, eps, n, BLOCK_N: tl.constexpr, BLOCK_T: tl.constexpr
):
    """Sinkhorn normalisation of [n, n] matrices; entries beyond n are zero throughout."""
    t = tl.program_id(0) * BLOCK_T + tl.arange(0, BLOCK_T)[:, None, None]
    i = tl.arange(0, BLOCK_N)[None, :, None]
    j = tl.arange(0, BLOCK_N)[None, None, :]
    entry = (i < n) & (j < n)
    inside = (t < num_tokens) & entry
    at = t.to(tl.int64) * n * n + i * n + j
    k = tl.load(scores + at, mask=inside, other=float("-inf"))
    top = tl.max(k, 2, keep_dims=True)
    # Rows that are not there hold nothing but -inf.
    k = tl.where(inside, tl.exp(k - tl.where(top > float("-inf"), top, 0.0)), 0.0)
    k = k / tl.maximum(tl.sum(k, 2, keep_dims=True), 1e-38)
    k = tl.where(entry, k + eps, 0.0)
    k = k / (tl.sum(k, 1, keep_dims=True) + eps)
    for _ in range(iterations - 1):
        k = k / (tl.sum(k, 2, keep_dims=True) + eps)
        k = k / (tl.sum(k, 1, keep_dims=True) + eps)
    tl.store(out + at, k, mask=inside)


@triton.jit
def mix_streams_kernel(
    streams,
    output,
    post,
    mix,
    out,
    channels,
    NUM_IN: tl.constexpr,
    NUM_OUT: tl.constexpr,
    ADDS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """`out[t, j] = post[t, j] * output[t] + sum_i mix[t, i, j] * streams[t, i]` for a piece of the channels.

    Without ADDS the first term falls away.
    """
    t = tl.program_id(0).to(tl.int64)
    c = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = c < channels
    for j in tl.static_range(NUM_OUT):
        if ADDS:
            added = tl.load(output + t * channels + c, mask=inside, other=0.0).to(tl.float32)
            total = tl.load(post + t * NUM_OUT + j) * added
        else:
            total = tl.zeros((BLOCK,), dtype=tl.float32)
        for i in tl.static_range(NUM_IN):
            share = tl.load(mix + (t * NUM_IN + i) * NUM_OUT + j)
            stream = tl.load(streams + (t * NUM_IN + i) * channels + c, mask=inside, other=0.0)
            total += share * stream.to(tl.float32)
        to = out + (t * NUM_OUT + j) * channels + c
        tl.store(to, total.to(out.dtype.element_ty), mask=inside)
