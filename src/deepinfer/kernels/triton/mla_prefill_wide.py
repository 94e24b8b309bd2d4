"""Sparse attention of many query rows on Hopper: 64 heads a program, keys gathered by index into shared memory.

Four warps copy the keys of a tile, row by row, into a ring of two tiles; two warpgroups multiply. Each warpgroup takes
the logits of half of a tile's keys and the outputs of half of the channels; the shares pass through shared memory.
The grid is as large as the chip, and copies of the next row start while the last one is still multiplied.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from deepinfer.kernels.triton.gluon_names import block_barrier

__all__ = ["mla_prefill_wide_kernel"]


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
def _copies(
    q,
    kv,
    indices,
    lengths,
    extra_kv,
    extra_indices,
    extra_lengths,
    q_tile,
    ring,
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
    PARTS: gl.constexpr,
    WARPS: gl.constexpr,
):
    """Copies keys, and the queries of each row, as space gets free."""
    TILE: gl.constexpr = 64
    ROWS: gl.constexpr = 16
    SPAN: gl.constexpr = TILE // PARTS
    STEPS: gl.constexpr = SPAN // ROWS
    layout: gl.constexpr = gl.BlockedLayout([1, 8], [1, 32], [WARPS, 1], [1, 0])
    row_layout: gl.constexpr = gl.SliceLayout(1, layout)
    d = gl.arange(0, 512, layout=gl.SliceLayout(0, layout))
    r = gl.arange(0, ROWS, layout=row_layout)
    blocks = gl.cdiv(heads, 64)
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
                    keys = keys + (key,)
                    valids = valids + (valid,)
                mbarrier.wait(empty.index(slot * PARTS + part), phase)
                into = ring.index(slot)
                for step in gl.static_range(STEPS):
                    at = keys[step].to(gl.int64) * stride
                    async_copy.async_copy_global_to_shared(
                        into.slice(part * SPAN + step * ROWS, ROWS, dim=0),
                        base + at[:, None] + d[None, :],
                        mask=valids[step][:, None] & (d < 512)[None, :],
                    )
                async_copy.mbarrier_arrive(full.index(slot * PARTS + part), increment_count=False)
            if tile == 0:
                # Behind the first keys, which do not wait for the last product with the queries before.
                mbarrier.wait(q_empty, (turn & 1) ^ 1)
                turn += 1
                head = (unit % blocks) * 64
                from_q = q + row.to(gl.int64) * stride_qt
                for step in gl.static_range(64 // ROWS):
                    h = head + step * ROWS + r
                    async_copy.async_copy_global_to_shared(
                        q_tile.slice(step * ROWS, ROWS, dim=0),
                        from_q + (h * stride_qh)[:, None] + d[None, :],
                        mask=(h < heads)[:, None] & (d < 512)[None, :],
                    )
                async_copy.mbarrier_arrive(q_full, increment_count=False)
            slot ^= 1
            if slot == 0:
                phase ^= 1


@gluon.jit
def turn_back(acc, phases):
    """Rotates the last 64 channels back."""
    layout: gl.constexpr = acc.type.layout
    pairs = acc.reshape([64, 256, 2])
    even, odd = gl.split(pairs)
    pair = gl.arange(0, 256, layout=gl.SliceLayout(0, even.type.layout)) - 224
    cos = gl.load(phases + 2 * pair, mask=pair >= 0, other=1.0)[None, :]
    sin = gl.load(phases + 2 * pair + 1, mask=pair >= 0, other=0.0)[None, :]
    turned = gl.join(even * cos + odd * sin, odd * cos - even * sin)
    return gl.convert_layout(turned.reshape([64, 512]), layout)


@gluon.jit
def sum_columns(p):
    """Sums over the columns that a thread holds: [64, 64] to [64, 2, 4]."""
    return gl.sum(gl.sum(p.reshape([64, 2, 4, 4, 2]), 4), 2)


@gluon.jit
def release(empty, slot, PARTS: gl.constexpr):
    """Hands a tile's space back once every warp has done with it."""
    block_barrier()
    for part in gl.static_range(PARTS):
        mbarrier.arrive(empty.index(slot * PARTS + part), count=1)


