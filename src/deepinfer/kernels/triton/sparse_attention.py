"""Attention of tokens to rows picked by index, with a sink.

Rows are taken in parts of a fixed size, each with a softmax of its own, and parts are merged from first to last: by one
program a token and group of heads, or, for few tokens with wide heads, by one a part and a second launch. The sums are
the same.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

__all__ = ["sparse_attention"]

_PART = 128
_MOST_APART = 132  # programs a part up to which parts run side by side


@triton.jit
def _attend(
    q, table, index, first, width, offset, scale, DIM: tl.constexpr, BLOCK_DIM: tl.constexpr,
    HEADS: tl.constexpr, ROWS: tl.constexpr, PART: tl.constexpr,
):  # fmt: skip
    """Highest logit, sum of shares and weighted sum over the rows of one part of a list."""
    d = tl.arange(0, BLOCK_DIM)
    highest = tl.zeros([HEADS], tl.float32) - 1e30
    total = tl.zeros([HEADS], tl.float32)
    acc = tl.zeros([HEADS, BLOCK_DIM], tl.float32)
    for start in range(first, tl.minimum(first + PART, width), ROWS):
        at = start + tl.arange(0, ROWS)
        row = tl.load(index + at, mask=at < width, other=-1)
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
def _merge(highest, total, more_highest, more_total):
    """Highest logit and sum of shares of two parts, and the factors of their weighted sums."""
    new = tl.maximum(highest, more_highest)
    fade, share = tl.exp(highest - new), tl.exp(more_highest - new)
    # Named, so that no compiler chooses which product is rounded.
    return new, tl.fma(total, fade, more_total * share), fade, share


@triton.jit
def _queries(queries, token, h, heads, DIM: tl.constexpr, BLOCK_DIM: tl.constexpr):
    d = tl.arange(0, BLOCK_DIM)
    mask = (h < heads)[:, None] & (d < DIM)[None, :]
    return tl.load(queries + (token * heads + h[:, None]) * DIM + d[None, :], mask=mask, other=0.0)


@triton.jit
def _sparse_attention(
    queries, table, index, extra, sink, out, scale, width, more, offset, heads,
    DIM: tl.constexpr, BLOCK_DIM: tl.constexpr, HEADS: tl.constexpr, ROWS: tl.constexpr,
    PART: tl.constexpr,
):  # fmt: skip
    token = tl.program_id(0).to(tl.int64)
    h = tl.program_id(1) * HEADS + tl.arange(0, HEADS)
    d = tl.arange(0, BLOCK_DIM)
    q = _queries(queries, token, h, heads, DIM, BLOCK_DIM)
    # The sink is the first logit; its value is zero.
    highest = tl.maximum(tl.load(sink + h, mask=h < heads, other=0.0).to(tl.float32), -1e30)
    total = tl.zeros([HEADS], tl.float32) + 1.0
    acc = tl.zeros([HEADS, BLOCK_DIM], tl.float32)
    parts, more_parts = tl.cdiv(width, PART), tl.cdiv(more, PART)
    for part in range(parts + more_parts):
        is_first = part < parts
        rows = tl.where(is_first, index + token * width, extra + token * more)
        found_highest, found_total, found = _attend(
            q, table, rows, (part if is_first else part - parts) * PART,
            width if is_first else more, offset if is_first else 0, scale,
            DIM, BLOCK_DIM, HEADS, ROWS, PART,
        )  # fmt: skip
        highest, total, fade, share = _merge(highest, total, found_highest, found_total)
        acc = tl.fma(acc, tl.broadcast_to(fade[:, None], acc.shape), found * share[:, None])
    mask = (h < heads)[:, None] & (d < DIM)[None, :]
    at = (token * heads + h[:, None]) * DIM + d[None, :]
    tl.store(out + at, (acc / total[:, None]).to(out.dtype.element_ty), mask=mask)


@triton.jit
def _attend_parts(
    queries, table, index, extra, states, sums, scale, width, more, offset, heads,
    DIM: tl.constexpr, BLOCK_DIM: tl.constexpr, HEADS: tl.constexpr, ROWS: tl.constexpr,
    PART: tl.constexpr,
):  # fmt: skip
    """One part: its highest logit and sum of shares to `states`, its weighted sum to `sums`."""
    token = tl.program_id(0).to(tl.int64)
    h = tl.program_id(1) * HEADS + tl.arange(0, HEADS)
    d = tl.arange(0, BLOCK_DIM)
    part, parts = tl.program_id(2), tl.cdiv(width, PART)
    is_first = part < parts
    q = _queries(queries, token, h, heads, DIM, BLOCK_DIM)
    rows = tl.where(is_first, index + token * width, extra + token * more)
    highest, total, acc = _attend(
        q, table, rows, (part if is_first else part - parts) * PART,
        width if is_first else more, offset if is_first else 0, scale,
        DIM, BLOCK_DIM, HEADS, ROWS, PART,
    )  # fmt: skip
    at = (token * tl.num_programs(2) + part) * heads + h
    tl.store(states + 2 * at, highest, mask=h < heads)
    tl.store(states + 2 * at + 1, total, mask=h < heads)
    mask = (h < heads)[:, None] & (d < DIM)[None, :]
    tl.store(sums + at[:, None] * DIM + d[None, :], acc, mask=mask)


@triton.jit
def _merge_parts(states, sums, sink, out, parts, heads, DIM: tl.constexpr, BLOCK_DIM: tl.constexpr):
    """Merges the parts of one head of a token."""
    token, h = tl.program_id(0).to(tl.int64), tl.program_id(1)
    d = tl.arange(0, BLOCK_DIM)
    highest = tl.maximum(tl.load(sink + h).to(tl.float32), -1e30)
    total = highest * 0.0 + 1.0
    acc = tl.zeros([BLOCK_DIM], tl.float32)
    for part in range(parts):
        at = (token * parts + part) * heads + h
        highest, total, fade, share = _merge(
            highest, total, tl.load(states + 2 * at), tl.load(states + 2 * at + 1)
        )
        found = tl.load(sums + at * DIM + d, mask=d < DIM, other=0.0)
        acc = tl.fma(acc, tl.broadcast_to(fade, acc.shape), found * share)
    to = out + (token * heads + h) * DIM + d
    tl.store(to, (acc / total).to(out.dtype.element_ty), mask=d < DIM)


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
    """Attention to picked rows; see `deepinfer.kernels.reference.rows.sparse_attention`.

    A token's bits depend on its lists, their order and widths alone.
    """
    tokens, heads, dim = queries.shape
    out = torch.empty_like(queries)
    if not tokens:
        return out
    block_dim = max(16, triton.next_power_of_2(dim))
    is_narrow = table.dtype != torch.float32
    block_heads = 32 if block_dim >= 256 and is_narrow and heads >= 32 else 16
    # Wider tiles of fp32 rows spill.
    rows = 32 if block_dim <= 64 or is_narrow else 16
    widths = index.shape[1], 0 if extra is None else extra.shape[1]
    parts = sum(triton.cdiv(width, _PART) for width in widths)
    tiles = {
        "DIM": dim, "BLOCK_DIM": block_dim, "HEADS": block_heads, "ROWS": rows, "PART": _PART,
        "num_warps": 8 if block_dim >= 256 else 4, "num_stages": 2,
    }  # fmt: skip
    grid = tokens, triton.cdiv(heads, block_heads)
    lists = index, index if extra is None else extra
    if block_dim < 256 or parts < 2 or grid[0] * grid[1] > _MOST_APART:
        _sparse_attention[grid](
            queries, table, *lists, sink, out, scale, *widths, offset, heads, **tiles
        )
        return out
    states = torch.empty(tokens, parts, heads, 2, dtype=torch.float32, device=out.device)
    sums = torch.empty(tokens, parts, heads, dim, dtype=torch.float32, device=out.device)
    _attend_parts[(*grid, parts)](
        queries, table, *lists, states, sums, scale, *widths, offset, heads, **tiles
    )
    _merge_parts[(tokens, heads)](
        states, sums, sink, out, parts, heads, DIM=dim, BLOCK_DIM=block_dim, num_warps=4
    )
    return out
