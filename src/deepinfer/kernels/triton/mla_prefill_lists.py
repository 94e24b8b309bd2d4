"""Which keys a row of sparse attention sees, and their copies into shared memory.

Every copying thread arrives by itself at a barrier once its copies have landed; what is no key becomes a row of zeros
and a mask of -inf.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy
from triton.experimental.gluon.language.nvidia.hopper import mbarrier

from deepinfer.kernels.triton.gluon_names import block_barrier, copy_elements

__all__ = ["copy_rows", "release", "release_tile", "scope_lengths"]


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
def _listed(
    index,
    extra_index,
    begin,
    tile,
    tiles,
    first,
    more,
    column,
    BAND: gl.constexpr,
    EXTRA: gl.constexpr,
):
    """What the lists of a row have in some columns of a tile, -1 behind their ends; read, but not looked at."""
    at = tile * 64 + column
    far = at - tiles * 64
    near = tile < tiles
    if BAND:
        key = gl.where(at < first, begin + at, -1)
        if EXTRA:
            key = gl.where(near, key, -1)
            seen = (far >= 0) & (far < more)
            key = gl.maximum(key, gl.load(extra_index + far, mask=seen, other=-1))
    elif EXTRA:
        source = gl.where(near, index, extra_index)
        at = gl.where(near, at, far)
        key = gl.load(source + at, mask=at < gl.where(near, first, more), other=-1)
    else:
        key = gl.load(index + at, mask=at < first, other=-1)
    return key


@gluon.jit
def release(empty, place):
    """Hands space back once every warp has done with it."""
    block_barrier()
    mbarrier.arrive(empty.index(place), count=1)


@gluon.jit
def release_tile(empty, slot, PARTS: gl.constexpr):
    """Hands the space of all pieces of a tile back."""
    block_barrier()
    for part in gl.static_range(PARTS):
        mbarrier.arrive(empty.index(slot * PARTS + part), count=1)


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
    keys,
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
    HEADS: gl.constexpr,
    PARTS: gl.constexpr,
    DEPTH: gl.constexpr,
    MULTIPLE: gl.constexpr,
    ROWS: gl.constexpr,
    WARPS: gl.constexpr,
):
    """Copies keys, and the queries of each row, as space gets free."""
    SPAN: gl.constexpr = 64 // PARTS
    STEP: gl.constexpr = min(SPAN, ROWS)
    Q_ROWS: gl.constexpr = min(HEADS, 16)
    # Rows of a thread lie one behind the other: where they go in shared memory is known beforehand.
    layout: gl.constexpr = gl.BlockedLayout([STEP // WARPS, 8], [1, 32], [WARPS, 1], [1, 0])
    row_layout: gl.constexpr = gl.SliceLayout(1, layout)
    d = gl.arange(0, 512, layout=gl.SliceLayout(0, layout))
    q_layout: gl.constexpr = gl.BlockedLayout([1, 8], [1, 32], [WARPS, 1], [1, 0])
    q_d = gl.arange(0, 512, layout=gl.SliceLayout(0, q_layout))
    q_r = gl.arange(0, Q_ROWS, layout=gl.SliceLayout(1, q_layout))
    column = gl.arange(0, 64, layout=gl.BlockedLayout([1], [32], [WARPS], [0]))
    blocks = gl.cdiv(heads, HEADS)
    slot = 0
    phase = 1
    turn = 0
    for unit in range(gl.program_id(0), s_q * blocks, gl.num_programs(0)):
        row = unit // blocks
        first, more = scope_lengths(
            lengths, extra_lengths, row, width, extra_width, COUNTED, EXTRA, EXTRA_COUNTED
        )
        tiles = gl.cdiv(first, 64)
        # Tiles behind the last one have no keys.
        total = gl.cdiv(tiles + gl.cdiv(more, 64), MULTIPLE) * MULTIPLE
        begin = 0
        index = indices + row.to(gl.int64) * stride_i
        if BAND:
            begin = gl.load(indices + row)
            index = indices
        extra_index = extra_indices + row.to(gl.int64) * stride_ei
        found = _listed(index, extra_index, begin, 0, tiles, first, more, column, BAND, EXTRA)
        for tile in range(total):
            base = kv
            stride = stride_kv
            limit = s_kv
            if EXTRA:
                near = tile < tiles
                base = gl.where(near, kv, extra_kv)
                stride = gl.where(near, stride_kv, stride_extra)
                limit = gl.where(near, s_kv, s_extra)
            valid = (found >= 0) & (found < limit)
            keys.index(slot).store(gl.where(valid, found, -1))
            mask = gl.where(valid, 0.0, float("-inf"))
            # The next tile's keys are on their way while this tile's space is waited for.
            found = _listed(
                index, extra_index, begin, tile + 1, tiles, first, more, column, BAND, EXTRA
            )
            for part in gl.static_range(PARTS):
                place = slot * PARTS + part
                mbarrier.wait(empty.index(place), phase)
                if part == 0:
                    masks.index(slot).store(mask)
                for step in gl.static_range(SPAN // STEP):
                    key = keys.index(slot).slice(part * SPAN + step * STEP, STEP).load(row_layout)
                    copy_elements(
                        ring.index(slot).slice(part * SPAN + step * STEP, STEP, dim=0),
                        (base + key.to(gl.int64) * stride)[:, None] + d[None, :],
                        mask=(key >= 0)[:, None] & (d < 512)[None, :],
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
                    h = head + step * Q_ROWS + q_r
                    copy_elements(
                        q_tile.slice(step * Q_ROWS, Q_ROWS, dim=0),
                        from_q + (h * stride_qh)[:, None] + q_d[None, :],
                        mask=(h < heads)[:, None] & (q_d < 512)[None, :],
                    )
                async_copy.mbarrier_arrive(q_full, increment_count=False)
            slot += 1
            if slot == DEPTH:
                slot = 0
                phase ^= 1
