"""Matrix products in Triton whose elements are summed in one order, whatever the number of rows.

The weight is the left operand of every tile and the tokens are the right one, for few tokens as for many: one family
of tensor core instructions, which walks the inner axis in steps of 16, serves all of them. The inner axis of thin
weights is cut into parts that hang on the weight's shape and are added from first to last: by programs side by side
for few tokens, by one program in turn for many, with the same sums. Products in fp32 are three products in tf32 of
the leading and the following bits.
"""

from __future__ import annotations

import triton
import triton.language as tl

__all__ = ["expert_linear_kernel", "linear_kernel", "pair_linear_kernel", "sum_parts_kernel"]


@triton.jit
def _product(
    x_rows,
    w_rows,
    first_k,
    end_k,
    BLOCK_K: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    EVEN_K: tl.constexpr,
    NUM_STAGES: tl.constexpr,
):
    """Products of a tile of weight rows with a tile of tokens, [BLOCK_N, BLOCK_M] fp32, over [first_k, end_k)."""
    k = tl.arange(0, BLOCK_K)
    acc = tl.zeros((BLOCK_N, BLOCK_M), dtype=tl.float32)
    for start in tl.range(first_k, end_k, BLOCK_K, num_stages=NUM_STAGES):
        if EVEN_K:
            w = tl.load(w_rows[:, None] + (start + k)[None, :])
            x = tl.load(x_rows[None, :] + (start + k)[:, None])
        else:
            inside = start + k < end_k
            w = tl.load(w_rows[:, None] + (start + k)[None, :], mask=inside[None, :], other=0.0)
            x = tl.load(x_rows[None, :] + (start + k)[:, None], mask=inside[:, None], other=0.0)
        acc = tl.dot(w, x, acc, input_precision="tf32x3")
    return acc


