"""Index scores of a few queries a request over a paged cache of keys: e4m3 with one scale, or MXFP4 as it lies."""

from __future__ import annotations

import triton
import triton.language as tl

from deepinfer.kernels.triton.cache_codes import decode_e2m1, decode_e4m3, decode_e8m0

__all__ = ["paged_scores_kernel"]


@triton.jit
def _wide_e4m3(code):
    """Bytes of e4m3 to fp16, where the chip has no e4m3."""
    return decode_e4m3(code, False).to(tl.float16)


@triton.jit
def _products(rows, scales, q, read, D: tl.constexpr, FP4: tl.constexpr, NATIVE: tl.constexpr):
    """Products of keys with queries, shape [keys, columns], fp32; `q` has shape [D, columns], or its four groups."""
    if FP4:
        h = tl.arange(0, 16)[None, :]
        acc = tl.zeros((rows.shape[0], q[0].shape[1]), tl.float32)
        for g in tl.static_range(D // 32):
            code = tl.load(rows + (16 * g + h), mask=read, other=0)
            if NATIVE:
                # The bits of a code, moved apart, are those of e4m3, times 2^-6.
                low = ((code & 7) << 2) | ((code & 8) << 4)
                high = ((code >> 2) & 0x1C) | (code & 0x80)
                both = tl.join(low, high).to(tl.float8e4nv, bitcast=True)
            else:
                wide = code.to(tl.int32)
                both = tl.join(decode_e2m1(wide & 15), decode_e2m1(wide >> 4)) * 0.015625
                both = both.to(tl.float16)
            both = both.reshape(rows.shape[0], 32)
            byte = tl.load(scales + g, mask=read, other=127).to(tl.int32)
            acc += tl.dot(both, q[g]) * (decode_e8m0(byte) * 64.0)
    else:
        c = tl.arange(0, D)[None, :]
        if NATIVE:
            # Loaded as what the product takes, so that the copies run ahead.
            keys = tl.load(rows.to(tl.pointer_type(tl.float8e4nv)) + c, mask=read, other=0.0)
        else:
            keys = _wide_e4m3(tl.load(rows + c, mask=read, other=0))
        acc = tl.dot(keys, q[0])
        acc *= tl.load(scales.to(tl.pointer_type(tl.float32)), mask=read, other=0.0)
    return acc


@triton.jit
def _queries(q, D: tl.constexpr, FIRST: tl.constexpr, COUNT: tl.constexpr, COLUMNS: tl.constexpr, used, NATIVE: tl.constexpr):  # fmt: skip
    """Queries as the right operand, channels FIRST and the COUNT - 1 behind it: shape [COUNT, COLUMNS]."""
    n = tl.arange(0, COLUMNS)[None, :]
    c = FIRST + tl.arange(0, COUNT)[:, None]
    code = tl.load(q + n * D + c, mask=n < used, other=0)
    return code.to(tl.float8e4nv, bitcast=True) if NATIVE else _wide_e4m3(code)


@triton.jit(do_not_specialize=["most", "num_pages"])
def paged_scores_kernel(
    q, cache, weights, lengths, table, meta, out, next_n, most, num_pages, stride_page, stride_w, stride_table, stride_out,
    HEADS: tl.constexpr, D: tl.constexpr, NEXT: tl.constexpr, PAGE: tl.constexpr, FP4: tl.constexpr,
    NATIVE: tl.constexpr, SPLIT: tl.constexpr, BLOCK: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """One program from one place of the work list to the next; a place is a request and a split of its keys."""
    COLUMNS: tl.constexpr = NEXT * HEADS
    ROW: tl.constexpr = D // 2 if FP4 else D
    at = meta + tl.program_id(0) * 2
    b = tl.load(at)
    split = tl.load(at + 1)
    last_b = tl.load(at + 2)
    last_split = tl.load(at + 3)
    n = tl.arange(0, COLUMNS)
    j = tl.arange(0, NEXT)
    while (b < last_b) | ((b == last_b) & (split < last_split)):
        request = b.to(tl.int64)
        ends = tl.load(lengths + request * next_n + j, mask=j < next_n, other=0)
        # Neither columns nor pages behind the last ones are touched, whatever the lengths say.
        ends = tl.minimum(ends, most)
        length = tl.max(ends, 0)
        stop = length
        if b == last_b:
            stop = tl.minimum(length, last_split * SPLIT)
        mine = q + request * next_n * (HEADS * D)
        used = next_n * HEADS
        if FP4:
            operand = (
                _queries(mine, D, 0, 32, COLUMNS, used, NATIVE), _queries(mine, D, 32, 32, COLUMNS, used, NATIVE),
                _queries(mine, D, 64, 32, COLUMNS, used, NATIVE), _queries(mine, D, 96, 32, COLUMNS, used, NATIVE),
            )  # fmt: skip
        else:
            operand = (_queries(mine, D, 0, D, COLUMNS, used, NATIVE),)
        w = tl.load(
            weights + (request * next_n + n // HEADS) * stride_w + n % HEADS,
            mask=n < used, other=0.0,
        )  # fmt: skip
        to = out + (request * next_n + j) * stride_out
        pages = table + request * stride_table
        for start in tl.range(split * SPLIT, stop, BLOCK, num_stages=STAGES):
            key = start + tl.arange(0, BLOCK)
            inside = key < stop
            page = tl.load(pages + key // PAGE, mask=inside, other=-1).to(tl.int64)
            # A page behind the cache is none, as one below 0.
            page = tl.where(page < num_pages, page, -1)
            read = (inside & (page >= 0))[:, None]
            base = cache + tl.maximum(page, 0) * stride_page
            rows = (base + key % PAGE * ROW)[:, None]
            scales = (base + (PAGE * ROW + key % PAGE * 4))[:, None]
            acc = _products(rows, scales, operand, read, D, FP4, NATIVE)
            y = tl.maximum(acc, 0.0) * w[None, :]
            y = tl.sum(tl.reshape(y, (BLOCK, NEXT, HEADS)), 2)
            y = tl.where((key[:, None] < ends[None, :]) & read, y, float("-inf"))
            live = inside[:, None] & (j < next_n)[None, :]
            tl.store(to[None, :] + key[:, None], y.to(out.dtype.element_ty), mask=live)
        b += 1
        split = 0
