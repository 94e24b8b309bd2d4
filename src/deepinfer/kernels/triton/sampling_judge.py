"""Device functions that judge by masses: what bounds and groups of a row weigh, and whether that answers."""

from __future__ import annotations

import triton
import triton.language as tl

from deepinfer.kernels.triton.sampling_keys import first_bit, key_of, value_of

__all__ = ["append_open", "group_bounds", "group_masses", "limit_of_row", "verdict"]


@triton.jit
def append_open(num_open, open_rows, row):
    """Notes an open row. The order hangs on time, and nothing on the order."""
    tl.store(open_rows + tl.atomic_add(num_open, 1), row.to(tl.int32))


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
def group_bounds(best, part, highest, factor, target, slack):
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
    # With a target of nothing, a key that is above all.
    return lower, tl.minimum(value_of(high), highest)


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