@gluon.jit
def _products(
    indices,
    lengths,
    extra_indices,
    extra_lengths,
    sink,
    phases,
    out,
    max_logits,
    lse,
    q_tile,
    ring,
    p_tile,
    tops,
    rises,
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
    scale,
    stride_i,
    stride_ei,
    stride_ot,
    stride_oh,
    BAND: gl.constexpr,
    COUNTED: gl.constexpr,
    EXTRA: gl.constexpr,
    EXTRA_COUNTED: gl.constexpr,
    SINK: gl.constexpr,
    ROPE: gl.constexpr,
    PARTS: gl.constexpr,
    LAZY: gl.constexpr,
    STAGED: gl.constexpr,
):
    TILE: gl.constexpr = 64
    s_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 2], [16, 32, 16])
    o_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 2], [16, 256, 16])
    head_layout: gl.constexpr = gl.SliceLayout(1, s_layout)
    o_head_layout: gl.constexpr = gl.SliceLayout(1, o_layout)
    out_layout: gl.constexpr = gl.BlockedLayout([1, 8], [1, 32], [8, 1], [1, 0])
    column = gl.arange(0, TILE, layout=gl.SliceLayout(0, s_layout))
    blocks = gl.cdiv(heads, 64)
    no_logits = gl.zeros([64, TILE], gl.float32, s_layout)
    sums_layout: gl.constexpr = sum_columns(no_logits).type.layout
    sums_head_layout: gl.constexpr = gl.SliceLayout(1, gl.SliceLayout(2, sums_layout))
    count = 0
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
        highest = gl.full([64], float("-inf"), gl.float32, head_layout)
        base = highest
        sums = sum_columns(no_logits)
        acc = gl.zeros([64, 512], gl.float32, o_layout)
        if total > 0:
            mbarrier.wait(q_full, turn & 1)
        for tile in range(total):
            _, valid = tile_keys(
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
                BAND,
                EXTRA,
                TILE,
            )
            slot = count & 1
            for part in gl.static_range(PARTS):
                mbarrier.wait(full.index(slot * PARTS + part), (count >> 1) & 1)
            fence_async_shared()
            keys = ring.index(slot)
            s = warpgroup_mma(
                q_tile, keys.permute((1, 0)), no_logits, use_acc=False, is_async=True
            )
            s = warpgroup_mma_wait(0, [s])
            if tile == total - 1:
                block_barrier()
                mbarrier.arrive(q_empty, count=1)
            s = gl.where(valid[None, :], s * scale, float("-inf"))
            # Each warpgroup has the highest logits of its half of the keys.
            halves = gl.max(s.reshape([64, 2, 32]), axis=2)
            tops.store(gl.permute(halves, (1, 0)).reshape([128]))
            if LAZY:
                rise = halves - gl.convert_layout(base, gl.SliceLayout(1, halves.type.layout))[:, None]
                rises.store(gl.max(rise.reshape([4, 16, 2]), axis=1).reshape([8]))
            top = gl.maximum(tops.slice(0, 64).load(head_layout), tops.slice(64, 64).load(head_layout))
            highest = gl.maximum(highest, top)
            # The base follows the highest logit only when the shares would get large.
            raised = gl.where(top > base + 8.0, top, base)
            origin = gl.where(raised == float("-inf"), 0.0, raised)
            fade = gl.exp2(base - origin)
            base = raised
            p = gl.exp2(s - origin[:, None])
            sums = sums * gl.convert_layout(fade, sums_head_layout)[:, None, None] + sum_columns(p)
            p_tile.store(p.to(gl.bfloat16))
            fence_async_shared()
            if LAZY:
                if gl.max(rises.load(gl.BlockedLayout([8], [32], [8], [0])), 0) > 8.0:
                    acc = acc * gl.convert_layout(fade, o_head_layout)[:, None]
            else:
                acc = acc * gl.convert_layout(fade, o_head_layout)[:, None]
            block_barrier()
            acc = warpgroup_mma(p_tile, keys, acc, is_async=True)
            acc = warpgroup_mma_wait(0, [acc])
            if (not STAGED) or tile < total - 1:
                release(empty, slot, PARTS)
            count += 1
        turn += total > 0
        # Shares sum to less than one where there is a sink, a logit without a value.
        share = gl.convert_layout(gl.sum(gl.sum(sums, 2), 1), head_layout)
        origin = gl.where(base == float("-inf"), 0.0, base)
        h = (unit % blocks) * 64 + gl.arange(0, 64, layout=head_layout)
        nothing = share == 0.0
        whole = gl.where(nothing, 1.0, share)
        factor = 1.0 / whole
        if SINK:
            # Far above all logits it leaves nothing; neither it nor its share may overflow.
            more_share = gl.load(sink + h, mask=h < heads, other=0.0)
            more_share = gl.minimum(gl.maximum(more_share, -1e37), 1e37) * 1.4426950408889634
            more_share = more_share - origin
            more_whole = whole + gl.exp2(gl.minimum(more_share, 126.0))
            factor = gl.where(more_share > 126.0, 0.0, 1.0 / more_whole)
        factor = gl.where(nothing, 0.0, factor)
        at = row.to(gl.int64) * heads + h
        gl.store(max_logits + at, highest * 0.6931471805599453, mask=h < heads)
        ln_sum = (origin + gl.log2(whole)) * 0.6931471805599453
        gl.store(lse + at, gl.where(nothing, float("inf"), ln_sum), mask=h < heads)
        acc = acc * gl.convert_layout(factor, o_head_layout)[:, None]
        if ROPE:
            acc = turn_back(acc, phases + row.to(gl.int64) * 64)
        to = out + row.to(gl.int64) * stride_ot
        if STAGED:
            d = gl.arange(0, 512, layout=gl.SliceLayout(0, out_layout))
            r = gl.arange(0, 16, layout=gl.SliceLayout(1, out_layout))
            stage = ring.index((count - 1) & 1)
            if total > 0:
                stage.store(acc.to(gl.bfloat16))
            for step in gl.static_range(4):
                h = (unit % blocks) * 64 + step * 16 + r
                y = gl.zeros([16, 512], gl.bfloat16, out_layout)
                if total > 0:
                    y = stage.slice(step * 16, 16, dim=0).load(out_layout)
                place = to + (h * stride_oh)[:, None] + d[None, :]
                gl.store(place, y, mask=(h < heads)[:, None] & (d < 512)[None, :])
            if total > 0:
                release(empty, (count - 1) & 1, PARTS)
        else:
            d = gl.arange(0, 512, layout=gl.SliceLayout(0, o_layout))
            h = (unit % blocks) * 64 + gl.arange(0, 64, layout=o_head_layout)
            place = to + (h * stride_oh)[:, None] + d[None, :]
            gl.store(place, acc.to(gl.bfloat16), mask=(h < heads)[:, None] & (d < 512)[None, :])


