"""Places of (token, expert) pairs in expert order, by counting: every program counts for itself, nothing is atomic."""

from __future__ import annotations

import triton
import triton.language as tl

__all__ = ["block_sums_kernel", "pair_counts_kernel", "pair_places_kernel"]


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


@triton.jit(do_not_specialize=["num_blocks"])
def block_sums_kernel(counts, totals, num_blocks, BINS: tl.constexpr, COLUMNS: tl.constexpr):
    """Counts of blocks become counts of the blocks before; and their totals, for some experts."""
    bins = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    total = tl.zeros([COLUMNS], tl.int32)
    for start in range(0, num_blocks, 64):
        block = start + tl.arange(0, 64)
        at = counts + block[:, None] * BINS + bins[None, :]
        part = tl.load(at, mask=(block < num_blocks)[:, None], other=0)
        before = total[None, :] + tl.cumsum(part, 0) - part
        tl.store(at, before, mask=(block < num_blocks)[:, None])
        total += tl.sum(part, 0)
    tl.store(totals + bins, total)


@triton.jit(do_not_specialize=["pairs", "places", "max_m", "pair_programs", "pad_programs"])
def pair_places_kernel(
    topk_ids,
    counts,
    totals,
    pair_place,
    place_pair,
    place_expert,
    starts,
    ends,
    pairs,
    places,
    max_m,
    pair_programs,
    pad_programs,
    MASKED: tl.constexpr,
    COUNTED: tl.constexpr,
    LISTED: tl.constexpr,
    ALIGN: tl.constexpr,
    EXPERTS: tl.constexpr,
    BINS: tl.constexpr,
    BLOCK: tl.constexpr,
    OWN: tl.constexpr,
    PADDED: tl.constexpr,
):
    """Places OWN pairs; or marks the padding of PADDED experts; or marks 1,024 places behind the last expert.

    Expert e has the places from `starts[e]` to `ends[e]`, in the order of its pairs; in the masked layout `ends` are
    counts, and starts are `e * max_m`.
    """
    program = tl.program_id(0)
    bins = tl.arange(0, BINS)
    own = tl.arange(0, OWN)
    first = tl.where(program < pair_programs, program * OWN, 0)
    before = tl.zeros([BINS], tl.int32)
    if COUNTED:
        total = tl.load(totals + bins)
        if program < pair_programs:
            begin = first // BLOCK * BLOCK
            before = tl.load(counts + first // BLOCK * BINS + bins)
            if first > begin:
                at = begin + tl.arange(0, BLOCK)
                found = _experts(topk_ids, at, pairs, EXPERTS)
                before += tl.histogram(tl.where(at < first, found, EXPERTS), BINS)
    else:
        total = tl.zeros([BINS], tl.int32)
        for start in range(0, pairs, BLOCK):
            at = start + tl.arange(0, BLOCK)
            found = _experts(topk_ids, at, pairs, EXPERTS)
            total += tl.histogram(found, BINS)
            if start < first:
                before += tl.histogram(tl.where(at < first, found, EXPERTS), BINS)
    is_expert = bins < EXPERTS
    total = tl.where(is_expert, total, 0)
    if MASKED:
        padded = tl.where(is_expert, max_m, 0)
        start = bins * max_m
        end = total
    else:
        padded = (total + ALIGN - 1) // ALIGN * ALIGN
        start = tl.cumsum(padded, 0) - padded
        end = start + total
    if program == 0:
        tl.store(starts + bins, start, mask=is_expert)
        tl.store(ends + bins, end, mask=is_expert)
    nothing = tl.full([OWN], -1, tl.int32)
    if program < pair_programs:
        at = first + own
        expert = _experts(topk_ids, at, pairs, EXPERTS)
        same = (expert[:, None] == expert[None, :]) & (own[None, :] < own[:, None])
        place = tl.gather(start + before, expert, 0) + tl.sum(same.to(tl.int32), 1)
        good = expert < EXPERTS
        if MASKED:
            good &= place - expert * max_m < max_m
        tl.store(pair_place + at, tl.where(good, place, -1), mask=at < pairs)
        if LISTED:
            tl.store(place_pair + place, at, mask=good)
            tl.store(place_expert + place, expert, mask=good)
    elif program < pair_programs + pad_programs:
        for i in range(PADDED):
            mine = bins == (program - pair_programs) * PADDED + i
            begin = tl.sum(tl.where(mine, start, 0), 0)
            width = tl.sum(tl.where(mine, padded, 0), 0)
            used = tl.minimum(tl.sum(tl.where(mine, total, 0), 0), width)
            for offset in range(used, width, OWN):
                place = offset + own
                tl.store(place_pair + begin + place, nothing, mask=place < width)
                tl.store(place_expert + begin + place, nothing, mask=place < width)
    else:
        tail = (program - pair_programs - pad_programs) * 1024
        last = tl.sum(padded, 0)
        for offset in range(tl.maximum(tail, last), tl.minimum(tail + 1024, places), OWN):
            place = offset + own
            inside = place < tl.minimum(tail + 1024, places)
            tl.store(place_pair + place, nothing, mask=inside)
            tl.store(place_expert + place, nothing, mask=inside)
