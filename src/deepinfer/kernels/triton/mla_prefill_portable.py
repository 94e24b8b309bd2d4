"""Attention of query rows to keys picked by index or to a band of keys, for every chip.

A program takes one row and a block of heads. Keys come in tiles from the beginning of each list, with the running
maximum and sum of an online softmax.
"""

from __future__ import annotations

import triton
import triton.language as tl

__all__ = ["mla_prefill_portable_kernel"]


@triton.jit
def _attend_list(
    highest, total, acc, q, q_tail, kv, index, begin, length, keys, stride_kv, scale, d, d_v,
    BAND: tl.constexpr, HEADS: tl.constexpr, TILE: tl.constexpr, VALUES: tl.constexpr, TAIL: tl.constexpr,
):  # fmt: skip
    """Goes on with the keys of one list."""
    c = tl.arange(0, VALUES)
    for first in range(0, length, TILE):
        at = first + tl.arange(0, TILE)
        if BAND:  # noqa: SIM108 - the compiler takes it as a constant
            key = begin + at
        else:
            key = tl.load(index + at, mask=at < length, other=-1)
        valid = (at < length) & (key >= 0) & (key < keys)
        row = kv + tl.where(valid, key, 0).to(tl.int64) * stride_kv
        x = tl.load(row[:, None] + c[None, :], mask=valid[:, None] & (c < d_v)[None, :], other=0.0)
        logits = tl.dot(q, tl.trans(x), input_precision="ieee")
        if TAIL:
            e = tl.arange(0, TAIL)
            mask = valid[:, None] & (d_v + e < d)[None, :]
            y = tl.load(row[:, None] + (d_v + e)[None, :], mask=mask, other=0.0)
            logits = tl.dot(q_tail, tl.trans(y), logits, input_precision="ieee")
        logits = tl.where(valid[None, :], logits * scale, float("-inf"))
        new = tl.maximum(highest, tl.max(logits, axis=1))
        origin = tl.where(new == float("-inf"), 0.0, new)
        fade = tl.exp2(highest - origin)
        shares = tl.exp2(logits - origin[:, None])
        total = total * fade + tl.sum(shares, axis=1)
        acc = acc * fade[:, None]
        acc = tl.dot(shares.to(x.dtype), x, acc, input_precision="ieee")
        highest = new
    return highest, total, acc


@triton.jit(do_not_specialize=["s_kv", "s_extra", "width", "extra_width"])
def mla_prefill_portable_kernel(
    q, kv, indices, lengths, extra_kv, extra_indices, extra_lengths, sink, phases, out, max_logits, lse,
    heads, s_kv, s_extra, width, extra_width, scale, d, d_v, pairs,
    stride_qt, stride_qh, stride_kv, stride_extra, stride_i, stride_ei, stride_ot, stride_oh,
    BAND: tl.constexpr, COUNTED: tl.constexpr, EXTRA: tl.constexpr, EXTRA_COUNTED: tl.constexpr,
    SINK: tl.constexpr, ROPE: tl.constexpr, HEADS: tl.constexpr, TILE: tl.constexpr, VALUES: tl.constexpr,
    TAIL: tl.constexpr,
):  # fmt: skip
    """Attention of a block of heads to the keys that a query row picks; the first channels of a key are its value."""
    row = tl.program_id(0).to(tl.int64)
    h = tl.program_id(1) * HEADS + tl.arange(0, HEADS)
    c = tl.arange(0, VALUES)
    from_q = q + row * stride_qt + h[:, None].to(tl.int64) * stride_qh
    x = tl.load(from_q + c[None, :], mask=(h < heads)[:, None] & (c < d_v)[None, :], other=0.0)
    tail = x
    if TAIL:
        e = d_v + tl.arange(0, TAIL)
        tail = tl.load(from_q + e[None, :], mask=(h < heads)[:, None] & (e < d)[None, :], other=0.0)
    highest = tl.full([HEADS], float("-inf"), tl.float32)
    total = tl.zeros([HEADS], tl.float32)
    acc = tl.zeros([HEADS, VALUES], tl.float32)
    length = width
    if COUNTED:
        length = tl.minimum(tl.load(lengths + row), width)
    begin = 0
    index = indices + row * stride_i
    if BAND:
        begin = tl.load(indices + row)
    highest, total, acc = _attend_list(
        highest, total, acc, x, tail, kv, index, begin, length, s_kv, stride_kv, scale, d, d_v,
        BAND, HEADS, TILE, VALUES, TAIL,
    )  # fmt: skip
    if EXTRA:
        length = extra_width
        if EXTRA_COUNTED:
            length = tl.minimum(tl.load(extra_lengths + row), extra_width)
        highest, total, acc = _attend_list(
            highest, total, acc, x, tail, extra_kv, extra_indices + row * stride_ei, 0, length, s_extra,
            stride_extra, scale, d, d_v, False, HEADS, TILE, VALUES, TAIL,
        )  # fmt: skip
    origin = tl.where(highest == float("-inf"), 0.0, highest)
    nothing = total == 0.0
    whole = tl.where(nothing, 1.0, total)
    factor = 1.0 / whole
    if SINK:
        # Far above all logits it leaves nothing; neither it nor its share may overflow.
        share = tl.clamp(tl.load(sink + h, mask=h < heads, other=0.0), -1e37, 1e37)
        share = share * 1.4426950408889634 - origin
        factor = tl.where(share > 126.0, 0.0, 1.0 / (whole + tl.exp2(tl.minimum(share, 126.0))))
    acc = acc * tl.where(nothing, 0.0, factor)[:, None]
    at = row * heads + h
    highest = tl.where(total == total, highest, total)  # maxima pass over NaN
    tl.store(max_logits + at, highest * 0.6931471805599453, mask=h < heads)
    ln_sum = (origin + tl.log2(whole)) * 0.6931471805599453
    ln_sum = tl.where(nothing, float("inf"), ln_sum)
    tl.store(lse + at, ln_sum, mask=h < heads)
    if ROPE:
        even, odd = tl.split(tl.reshape(acc, [HEADS, VALUES // 2, 2]))
        pair = tl.arange(0, VALUES // 2) - (d_v // 2 - pairs)
        turns = (pair >= 0) & (pair < pairs)
        to = phases + row * (2 * pairs) + 2 * pair
        cos = tl.load(to, mask=turns, other=1.0)[None, :]
        sin = tl.load(to + 1, mask=turns, other=0.0)[None, :]
        turned = tl.join(even * cos + odd * sin, odd * cos - even * sin)
        acc = tl.reshape(turned, [HEADS, VALUES])
    place = out + row * stride_ot + h[:, None].to(tl.int64) * stride_oh + c[None, :]
    mask = (h < heads)[:, None] & (c < d_v)[None, :]
    tl.store(place, acc.to(out.dtype.element_ty), mask=mask)
