"""Sparse MLA decode on every GPU that Triton has: records are decoded by integer operations, then multiplied."""

from __future__ import annotations

import triton
import triton.language as tl

__all__ = ["mla_decode_portable_kernel"]


@triton.jit
def _e8m0(e):
    """2^(e - 127), NaN for 255."""
    e = e.to(tl.int32)
    bits = tl.where(e == 0, 0x400000, e << 23)
    return tl.where(e == 255, 0x7FC00000, bits).to(tl.float32, bitcast=True)


@triton.jit
def _e4m3(c):
    """Values of e4m3 codes; NaN codes count as 480."""
    c = c.to(tl.int32)
    x = ((c & 127) << 20).to(tl.float32, bitcast=True) * 1329227995784915872903807060280344576.0
    return tl.where((c & 128) != 0, -x, x)


@triton.jit
def _e2m1(c):
    """Values of e2m1 codes."""
    x = ((c & 7) << 22).to(tl.float32, bitcast=True) * 85070591730234615865843651857942052864.0
    return tl.where((c & 8) != 0, -x, x)


@triton.jit
def _rows(
    cache, tails, slots, valid, page_bytes, FORM: tl.constexpr, PAGE: tl.constexpr, DIM: tl.constexpr, KEYS: tl.constexpr
):  # fmt: skip
    """Values of records, [KEYS, DIM], fp32; zeros where not valid."""
    page = slots // PAGE
    line = slots - page * PAGE
    page = page.to(tl.int64) * page_bytes
    mask = valid[:, None]
    if FORM == "V41_NVFP4":
        half = tl.arange(0, DIM // 2)
        group = tl.arange(0, DIM // 16)
        at = (page + line * (DIM // 2))[:, None] + half[None, :]
        c = tl.load(cache + at, mask=mask, other=0).to(tl.int32)
        x = tl.reshape(tl.join(_e2m1(c), _e2m1(c >> 4)), [KEYS, DIM])
        at = (page + PAGE * (DIM // 2) + line * (DIM // 16))[:, None] + group[None, :]
        c = tl.load(cache + at, mask=mask, other=0)
        s = tl.where((c & 127) == 127, float("nan"), _e4m3(c))
        s = tl.broadcast_to(s[:, :, None], [KEYS, DIM // 16, 16])
        return x * tl.reshape(s, [KEYS, DIM])
    d = tl.arange(0, DIM)
    if FORM == "V4_FP8":
        coded: tl.constexpr = DIM - 64
        at = (page + line * (DIM + 64))[:, None] + d[None, :]
        x = _e4m3(tl.load(cache + at, mask=mask & (d < coded)[None, :], other=0))
        group = tl.arange(0, DIM // 64)
        at = (page + PAGE * (DIM + 64) + line * (DIM // 64))[:, None] + group[None, :]
        s = _e8m0(tl.load(cache + at, mask=mask, other=127))
        s = tl.broadcast_to(s[:, :, None], [KEYS, DIM // 64, 64])
        x = tl.where((d < coded)[None, :], x * tl.reshape(s, [KEYS, DIM]), 0.0)
        at = (page + line * (DIM + 64) + coded)[:, None] // 2 + (d - coded)[None, :]
        t = tl.load(tails + at, mask=mask & (d >= coded)[None, :], other=0)
        t = (t.to(tl.int32) << 16).to(tl.float32, bitcast=True)
        return tl.where((d < coded)[None, :], x, t)
    group = tl.arange(0, DIM // 32)
    at = (page + line * DIM)[:, None] + d[None, :]
    x = _e4m3(tl.load(cache + at, mask=mask, other=0))
    at = (page + PAGE * DIM + line * (DIM // 32))[:, None] + group[None, :]
    s = _e8m0(tl.load(cache + at, mask=mask, other=127))
    s = tl.broadcast_to(s[:, :, None], [KEYS, DIM // 32, 32])
    return x * tl.reshape(s, [KEYS, DIM])


@triton.jit
def _attend(
    q, cache, tails, index, low, high, limit, page_bytes, scale, top, total, acc,
    FORM: tl.constexpr, PAGE: tl.constexpr, DIM: tl.constexpr, KEYS: tl.constexpr,
):  # fmt: skip
    """Adds the keys `low` to `high` of a list to a running softmax."""
    for start in range(low, high, KEYS):
        at = start + tl.arange(0, KEYS)
        slots = tl.load(index + at, mask=at < high, other=-1)
        valid = (slots >= 0) & (slots < limit)
        slots = tl.where(valid, slots, 0)
        k = _rows(cache, tails, slots, valid, page_bytes, FORM, PAGE, DIM, KEYS).to(q.dtype)
        s = tl.dot(q, tl.trans(k), input_precision="ieee") * scale
        s = tl.where(valid[None, :], s, -float("inf"))
        new = tl.maximum(top, tl.max(s, axis=1))
        p = tl.exp2(s - new[:, None])
        fade = tl.exp2(top - new)
        total = total * fade + tl.sum(p, axis=1)
        acc = tl.dot(p.to(k.dtype), k, acc * fade[:, None], input_precision="ieee")
        top = new
    return top, total, acc


@triton.jit(
    do_not_specialize=["entries", "splits", "part", "width", "extra_width", "limit", "extra_limit"]
)
def mla_decode_portable_kernel(
    q, cache, tails, index, lengths, extra_cache, extra_tails, extra_index, extra_lengths,
    out, lse, sink, phases, phase_index, entries,
    splits, part, heads, width, extra_width, limit, extra_limit, page_bytes, extra_page_bytes,
    stride_qt, stride_qh, stride_i, stride_e, stride_ot, stride_os, stride_oh, stride_lt, stride_ls, stride_lh, scale,
    FORM: tl.constexpr, PAGE: tl.constexpr, LENGTHS: tl.constexpr,
    EXTRA: tl.constexpr, EXTRA_FORM: tl.constexpr, EXTRA_PAGE: tl.constexpr, EXTRA_LENGTHS: tl.constexpr,
    SINK: tl.constexpr, ROTATED: tl.constexpr, INDEXED: tl.constexpr, PARTIAL: tl.constexpr,
    DIM: tl.constexpr, HEADS: tl.constexpr, KEYS: tl.constexpr,
):  # fmt: skip
    """Attention of a row, or of a part of `part` keys of its lists, one behind the other."""
    unit = tl.program_id(0)
    split = unit % splits
    row = (unit // splits).to(tl.int64)
    h = tl.program_id(1) * HEADS + tl.arange(0, HEADS)
    d = tl.arange(0, DIM)
    inside = h < heads
    at = q + row * stride_qt + (h * stride_qh)[:, None] + d[None, :]
    queries = tl.load(at, mask=inside[:, None], other=0.0)
    top = tl.full([HEADS], -1e30, tl.float32)
    total = tl.zeros([HEADS], tl.float32)
    acc = tl.zeros([HEADS, DIM], tl.float32)
    low = split * part
    high = low + part
    count = width
    if LENGTHS:
        count = tl.minimum(count, tl.load(lengths + row))
    top, total, acc = _attend(
        queries, cache, tails, index + row * stride_i, low, tl.minimum(high, count), limit, page_bytes, scale,
        top, total, acc, FORM, PAGE, DIM, KEYS,
    )  # fmt: skip
    if EXTRA:
        begin = tl.cdiv(width, 64) * 64
        count = extra_width
        if EXTRA_LENGTHS:
            count = tl.minimum(count, tl.load(extra_lengths + row))
        top, total, acc = _attend(
            queries, extra_cache, extra_tails, extra_index + row * stride_e, tl.maximum(low - begin, 0),
            tl.minimum(high - begin, count), extra_limit, extra_page_bytes, scale,
            top, total, acc, EXTRA_FORM, EXTRA_PAGE, DIM, KEYS,
        )  # fmt: skip
    live = total != 0  # NaN is no absence of keys
    total = tl.where(live, total, 1.0)
    log = top + tl.log2(total)
    weight = tl.where(live, 1.0 / total, 0.0)
    if SINK:
        x = tl.load(sink + h, mask=inside, other=0.0) * 1.4426950408889634
        weight = weight / (1.0 + tl.exp2(x - log))
    acc = acc * weight[:, None]
    if ROTATED > 0:
        entry = row
        if INDEXED:
            entry = tl.load(phase_index + row).to(tl.int64)
        pair = tl.arange(0, DIM // 2) - (DIM - ROTATED) // 2
        # A row of an entry that is none is not turned.
        turned = (pair >= 0) & (entry >= 0) & (entry < entries)
        at = phases + entry * ROTATED + 2 * pair
        cos = tl.load(at, mask=turned, other=1.0)[None, :]
        sin = tl.load(at + 1, mask=turned, other=0.0)[None, :]
        even, odd = tl.split(tl.reshape(acc, [HEADS, DIM // 2, 2]))
        acc = tl.reshape(tl.join(even * cos + odd * sin, odd * cos - even * sin), [HEADS, DIM])
    at = out + row * stride_ot + split * stride_os + (h * stride_oh)[:, None] + d[None, :]
    tl.store(at, acc.to(out.dtype.element_ty), mask=inside[:, None])
    bare: tl.constexpr = -float("inf") if PARTIAL else float("inf")
    y = tl.where(live, log * 0.6931471805599453, bare)
    tl.store(lse + row * stride_lt + split * stride_ls + h * stride_lh, y, mask=inside)