@triton.jit(do_not_specialize=["num_tokens"])
def linear_kernel(
    x,
    weight,
    out,
    num_tokens,
    N,
    K,
    stride_xm,
    stride_xg,
    stride_wg,
    stride_wn,
    stride_om,
    stride_og,
    stride_os,
    PART_K: tl.constexpr,
    IN_TURN: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    EVEN_K: tl.constexpr,
    GROUP: tl.constexpr,
    NUM_STAGES: tl.constexpr,
):
    """One tile of `out[part, m, g, n] = sum over the part of k of x[m, g, k] * weight[g, n, k]`.

    With IN_TURN above 1, a program adds up so many parts itself.
    """
    tiles_m = tl.cdiv(num_tokens, BLOCK_M)
    tiles_n = tl.cdiv(N, BLOCK_N)
    pid, g, part = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    # A few tiles of tokens stay in the cache while all the weights pass by.
    width = GROUP * tiles_n
    first_m = (pid // width) * GROUP
    size_m = min(tiles_m - first_m, GROUP)
    tile_m = first_m + (pid % width) % size_m
    tile_n = (pid % width) // size_m
    m = tile_m * BLOCK_M + tl.arange(0, BLOCK_M)
    n = tile_n * BLOCK_N + tl.arange(0, BLOCK_N)
    x_rows = x + tl.minimum(m, num_tokens - 1).to(tl.int64) * stride_xm + g * stride_xg
    w_rows = weight + tl.minimum(n, N - 1).to(tl.int64) * stride_wn + g.to(tl.int64) * stride_wg
    first_k = part * PART_K
    end_k = tl.minimum(first_k + PART_K, K)
    acc = _product(x_rows, w_rows, first_k, end_k, BLOCK_K, BLOCK_M, BLOCK_N, EVEN_K, NUM_STAGES)
    if IN_TURN > 1:
        for other in range(1, IN_TURN):
            first_k = other * PART_K
            end_k = tl.minimum(first_k + PART_K, K)
            acc += _product(
                x_rows, w_rows, first_k, end_k, BLOCK_K, BLOCK_M, BLOCK_N, EVEN_K, NUM_STAGES
            )
    to = out + m.to(tl.int64)[:, None] * stride_om + n[None, :] + g * stride_og
    to += part.to(tl.int64) * stride_os
    inside = (m < num_tokens)[:, None] & (n < N)[None, :]
    tl.store(to, tl.trans(acc).to(out.dtype.element_ty), mask=inside)


@triton.jit
def expert_linear_kernel(
    x,
    weight,
    out,
    counts,
    num_experts,
    N,
    K,
    stride_xm,
    stride_we,
    stride_wn,
    stride_om,
    BLOCK_E: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    EVEN_K: tl.constexpr,
    NUM_STAGES: tl.constexpr,
):
    """One tile of one expert's rows; each expert's rows are tiled from its first one."""
    tile = tl.program_id(1)
    ids = tl.arange(0, BLOCK_E)
    rows = tl.load(counts + ids, mask=ids < num_experts, other=0)
    tiles = (rows + BLOCK_M - 1) // BLOCK_M
    ends = tl.cumsum(tiles, 0)
    expert = tl.sum((ends <= tile).to(tl.int32), 0)
    if expert < num_experts:
        before = ids < expert
        first = tl.sum(tl.where(before, rows, 0), 0)
        first_tile = tl.sum(tl.where(before, tiles, 0), 0)
        end = first + tl.sum(tl.where(ids == expert, rows, 0), 0)
        m = first + (tile - first_tile) * BLOCK_M + tl.arange(0, BLOCK_M)
        n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
        x_rows = x + tl.minimum(m, end - 1).to(tl.int64) * stride_xm
        w_rows = weight + tl.minimum(n, N - 1).to(tl.int64) * stride_wn
        w_rows += expert.to(tl.int64) * stride_we
        acc = _product(x_rows, w_rows, 0, K, BLOCK_K, BLOCK_M, BLOCK_N, EVEN_K, NUM_STAGES)
        to = out + m.to(tl.int64)[:, None] * stride_om + n[None, :]
        inside = (m < end)[:, None] & (n < N)[None, :]
        tl.store(to, tl.trans(acc).to(out.dtype.element_ty), mask=inside)


@triton.jit(do_not_specialize=["num_pairs"])
def pair_linear_kernel(
    x,
    weight,
    out,
    places,
    tile_experts,
    num_pairs,
    N,
    K,
    stride_xm,
    stride_we,
    stride_wn,
    stride_om,
    PER_INPUT: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    EVEN_K: tl.constexpr,
    NUM_STAGES: tl.constexpr,
):
    """One tile of pairs of one expert, read from their tokens' rows and written to the pairs' own."""
    tile = tl.program_id(1)
    expert = tl.load(tile_experts + tile)
    if expert >= 0:
        pair = tl.load(places + tile * BLOCK_M + tl.arange(0, BLOCK_M)).to(tl.int64)
        used = pair < num_pairs
        n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
        x_rows = x + tl.where(used, pair // PER_INPUT, 0) * stride_xm
        w_rows = weight + tl.minimum(n, N - 1).to(tl.int64) * stride_wn
        w_rows += expert.to(tl.int64) * stride_we
        acc = _product(x_rows, w_rows, 0, K, BLOCK_K, BLOCK_M, BLOCK_N, EVEN_K, NUM_STAGES)
        to = out + pair[:, None] * stride_om + n[None, :]
        inside = used[:, None] & (n < N)[None, :]
        tl.store(to, tl.trans(acc).to(out.dtype.element_ty), mask=inside)


@triton.jit(do_not_specialize=["size"])
def sum_parts_kernel(parts, out, size, NUM_PARTS: tl.constexpr, BLOCK: tl.constexpr):
    """`out[i] = parts[0, i] + parts[1, i] + ...`, in this order."""
    i = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = i < size
    total = tl.load(parts + i, mask=inside, other=0.0)
    for part in range(1, NUM_PARTS):
        total += tl.load(parts + part * size.to(tl.int64) + i, mask=inside, other=0.0)
    tl.store(out + i, total.to(out.dtype.element_ty), mask=inside)