@gluon.jit(do_not_specialize=["s_q", "s_kv", "s_extra", "width", "extra_width"])
def mla_prefill_wide_kernel(
    q,
    kv,
    indices,
    lengths,
    extra_kv,
    extra_indices,
    extra_lengths,
    sink,
    phases,
    out,
    max_logits,
    lse,
    s_q,
    heads,
    s_kv,
    s_extra,
    width,
    extra_width,
    scale,
    stride_qt,
    stride_qh,
    stride_kv,
    stride_extra,
    stride_i,
    stride_ei,
    stride_ot,
    stride_oh,
    BAND: gl.constexpr,
    COUNTED: gl.constexpr,
    EXTRA: gl.constexpr,
    EXTRA_COUNTED: gl.constexpr,
    SINK: gl.constexpr,
    ROPE: gl.constexpr,
    PARTS: gl.constexpr,
    LAZY: gl.constexpr,
    STAGED: gl.constexpr,
    COPY_WARPS: gl.constexpr,
    COPY_REGISTERS: gl.constexpr,
):
    """Attention of 64 heads a program to the keys that each query row picks; keys are values."""
    tile_layout: gl.constexpr = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16)
    q_tile = gl.allocate_shared_memory(gl.bfloat16, [64, 512], tile_layout)
    ring = gl.allocate_shared_memory(gl.bfloat16, [2, 64, 512], tile_layout)
    p_tile = gl.allocate_shared_memory(gl.bfloat16, [64, 64], tile_layout)
    plain: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    tops = gl.allocate_shared_memory(gl.float32, [128], plain)
    rises = gl.allocate_shared_memory(gl.float32, [8], plain)
    bar: gl.constexpr = mbarrier.MBarrierLayout()
    q_full = gl.allocate_shared_memory(gl.int64, [1], bar)
    q_empty = gl.allocate_shared_memory(gl.int64, [1], bar)
    full = gl.allocate_shared_memory(gl.int64, [2 * PARTS, 1], bar)
    empty = gl.allocate_shared_memory(gl.int64, [2 * PARTS, 1], bar)
    # Every copying thread arrives by itself once its copies have landed.
    mbarrier.init(q_full, count=32 * COPY_WARPS)
    mbarrier.init(q_empty, count=1)
    for i in gl.static_range(2 * PARTS):
        mbarrier.init(full.index(i), count=32 * COPY_WARPS)
        mbarrier.init(empty.index(i), count=1)
    gl.warp_specialize(
        [
            (
                _products,
                (
                    indices,
                    lengths,
                    extra_indices,
                    extra_lengths,
                    sink,
                    phases,
                    out,
                    max_logits,
                    lse,
                    q_tile,
                    ring,
                    p_tile,
                    tops,
                    rises,
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
                    scale,
                    stride_i,
                    stride_ei,
                    stride_ot,
                    stride_oh,
                    BAND,
                    COUNTED,
                    EXTRA,
                    EXTRA_COUNTED,
                    SINK,
                    ROPE,
                    PARTS,
                    LAZY,
                    STAGED,
                ),
            ),
            (
                _copies,
                (
                    q,
                    kv,
                    indices,
                    lengths,
                    extra_kv,
                    extra_indices,
                    extra_lengths,
                    q_tile,
                    ring,
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
                    BAND,
                    COUNTED,
                    EXTRA,
                    EXTRA_COUNTED,
                    PARTS,
                    COPY_WARPS,
                ),
            ),
        ],
        [COPY_WARPS],
        [COPY_REGISTERS],
    )
