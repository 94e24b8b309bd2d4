"""Sparse attention of many query rows on Hopper: 64 heads a program, keys gathered by index into shared memory.

Four warps copy the keys of a tile, row by row, into a ring of two tiles; two warpgroups multiply. Each warpgroup takes
the logits of half of a tile's keys and the outputs of half of the channels; the shares pass through shared memory.
The grid is as large as the chip, and copies of the next row start while the last one is still multiplied.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from deepinfer.kernels.triton.gluon_names import block_barrier
from deepinfer.kernels.triton.mla_prefill_lists import copy_rows, scope_lengths
from deepinfer.kernels.triton.mla_prefill_softmax import (
    finish_row,
    release,
    release_tile,
    rescale,
    share_tile,
    sum_columns,
    turn_back,
)

__all__ = ["mla_prefill_wide_kernel"]


@gluon.jit
def _wait_tile(full, count, PARTS: gl.constexpr):
    """Waits for the keys of a tile, which were written by ordinary copies."""
    for part in gl.static_range(PARTS):
        mbarrier.wait(full.index((count & 1) * PARTS + part), (count >> 1) & 1)
    fence_async_shared()


@gluon.jit
def _logits(q_part, q_tile, keys, q_tail, tail, zero, HELD: gl.constexpr, TAIL: gl.constexpr):
    """Queries times keys, begun; `HELD` channels (0 or 128) of the queries are in registers.

    The queries are given as part `count >> 30`, which is zero: the compiler, who does not know, would else keep all
    addresses in registers.
    """
    if HELD == 0:
        s = warpgroup_mma(q_tile, keys.permute((1, 0)), zero, use_acc=False, is_async=True)
    else:
        columns = keys.slice(0, HELD, dim=1).permute((1, 0))
        s = warpgroup_mma(q_part, columns, zero, use_acc=False, is_async=True)
        columns = keys.slice(128, 128, dim=1).permute((1, 0))
        s = warpgroup_mma(q_tile.slice(128, 128, dim=1), columns, s, is_async=True)
        columns = keys.slice(256, 256, dim=1).permute((1, 0))
        s = warpgroup_mma(q_tile.slice(256, 256, dim=1), columns, s, is_async=True)
    if TAIL:
        s = warpgroup_mma(q_tail, tail.permute((1, 0)), s, is_async=True)
    return s


@gluon.jit
def _write_row(acc, to, stage, head, heads, stride_oh, filled, STAGED: gl.constexpr):
    """Outputs of a row as bf16; through shared memory, so that each thread writes 16 bytes."""
    acc_layout: gl.constexpr = acc.type.layout
    layout: gl.constexpr = gl.BlockedLayout([1, 8], [1, 32], [8, 1], [1, 0])
    if STAGED:
        d = gl.arange(0, 512, layout=gl.SliceLayout(0, layout))
        r = gl.arange(0, 16, layout=gl.SliceLayout(1, layout))
        if filled:
            stage.store(acc.to(gl.bfloat16))
        for step in gl.static_range(4):
            h = head + step * 16 + r
            y = gl.zeros([16, 512], gl.bfloat16, layout)
            if filled:
                y = stage.slice(step * 16, 16, dim=0).load(layout)
            place = to + (h * stride_oh)[:, None] + d[None, :]
            gl.store(place, y, mask=(h < heads)[:, None] & (d < 512)[None, :])
    else:
        d = gl.arange(0, 512, layout=gl.SliceLayout(0, acc_layout))
        h = head + gl.arange(0, 64, layout=gl.SliceLayout(1, acc_layout))
        place = to + (h * stride_oh)[:, None] + d[None, :]
        gl.store(place, acc.to(gl.bfloat16), mask=(h < heads)[:, None] & (d < 512)[None, :])


@gluon.jit
def _products(
    lengths,
    extra_lengths,
    sink,
    phases,
    out,
    max_logits,
    lse,
    q_tile,
    ring,
    q_tail,
    tails,
    masks,
    p_tile,
    tops,
    rises,
    q_full,
    q_empty,
    full,
    empty,
    s_q,
    heads,
    width,
    extra_width,
    scale,
    stride_ot,
    stride_oh,
    COUNTED: gl.constexpr,
    EXTRA: gl.constexpr,
    EXTRA_COUNTED: gl.constexpr,
    SINK: gl.constexpr,
    ROPE: gl.constexpr,
    PARTS: gl.constexpr,
    AHEAD: gl.constexpr,
    LAZY: gl.constexpr,
    HELD: gl.constexpr,
    TAIL: gl.constexpr,
    STAGED: gl.constexpr,
):
    TILE: gl.constexpr = 64
    SPAN: gl.constexpr = TILE // PARTS
    # Groups of products that the logits of a tile are made of.
    BEHIND: gl.constexpr = (3 if HELD > 0 else 1) + (1 if TAIL else 0)
    s_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 2], [16, 32, 16])
    o_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 2], [16, 256, 16])
    o_head_layout: gl.constexpr = gl.SliceLayout(1, o_layout)
    mask_layout: gl.constexpr = gl.SliceLayout(0, s_layout)
    blocks = gl.cdiv(heads, 64)
    no_logits = gl.zeros([64, TILE], gl.float32, s_layout)
    count = 0
    turn = 0
    for unit in range(gl.program_id(0), s_q * blocks, gl.num_programs(0)):
        row = unit // blocks
        first, more = scope_lengths(
            lengths, extra_lengths, row, width, extra_width, COUNTED, EXTRA, EXTRA_COUNTED
        )
        total = gl.cdiv(first, TILE) + gl.cdiv(more, TILE)
        highest = gl.full([64], float("-inf"), gl.float32, gl.SliceLayout(1, s_layout))
        base = highest
        sums = sum_columns(no_logits)
        acc = gl.zeros([64, 512], gl.float32, o_layout)
        if total > 0:
            mbarrier.wait(q_full, turn & 1)
            turn += 1
        q_part = base
        if HELD > 0:
            q_part = q_tile.index(0).slice(0, HELD, dim=1).load(gl.DotOperandLayout(0, s_layout, 2))
        if AHEAD:
            # Logits of the next tile follow the outputs of this one without a pause.
            if total > 0:
                _wait_tile(full, count, PARTS)
                s = _logits(
                    q_part,
                    q_tile.index(count >> 30),
                    ring.index(count & 1),
                    q_tail,
                    tails.index(count & 1),
                    no_logits,
                    HELD,
                    TAIL,
                )
                mask = masks.index(count & 1).load(mask_layout)
                s = warpgroup_mma_wait(0, [s])
                for _ in range(total - 1):
                    highest, base, sums, fade, moved = share_tile(
                        s, mask, scale, highest, base, sums, tops, rises, p_tile, LAZY
                    )
                    acc = rescale(acc, fade, moved, LAZY)
                    block_barrier()
                    keys = ring.index(count & 1)
                    for part in gl.static_range(PARTS):
                        acc = warpgroup_mma(
                            p_tile.slice(part * SPAN, SPAN, dim=1),
                            keys.slice(part * SPAN, SPAN, dim=0),
                            acc,
                            is_async=True,
                        )
                    _wait_tile(full, count + 1, PARTS)
                    following = ring.index((count + 1) & 1)
                    s = _logits(
                        q_part,
                        q_tile.index(count >> 30),
                        following,
                        q_tail,
                        tails.index((count + 1) & 1),
                        no_logits,
                        HELD,
                        TAIL,
                    )
                    mask = masks.index((count + 1) & 1).load(mask_layout)
                    for part in gl.static_range(PARTS):
                        acc = warpgroup_mma_wait(BEHIND + PARTS - 1 - part, [acc])
                        release(empty, (count & 1) * PARTS + part)
                    s = warpgroup_mma_wait(0, [s])
                    count += 1
                block_barrier()
                mbarrier.arrive(q_empty, count=1)
                highest, base, sums, fade, moved = share_tile(
                    s, mask, scale, highest, base, sums, tops, rises, p_tile, LAZY
                )
                acc = rescale(acc, fade, moved, LAZY)
                block_barrier()
                acc = warpgroup_mma(p_tile, ring.index(count & 1), acc, is_async=True)
                acc = warpgroup_mma_wait(0, [acc])
                count += 1
        else:
            for tile in range(total):
                _wait_tile(full, count, PARTS)
                mask = masks.index(count & 1).load(mask_layout)
                keys = ring.index(count & 1)
                s = _logits(
                    q_part,
                    q_tile.index(count >> 30),
                    keys,
                    q_tail,
                    tails.index(count & 1),
                    no_logits,
                    HELD,
                    TAIL,
                )
                s = warpgroup_mma_wait(0, [s])
                if tile == total - 1:
                    block_barrier()
                    mbarrier.arrive(q_empty, count=1)
                highest, base, sums, fade, moved = share_tile(
                    s, mask, scale, highest, base, sums, tops, rises, p_tile, LAZY
                )
                acc = rescale(acc, fade, moved, LAZY)
                block_barrier()
                for part in gl.static_range(PARTS):
                    acc = warpgroup_mma(
                        p_tile.slice(part * SPAN, SPAN, dim=1),
                        keys.slice(part * SPAN, SPAN, dim=0),
                        acc,
                        is_async=True,
                    )
                for part in gl.static_range(PARTS):
                    acc = warpgroup_mma_wait(PARTS - 1 - part, [acc])
                    if tile < total - 1:
                        release(empty, (count & 1) * PARTS + part)
                count += 1
        last = (count - 1) & 1
        head = (unit % blocks) * 64
        if not STAGED and total > 0:
            release_tile(empty, last, PARTS)
        factor = finish_row(highest, base, sums, sink, max_logits, lse, row, head, heads, SINK)
        acc = acc * gl.convert_layout(factor, o_head_layout)[:, None]
        if ROPE:
            acc = turn_back(acc, phases + row.to(gl.int64) * 64)
        to = out + row.to(gl.int64) * stride_ot
        _write_row(acc, to, ring.index(last), head, heads, stride_oh, total > 0, STAGED)
        if STAGED and total > 0:
            release_tile(empty, last, PARTS)


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
    AHEAD: gl.constexpr,
    LAZY: gl.constexpr,
    HELD: gl.constexpr,
    TAIL: gl.constexpr,
    STAGED: gl.constexpr,
    COPY_ROWS: gl.constexpr,
    COPY_WARPS: gl.constexpr,
    COPY_REGISTERS: gl.constexpr,
):
    """Attention of 64 heads a program to the keys that each query row picks; keys are values."""
    tile_layout: gl.constexpr = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16)
    q_tile = gl.allocate_shared_memory(gl.bfloat16, [1, 64, 512], tile_layout)
    ring = gl.allocate_shared_memory(gl.bfloat16, [2, 64, 512], tile_layout)
    q_tail = q_tile.index(0)
    tails = ring
    if TAIL:
        q_tail = gl.allocate_shared_memory(gl.bfloat16, [64, 64], tile_layout)
        tails = gl.allocate_shared_memory(gl.bfloat16, [2, 64, 64], tile_layout)
    p_tile = gl.allocate_shared_memory(gl.bfloat16, [64, 64], tile_layout)
    plain: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    keys = gl.allocate_shared_memory(gl.int32, [2, 64], plain)
    masks = gl.allocate_shared_memory(gl.float32, [2, 64], plain)
    tops = gl.allocate_shared_memory(gl.float32, [128], plain)
    rises = gl.allocate_shared_memory(gl.float32, [8], plain)
    bar: gl.constexpr = mbarrier.MBarrierLayout()
    q_full = gl.allocate_shared_memory(gl.int64, [1], bar)
    q_empty = gl.allocate_shared_memory(gl.int64, [1], bar)
    full = gl.allocate_shared_memory(gl.int64, [2 * PARTS, 1], bar)
    empty = gl.allocate_shared_memory(gl.int64, [2 * PARTS, 1], bar)
    mbarrier.init(q_full, count=32 * COPY_WARPS)
    mbarrier.init(q_empty, count=1)
    for i in gl.static_range(2 * PARTS):
        mbarrier.init(full.index(i), count=32 * COPY_WARPS + 1)
        mbarrier.init(empty.index(i), count=1)
    gl.warp_specialize(
        [
            (
                _products,
                (
                    lengths,
                    extra_lengths,
                    sink,
                    phases,
                    out,
                    max_logits,
                    lse,
                    q_tile,
                    ring,
                    q_tail,
                    tails,
                    masks,
                    p_tile,
                    tops,
                    rises,
                    q_full,
                    q_empty,
                    full,
                    empty,
                    s_q,
                    heads,
                    width,
                    extra_width,
                    scale,
                    stride_ot,
                    stride_oh,
                    COUNTED,
                    EXTRA,
                    EXTRA_COUNTED,
                    SINK,
                    ROPE,
                    PARTS,
                    AHEAD,
                    LAZY,
                    HELD,
                    TAIL,
                    STAGED,
                ),
            ),
            (
                copy_rows,
                (
                    q,
                    kv,
                    indices,
                    lengths,
                    extra_kv,
                    extra_indices,
                    extra_lengths,
                    q_tile.index(0),
                    ring,
                    q_tail,
                    tails,
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
                    BAND,
                    COUNTED,
                    EXTRA,
                    EXTRA_COUNTED,
                    TAIL,
                    64,
                    PARTS,
                    2,
                    1,
                    COPY_ROWS,
                    COPY_WARPS,
                ),
            ),
        ],
        [COPY_WARPS],
        [COPY_REGISTERS],
    )
