"""RMS norm before rotation and cast of bf16 two values at a time, with the place of every value in registers set by hand.

For chips with packed bf16 arithmetic. A thread holds sixteen channels of a row, all of one group, so that the norm, the
rotation of neighbours and most of the search for the largest need no other thread.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import async_copy

from deepinfer.kernels.triton.bf16_pairs import even, odd, pair_codes, pair_of, squares
from deepinfer.kernels.triton.gluon_names import copy_elements

__all__ = ["lanes", "norm_rope_pairs_kernel"]


@gluon.constexpr_function
def lanes(each, span, pairs, warps):
    """A tile of rows, groups and pairs: as many threads of a warp as it takes for a row, the others on further rows."""
    lanes = pairs // each
    wide = min(span, 32 // lanes)
    tall = 32 // (wide * lanes)
    return gl.BlockedLayout([1, 1, each], [tall, wide, lanes], [warps, 1, 1], [2, 1, 0])


@gluon.jit
def _starts(x, row, heads, x_token, x_head, FLAT: gl.constexpr):
    """Where rows begin."""
    if FLAT:
        return x + row.to(gl.int64) * x_head
    token, head = (row // heads).to(gl.int64), (row % heads).to(gl.int64)
    return x + token * x_token + head * x_head


@gluon.jit
def _turned(w, phase, turned):
    """Pairs rotated by cosines and sines, where they are to be."""
    cos = phase.to(gl.int32).to(gl.float32, bitcast=True)
    sin = (phase >> 32).to(gl.int32).to(gl.float32, bitcast=True)
    a, b = even(w), odd(w)
    return gl.where(turned, pair_of(a * cos - b * sin, a * sin + b * cos), w)


@gluon.jit
def _put(w, q, scale, at, c, there, FORMAT: gl.constexpr, PAIRS: gl.constexpr):
    """Quantises and stores groups, shape [rows, groups]."""
    codes, byte = pair_codes(w, FORMAT)
    # Without its last axis, along which a thread would have a copy for each of its pairs, and store every one.
    gl.store(scale + at, gl.max(byte, axis=2), mask=there)
    gl.store(q + (at * PAIRS)[:, :, None] + c, codes, mask=there[:, :, None] & (c < PAIRS))


@gluon.jit(do_not_specialize=["rows", "places"])
def norm_rope_pairs_kernel(
    x, gains, phases, positions, q, scale, rows, places, heads, x_token, x_head, eps,
    CHANNELS: gl.constexpr, ROPE: gl.constexpr, HAS_NORM: gl.constexpr,
    HAS_POSITIONS: gl.constexpr, FLAT: gl.constexpr, FORMAT: gl.constexpr, ROWS: gl.constexpr,
    SPAN: gl.constexpr, TURNED: gl.constexpr, GROUP: gl.constexpr, EACH: gl.constexpr,
    SHARED: gl.constexpr, AHEAD: gl.constexpr,
):  # fmt: skip
    """As `norm_rope_cast_kernel`.

    Args:
        x: Pairs of bf16 as int32, the even one in the low half; distances are in pairs.
        gains: Pairs as well.
        phases: Cosine and sine of a pair as int64, the cosine in the low half.
        positions: As there.
        q: Codes: two of e4m3 as int16, or two of e2m1 as uint8.
        scale: Bytes.
        rows: Heads of all tokens.
        places: Places that phases are known of.
        heads: Heads of a token.
        x_token: Distance of tokens.
        x_head: Distance of heads.
        eps: Added to the mean square.
        CHANNELS: Channels of a head, a multiple of the group.
        ROPE: Channels that are rotated.
        HAS_NORM: Whether there are gains.
        HAS_POSITIONS: Whether there are positions.
        FLAT: Whether all rows are `x_head` apart.
        FORMAT: As in `small_floats`.
        ROWS: Rows of a program.
        SPAN: Groups of a row, up to a power of two.
        TURNED: Groups with rotated channels, up to a power of two.
        GROUP: Channels of a group.
        EACH: Pairs of a thread side by side.
        SHARED: Whether turned channels, a power of two as all are, are spread over a warp, with no tile of their own.
        AHEAD: With SHARED: whether rows lie side by side and those of a program are heads of one token. They come by way of shared
            memory, so that registers do not say how many are on their way.
    """
    PAIRS: gl.constexpr = GROUP // 2
    REAL: gl.constexpr = CHANNELS // GROUP
    LAST: gl.constexpr = REAL - TURNED
    WARPS: gl.constexpr = gl.num_warps()
    layout: gl.constexpr = lanes(EACH, SPAN, PAIRS, WARPS)
    row_layout: gl.constexpr = gl.SliceLayout(1, gl.SliceLayout(2, layout))
    first = gl.program_id(0) * ROWS
    row = first + gl.arange(0, ROWS, layout=row_layout)
    group = gl.arange(0, SPAN, layout=gl.SliceLayout(0, gl.SliceLayout(2, layout)))
    c = gl.arange(0, PAIRS, layout=gl.SliceLayout(0, gl.SliceLayout(1, layout)))[None, None, :]
    at = (gl.minimum(group, REAL - 1) * PAIRS)[None, :][:, :, None] + c
    if AHEAD:
        # One address and distances that are known.
        begin = x + gl.to_tensor(first).to(gl.int64) * (CHANNELS // 2)
        copies: gl.constexpr = gl.BlockedLayout([1, 4], [1, 32], [WARPS, 1], [1, 0])
        local = gl.arange(0, ROWS, layout=gl.SliceLayout(1, copies))[:, None] * (CHANNELS // 2)
        local += gl.arange(0, CHANNELS // 2, layout=gl.SliceLayout(0, copies))[None, :]
        words = gl.allocate_shared_memory(
            gl.int32, [ROWS, CHANNELS // 2], gl.SwizzledSharedLayout(1, 1, 1, [1, 0])
        )
        copy_elements(words, begin + local)
        async_copy.commit_group()
    else:
        # Rows behind the last are the last again, and not stored.
        start = _starts(x, gl.minimum(row, rows - 1), heads, x_token, x_head, FLAT)
        w = gl.load(start[:, None][:, :, None] + at)
    # What is read is asked for at once, also by the second tile.
    if HAS_NORM:
        g = gl.load(gains + at)
    if SHARED:
        # A pair a thread: those at the end of a row are spread over the warp by way of shared memory.
        turns: gl.constexpr = gl.BlockedLayout([1, 1], [1, 32], [WARPS, 1], [1, 0])
        n = gl.arange(0, ROPE // 2, layout=gl.SliceLayout(0, turns))[None, :]
        row2 = first + gl.arange(0, 1 if AHEAD else ROWS, layout=gl.SliceLayout(1, turns))
        place = (gl.minimum(row2, rows - 1) // heads).to(gl.int64)
        if HAS_POSITIONS:
            place = gl.load(positions + place).to(gl.int64)
        turned = ((place >= 0) & (place < places))[:, None] & (n < ROPE // 2)
        phase = gl.load(phases + (place * (ROPE // 2))[:, None] + n, mask=turned, other=0)
    elif TURNED > 0:
        START: gl.constexpr = (CHANNELS - ROPE) // 2
        turned_layout: gl.constexpr = lanes(4, TURNED, PAIRS, WARPS)
        row_layout2: gl.constexpr = gl.SliceLayout(1, gl.SliceLayout(2, turned_layout))
        row2 = first + gl.arange(0, ROWS, layout=row_layout2)
        last = gl.minimum(row2, rows - 1)
        place = (last // heads).to(gl.int64)
        if HAS_POSITIONS:
            place = gl.load(positions + place).to(gl.int64)
        group2 = LAST + gl.arange(
            0, TURNED, layout=gl.SliceLayout(0, gl.SliceLayout(2, turned_layout))
        )
        c2 = gl.arange(0, PAIRS, layout=gl.SliceLayout(0, gl.SliceLayout(1, turned_layout)))[
            None, None, :
        ]
        at2 = (gl.maximum(group2, 0) * PAIRS)[None, :][:, :, None] + c2
        start2 = _starts(x, last, heads, x_token, x_head, FLAT)
        w2 = gl.load(start2[:, None][:, :, None] + at2)
        if HAS_NORM:
            g2 = gl.load(gains + at2)
        known = ((place >= 0) & (place < places))[:, None][:, :, None]
        turned = known & (at2 >= START)
        phase = phases + (place * (ROPE // 2) - START)[:, None][:, :, None] + at2
        phase = gl.load(phase, mask=turned, other=0)
    if AHEAD:
        flat_layout: gl.constexpr = gl.BlockedLayout([1, EACH], [1, 32], [WARPS, 1], [1, 0])
        async_copy.wait_group(0)
        w = gl.reshape(words.load(flat_layout), [ROWS, SPAN, PAIRS])
        w = gl.convert_layout(w, layout)
    factor = row.to(gl.float32)
    if HAS_NORM:
        real = w
        if REAL < SPAN:
            real = gl.where((group < REAL)[None, :][:, :, None], w, 0)
        square = gl.convert_layout(squares(real, EACH == 8), row_layout)
        factor = gl.rsqrt(square / CHANNELS + eps)
        f = factor[:, None][:, :, None]
        w = pair_of(even(w) * f * even(g), odd(w) * f * odd(g))
    if SHARED:
        flat = gl.reshape(w, [ROWS, CHANNELS // 2])
        if not AHEAD:
            words = gl.allocate_shared_memory(
                gl.int32, [ROWS, CHANNELS // 2], gl.SwizzledSharedLayout(1, 1, 1, [1, 0])
            )
        words.store(flat)
        last_words = words.slice((CHANNELS - ROPE) // 2, ROPE // 2, dim=1)
        last_words.store(_turned(last_words.load(turns), phase, turned))
        w = gl.reshape(words.load(flat.type.layout), [ROWS, SPAN, PAIRS])
        w = gl.convert_layout(w, layout)
    if AHEAD:
        before = gl.to_tensor(first).to(gl.int64) * REAL
        local = gl.arange(0, ROWS, layout=row_layout)[:, None] * REAL + group[None, :]
        there = local >= 0
        _put(w, q + before * PAIRS, scale + before, local, c, there, FORMAT, PAIRS)
    else:
        there = (row < rows)[:, None] & (group < (REAL if SHARED else LAST))[None, :]
        to = row.to(gl.int64)[:, None] * REAL + group[None, :]
        _put(w, q, scale, to, c, there, FORMAT, PAIRS)
    if TURNED > 0 and not SHARED:
        if HAS_NORM:
            f2 = gl.convert_layout(factor, row_layout2)[:, None][:, :, None]
            w2 = pair_of(even(w2) * f2 * even(g2), odd(w2) * f2 * odd(g2))
        w2 = _turned(w2, phase, turned)
        there2 = (row2 < rows)[:, None] & (group2 >= 0)[None, :]
        _put(
            w2, q, scale, row2.to(gl.int64)[:, None] * REAL + group2[None, :], c2, there2, FORMAT, PAIRS
        )  # fmt: skip
