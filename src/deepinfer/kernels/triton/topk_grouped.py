"""The selection of `topk_wide` for rows whose groups' maxima are at hand: of the row, only groups that count are read.

A row's program finds a bound among the maxima, gathers the groups that reach it, then their elements that do, in the order
of the index, and finds the exact k-th among these.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from deepinfer.kernels.triton.gluon_names import block_barrier
from deepinfer.kernels.triton.topk_search import (
    before,
    choose,
    ends,
    from_key,
    keys_of,
    least_of_pairs,
    search,
    sift,
    total_of,
    value_of,
)
from deepinfer.kernels.triton.topk_wide import select_row

__all__ = ["topk_by_groups_kernel"]


@gluon.jit
def _add(a, b):
    return a + b


@gluon.jit
def _passing_groups(bests, bound, to, THREADS: gl.constexpr, HIGH: gl.constexpr):
    """Writes the groups whose maxima reach the bound, ascending; returns how many there are."""
    layout: gl.constexpr = bests[0].type.layout
    t = gl.arange(0, THREADS, layout=gl.SliceLayout(1, layout))[:, None] * 8
    t += gl.arange(0, 8, layout=gl.SliceLayout(0, layout))[None, :]
    total = gl.to_tensor(0)
    for first in gl.static_range(0, HIGH, 4):
        packed = gl.zeros([THREADS], gl.int64, gl.SliceLayout(1, layout))
        for u in gl.static_range(4 if HIGH > 4 else HIGH):
            count = gl.sum((bests[first + u] >= bound).to(gl.int32), 1)
            packed += count.to(gl.int64) << (16 * u)
        earlier, counts = before(packed)
        for u in gl.static_range(4 if HIGH > 4 else HIGH):
            good = (bests[first + u] >= bound).to(gl.int32)
            place = ((earlier >> (16 * u)) & 0xFFFF).to(gl.int32)[:, None] + total
            place += gl.associative_scan(good, 1, _add) - good
            gl.store(to + place, (first + u) * (THREADS * 8) + t, mask=good > 0)
            total += ((counts >> (16 * u)) & 0xFFFF).to(gl.int32)
    return total


@gluon.jit
def _needed_groups(bests, bound, k, to, THREADS: gl.constexpr, HIGH: gl.constexpr):
    """As `_passing_groups`, but of the groups whose maxima equal the bound only the first k: others hold no winner."""
    layout: gl.constexpr = bests[0].type.layout
    t = gl.arange(0, THREADS, layout=gl.SliceLayout(1, layout))[:, None] * 8
    t += gl.arange(0, 8, layout=gl.SliceLayout(0, layout))[None, :]
    total = gl.to_tensor(0)
    ties = gl.to_tensor(0)
    for u in gl.static_range(HIGH):
        more = (bests[u] > bound).to(gl.int32)
        same = (bests[u] == bound).to(gl.int32)
        both = more + (same << 16)
        earlier, count = before(gl.sum(both, 1))
        place = earlier[:, None] + gl.associative_scan(both, 1, _add) - both
        rank = place >> 16
        room = gl.maximum(k - ties, 0)
        kept = (more > 0) | ((same > 0) & (rank < room))
        at = total + (place & 0xFFFF) + gl.minimum(rank, room)
        gl.store(to + at, u * (THREADS * 8) + t, mask=kept)
        total += (count & 0xFFFF) + gl.minimum(count >> 16, room)
        ties += count >> 16
    return total


@gluon.jit
def _passing_elements(
    xs, groups_at, units, bound, length, to, BITS: gl.constexpr, GROUP: gl.constexpr, PART: gl.constexpr,
    TILES: gl.constexpr, CAPACITY: gl.constexpr,
):  # fmt: skip
    """Writes the elements of some groups that reach the bound, index below bits, ascending; returns how many there are.

    A unit is PART elements of a group, which a thread reads.
    """
    WARPS: gl.constexpr = gl.num_warps()
    THREADS: gl.constexpr = 32 * WARPS
    SUBS: gl.constexpr = GROUP // PART
    layout: gl.constexpr = gl.BlockedLayout([1, PART], [32, 1], [WARPS, 1], [1, 0])
    i = gl.arange(0, THREADS, layout=gl.SliceLayout(1, layout))
    e = gl.arange(0, PART, layout=gl.SliceLayout(0, layout))[None, :]
    # Reads are masked by 16 bytes, which may end behind the row: what holds its last element is there.
    VECTOR: gl.constexpr = 128 // BITS if PART >= 128 // BITS else PART
    least = from_key(bound, BITS)
    total = gl.to_tensor(0)
    for start in range(0, units, TILES * THREADS):
        bases = ()
        for u in gl.static_range(TILES):
            q = start + u * THREADS + i
            # Behind the last group: one that is no group.
            group = gl.load(groups_at + q // SUBS, mask=q < units, other=0x1FFFFFF)
            bases = bases + (group * GROUP + q % SUBS * PART,)  # noqa: RUF005
        raws = ()
        for u in gl.static_range(TILES):
            there = (bases[u][:, None] + e) // VECTOR * VECTOR < length
            raws = raws + (gl.load(xs + bases[u][:, None] + e, mask=there, other=0),)  # noqa: RUF005
        masks = ()
        packed = gl.zeros([THREADS], gl.int64, gl.SliceLayout(1, layout))
        for u in gl.static_range(TILES):
            good = (bases[u][:, None] + e < length) & (value_of(raws[u], BITS) >= least)
            packed += gl.sum(good.to(gl.int32), 1).to(gl.int64) << (16 * u)
            # A bit an element takes fewer registers than a number.
            masks = masks + (gl.sum(good.to(gl.int32) << e, 1),)  # noqa: RUF005
        earlier, counts = before(packed)
        for u in gl.static_range(TILES):
            good = (masks[u][:, None] >> e) & 1
            place = total + ((earlier >> (16 * u)) & 0xFFFF).to(gl.int32)[:, None]
            place += gl.associative_scan(good, 1, _add) - good
            pair = (bases[u][:, None] + e).to(gl.int64) | (raws[u].to(gl.int64) << 32)
            gl.store(to + place, pair, mask=(good > 0) & (place < CAPACITY))
            total += ((counts >> (16 * u)) & 0xFFFF).to(gl.int32)
    return total


@gluon.jit
def _maxima(source, length, BITS: gl.constexpr, GROUP: gl.constexpr, HIGH: gl.constexpr):
    """Keys of the maxima of all groups, -2^31 behind the last one."""
    THREADS: gl.constexpr = 32 * gl.num_warps()
    layout: gl.constexpr = gl.BlockedLayout([1, 8], [32, 1], [gl.num_warps(), 1], [1, 0])
    at = gl.arange(0, THREADS, layout=gl.SliceLayout(1, layout))[:, None] * 8
    at += gl.arange(0, 8, layout=gl.SliceLayout(0, layout))[None, :]
    bests = ()
    for u in gl.static_range(HIGH):
        key = keys_of(value_of(gl.load(source + u * (8 * THREADS) + at), BITS), BITS)
        known = (u * (8 * THREADS) + at) * GROUP < length
        bests = bests + (gl.where(known, key, -0x80000000),)  # noqa: RUF005 - no unpacking in Gluon
    return bests


@gluon.jit(do_not_specialize=["n", "k", "fill", "least_length"])
def topk_by_groups_kernel(
    x, lengths, out, maxima, groups_of, found, n, k, fill, least_length, stride_x, stride_out, stride_maxima,
    HAS_LENGTHS: gl.constexpr, BITS: gl.constexpr, GROUPS: gl.constexpr, CAPACITY: gl.constexpr,
    GROUP: gl.constexpr, ALL: gl.constexpr, COARSE: gl.constexpr, TILES: gl.constexpr, EARLY: gl.constexpr,
):  # fmt: skip
    """Writes the k indices of one row; `fill` behind the last one of a row with fewer than k elements."""
    WARPS: gl.constexpr = gl.num_warps()
    THREADS: gl.constexpr = 32 * WARPS
    HIGH: gl.constexpr = ALL // (8 * THREADS)
    KEPT: gl.constexpr = COARSE // (8 * THREADS)
    PART: gl.constexpr = GROUP if GROUP < 16 else 16
    SUBS: gl.constexpr = GROUP // PART
    if EARLY:
        # The maxima may still be in the making.
        gl.inline_asm_elementwise(
            "griddepcontrol.wait; // $0", "=r", [], dtype=gl.int32, is_pure=False, pack=1
        )
    row = gl.program_id(0).to(gl.int64)
    to = out + row * stride_out
    xs = x + row * stride_x
    groups_at = groups_of + row * ALL
    found_at = found + row * CAPACITY
    length = n
    if HAS_LENGTHS:
        length = gl.minimum(gl.maximum(gl.load(lengths + row), 0), n)
    if length <= k:
        f = gl.arange(0, THREADS, layout=gl.BlockedLayout([1], [32], [WARPS], [0]))
        for start in range(0, k, THREADS):
            gl.store(
                to + start + f, gl.where(start + f < length, start + f, fill), mask=start + f < k
            )
    elif length < least_length:
        select_row(xs, to, found_at, length, k, BITS, GROUPS, CAPACITY)
    else:
        source = maxima + row * stride_maxima
        bests = _maxima(source, length, BITS, GROUP, HIGH)
        coarse = ()
        for u in gl.static_range(KEPT):
            joined = bests[u]
            for v in gl.static_range(u + KEPT, HIGH, KEPT):
                joined = gl.maximum(joined, bests[v])
            coarse = coarse + (joined,)  # noqa: RUF005
        # There are 2 * k groups at least.
        low = least_of_pairs(coarse[0])
        high = coarse[0]
        for u in gl.static_range(1, KEPT):
            low = gl.minimum(low, least_of_pairs(coarse[u]))
            high = gl.maximum(high, coarse[u])
        low, high = ends(low, high)
        bound, _, _ = search(coarse, low, high, k, k // 8)
        groups = _passing_groups(bests, bound, groups_at, THREADS, HIGH)
        block_barrier()
        total = gl.to_tensor(0)
        if groups <= CAPACITY:
            total = _passing_elements(
                xs,
                groups_at,
                groups * SUBS,
                bound,
                length,
                found_at,
                BITS,
                GROUP,
                PART,
                TILES,
                CAPACITY,
            )
        block_barrier()
        if (total >= k) & (total <= CAPACITY):
            EACH: gl.constexpr = CAPACITY // THREADS
            wide: gl.constexpr = gl.BlockedLayout([1, EACH], [32, 1], [WARPS, 1], [1, 0])
            c = gl.arange(0, THREADS, layout=gl.SliceLayout(1, wide))[:, None] * EACH
            c += gl.arange(0, EACH, layout=gl.SliceLayout(0, wide))[None, :]
            pair = gl.load(found_at + c, mask=c < total, other=0)
            keys = keys_of(value_of((pair >> 32).to(gl.int32), BITS), BITS)
            keys = gl.where(c < total, keys, -0x80000000)
            choose(to, keys, pair.to(gl.int32), bound, high, k)
        else:
            # Equal elements, or neighbours all large: fewer than 2 * k of all groups can hold a winner.
            bests = _maxima(source, length, BITS, GROUP, HIGH)
            above = gl.zeros([THREADS], gl.int32, gl.SliceLayout(1, bests[0].type.layout))
            for u in gl.static_range(HIGH):
                above += gl.sum((bests[u] > bound).to(gl.int32), 1)
            end = gl.where(total_of(above) < k, bound, high)
            bound, _, _ = search(bests, bound, end, k, 0)
            groups = _needed_groups(bests, bound, k, groups_at, THREADS, HIGH)
            block_barrier()
            sift(xs, groups_at, groups * SUBS, length, to, bound, high, k, BITS, GROUP, PART, True)
