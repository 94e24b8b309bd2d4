"""Tokens and their scales in the order in which the products of few tokens with MXFP4 weights read them."""

from __future__ import annotations

import triton
import triton.language as tl

__all__ = ["arrange_tokens_kernel"]


@triton.jit(do_not_specialize=["max_m"])
def arrange_tokens_kernel(
    x,
    scale,
    counts,
    x_out,
    scale_out,
    max_m,
    K,
    stride_xg,
    stride_xm,
    stride_sg,
    stride_sm,
    stride_sk,
    out_rows,
    FACTOR: tl.constexpr,
    COUNTED: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """One token: of each 32 channels the even ones come first; its scales lie token by token, times a factor."""
    m = tl.program_id(0)
    g = tl.program_id(1).to(tl.int64)
    rows = max_m
    if COUNTED:
        rows = tl.load(counts + g)
    if m < rows:
        blocks = tl.cdiv(K, 128)
        b = tl.arange(0, BLOCK)
        s = tl.load(
            scale + g * stride_sg + m.to(tl.int64) * stride_sm + b * stride_sk,
            mask=b < blocks,
            other=0.0,
        )
        tl.store(scale_out + (g * blocks + b) * out_rows + m, s * FACTOR, mask=b < blocks)
        at = tl.arange(0, 64 * BLOCK)
        pairs = tl.load(
            x + g * stride_xg + m.to(tl.int64) * stride_xm + at, mask=at < K // 2, other=0
        )
        even = (pairs & 255).to(tl.uint8)
        odd = ((pairs >> 8) & 255).to(tl.uint8)
        both = (
            tl.join(even.reshape(4 * BLOCK, 16), odd.reshape(4 * BLOCK, 16))
            .permute(0, 2, 1)
            .reshape(128 * BLOCK)
        )
        to = tl.arange(0, 128 * BLOCK)
        tl.store(x_out + (g * max_m + m) * K + to, both, mask=to < K)
