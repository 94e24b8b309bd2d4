"""Attention of tokens to rows picked by index, with a sink; one program a token and group of heads."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

__all__ = ["sparse_attention"]


@triton.jit
def _attend(
    q, table, index, width, offset, at_row, highest, total, acc, scale, DIM: tl.constexpr,
    BLOCK_DIM: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """Goes on over one list of rows."""
    d = tl.arange(0, BLOCK_DIM)
    for start in range(0, width, ROWS):
        at = start + tl.arange(0, ROWS)
        row = tl.load(index + at_row * width + at, mask=at < width, other=-1)
        kept = row >= 0
        row = tl.where(kept, row + offset, 0)
        mask = kept[:, None] & (d < DIM)[None, :]
        keys = tl.load(table + row[:, None] * DIM + d[None, :], mask=mask, other=0.0)
        logits = tl.dot(q, tl.trans(keys), input_precision="ieee") * scale
        logits = tl.where(kept[None, :], logits, -float("inf"))
        new = tl.maximum(highest, tl.max(logits, axis=1))
        shares = tl.exp(logits - new[:, None])
        fade = tl.exp(highest - new)
        total = total * fade + tl.sum(shares, axis=1)
        acc = acc * fade[:, None]
        if keys.dtype == tl.float32:
            acc = tl.dot(shares, keys, acc, input_precision="ieee")
        else:
            # Two halves keep sixteen bits of each share.
            high = shares.to(keys.dtype)
            acc = tl.dot(high, keys, acc)
            acc = tl.dot((shares - high.to(tl.float32)).to(keys.dtype), keys, acc)
        highest = new
    return highest, total, acc


@triton.jit
def _sparse_attention(
    queries, table, index, extra, sink, out, scale, width, more, offset, heads,
    DIM: tl.constexpr, BLOCK_DIM: tl.constexpr, HEADS: tl.constexpr, ROWS: tl.constexpr,
    HAS_EXTRA: tl.constexpr,
):  # fmt: skip
    token = tl.program_id(0).to(tl.int64)
    h = tl.program_id(1) * HEADS + tl.arange(0, HEADS)
    d = tl.arange(0, BLOCK_DIM)
    mask = (h < heads)[:, None] & (d < DIM)[None, :]
    at = (token * heads + h[:, None]) * DIM + d[None, :]
    q = tl.load(queries + at, mask=mask, other=0.0)
    # The sink is the first logit; its value is zero.
    highest = tl.maximum(tl.load(sink + h, mask=h < heads, other=0.0).to(tl.float32), -1e30)
    total = tl.zeros([HEADS], tl.float32) + 1.0
    acc = tl.zeros([HEADS, BLOCK_DIM], tl.float32)
    highest, total, acc = _attend(
        q, table, index, width, offset, token, highest, total, acc, scale, DIM, BLOCK_DIM, ROWS
    )
    if HAS_EXTRA:
        highest, total, acc = _attend(
            q, table, extra, more, 0, token, highest, total, acc, scale, DIM, BLOCK_DIM, ROWS
        )
    tl.store(out + at, (acc / total[:, None]).to(out.dtype.element_ty), mask=mask)


def sparse_attention(
    queries: Tensor,
    table: Tensor,
    index: Tensor,
    extra: Tensor | None,
    sink: Tensor,
    scale: float,
    *,
    offset: int = 0,
) -> Tensor:
    """Attention to picked rows; see `deepinfer.kernels.reference.rows.sparse_attention`."""
    tokens, heads, dim = queries.shape
    out = torch.empty_like(queries)
    if tokens:
        block_dim = max(16, triton.next_power_of_2(dim))
        block_heads = 16
        # Wider tiles of fp32 rows spill.
        rows = 32 if block_dim <= (64 if table.dtype == torch.float32 else 256) else 16
        _sparse_attention[(tokens, triton.cdiv(heads, block_heads))](
            queries, table, index, index if extra is None else extra, sink, out, scale,
            index.shape[1], 0 if extra is None else extra.shape[1], offset, heads, DIM=dim,
            BLOCK_DIM=block_dim, HEADS=block_heads, ROWS=rows,
            HAS_EXTRA=extra is not None, num_warps=4, num_stages=2,
        )  # fmt: skip
    return out
