"""Selection of the k largest of every row, ties to the lowest index, in ascending order of the index.

One program a row. The maxima of G >= k disjoint groups of the row bound the k-th largest value from below; what is not
below the bound is gathered in the order of the index, usually little more than k elements, and the exact k-th key is
found among it. Rows on which the bound says too little (many equal elements) are searched as a whole.

For long rows the maxima of small groups are made first, by as many programs as fill the chip; then the row's own
program reads the maxima, and of the row only the groups that reach the bound.
"""

from __future__ import annotations

import triton
import triton.language as tl

from deepinfer.kernels.triton.topk_parts import (
    choose,
    from_key,
    keys_of,
    search,
    select_row,
    value_of,
    whole_row,
)

__all__ = ["group_maxima_kernel", "topk_grouped_kernel", "topk_select_kernel"]


@triton.jit
def _length(lengths, row, n, HAS_LENGTHS: tl.constexpr):
    length = n
    if HAS_LENGTHS:
        length = tl.minimum(tl.maximum(tl.load(lengths + row), 0), n)
    return length


@triton.jit
def _all(to, length, k, fill, BLOCK_K: tl.constexpr):
    """Writes all elements of a row that has no more than k."""
    for start in range(0, k, BLOCK_K):
        i = start + tl.arange(0, BLOCK_K)
        tl.store(to + i, tl.where(i < length, i, fill), mask=i < k)


@triton.jit(do_not_specialize=["n", "k", "fill"])
def topk_select_kernel(
    x, lengths, out, scratch_index, n, k, fill, stride_x, stride_out,
    HAS_LENGTHS: tl.constexpr, BITS: tl.constexpr, BLOCK: tl.constexpr, GROUPS: tl.constexpr,
    CAPACITY: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """Writes the k indices of one row; `fill` behind the last one of a row with fewer than k elements."""
    row = tl.program_id(0).to(tl.int64)
    to = out + row * stride_out
    length = _length(lengths, row, n, HAS_LENGTHS)
    if length <= k:
        _all(to, length, k, fill, BLOCK_K)
    else:
        select_row(
            x + row * stride_x, to, scratch_index + row * CAPACITY, length, k, BITS, BLOCK, GROUPS, CAPACITY
        )  # fmt: skip


@triton.jit(do_not_specialize=["n", "chunks", "least_length"])
def group_maxima_kernel(
    x, lengths, maxima, n, chunks, least_length, stride_x, stride_maxima,
    HAS_LENGTHS: tl.constexpr, BITS: tl.constexpr, BLOCK: tl.constexpr, GROUP: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """Maxima of groups of neighbours, as bits of the dtype, NaN where all are; rows below `least_length` are left out.

    EARLY: the next kernel may begin, and wait for this one at the place where it needs the maxima.
    """
    if EARLY:
        tl.inline_asm_elementwise(
            "griddepcontrol.launch_dependents; // $0", "=r", [], dtype=tl.int32, is_pure=False, pack=1
        )  # fmt: skip
    VECTOR: tl.constexpr = min(128 // BITS, GROUP)
    row = (tl.program_id(0) // chunks).to(tl.int64)
    start = tl.program_id(0) % chunks * BLOCK
    length = _length(lengths, row, n, HAS_LENGTHS)
    if (start < length) & (length >= least_length):
        g = tl.arange(0, BLOCK // GROUP)
        if start + BLOCK <= length:
            if GROUP <= 2 * VECTOR:
                # A thread reads whole groups, 16 bytes at a time.
                xs = (
                    x
                    + row * stride_x
                    + start
                    + (g[:, None] * GROUP + tl.arange(0, VECTOR)[None, :])
                )
                # Of NaN and a number, the number is the maximum.
                parts = value_of(tl.load(xs), BITS)
                for i in tl.static_range(VECTOR, GROUP, VECTOR):
                    parts = tl.maximum(parts, value_of(tl.load(xs + i), BITS))
                best = tl.max(parts, 1)
            else:
                v = value_of(tl.load(x + row * stride_x + start + tl.arange(0, BLOCK)), BITS)
                best = tl.max(tl.reshape(v, (BLOCK // GROUP, GROUP)), 1)
        else:
            at = start + tl.arange(0, BLOCK)
            inside = at < length
            v = value_of(tl.load(x + row * stride_x + at, mask=inside, other=0), BITS)
            v = tl.where(inside, v, float("nan"))
            best = tl.max(tl.reshape(v, (BLOCK // GROUP, GROUP)), 1)
        bits = best.to(tl.int32, bitcast=True)
        if BITS == 16:
            bits = bits >> 16
        tl.store(
            maxima + row * stride_maxima + start // GROUP + g, bits.to(maxima.dtype.element_ty)
        )


@triton.jit(do_not_specialize=["n", "k", "fill", "least_length"])
def topk_grouped_kernel(
    x, lengths, out, maxima, scratch_index, n, k, fill, least_length, stride_x, stride_out, stride_maxima,
    HAS_LENGTHS: tl.constexpr, BITS: tl.constexpr, BLOCK: tl.constexpr, GROUPS: tl.constexpr,
    CAPACITY: tl.constexpr, BLOCK_K: tl.constexpr, GROUP: tl.constexpr, ALL: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """As `topk_select_kernel`, with the maxima of small groups at hand; ALL is at least their number."""
    row = tl.program_id(0).to(tl.int64)
    to = out + row * stride_out
    xs = x + row * stride_x
    index_at = scratch_index + row * (2 * CAPACITY)
    length = _length(lengths, row, n, HAS_LENGTHS)
    if length <= k:
        _all(to, length, k, fill, BLOCK_K)
    elif length < least_length:
        select_row(xs, to, index_at, length, k, BITS, BLOCK, GROUPS, CAPACITY)
    else:
        g = tl.arange(0, ALL)
        known = g * GROUP < length
        lowest = float("-inf")
        best = value_of(tl.load(maxima + row * stride_maxima + g, mask=known, other=0), BITS)
        best = tl.where(known, best, lowest)
        coarse = tl.max(tl.reshape(best, (ALL // GROUPS, GROUPS)), 0) if ALL > GROUPS else best
        bound = search(keys_of(coarse, BITS), coarse == coarse, k, 8)
        least = from_key(bound, BITS)
        good = (known & (best >= least)).to(tl.int32)
        groups = tl.sum(good, 0)
        group_at = index_at + CAPACITY
        place = tl.cumsum(good, 0) - good
        tl.store(group_at + place, g, mask=(good > 0) & (place < CAPACITY))
        total = 0
        if groups <= CAPACITY:
            tl.debug_barrier()
            t = tl.arange(0, TILE)
            for start in range(0, groups, TILE):
                live = start + t < groups
                group = tl.load(group_at + start + t, mask=live, other=0)
                at = group[:, None] * GROUP + tl.arange(0, GROUP)[None, :]
                inside = live[:, None] & (at < length)
                v = value_of(tl.load(xs + at, mask=inside, other=0), BITS)
                passed = (inside & (v >= least)).to(tl.int32)
                count = tl.sum(passed, 1)
                before = total + tl.cumsum(count, 0) - count
                spot = before[:, None] + tl.cumsum(passed, 1) - passed
                tl.store(index_at + spot, at, mask=(passed > 0) & (spot < CAPACITY))
                total += tl.sum(count, 0)
        if (total >= k) & (total <= CAPACITY):
            tl.debug_barrier()
            c = tl.arange(0, CAPACITY)
            inside = c < total
            choose(xs, to, tl.load(index_at + c, mask=inside, other=0), inside, k, BITS)
        else:
            whole_row(xs, to, length, k, BITS, BLOCK)
