"""Places of (token, expert) pairs in expert order, by counting: every program counts for itself, nothing is atomic."""

from __future__ import annotations

import triton
import triton.language as tl

__all__ = ["pair_counts_kernel", "pair_places_kernel"]


@triton.jit
def _experts(topk_ids, at, pairs, EXPERTS: tl.constexpr):
    """Expert of each pair; EXPERTS where there is none."""
    found = tl.load(topk_ids + at, mask=at < pairs, other=-1).to(tl.int32)
    return tl.where((found >= 0) & (found < EXPERTS), found, EXPERTS)


@triton.jit(do_not_specialize=["pairs"])
def pair_counts_kernel(
    topk_ids, counts, pairs, EXPERTS: tl.constexpr, BINS: tl.constexpr, BLOCK: tl.constexpr
):  # fmt: skip
    """How many pairs of one block each expert has."""
    block = tl.program_id(0)
    found = _experts(topk_ids, block * BLOCK + tl.arange(0, BLOCK), pairs, EXPERTS)
    tl.store(counts + block * BINS + tl.arange(0, BINS), tl.histogram(found, BINS))


@triton.jit(do_not_specialize=["pairs", "num_blocks", "places", "max_m"])
def pair_places_kernel(
    topk_ids,
    counts,
    pair_place,
    place_pair,
    place_expert,
    starts,
    ends,
    pairs,
    num_blocks,
    places,
    max_m,
    pair_programs,
    MASKED: tl.constexpr,
    LISTED: tl.constexpr,
    COUNTED: tl.constexpr,
    ALIGN: tl.constexpr,
    EXPERTS: tl.constexpr,
    BINS: tl.constexpr,
    BLOCK: tl.constexpr,
    OWN: tl.constexpr,
):
    """Places OWN pairs, or marks OWN places without a pair.

    Expert e has the places from `starts[e]` to `ends[e]`, in the order of its pairs; in the masked layout `ends` are
    counts, and starts are `e * max_m`.
    """
    program = tl.program_id(0)
    bins = tl.arange(0, BINS)
    own = tl.arange(0, OWN)
    first = tl.where(program < pair_programs, program * OWN, 0)
    before = tl.zeros([BINS], tl.int32)
    total = tl.zeros([BINS], tl.int32)
    if COUNTED:
        # Blocks are multiples of OWN pairs, so what lies between the last whole block and our pairs is counted below.
        whole = first // BLOCK
        for start in range(0, num_blocks, 8):
            block = start + tl.arange(0, 8)
            part = tl.load(
                counts + block[:, None] * BINS + bins[None, :], mask=(block < num_blocks)[:, None], other=0
            )  # fmt: skip
            total += tl.sum(part, 0)
            before += tl.sum(tl.where((block < whole)[:, None], part, 0), 0)
        for start in range(whole * BLOCK, first, OWN):
            before += tl.histogram(_experts(topk_ids, start + own, pairs, EXPERTS), BINS)
    else:
        for start in range(0, pairs, BLOCK):
            at = start + tl.arange(0, BLOCK)
            found = _experts(topk_ids, at, pairs, EXPERTS)
            total += tl.histogram(found, BINS)
            if start < first:
                before += tl.histogram(tl.where(at < first, found, EXPERTS), BINS)
    is_expert = bins < EXPERTS
    total = tl.where(is_expert, total, 0)
    if MASKED:
        start = bins * max_m
        end = total
    else:
        padded = (total + ALIGN - 1) // ALIGN * ALIGN
        start = tl.cumsum(padded, 0) - padded
        end = start + total
    if program == 0:
        tl.store(starts + bins, start, mask=is_expert)
        tl.store(ends + bins, end, mask=is_expert)
    if program < pair_programs:
        at = first + own
        expert = _experts(topk_ids, at, pairs, EXPERTS)
        same = (expert[:, None] == expert[None, :]) & (own[None, :] < own[:, None])
        rank = tl.sum(same.to(tl.int32), 1)
        safe = tl.where(expert < EXPERTS, expert, EXPERTS)
        offset = tl.gather(start + before, safe, 0)
        place = offset + rank
        good = expert < EXPERTS
        if MASKED:
            good &= place - expert * max_m < max_m
        tl.store(pair_place + at, tl.where(good, place, -1), mask=at < pairs)
        if LISTED:
            tl.store(place_pair + place, at, mask=good)
            tl.store(place_expert + place, expert, mask=good)
    else:
        place = (program - pair_programs) * OWN + own
        if MASKED:
            expert = tl.minimum(place // max_m, EXPERTS)
            is_free = place % max_m >= tl.gather(end, expert, 0)
        else:
            expert = tl.sum(((start + padded)[None, :] <= place[:, None]).to(tl.int32), 1)
            # Behind the last expert the sum counts the bins without one too.
            expert = tl.minimum(expert, BINS - 1)
            is_free = place >= tl.gather(end, expert, 0)
        nothing = tl.full([OWN], -1, tl.int32)
        tl.store(place_pair + place, nothing, mask=(place < places) & is_free)
        tl.store(place_expert + place, nothing, mask=(place < places) & is_free)
