"""Device functions of the selections whose registers are set by hand: keys, the search of the k-th, and the choice.

Threads hold tensors of shape [threads, each], in the order of the index.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

__all__ = [
    "before",
    "choose",
    "ends",
    "from_key",
    "keys_of",
    "least_of_pairs",
    "lowest_key",
    "search",
    "sift",
    "total_of",
    "value_of",
]


@gluon.jit
def _add(a, b):
    return a + b


@gluon.jit
def value_of(raw, BITS: gl.constexpr):
    """Bits of bf16 or fp32, as integers, to fp32."""
    if BITS == 16:
        value = (raw.to(gl.int32) << 16).to(gl.float32, bitcast=True)
    else:
        value = raw.to(gl.float32, bitcast=True)
    return value


@gluon.jit
def lowest_key(BITS: gl.constexpr):
    """The key of NaN."""
    return gl.to_tensor(-0x7FFF if BITS == 16 else -0x7FFFFFFF)


@gluon.jit
def keys_of(value, BITS: gl.constexpr):
    """Signed integers in the order of fp32 values, NaN lowest and both zeros equal; of the upper bits for bf16."""
    raw = value.to(gl.int32, bitcast=True)
    raw = gl.where(value == 0.0, 0, raw)
    key = gl.where(raw < 0, raw ^ 0x7FFFFFFF, raw)
    if BITS == 16:
        key = key >> 16
    return gl.where(value != value, -0x7FFF if BITS == 16 else -0x7FFFFFFF, key)


@gluon.jit
def from_key(key, BITS: gl.constexpr):
    """The value of a key as fp32; NaN where it has none."""
    if BITS == 16:
        raw = gl.where(key < 0, key ^ 0x7FFF, key) << 16
    else:
        raw = gl.where(key < 0, key ^ 0x7FFFFFFF, key)
    return raw.to(gl.float32, bitcast=True)


@gluon.jit
def _by_warps(x):
    """A number of each thread, shape [threads], as [warps, 32]."""
    WARPS: gl.constexpr = gl.num_warps()
    layout: gl.constexpr = gl.BlockedLayout([1, 1], [1, 32], [WARPS, 1], [1, 0])
    return gl.convert_layout(x.reshape([WARPS, 32]), layout)


@gluon.jit
def _known_to_all(x):
    """A number of each warp, shape [warps]: every thread gets all of them, by one exchange."""
    WARPS: gl.constexpr = gl.num_warps()
    EACH: gl.constexpr = WARPS if WARPS <= 16 else 1  # else a lane
    return gl.convert_layout(x, gl.BlockedLayout([EACH], [32], [WARPS], [0]))


@gluon.jit
def total_of(x):
    """Sum over all threads."""
    return gl.sum(_known_to_all(gl.sum(_by_warps(x), 1)), 0)


@gluon.jit
def before(counts):
    """Sums of the counts of the threads before each one, and of all threads, by one exchange."""
    WARPS: gl.constexpr = gl.num_warps()
    EACH: gl.constexpr = WARPS if WARPS <= 16 else 1
    every: gl.constexpr = gl.BlockedLayout([1, EACH], [1, 32], [WARPS, 1], [1, 0])
    own = _by_warps(counts)
    within = gl.associative_scan(own, 1, _add) - own
    parts = gl.convert_layout(gl.sum(own, 1), gl.SliceLayout(0, every))
    warp = gl.arange(0, WARPS, layout=gl.SliceLayout(1, every))[:, None]
    other = gl.arange(0, WARPS, layout=gl.SliceLayout(0, every))[None, :]
    earlier = gl.sum(gl.where(other < warp, parts[None, :], 0), 1)
    earlier = gl.convert_layout(earlier, gl.SliceLayout(1, own.type.layout))
    found = (within + earlier[:, None]).reshape([32 * WARPS])
    return gl.convert_layout(found, counts.type.layout), gl.sum(parts, 0)


@gluon.jit
def ends(low, high):
    """The smallest of some keys and the largest of others."""
    low = gl.min(_by_warps(gl.min(low, 1)), 1)
    high = gl.max(_by_warps(gl.max(high, 1)), 1)
    both = _known_to_all((low.to(gl.int64) & 0xFFFFFFFF) | (high.to(gl.int64) << 32))
    return gl.min(both.to(gl.int32), 0), gl.max((both >> 32).to(gl.int32), 0)


@gluon.jit
def least_of_pairs(keys):
    """What half of the keys reach at least: the greater ones of each two, shape [threads, each / 2], to take the least of.

    A pair without a key, -2^31, counts as none.
    """
    THREADS: gl.constexpr = keys.shape[0]
    EACH: gl.constexpr = keys.shape[1]
    if EACH > 1:
        keys = gl.max(keys.reshape([THREADS, EACH // 2, 2]), 2)
    return gl.where(keys == -0x80000000, 0x7FFFFFFF, keys)


@gluon.jit
def _first_step(low, high):
    """The step of the first three trials between two keys; 0 when they are equal."""
    differ = high - low
    bits = differ.to(gl.float32).to(gl.int32, bitcast=True)
    # The float may be rounded up to the next power of two.
    steps = gl.minimum((gl.maximum((bits >> 23) - 126, 0) + 1) // 2, 16)
    steps = gl.where(differ < 0, 16, steps)
    return gl.where(steps > 0, gl.to_tensor(1) << (2 * gl.maximum(steps - 1, 0)), 0)


@gluon.jit
def _trial(at, end, low):
    """The key at a distance from `low`, the first bit turned; above all keys behind the distance `end`."""
    return gl.where(at > end, 0x7FFFFFFF, at + (low + -0x80000000))


@gluon.jit
def _narrow(found, step, reached, above, at_first, at_second, at_third, k):
    """Takes the last of three trials that k keys reach."""
    above = gl.where(
        at_third >= k,
        above,
        gl.where(at_second >= k, at_third, gl.where(at_first >= k, at_second, at_first)),
    )
    reached = gl.where(
        at_third >= k,
        at_third,
        gl.where(at_second >= k, at_second, gl.where(at_first >= k, at_first, reached)),
    )
    taken = gl.where(at_third >= k, 3, gl.where(at_second >= k, 2, gl.where(at_first >= k, 1, 0)))
    return found + taken * step, reached, above


@gluon.jit
def search(keys, low, high, k, slack):
    """A key that k to k + slack of the keys reach, or the k-th largest; two bits a step from `low`, its first bound.

    Args:
        keys: A tuple of tensors of shape [threads, each], -2^31 where there is none; 65535 at most.
        low: Not above the k-th largest.
        high: Not below the largest.
        k: Which.
        slack: How many more are as good.

    Returns:
        The key, and how many keys reach it and how many are above it, if the k-th was found by its last bit.
    """
    # Distances from `low` are unsigned numbers: signed ones with the first bit turned.
    end = high - low + -0x80000000
    found = gl.to_tensor(-0x80000000)
    step = _first_step(low, high)
    reached = gl.to_tensor(0x7FFFFFFF)
    above = gl.to_tensor(0)
    while step != 0:
        first = _trial(found + step, end, low)
        second = _trial(found + 2 * step, end, low)
        third = _trial(found + 3 * step, end, low)
        own = gl.zeros([32 * gl.num_warps()], gl.int32, gl.SliceLayout(1, keys[0].type.layout))
        last = gl.zeros([32 * gl.num_warps()], gl.int32, gl.SliceLayout(1, keys[0].type.layout))
        for u in gl.static_range(len(keys)):
            both = (keys[u] >= first).to(gl.int32) + ((keys[u] >= second).to(gl.int32) << 16)
            own += gl.sum(both, 1)
            last += gl.sum((keys[u] >= third).to(gl.int32), 1)
        # Sums of 32 bits are one instruction for a warp.
        own = gl.sum(_by_warps(own), 1).to(gl.int64) & 0xFFFFFFFF
        last = gl.sum(_by_warps(last), 1).to(gl.int64)
        count = gl.sum(_known_to_all(own | (last << 32)), 0)
        at_first = count.to(gl.int32) & 0xFFFF
        at_second = (count.to(gl.int32) >> 16) & 0xFFFF
        at_third = (count >> 32).to(gl.int32)
        found, reached, above = _narrow(
            found, step, reached, above, at_first, at_second, at_third, k
        )
        step = gl.where(reached <= k + slack, 0, step >> 2)
    return _trial(found, end, low), reached, above


@gluon.jit
def choose(to, keys, index, low, high, k):
    """Writes the indices of the k largest keys, -2^31 where there is none; ties to the lowest index."""
    last, reached, above = search((keys,), low, high, k, 0)
    # With k keys from some key on, no bit behind it matters: all above the one before it are taken.
    exact = reached == k
    last = gl.where(exact, last - 1, last)
    room = gl.where(exact, 0, k - above)
    more = (keys > last).to(gl.int32)
    same = (keys == last).to(gl.int32)
    both = more + (same << 16)
    earlier, _ = before(gl.sum(both, 1))
    place = earlier[:, None] + gl.associative_scan(both, 1, _add) - both
    ties = place >> 16
    chosen = (more > 0) | ((same > 0) & (ties < room))
    gl.store(to + (place & 0xFFFF) + gl.minimum(ties, room), index, mask=chosen)


@gluon.jit
def _units(xs, groups_at, start, units, length, at, BITS: gl.constexpr, GROUP: gl.constexpr, PART: gl.constexpr,
           LISTED: gl.constexpr):  # fmt: skip
    """Keys and indices of some parts of groups, -2^31 behind the last one; `at` is a thread and an element."""
    SUBS: gl.constexpr = GROUP // PART
    q = start + at[0]
    live = q < units
    if LISTED:  # noqa: SIM108 - one branch is compiled
        group = gl.load(groups_at + q // SUBS, mask=live, other=0)
    else:
        group = q // SUBS
    index = (group * GROUP + q % SUBS * PART)[:, None] + at[1]
    inside = live[:, None] & (index < length)
    # Reads are masked by 16 bytes, which may end behind the row: what holds its last element is there.
    VECTOR: gl.constexpr = 128 // BITS if PART >= 128 // BITS else PART
    there = live[:, None] & (index // VECTOR * VECTOR < length)
    keys = keys_of(value_of(gl.load(xs + index, mask=there, other=0), BITS), BITS)
    return gl.where(inside, keys, -0x80000000), index


@gluon.jit
def _tally(xs, groups_at, units, length, first, second, third, BITS: gl.constexpr, GROUP: gl.constexpr,
           PART: gl.constexpr, LISTED: gl.constexpr):  # fmt: skip
    """How many elements reach each of three keys."""
    WARPS: gl.constexpr = gl.num_warps()
    THREADS: gl.constexpr = 32 * WARPS
    layout: gl.constexpr = gl.BlockedLayout([1, PART], [32, 1], [WARPS, 1], [1, 0])
    i = gl.arange(0, THREADS, layout=gl.SliceLayout(1, layout))
    e = gl.arange(0, PART, layout=gl.SliceLayout(0, layout))[None, :]
    one = gl.zeros([THREADS], gl.int32, gl.SliceLayout(1, layout))
    two = gl.zeros([THREADS], gl.int32, gl.SliceLayout(1, layout))
    three = gl.zeros([THREADS], gl.int32, gl.SliceLayout(1, layout))
    for start in range(0, units, 2 * THREADS):
        for u in gl.static_range(2):
            keys, _ = _units(
                xs, groups_at, start + u * THREADS, units, length, (i, e), BITS, GROUP, PART, LISTED
            )
            one += gl.sum((keys >= first).to(gl.int32), 1)
            two += gl.sum((keys >= second).to(gl.int32), 1)
            three += gl.sum((keys >= third).to(gl.int32), 1)
    return total_of(one), total_of(two), total_of(three)


@gluon.jit
def _next_key(xs, groups_at, units, length, low, BITS: gl.constexpr, GROUP: gl.constexpr, PART: gl.constexpr,
              LISTED: gl.constexpr):  # fmt: skip
    """How many elements are above a key, and the smallest of their keys."""
    WARPS: gl.constexpr = gl.num_warps()
    THREADS: gl.constexpr = 32 * WARPS
    layout: gl.constexpr = gl.BlockedLayout([1, PART], [32, 1], [WARPS, 1], [1, 0])
    i = gl.arange(0, THREADS, layout=gl.SliceLayout(1, layout))
    e = gl.arange(0, PART, layout=gl.SliceLayout(0, layout))[None, :]
    count = gl.zeros([THREADS], gl.int32, gl.SliceLayout(1, layout))
    least = gl.full([THREADS], 0x7FFFFFFF, gl.int32, gl.SliceLayout(1, layout))
    for start in range(0, units, 2 * THREADS):
        for u in gl.static_range(2):
            keys, _ = _units(
                xs, groups_at, start + u * THREADS, units, length, (i, e), BITS, GROUP, PART, LISTED
            )
            count += gl.sum((keys > low).to(gl.int32), 1)
            least = gl.minimum(least, gl.min(gl.where(keys > low, keys, 0x7FFFFFFF), 1))
    return total_of(count), gl.min(_known_to_all(gl.min(_by_warps(least), 1)), 0)


@gluon.jit
def sift(xs, groups_at, units, length, to, low, high, k, BITS: gl.constexpr, GROUP: gl.constexpr, PART: gl.constexpr,
         LISTED: gl.constexpr):  # fmt: skip
    """Writes the k largest elements of groups, or of a row, of any number: it is read again for each two bits.

    Args:
        xs: The row.
        groups_at: Ascending groups, when LISTED.
        units: Parts of groups: PART elements a thread.
        length: Elements of the row.
        to: Written with the indices.
        low: Not above the key of the k-th largest.
        high: Not below the largest key.
        k: How many.
        BITS: Of an element.
        GROUP: Elements of a group.
        PART: Elements a thread; divides GROUP.
        LISTED: Whether the groups are listed; else they are all those of the row.
    """
    WARPS: gl.constexpr = gl.num_warps()
    THREADS: gl.constexpr = 32 * WARPS
    layout: gl.constexpr = gl.BlockedLayout([1, PART], [32, 1], [WARPS, 1], [1, 0])
    i = gl.arange(0, THREADS, layout=gl.SliceLayout(1, layout))
    e = gl.arange(0, PART, layout=gl.SliceLayout(0, layout))[None, :]
    # Most often the k-th largest equals the bound, or one of the next keys that there are.
    above, following = _next_key(xs, groups_at, units, length, low, BITS, GROUP, PART, LISTED)
    looks = gl.to_tensor(1)
    while (above >= k) & (looks < 3):
        low = following
        above, following = _next_key(xs, groups_at, units, length, low, BITS, GROUP, PART, LISTED)
        looks += 1
    end = high - low + -0x80000000
    found = gl.to_tensor(-0x80000000)
    step = gl.where(above < k, 0, _first_step(low, high))
    above = gl.where(above < k, above, 0)
    reached = gl.to_tensor(0x7FFFFFFF)
    while step != 0:
        first = _trial(found + step, end, low)
        second = _trial(found + 2 * step, end, low)
        third = _trial(found + 3 * step, end, low)
        at_first, at_second, at_third = _tally(
            xs, groups_at, units, length, first, second, third, BITS, GROUP, PART, LISTED
        )
        found, reached, above = _narrow(
            found, step, reached, above, at_first, at_second, at_third, k
        )
        step = gl.where(reached == k, 0, step >> 2)
    exact = reached == k
    last = _trial(found, end, low)
    last = gl.where(exact, last - 1, last)
    room = gl.where(exact, 0, k - above)
    done = gl.to_tensor(0)
    start = gl.to_tensor(0)
    while (start < units) & (done < k):
        keys, index = _units(xs, groups_at, start, units, length, (i, e), BITS, GROUP, PART, LISTED)
        more = (keys > last).to(gl.int32)
        same = (keys == last).to(gl.int32)
        both = more + (same << 16)
        earlier, count_all = before(gl.sum(both, 1))
        place = earlier[:, None] + gl.associative_scan(both, 1, _add) - both
        ties = place >> 16
        chosen = (more > 0) | ((same > 0) & (ties < room))
        gl.store(to + done + (place & 0xFFFF) + gl.minimum(ties, room), index, mask=chosen)
        taken = gl.minimum(count_all >> 16, room)
        done += (count_all & 0xFFFF) + taken
        room -= taken
        start += THREADS
