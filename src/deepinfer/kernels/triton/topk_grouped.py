"""The selection of `topk_wide` for rows whose groups' maxima are at hand: of the row, only groups that count are read.

A row's program finds a bound among the maxima, gathers the groups that reach it, then their elements that do, in the order
of the index, and finds the exact k-th among these.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from deepinfer.kernels.triton.gluon_names import block_barrier
from deepinfer.kernels.triton.topk_wide import select_row, whole_row

__all__ = ["topk_by_groups_kernel"]


@gluon.jit
def _add(a, b):
    return a + b


@gluon.jit
def _ends(low_a, high_a, low_b, high_b):
    return gl.minimum(low_a, low_b), gl.maximum(high_a, high_b)


@gluon.jit
def _value(raw, BITS: gl.constexpr):
    if BITS == 16:
        value = (raw.to(gl.int32) << 16).to(gl.float32, bitcast=True)
    else:
        value = raw.to(gl.float32, bitcast=True)
    return value


@gluon.jit
def _keys(value, BITS: gl.constexpr):
    """Signed integers in the order of fp32 values, NaN lowest and both zeros equal; of the upper bits for bf16."""
    raw = value.to(gl.int32, bitcast=True)
    raw = gl.where(value == 0.0, 0, raw)
    key = gl.where(raw < 0, raw ^ 0x7FFFFFFF, raw)
    if BITS == 16:
        key = key >> 16
    return gl.where(value != value, -0x80000000, key)


@gluon.jit
def _from_key(key, BITS: gl.constexpr):
    """The value of a key as fp32; NaN where it has none."""
    if BITS == 16:
        raw = gl.where(key < 0, key ^ 0x7FFF, key) << 16
    else:
        raw = gl.where(key < 0, key ^ 0x7FFFFFFF, key)
    return raw.to(gl.float32, bitcast=True)


@gluon.jit
def _search(keys, used, k, STEPS: gl.constexpr, EXACT: gl.constexpr):
    """The k-th largest of the used keys, shape [threads, each], to the first 2 * STEPS bits in which they differ.

    EXACT: any key of which no more than k are greater, and all of these are among the k largest, with what equals it.
    """
    low, high = gl.reduce(
        (gl.where(used, keys, 0x7FFFFFFF), gl.where(used, keys, -0x80000000)), 1, _ends
    )
    low, high = gl.reduce((low, high), 0, _ends)
    keys = gl.where(used, keys, -0x80000000)
    differ = low ^ high
    bits = differ.to(gl.float32).to(gl.int32, bitcast=True)
    steps = gl.minimum((gl.maximum((bits >> 23) - 126, 0) + 1) // 2, 16)
    steps = gl.where(differ < 0, 16, steps)
    kept = gl.minimum(2 * steps, 30)
    # Trials are unsigned numbers: signed ones with the first bit turned.
    found = gl.where(steps > 15, 0, ((high ^ -0x80000000) >> kept) << kept)
    step = gl.where(steps > 0, gl.to_tensor(1) << (2 * gl.maximum(steps - 1, 0)), 0)
    left = gl.to_tensor(STEPS)
    exact = gl.to_tensor(0)
    while step != 0:
        first = found + step
        second = first + step
        third = second + step
        own = (keys >= (first ^ -0x80000000)).to(gl.int32)
        own += (keys >= (second ^ -0x80000000)).to(gl.int32) << 8
        own += (keys >= (third ^ -0x80000000)).to(gl.int32) << 16
        own = gl.sum(own, 1)
        wide = (own & 255).to(gl.int64) + (((own >> 8) & 255).to(gl.int64) << 21)
        count = gl.sum(wide + ((own >> 16).to(gl.int64) << 42), 0)
        at_first = (count & 0x1FFFFF).to(gl.int32)
        at_second = ((count >> 21) & 0x1FFFFF).to(gl.int32)
        at_third = (count >> 42).to(gl.int32)
        reached = gl.where(at_third >= k, at_third, gl.where(at_second >= k, at_second, at_first))
        found = gl.where(
            at_third >= k,
            third,
            gl.where(at_second >= k, second, gl.where(at_first >= k, first, found)),
        )
        # With k keys from a trial on, no bit behind it matters: the key before the trial is as good as the k-th.
        exact = (reached == k).to(gl.int32)
        left -= 1
        step = gl.where((exact != 0) | (left == 0), 0, step >> 2)
    return (found ^ -0x80000000) - (exact if EXACT else 0)


@gluon.jit
def _before(counts):
    """Sum of the counts of all threads before each one, and of all."""
    flat: gl.constexpr = gl.BlockedLayout([1], [32], [gl.num_warps()], [0])
    own = gl.convert_layout(counts, flat)
    return gl.convert_layout(gl.associative_scan(own, 0, _add) - own, counts.type.layout)


@gluon.jit
def _passing_groups(bests, least, to, THREADS: gl.constexpr, HIGH: gl.constexpr):
    """Writes the groups whose maxima reach the bound, ascending; returns how many there are."""
    layout: gl.constexpr = bests[0].type.layout
    t = gl.arange(0, THREADS, layout=gl.SliceLayout(1, layout))[:, None] * 8
    t += gl.arange(0, 8, layout=gl.SliceLayout(0, layout))[None, :]
    total = 0
    for first in gl.static_range(0, HIGH, 4):
        packed = gl.zeros([THREADS], gl.int64, gl.SliceLayout(1, layout))
        for u in gl.static_range(4 if HIGH > 4 else HIGH):
            count = gl.sum((bests[first + u] >= least).to(gl.int32), 1)
            packed += count.to(gl.int64) << (16 * u)
        before = _before(packed)
        counts = gl.sum(packed, 0)
        for u in gl.static_range(4 if HIGH > 4 else HIGH):
            good = (bests[first + u] >= least).to(gl.int32)
            place = ((before >> (16 * u)) & 0xFFFF).to(gl.int32)[:, None] + total
            place += gl.associative_scan(good, 1, _add) - good
            gl.store(to + place, (first + u) * (THREADS * 8) + t, mask=good > 0)
            total += ((counts >> (16 * u)) & 0xFFFF).to(gl.int32)
    return total


@gluon.jit
def _passing_elements(
    xs, groups_at, groups, least, length, to, BITS: gl.constexpr, GROUP: gl.constexpr, TILES: gl.constexpr,
    CAPACITY: gl.constexpr,
):  # fmt: skip
    """Writes the elements of some groups that reach the bound, index below bits, ascending; returns how many there are."""
    WARPS: gl.constexpr = gl.num_warps()
    THREADS: gl.constexpr = 32 * WARPS
    layout: gl.constexpr = gl.BlockedLayout([1, GROUP], [32, 1], [WARPS, 1], [1, 0])
    i = gl.arange(0, THREADS, layout=gl.SliceLayout(1, layout))
    e = gl.arange(0, GROUP, layout=gl.SliceLayout(0, layout))[None, :]
    # Reads are masked by 16 bytes, which may end behind the row: what holds its last element is there.
    VECTOR: gl.constexpr = 128 // BITS if GROUP >= 128 // BITS else GROUP
    total = 0
    for start in range(0, groups, TILES * THREADS):
        places = ()
        for u in gl.static_range(TILES):
            live = start + u * THREADS + i < groups
            # Behind the last group: one that is no group.
            group = gl.load(groups_at + start + u * THREADS + i, mask=live, other=0x1FFFFFF)
            places = places + (group[:, None] * GROUP + e,)  # noqa: RUF005 - no unpacking in Gluon
        raws = ()
        for u in gl.static_range(TILES):
            there = places[u] // VECTOR * VECTOR < length
            raws = raws + (gl.load(xs + places[u], mask=there, other=0),)  # noqa: RUF005
        goods = ()
        packed = gl.zeros([THREADS], gl.int64, gl.SliceLayout(1, layout))
        for u in gl.static_range(TILES):
            good = ((places[u] < length) & (_value(raws[u], BITS) >= least)).to(gl.int32)
            packed += gl.sum(good, 1).to(gl.int64) << (16 * u)
            goods = goods + (good,)  # noqa: RUF005
        before = _before(packed)
        counts = gl.sum(packed, 0)
        for u in gl.static_range(TILES):
            place = total + ((before >> (16 * u)) & 0xFFFF).to(gl.int32)[:, None]
            place += gl.associative_scan(goods[u], 1, _add) - goods[u]
            pair = places[u].to(gl.int64) | (raws[u].to(gl.int64) << 32)
            gl.store(to + place, pair, mask=(goods[u] > 0) & (place < CAPACITY))
            total += ((counts >> (16 * u)) & 0xFFFF).to(gl.int32)
    return total


@gluon.jit
def _choose(to, found_at, total, k, BITS: gl.constexpr, CAPACITY: gl.constexpr):
    """Writes the k best of the elements that were found, whose indices ascend."""
    WARPS: gl.constexpr = gl.num_warps()
    THREADS: gl.constexpr = 32 * WARPS
    EACH: gl.constexpr = CAPACITY // THREADS
    layout: gl.constexpr = gl.BlockedLayout([1, EACH], [32, 1], [WARPS, 1], [1, 0])
    c = gl.arange(0, THREADS, layout=gl.SliceLayout(1, layout))[:, None] * EACH
    c += gl.arange(0, EACH, layout=gl.SliceLayout(0, layout))[None, :]
    inside = c < total
    pair = gl.load(found_at + c, mask=inside, other=0)
    index = pair.to(gl.int32)
    keys = _keys(_value((pair >> 32).to(gl.int32), BITS), BITS)
    last = _search(keys, inside, k, BITS // 2, True)
    more = (inside & (keys > last)).to(gl.int32)
    same = (inside & (keys == last)).to(gl.int32)
    both = more + (same << 16)
    own = gl.sum(both, 1)
    before = _before(own)[:, None] + gl.associative_scan(both, 1, _add) - both
    room = k - (gl.sum(own, 0) & 0xFFFF)
    ties = before >> 16
    chosen = (more > 0) | ((same > 0) & (ties < room))
    gl.store(to + (before & 0xFFFF) + gl.minimum(ties, room), index, mask=chosen)


@gluon.jit(do_not_specialize=["n", "k", "fill", "least_length"])
def topk_by_groups_kernel(
    x, lengths, out, maxima, groups_of, found, n, k, fill, least_length, stride_x, stride_out, stride_maxima,
    HAS_LENGTHS: gl.constexpr, BITS: gl.constexpr, GROUPS: gl.constexpr, CAPACITY: gl.constexpr,
    GROUP: gl.constexpr, ALL: gl.constexpr, TILES: gl.constexpr, STEPS: gl.constexpr, EARLY: gl.constexpr,
):  # fmt: skip
    """Writes the k indices of one row; `fill` behind the last one of a row with fewer than k elements."""
    WARPS: gl.constexpr = gl.num_warps()
    THREADS: gl.constexpr = 32 * WARPS
    HIGH: gl.constexpr = ALL // (8 * THREADS)
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
        select_row(xs, to, groups_at, length, k, BITS, GROUPS, CAPACITY)
    else:
        layout: gl.constexpr = gl.BlockedLayout([1, 8], [32, 1], [WARPS, 1], [1, 0])
        at = gl.arange(0, THREADS, layout=gl.SliceLayout(1, layout))[:, None] * 8
        at += gl.arange(0, 8, layout=gl.SliceLayout(0, layout))[None, :]
        lowest = float("-inf")
        source = maxima + row * stride_maxima
        bests = ()
        for u in gl.static_range(HIGH):
            best = _value(gl.load(source + u * (8 * THREADS) + at), BITS)
            known = (u * (8 * THREADS) + at) * GROUP < length
            bests = bests + (gl.where(known, best, lowest),)  # noqa: RUF005 - no unpacking in Gluon
        coarse = bests[0]
        for u in gl.static_range(1, HIGH):
            coarse = gl.maximum(coarse, bests[u])
        bound = _search(_keys(coarse, BITS), coarse == coarse, k, STEPS, False)
        least = _from_key(bound, BITS)
        groups = _passing_groups(bests, least, groups_at, THREADS, HIGH)
        block_barrier()
        total = _passing_elements(
            xs, groups_at, groups, least, length, found_at, BITS, GROUP, TILES, CAPACITY
        )
        block_barrier()
        if (total >= k) & (total <= CAPACITY):
            _choose(to, found_at, total, k, BITS, CAPACITY)
        else:
            whole_row(xs, to, length, k, BITS)
