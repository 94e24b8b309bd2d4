"""Which experts a token uses, in one launch: scores, bias, groups, the best of them, weights."""

from __future__ import annotations

import triton
import triton.language as tl

__all__ = ["topk_gate_kernel"]


@triton.jit
def _sortable(x):
    """int32 in the order of fp32 values; NaN lowest but for what is no choice at all, both zeros equal."""
    bits = tl.where(x == 0.0, 0.0, x).to(tl.int32, bitcast=True)
    key = bits ^ ((bits >> 31) & 0x7FFFFFFF)
    return tl.where(x == x, key, -2147483647)


@triton.jit
def _log1p(u):
    """log(1 + u) for u in [0, 1], with a relative error of 2e-7: u times a polynomial."""
    p = 0.004579763859510422 * u - 0.025682779029011726
    p = p * u + 0.06751179695129395
    p = p * u - 0.11626526713371277
    p = p * u + 0.15878385305404663
    p = p * u - 0.19862109422683716
    p = p * u + 0.2498755156993866
    p = p * u - 0.3333289325237274
    p = p * u + 0.4999999701976776
    return u * (1.0 - u * p)


@triton.jit
def _score(x, SCORE: tl.constexpr, top, total):
    """Scores of logits; softmax needs the highest logit and the sum of exponentials below it."""
    if SCORE == 0:
        high = tl.maximum(x, 0.0, propagate_nan=tl.PropagateNan.ALL)
        return tl.sqrt(high + _log1p(tl.exp(-tl.abs(x))))
    if SCORE == 1:
        return 1.0 / (1.0 + tl.exp(-x))
    return tl.exp(x - top) / total


@triton.jit(do_not_specialize=["num_tokens"])
def topk_gate_kernel(
    logits,
    bias,
    bias_vl,
    is_image,
    count,
    weights,
    experts,
    num_tokens,
    stride,
    scale,
    SCORE: tl.constexpr,
    BIAS: tl.constexpr,
    VISION: tl.constexpr,
    COUNTED: tl.constexpr,
    RENORMALISE: tl.constexpr,
    EXPERTS: tl.constexpr,
    GROUPS: tl.constexpr,
    TOPK_GROUPS: tl.constexpr,
    TOPK: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    WIDTH: tl.constexpr,
):
    """One token. Experts lie as ROWS x COLUMNS: a group a row when there are groups."""
    token = tl.program_id(0).to(tl.int64)
    k = tl.arange(0, WIDTH)
    at = token * TOPK + k
    live = num_tokens
    if COUNTED:
        live = tl.load(count)
    if token >= live:
        tl.store(weights + at, tl.zeros([WIDTH], tl.float32), mask=k < TOPK)
        tl.store(experts + at, tl.full([WIDTH], -1, experts.dtype.element_ty), mask=k < TOPK)
    else:
        EACH: tl.constexpr = EXPERTS // GROUPS
        r = tl.arange(0, ROWS)[:, None]
        c = tl.arange(0, COLUMNS)[None, :]
        ids = r * EACH + c
        inside = (r < GROUPS) & (c < EACH)
        x = tl.load(logits + token * stride + ids, mask=inside, other=float("-inf"))
        x = x.to(tl.float32)
        top = 0.0
        total = 1.0
        if SCORE == 2:
            top = tl.max(tl.max(x, 1), 0)
            total = tl.sum(tl.sum(tl.exp(x - top), 1), 0)
        share = _score(x, SCORE, top, total)
        choice = share
        if BIAS:
            added = tl.load(bias + ids, mask=inside, other=0.0)
            if VISION:  # noqa: SIM102 - known when it is compiled
                if tl.load(is_image + token) != 0:
                    added = tl.load(bias_vl + ids, mask=inside, other=0.0)
            choice = share + added
        keys = tl.where(inside, _sortable(choice), -2147483648)
        if GROUPS > 1:
            # A group is worth its highest choice; with a bias, the sum of its two highest.
            first = tl.max(keys, 1)
            worth = tl.max(tl.where(keys == first[:, None], choice, float("-inf")), 1)
            if BIAS:
                place = tl.min(tl.where(keys == first[:, None], ids, 2147483647), 1)
                rest = tl.where(ids == place[:, None], -2147483648, keys)
                second = tl.max(rest, 1)
                worth += tl.max(tl.where((rest == second[:, None]) & (ids != place[:, None]), choice, float("-inf")), 1)  # fmt: skip
            g = tl.arange(0, ROWS)
            group_keys = tl.where(g < GROUPS, _sortable(worth), -2147483648)
            kept = g < 0
            for _ in tl.static_range(TOPK_GROUPS):
                best = tl.max(group_keys, 0)
                group = tl.min(tl.where((group_keys == best) & (g < GROUPS) & (kept == 0), g, GROUPS), 0)  # fmt: skip
                kept |= g == group
                group_keys = tl.where(g == group, -2147483648, group_keys)
            keys = tl.where(kept[:, None], keys, -2147483648)
        picked = tl.zeros([WIDTH], tl.int32)
        for i in tl.static_range(TOPK):
            best = tl.max(tl.max(keys, 1), 0)
            expert = tl.min(tl.min(tl.where(keys == best, ids, 2147483647), 1), 0)
            picked = tl.where(k == i, expert, picked)
            keys = tl.where(ids == expert, -2147483648, keys)
        # Once more for the chosen alone: cheaper than to look for each among the scores.
        again = tl.load(logits + token * stride + picked, mask=k < TOPK, other=0.0).to(tl.float32)
        picked_weights = tl.where(k < TOPK, _score(again, SCORE, top, total), 0.0)
        if RENORMALISE:
            picked_weights = picked_weights * (scale / (tl.sum(picked_weights, 0) + 1e-20))
        else:
            picked_weights = picked_weights * scale
        tl.store(weights + at, picked_weights, mask=k < TOPK)
        tl.store(experts + at, picked.to(experts.dtype.element_ty), mask=k < TOPK)
