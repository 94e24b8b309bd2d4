"""Attention over index lists and index scores in Triton: a token by itself, keys in fixed tiles from first to last."""

from __future__ import annotations

import triton
import triton.language as tl

__all__ = ["index_scores_kernel", "sparse_attention_kernel"]


@triton.jit
def sparse_attention_kernel(
    queries,
    kv,
    index,
    valid,
    sink,
    out,
    num_heads,
    rows,
    scale,
    stride_qt,
    stride_qh,
    stride_kv,
    DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_H: tl.constexpr,
    BLOCK_R: tl.constexpr,
):
    """A block of heads of one token over its list of rows; the sink starts the running softmax."""
    t = tl.program_id(0).to(tl.int64)
    h = tl.program_id(1) * BLOCK_H + tl.arange(0, BLOCK_H)
    d = tl.arange(0, BLOCK_D)
    there = h < num_heads
    in_query = there[:, None] & (d < DIM)[None, :]
    q = tl.load(
        queries + t * stride_qt + h[:, None] * stride_qh + d[None, :], mask=in_query, other=0.0
    )
    start_logit = tl.load(sink + h, mask=there, other=0.0).to(tl.float32)
    top = tl.maximum(start_logit, -1e30)
    total = tl.exp(start_logit - top)
    acc = tl.zeros((BLOCK_H, BLOCK_D), dtype=tl.float32)
    for start in range(0, rows, BLOCK_R):
        r = start + tl.arange(0, BLOCK_R)
        inside = r < rows
        keep = tl.load(valid + t * rows + r, mask=inside, other=0) != 0
        at = tl.load(index + t * rows + r, mask=keep, other=0)
        in_key = keep[:, None] & (d < DIM)[None, :]
        keys = tl.load(
            kv + at.to(tl.int64)[:, None] * stride_kv + d[None, :], mask=in_key, other=0.0
        )
        logits = tl.dot(q, tl.trans(keys), input_precision="ieee") * scale
        logits = tl.where(keep[None, :], logits, float("-inf"))
        new_top = tl.maximum(top, tl.max(logits, 1))
        shrink = tl.exp(top - new_top)
        shares = tl.exp(logits - new_top[:, None])
        total = total * shrink + tl.sum(shares, 1)
        acc = acc * shrink[:, None]
        acc = tl.dot(shares.to(keys.dtype), keys, acc, input_precision="ieee")
        top = new_top
    acc = acc / tl.where(total > 0, total, 1.0)[:, None]
    to = out + (t * num_heads + h)[:, None] * DIM + d[None, :]
    tl.store(to, acc.to(out.dtype.element_ty), mask=in_query)


@triton.jit(do_not_specialize=["tokens", "rows"])
def index_scores_kernel(
    queries,
    weights,
    keys,
    visible,
    out,
    tokens,
    rows,
    num_heads,
    stride_kg,
    stride_kr,
    DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_H: tl.constexpr,
    BLOCK_R: tl.constexpr,
    TILES: tl.constexpr,
    HAS_VISIBLE: tl.constexpr,
):
    """Scores of one query for a few tiles of keys, -inf from the rows that are visible on."""
    group = tl.program_id(2).to(tl.int64)
    t = group * tokens + tl.program_id(0)
    h = tl.arange(0, BLOCK_H)
    d = tl.arange(0, BLOCK_D)
    there = h < num_heads
    in_query = there[:, None] & (d < DIM)[None, :]
    q = tl.load(queries + (t * num_heads + h)[:, None] * DIM + d[None, :], mask=in_query, other=0.0)
    w = tl.load(weights + t * num_heads + h, mask=there, other=0.0)
    for tile in range(TILES):
        r = (tl.program_id(1) * TILES + tile) * BLOCK_R + tl.arange(0, BLOCK_R)
        in_keys = (r < rows)[:, None] & (d < DIM)[None, :]
        at = keys + group * stride_kg + r.to(tl.int64)[:, None] * stride_kr + d[None, :]
        k = tl.load(at, mask=in_keys, other=0.0)
        dots = tl.maximum(tl.dot(q, tl.trans(k), input_precision="ieee"), 0.0)
        score = tl.sum(dots * w[:, None], 0)
        if HAS_VISIBLE:
            score = tl.where(r < tl.load(visible + t), score, float("-inf"))
        tl.store(out + t * rows + r, score, mask=r < rows)
