"""Sparse MLA decode of 64 heads on Hopper.

A program has one row of 64 heads. Four warps decode records into a ring of two tiles of 64 keys. The first warpgroup
makes logits and shares and the first half of the output channels; it passes shares and factors through shared memory to
the second, which makes the other half while the first is at the next tile.
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
from deepinfer.kernels.triton.mla_copies import copy_records
from deepinfer.kernels.triton.mla_records import tile_range
from deepinfer.kernels.triton.mla_store import store_half

__all__ = ["mla_decode_kernel"]


@gluon.jit
def _lead(
    out, lse, sink, phases, phase_index, entries, lengths, extra_lengths, q_tile, q_full, q_empty, k_ring, bias_ring, full, empty,
    p_ring, f_ring, p_full, p_empty, units, splits, tiles_a_split, heads, width, extra_width, scale,
    stride_ot, stride_os, stride_oh, stride_lt, stride_ls, stride_lh,
    LENGTHS: gl.constexpr, EXTRA_LENGTHS: gl.constexpr, SINK: gl.constexpr, PARTIAL: gl.constexpr,
    DEPTH: gl.constexpr,
):  # fmt: skip
    """Logits, shares, and the first 256 channels."""
    s_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 64, 16])
    o_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 256, 16])
    row_layout: gl.constexpr = gl.SliceLayout(1, o_layout)
    zero = gl.zeros((64, 64), gl.float32, s_layout)
    slot = 0
    phase = 0
    q_phase = 0
    turn = 0
    for unit in range(gl.program_id(0), units, gl.num_programs(0)):
        row, head, split, _, _, first, last, first_more, last_more = tile_range(
            unit, lengths, extra_lengths, width, extra_width, splits, tiles_a_split, heads, 64, LENGTHS, EXTRA_LENGTHS
        )  # fmt: skip
        tiles = gl.maximum(last - first + last_more - first_more, 1)
        acc = gl.zeros((64, 256), gl.float32, o_layout)
        top = gl.full((64,), -1e30, gl.float32, gl.SliceLayout(1, s_layout))
        total = gl.zeros((64,), gl.float32, gl.SliceLayout(1, s_layout))
        mbarrier.wait(q_full, q_phase)
        q_phase ^= 1
        for tile in range(tiles):
            mbarrier.wait(full.index(slot), phase)
            k = k_ring.index(slot)
            s = warpgroup_mma(q_tile, k.permute((1, 0)), zero, use_acc=False, is_async=True)
            bias = bias_ring.index(slot).load(gl.SliceLayout(0, s_layout))
            s = warpgroup_mma_wait(0, [s])
            block_barrier()
            mbarrier.arrive(q_empty, count=1, pred=tile == tiles - 1)
            s = s * scale + bias[None, :]
            new = gl.maximum(top, gl.max(s, axis=1))
            p = gl.exp2(s - new[:, None])
            fade = gl.exp2(top - new)
            total = total * fade + gl.sum(p, axis=1)
            top = new
            p = p.to(gl.bfloat16)
            mbarrier.wait(p_empty.index(0), (turn & 1) ^ 1)
            p_ring.index(0).store(p)
            f_ring.index(0).store(fade)
            fence_async_shared()
            block_barrier()
            mbarrier.arrive(p_full.index(0), count=1)
            turn += 1
            acc = acc * gl.convert_layout(fade, row_layout)[:, None]
            a = gl.convert_layout(p, gl.DotOperandLayout(0, o_layout, 2))
            acc = warpgroup_mma(a, k.slice(0, 256, dim=1), acc, is_async=True)
            acc = warpgroup_mma_wait(0, [acc])
            block_barrier()
            mbarrier.arrive(empty.index(slot), count=1)
            slot += 1
            if slot == DEPTH:
                slot = 0
                phase ^= 1
        live = total != 0  # NaN is no absence of keys
        log = top + gl.log2(gl.where(live, total, 1.0))
        h = gl.arange(0, 64, layout=gl.SliceLayout(1, s_layout))
        factor = gl.where(live, 4294967296.0 / gl.where(live, total, 1.0), 0.0)
        if SINK:
            weight = gl.load(sink + head + h, mask=head + h < heads, other=0.0) * 1.4426950408889634
            factor = factor / (1.0 + gl.exp2(weight - log))
        mbarrier.wait(p_empty.index(0), (turn & 1) ^ 1)
        f_ring.index(0).store(factor)
        block_barrier()
        mbarrier.arrive(p_full.index(0), count=1)
        turn += 1
        empty_lse: gl.constexpr = float("-inf") if PARTIAL else float("inf")
        y = gl.where(live, log * 0.6931471805599453, empty_lse)
        to = lse + row.to(gl.int64) * stride_lt + split * stride_ls + (head + h) * stride_lh
        gl.store(to, y, mask=head + h < heads)
        acc = acc * gl.convert_layout(factor, row_layout)[:, None]
        to = out + row.to(gl.int64) * stride_ot + split * stride_os + head * stride_oh
        store_half(acc, to, phases, phase_index, entries, row, head, heads, stride_oh, False, False)


@gluon.jit
def _follow(
    out, phases, phase_index, entries, lengths, extra_lengths, k_ring, full, empty,
    p_ring, f_ring, p_full, p_empty, units, splits, tiles_a_split, heads, width, extra_width,
    stride_ot, stride_os, stride_oh,
    LENGTHS: gl.constexpr, EXTRA_LENGTHS: gl.constexpr, ROTATE: gl.constexpr, INDEXED: gl.constexpr,
    DEPTH: gl.constexpr,
):  # fmt: skip
    """The last 256 channels."""
    o_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 256, 16])
    row_layout: gl.constexpr = gl.SliceLayout(1, o_layout)
    slot = 0
    phase = 0
    turn = 0
    for unit in range(gl.program_id(0), units, gl.num_programs(0)):
        row, head, split, _, _, first, last, first_more, last_more = tile_range(
            unit, lengths, extra_lengths, width, extra_width, splits, tiles_a_split, heads, 64, LENGTHS, EXTRA_LENGTHS
        )  # fmt: skip
        tiles = gl.maximum(last - first + last_more - first_more, 1)
        acc = gl.zeros((64, 256), gl.float32, o_layout)
        for _ in range(tiles):
            mbarrier.wait(full.index(slot), phase)
            mbarrier.wait(p_full.index(0), turn & 1)
            fade = f_ring.index(0).load(row_layout)
            acc = acc * fade[:, None]
            k = k_ring.index(slot).slice(256, 256, dim=1)
            acc = warpgroup_mma(p_ring.index(0), k, acc, is_async=True)
            acc = warpgroup_mma_wait(0, [acc])
            block_barrier()
            mbarrier.arrive(p_empty.index(0), count=1)
            mbarrier.arrive(empty.index(slot), count=1)
            turn += 1
            slot += 1
            if slot == DEPTH:
                slot = 0
                phase ^= 1
        mbarrier.wait(p_full.index(0), turn & 1)
        factor = f_ring.index(0).load(row_layout)
        acc = acc * factor[:, None]
        block_barrier()
        mbarrier.arrive(p_empty.index(0), count=1)
        turn += 1
        to = out + row.to(gl.int64) * stride_ot + split * stride_os + head * stride_oh + 256
        store_half(
            acc, to, phases, phase_index, entries, row, head, heads, stride_oh, ROTATE, INDEXED
        )


@gluon.jit(
    do_not_specialize=["entries", "units", "splits", "tiles_a_split", "width", "extra_width", "limit", "extra_limit"]
)  # fmt: skip
def mla_decode_kernel(
    q_desc, words, scales, index, lengths, extra_words, extra_scales, extra_index, extra_lengths,
    out, lse, sink, phases, phase_index, entries,
    units, splits, tiles_a_split, heads, width, extra_width, limit, extra_limit, page16, extra_page16,
    stride_i, stride_e, stride_ot, stride_os, stride_oh, stride_lt, stride_ls, stride_lh, scale,
    FP4: gl.constexpr, PAGE: gl.constexpr, LENGTHS: gl.constexpr,
    EXTRA: gl.constexpr, EXTRA_FP4: gl.constexpr, EXTRA_PAGE: gl.constexpr, EXTRA_LENGTHS: gl.constexpr,
    SINK: gl.constexpr, ROTATE: gl.constexpr, INDEXED: gl.constexpr, PARTIAL: gl.constexpr,
    DEPTH: gl.constexpr, FOLLOWERS: gl.constexpr, REGISTERS: gl.constexpr,
):  # fmt: skip
    """Attention of rows of up to 64 heads to picked records; with `PARTIAL`, of parts of the lists."""
    tile_layout: gl.constexpr = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16)
    line_layout: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    q_tile = gl.allocate_shared_memory(gl.bfloat16, [64, 512], q_desc.layout)
    k_ring = gl.allocate_shared_memory(gl.bfloat16, [DEPTH, 64, 512], tile_layout)
    p_ring = gl.allocate_shared_memory(gl.bfloat16, [1, 64, 64], tile_layout)
    raw_ring = gl.allocate_shared_memory(
        gl.int32, [2, 16, 128], gl.SwizzledSharedLayout(4, 1, 8, [1, 0])
    )
    scale_ring = gl.allocate_shared_memory(
        gl.int32, [2, 16, 8], gl.SwizzledSharedLayout(4, 1, 1, [1, 0])
    )
    bias_ring = gl.allocate_shared_memory(gl.float32, [DEPTH, 64], line_layout)
    f_ring = gl.allocate_shared_memory(gl.float32, [1, 64], line_layout)
    q_full = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    q_empty = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    full = gl.allocate_shared_memory(gl.int64, [DEPTH, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [DEPTH, 1], mbarrier.MBarrierLayout())
    p_full = gl.allocate_shared_memory(gl.int64, [1, 1], mbarrier.MBarrierLayout())
    p_empty = gl.allocate_shared_memory(gl.int64, [1, 1], mbarrier.MBarrierLayout())
    mbarrier.init(q_full, count=1)
    mbarrier.init(q_empty, count=1)
    for i in gl.static_range(DEPTH):
        mbarrier.init(full.index(i), count=1)
        mbarrier.init(empty.index(i), count=2)
    mbarrier.init(p_full.index(0), count=1)
    mbarrier.init(p_empty.index(0), count=1)
    gl.warp_specialize(
        [
            (
                _lead,
                (
                    out, lse, sink, phases, phase_index, entries, lengths, extra_lengths, q_tile, q_full, q_empty, k_ring,
                    bias_ring, full, empty, p_ring, f_ring, p_full, p_empty, units, splits, tiles_a_split, heads,
                    width, extra_width, scale, stride_ot, stride_os, stride_oh, stride_lt, stride_ls, stride_lh,
                    LENGTHS, EXTRA_LENGTHS, SINK, PARTIAL, DEPTH,
                ),
            ),
            (
                _follow,
                (
                    out, phases, phase_index, entries, lengths, extra_lengths, k_ring, full, empty, p_ring, f_ring, p_full,
                    p_empty, units, splits, tiles_a_split, heads, width, extra_width, stride_ot, stride_os, stride_oh,
                    LENGTHS, EXTRA_LENGTHS, ROTATE, INDEXED, DEPTH,
                ),
            ),
            (
                copy_records,
                (
                    q_desc, words, scales, index, lengths, limit, page16, width, stride_i,
                    extra_words, extra_scales, extra_index, extra_lengths, extra_limit, extra_page16, extra_width,
                    stride_e, raw_ring, scale_ring, q_tile, q_full, q_empty, k_ring, bias_ring, full, empty, units, splits, tiles_a_split,
                    heads, 64, FP4, PAGE, LENGTHS, EXTRA, EXTRA_FP4, EXTRA_PAGE, EXTRA_LENGTHS, 4, 16, DEPTH,
                ),
            ),
        ],
        [4, 4],
        [FOLLOWERS, REGISTERS],
    )  # fmt: skip
