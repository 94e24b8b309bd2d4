"""Which keys a row of sparse attention sees, and their copies into shared memory.

Every copying thread arrives by itself at a barrier once its copies have landed; what is no key becomes a row of zeros
and a mask of -inf.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy
from triton.experimental.gluon.language.nvidia.hopper import mbarrier

__all__ = ["copy_rows", "scope_lengths", "tile_keys"]

# Called async_copy_global_to_shared up to Triton 3.6.
_load = getattr(async_copy, "async_load", None) or async_copy.async_copy_global_to_shared


@gluon.jit
def scope_lengths(
    lengths,
    extra_lengths,
    row,
    width,
    extra_width,
    COUNTED: gl.constexpr,
    EXTRA: gl.constexpr,
    EXTRA_COUNTED: gl.constexpr,
):
    """Keys of the two lists of a row."""
    first = width
    if COUNTED:
        first = gl.maximum(gl.minimum(gl.load(lengths + row), width), 0)
    more = 0
    if EXTRA:
        more = extra_width
        if EXTRA_COUNTED:
            more = gl.maximum(gl.minimum(gl.load(extra_lengths + row), extra_width), 0)
    return first, more


@gluon.jit
def tile_keys(
    index,
    extra_index,
    begin,
    tile,
    tiles,
    first,
    more,
    s_kv,
    s_extra,
    column,
    BAND: gl.constexpr,
    EXTRA: gl.constexpr,
    TILE: gl.constexpr,
):
    """Rows of some columns of a tile, and which of them are keys."""
    at = tile * TILE + column
    limit = s_kv
    if BAND:
        inside = (at < first) & (tile < tiles)
        key = begin + at
        if EXTRA:
            far = at - tiles * TILE
            near = tile < tiles
            key = gl.where(
                near, key, gl.load(extra_index + far, mask=(far >= 0) & (far < more), other=-1)
            )
            inside = gl.where(near, inside, far < more)
            limit = gl.where(near, s_kv, s_extra)
    else:
        from_list = index
        count = first
        if EXTRA:
            near = tile < tiles
            at = gl.where(near, at, at - tiles * TILE)
            from_list = gl.where(near, index, extra_index)
            count = gl.where(near, first, more)
            limit = gl.where(near, s_kv, s_extra)
        key = gl.load(from_list + at, mask=at < count, other=-1)
        inside = at < count
    valid = inside & (key >= 0) & (key < limit)
    return gl.where(valid, key, 0), valid


@gluon.jit
def copy_rows(
    q,
    kv,
    indices,
    lengths,
    extra_kv,
    extra_indices,
    extra_lengths,
    q_tile,
    ring,
    q_tail,
    tails,
    masks,
    q_full,
    q_empty,
    full,
    empty,
    s_q,
    heads,
    s_kv,
    s_extra,
    width,
    extra_width,
    stride_qt,
    stride_qh,
    stride_kv,
    stride_extra,
    stride_i,
    stride_ei,
    BAND: gl.constexpr,
    COUNTED: gl.constexpr,
    EXTRA: gl.constexpr,
    EXTRA_COUNTED: gl.constexpr,
    TAIL: gl.constexpr,
    HEADS: gl.constexpr,
    PARTS: gl.constexpr,
    DEPTH: gl.constexpr,
    WARPS: gl.constexpr,
):
    """Copies keys, and the queries of each row, as space gets free."""
    TILE: gl.constexpr = 64
    ROWS: gl.constexpr = 16
    Q_ROWS: gl.constexpr = min(HEADS, 16)
    SPAN: gl.constexpr = TILE // PARTS
    STEPS: gl.constexpr = SPAN // ROWS
    layout: gl.constexpr = gl.BlockedLayout([1, 8], [1, 32], [WARPS, 1], [1, 0])
    row_layout: gl.constexpr = gl.SliceLayout(1, layout)
    d = gl.arange(0, 512, layout=gl.SliceLayout(0, layout))
    r = gl.arange(0, ROWS, layout=row_layout)
    tail_layout: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [WARPS, 1], [1, 0])
    e = 512 + gl.arange(0, 64, layout=gl.SliceLayout(0, tail_layout))
    tail_r = gl.arange(0, ROWS, layout=gl.SliceLayout(1, tail_layout))
    blocks = gl.cdiv(heads, HEADS)
    slot = 0
    phase = 1
    turn = 0
    for unit in range(gl.program_id(0), s_q * blocks, gl.num_programs(0)):
        row = unit // blocks
        first, more = scope_lengths(
            lengths, extra_lengths, row, width, extra_width, COUNTED, EXTRA, EXTRA_COUNTED
        )
        tiles = gl.cdiv(first, TILE)
        total = tiles + gl.cdiv(more, TILE)
        begin = 0
        index = indices + row.to(gl.int64) * stride_i
        if BAND:
            begin = gl.load(indices + row)
            index = indices
        extra_index = extra_indices + row.to(gl.int64) * stride_ei
        for tile in range(total):
            base = kv
            stride = stride_kv
            if EXTRA:
                base = gl.where(tile < tiles, kv, extra_kv)
                stride = gl.where(tile < tiles, stride_kv, stride_extra)
            for part in gl.static_range(PARTS):
                keys = ()
                valids = ()
                for step in gl.static_range(STEPS):
                    key, valid = tile_keys(
                        index,
                        extra_index,
                        begin,
                        tile,
                        tiles,
                        first,
                        more,
                        s_kv,
                        s_extra,
                        part * SPAN + step * ROWS + r,
                        BAND,
                        EXTRA,
                        TILE,
                    )
                    keys = keys + (key,)  # type: ignore[assignment]  # noqa: RUF005
                    valids = valids + (valid,)  # type: ignore[assignment]  # noqa: RUF005
                place = slot * PARTS + part
                mbarrier.wait(empty.index(place), phase)
                into = ring.index(slot)
                for step in gl.static_range(STEPS):
                    mask = gl.where(valids[step], 0.0, float("-inf"))
                    masks.index(slot).slice(part * SPAN + step * ROWS, ROWS).store(mask)
                    at = keys[step].to(gl.int64) * stride
                    _load(
                        into.slice(part * SPAN + step * ROWS, ROWS, dim=0),
                        base + at[:, None] + d[None, :],
                        mask=valids[step][:, None] & (d < 512)[None, :],
                    )
                    if TAIL:
                        key, valid = tile_keys(
                            index,
                            extra_index,
                            begin,
                            tile,
                            tiles,
                            first,
                            more,
                            s_kv,
                            s_extra,
                            part * SPAN + step * ROWS + tail_r,
                            BAND,
                            EXTRA,
                            TILE,
                        )
                        at = key.to(gl.int64) * stride
                        _load(
                            tails.index(slot).slice(part * SPAN + step * ROWS, ROWS, dim=0),
                            base + at[:, None] + e[None, :],
                            mask=valid[:, None] & (e < 576)[None, :],
                        )
                async_copy.mbarrier_arrive(full.index(place), increment_count=False)
                # One more arrival, for the masks.
                mbarrier.arrive(full.index(place), count=1)
            if tile == 0:
                # Behind the first keys, which do not wait for the last product with the queries before.
                mbarrier.wait(q_empty, (turn & 1) ^ 1)
                turn += 1
                head = (unit % blocks) * HEADS
                from_q = q + row.to(gl.int64) * stride_qt
                for step in gl.static_range(HEADS // Q_ROWS):
                    h = head + step * Q_ROWS + gl.arange(0, Q_ROWS, layout=row_layout)
                    _load(
                        q_tile.slice(step * Q_ROWS, Q_ROWS, dim=0),
                        from_q + (h * stride_qh)[:, None] + d[None, :],
                        mask=(h < heads)[:, None] & (d < 512)[None, :],
                    )
                    if TAIL:
                        h = head + step * Q_ROWS + tail_r
                        _load(
                            q_tail.slice(step * Q_ROWS, Q_ROWS, dim=0),
                            from_q + (h * stride_qh)[:, None] + e[None, :],
                            mask=(h < heads)[:, None] & (e < 576)[None, :],
                        )
                async_copy.mbarrier_arrive(q_full, increment_count=False)
            slot += 1
            if slot == DEPTH:
                slot = 0
                phase ^= 1
