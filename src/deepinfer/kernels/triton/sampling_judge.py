"""Device functions that judge by masses: what bounds and groups of a row weigh, and whether that answers."""

from __future__ import annotations

import triton
import triton.language as tl

from deepinfer.kernels.triton.sampling_keys import first_bit, key_of, value_of

__all__ = [
    "bound_masses",
    "group_masses",
    "limit_of_row",
    "narrowed",
    "narrower",
    "verdict",
]


@triton.jit
def narrower(bound, bound_id, other, other_id):
    """The one of two bounds that holds less."""
    swap = (other > bound) | ((other == bound) & (other_id < bound_id))
    return tl.where(swap, other, bound), tl.where(swap, other_id, bound_id)


@triton.jit
def limit_of_row(shares, row, total, vocab, RANK: tl.constexpr):
    """What the tokens before a kept one weigh at most, and the error of such sums.

    Each weighs its mass, in units of that of the highest logit, `total` together, of which top-p is the share; or 1 with
    RANK, of which top-k is the number.
    """
    infinite = tl.full((), float("inf"), tl.float32)
    if RANK:
        k = tl.load(shares + row).to(tl.int64)
        limit = tl.where((k <= 0) | (k >= vocab), infinite, k.to(tl.float32) - 0.5)
        slack = tl.zeros((), tl.float32)
    else:
        top_p = tl.load(shares + row).to(tl.float64)
        # NaN keeps the highest alone, as in the reference.
        share = tl.where(top_p > 0, top_p, 0.0).to(tl.float32)
        limit = tl.where(top_p >= 1, infinite, share * total)
        slack = total * 2e-5
    return limit, slack


@triton.jit
def verdict(weight, limit, slack):
    """Whether a token is kept for sure, and whether it is dropped for sure, by the weight of the tokens before it.

    What is within the error of the sums is left open.
    """
    is_first = weight == 0
    is_in = is_first | (weight < limit - slack)
    is_out = (weight > limit + slack) & (is_first == 0)
    return is_in, is_out


@triton.jit
def _group_bounds(best, part, highest, factor, target, slack):
    """Logits between which top-p cuts, from the maxima and masses of groups: above the second, all tokens are kept.

    Below the first, none is: the maxima alone reach the target. Groups from a logit on have at least the mass from it on.
    """
    keys = key_of(best)
    own = tl.exp2((best - highest) * factor)
    bit, low = first_bit(
        tl.min(tl.where(best > float("-inf"), keys, key_of(highest)), 0), key_of(highest)
    )
    high = low
    while bit > 0:
        least = tl.sum(tl.where(keys >= (low | bit), own, 0.0), 0)
        most = tl.sum(tl.where(keys >= (high | bit), part, 0.0), 0)
        low = tl.where(least >= target + slack, low | bit, low)
        high = tl.where(most >= target - slack, high | bit, high)
        bit = bit >> 1
    least = tl.sum(tl.where(keys >= low, own, 0.0), 0)
    lower = tl.where(least >= target + slack, value_of(low), float("-inf"))
    return lower, value_of(high)


@triton.jit
def bound_masses(
    chunk_tops, sums, row, num_chunks, highest, factor, BOUNDS: tl.constexpr, CHUNKS: tl.constexpr
):  # fmt: skip
    """The masses of a row, of what its lower bound holds, and its upper one, in units of that of the highest logit.

    Those of a chunk are in units of that of its own.
    """
    c = tl.arange(0, CHUNKS)
    scale = tl.exp2((chunk_tops - highest) * factor)
    inside = (c < num_chunks) & (scale > 0)
    at = sums + (row * num_chunks + c) * 3
    total = tl.sum(tl.load(at, mask=inside, other=0.0) * scale, 0)
    in_lower = 0.0
    in_upper = float("inf")
    if BOUNDS:
        in_lower = tl.sum(tl.load(at + 1, mask=inside, other=0.0) * scale, 0)
        in_upper = tl.sum(tl.load(at + 2, mask=inside, other=0.0) * scale, 0)
    return total, in_lower, in_upper


@triton.jit
def group_masses(
    tops, groups, masses, row, num_chunks, highest, factor, GROUPS: tl.constexpr, ALL_GROUPS: tl.constexpr
):  # fmt: skip
    """Maxima of the groups of a row, and their masses in units of that of the highest logit."""
    num_groups = num_chunks * GROUPS
    g = tl.arange(0, ALL_GROUPS)
    best = tl.load(groups + row * num_groups + g, mask=g < num_groups, other=float("-inf"))
    some = best > float("-inf")
    part = tl.load(masses + row * num_groups + g, mask=some, other=0.0)
    top = tl.load(tops + row * num_chunks + g // GROUPS, mask=some, other=float("-inf"))
    return best, part * tl.exp2((top - highest) * factor)


@triton.jit
def narrowed(
    bounds, bound_ids, cuts, cut_ids, row, best, part, total, in_lower, in_upper, highest, factor, top_p,
    CUT: tl.constexpr,
):  # fmt: skip
    """Bounds of top-p that hold: the lower one all kept tokens, the upper one nothing else.

    Of the bounds of the sample, as far as their masses prove them, and those of the groups, the narrower ones.
    """
    lower = tl.load(bounds + row * 2)
    lower_id = tl.load(bound_ids + row * 2)
    upper = tl.load(bounds + row * 2 + 1)
    upper_id = tl.load(bound_ids + row * 2 + 1)
    target = top_p.to(tl.float32) * total
    slack = total * 2e-5
    end, most = _group_bounds(best, part, highest, factor, target, slack)
    end_id = 2147483647
    if CUT:
        end, end_id = narrower(end, end_id, tl.load(cuts + row), tl.load(cut_ids + row))
    if in_lower >= target + slack:
        end, end_id = narrower(end, end_id, lower, lower_id)
    swap = (in_upper >= target - slack) | (most < upper)
    return end, end_id, tl.where(swap, most, upper), tl.where(swap, -1, upper_id)
