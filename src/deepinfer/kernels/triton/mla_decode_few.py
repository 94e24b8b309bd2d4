"""Sparse MLA decode of 8, 16 or 32 heads on Hopper: keys are the tall operand, heads the wide one.

A program has one row, or a part of one. Eight warps decode records into a ring of two tiles of 64 keys; one warpgroup
makes logits and shares [keys, heads], another one the output [channels, heads] of the tile before, so that a head costs
what it needs and none is padded.
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

__all__ = ["mla_decode_few_kernel"]


@gluon.jit
def _rotate(x, phases, pairs):
    """Inverse rotation of pairs of channels, the first ones that there are angles for: [64, heads]."""
    HEADS: gl.constexpr = x.shape[1]
    even, odd = gl.split(x.reshape([32, 2, HEADS]).permute((0, 2, 1)))
    at = gl.arange(0, 32, layout=gl.SliceLayout(1, even.type.layout))
    c = gl.load(phases + 2 * at, mask=at < pairs, other=1.0)[:, None]
    s = gl.load(phases + 2 * at + 1, mask=at < pairs, other=0.0)[:, None]
    y = gl.join(even * c + odd * s, odd * c - even * s).permute((0, 2, 1)).reshape([64, HEADS])
    return gl.convert_layout(y, x.type.layout, assert_trivial=True)


@gluon.jit
def _halves(x):
    """The first and the second half of the rows."""
    ROWS: gl.constexpr = x.shape[0]
    return gl.split(x.reshape([2, ROWS // 2, x.shape[1]]).permute((1, 2, 0)))


@gluon.jit
def _store(x, to, phases, pairs, head, heads, stride_h, ROTATE: gl.constexpr):
    """Writes 64 channels of all heads."""
    layout: gl.constexpr = gl.BlockedLayout([8, 1], [8, 4], [1, 4], [0, 1])
    y = gl.convert_layout(x, layout)
    if ROTATE:
        y = _rotate(y, phases, pairs)
    d = gl.arange(0, 64, layout=gl.SliceLayout(1, layout))
    h = gl.arange(0, x.shape[1], layout=gl.SliceLayout(0, layout))
    at = to + d[:, None] + (h * stride_h)[None, :]
    gl.store(at, y.to(to.dtype.element_ty), mask=(head + h < heads)[None, :])


@gluon.jit
def _store_quarter(x, to, phases, pairs, head, heads, stride_h, ROTATE: gl.constexpr):
    """Writes 128 channels of all heads."""
    a, b = _halves(x)
    _store(a, to, phases, pairs, head, heads, stride_h, False)
    _store(b, to + 64, phases, pairs, head, heads, stride_h, ROTATE)


@gluon.jit
def _lead(
    lse, sink, lengths, extra_lengths, q_tile, q_full, q_empty, k_ring, bias_ring, full,
    p_ring, f_ring, p_full, p_empty, units, splits, tiles_a_split, heads, width, extra_width, scale,
    stride_lt, stride_ls, stride_lh,
    HEADS: gl.constexpr, LENGTHS: gl.constexpr, EXTRA_LENGTHS: gl.constexpr, SINK: gl.constexpr,
    PARTIAL: gl.constexpr, DEPTH: gl.constexpr,
):  # fmt: skip
    """Logits and shares [keys, heads]; passes the shares of each tile on, and at last the factor of the output."""
    layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, HEADS, 16])
    head_layout: gl.constexpr = gl.SliceLayout(0, layout)
    zero = gl.zeros((64, HEADS), gl.float32, layout)
    slot = 0
    phase = 0
    q_phase = 0
    turn = 0
    for unit in range(gl.program_id(0), units, gl.num_programs(0)):
        row, head, split, _, _, first, last, first_more, last_more = tile_range(
            unit, lengths, extra_lengths, width, extra_width, splits, tiles_a_split, heads, HEADS, LENGTHS,
            EXTRA_LENGTHS,
        )  # fmt: skip
        tiles = gl.maximum(last - first + last_more - first_more, 1)
        sums = gl.zeros((64, HEADS), gl.float32, layout)
        top = gl.full((HEADS,), -1e30, gl.float32, head_layout)
        mbarrier.wait(q_full, q_phase)
        q_phase ^= 1
        for tile in range(tiles):
            mbarrier.wait(full.index(slot), phase)
            s = warpgroup_mma(
                k_ring.index(slot), q_tile.permute((1, 0)), zero, use_acc=False, is_async=True
            )
            bias = bias_ring.index(slot).load(gl.SliceLayout(1, layout))
            s = warpgroup_mma_wait(0, [s])
            block_barrier()
            mbarrier.arrive(q_empty, count=1, pred=tile == tiles - 1)
            s = s * scale + bias[:, None]
            new = gl.maximum(top, gl.max(s, axis=0))
            p = gl.exp2(s - new[None, :])
            fade = gl.exp2(top - new)
            sums = sums * fade[None, :] + p
            top = new
            at = turn % 2
            mbarrier.wait(p_empty.index(at), ((turn // 2) & 1) ^ 1)
            p_ring.index(at).store(p.to(gl.bfloat16).permute((1, 0)))
            f_ring.index(at).store(fade)
            fence_async_shared()
            block_barrier()
            mbarrier.arrive(p_full.index(at), count=1)
            turn += 1
            slot += 1
            if slot == DEPTH:
                slot = 0
                phase ^= 1
        total = gl.sum(sums, axis=0)
        live = total != 0  # NaN is no absence of keys
        log = top + gl.log2(gl.where(live, total, 1.0))
        h = gl.arange(0, HEADS, layout=head_layout)
        factor = gl.where(live, 4294967296.0 / gl.where(live, total, 1.0), 0.0)
        if SINK:
            weight = gl.load(sink + head + h, mask=head + h < heads, other=0.0) * 1.4426950408889634
            factor = factor / (1.0 + gl.exp2(weight - log))
        at = turn % 2
        mbarrier.wait(p_empty.index(at), ((turn // 2) & 1) ^ 1)
        f_ring.index(at).store(factor)
        block_barrier()
        mbarrier.arrive(p_full.index(at), count=1)
        turn += 1
        empty_lse: gl.constexpr = float("-inf") if PARTIAL else float("inf")
        y = gl.where(live, log * 0.6931471805599453, empty_lse)
        to = lse + row.to(gl.int64) * stride_lt + split * stride_ls + (head + h) * stride_lh
        gl.store(to, y, mask=head + h < heads)


@gluon.jit
def _follow(
    out, phases, phase_index, entries, lengths, extra_lengths, k_ring, full, empty,
    p_ring, f_ring, p_full, p_empty, units, splits, tiles_a_split, heads, width, extra_width,
    stride_ot, stride_os, stride_oh,
    HEADS: gl.constexpr, LENGTHS: gl.constexpr, EXTRA_LENGTHS: gl.constexpr, ROTATE: gl.constexpr,
    INDEXED: gl.constexpr, DEPTH: gl.constexpr,
):  # fmt: skip
    """Output [channels, heads] of the shares that the other warpgroup passes on."""
    layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, HEADS, 16])
    head_layout: gl.constexpr = gl.SliceLayout(0, layout)
    slot = 0
    phase = 0
    turn = 0
    for unit in range(gl.program_id(0), units, gl.num_programs(0)):
        row, head, split, _, _, first, last, first_more, last_more = tile_range(
            unit, lengths, extra_lengths, width, extra_width, splits, tiles_a_split, heads, HEADS, LENGTHS,
            EXTRA_LENGTHS,
        )  # fmt: skip
        tiles = gl.maximum(last - first + last_more - first_more, 1)
        acc = gl.zeros((512, HEADS), gl.float32, layout)
        for _ in range(tiles):
            mbarrier.wait(full.index(slot), phase)
            at = turn % 2
            mbarrier.wait(p_full.index(at), (turn // 2) & 1)
            fade = f_ring.index(at).load(head_layout)
            acc = acc * fade[None, :]
            k = k_ring.index(slot).permute((1, 0))
            acc = warpgroup_mma(k, p_ring.index(at).permute((1, 0)), acc, is_async=True)
            acc = warpgroup_mma_wait(0, [acc])
            block_barrier()
            mbarrier.arrive(p_empty.index(at), count=1)
            mbarrier.arrive(empty.index(slot), count=1)
            turn += 1
            slot += 1
            if slot == DEPTH:
                slot = 0
                phase ^= 1
        at = turn % 2
        mbarrier.wait(p_full.index(at), (turn // 2) & 1)
        factor = f_ring.index(at).load(head_layout)
        acc = acc * factor[None, :]
        block_barrier()
        mbarrier.arrive(p_empty.index(at), count=1)
        turn += 1
        to = out + row.to(gl.int64) * stride_ot + split * stride_os + head * stride_oh
        entry = row
        if INDEXED:
            entry = gl.load(phase_index + row)
        pairs = gl.where((entry >= 0) & (entry < entries), 32, 0)
        phase_at = phases + entry.to(gl.int64) * 64
        a, b = _halves(acc)
        a0, a1 = _halves(a)
        b0, b1 = _halves(b)
        _store_quarter(a0, to, phase_at, pairs, head, heads, stride_oh, False)
        _store_quarter(a1, to + 128, phase_at, pairs, head, heads, stride_oh, False)
        _store_quarter(b0, to + 256, phase_at, pairs, head, heads, stride_oh, False)
        _store_quarter(b1, to + 384, phase_at, pairs, head, heads, stride_oh, ROTATE)


@gluon.jit(
    do_not_specialize=[
        "entries",
        "units",
        "splits",
        "tiles_a_split",
        "width",
        "extra_width",
        "limit",
        "extra_limit",
    ]
)
def mla_decode_few_kernel(
    q_desc, words, scales, index, lengths, extra_words, extra_scales, extra_index, extra_lengths,
    out, lse, sink, phases, phase_index, entries,
    units, splits, tiles_a_split, heads, width, extra_width, limit, extra_limit, page16, extra_page16,
    stride_i, stride_e, stride_ot, stride_os, stride_oh, stride_lt, stride_ls, stride_lh, scale,
    FP4: gl.constexpr, PAGE: gl.constexpr, LENGTHS: gl.constexpr,
    EXTRA: gl.constexpr, EXTRA_FP4: gl.constexpr, EXTRA_PAGE: gl.constexpr, EXTRA_LENGTHS: gl.constexpr,
    SINK: gl.constexpr, ROTATE: gl.constexpr, INDEXED: gl.constexpr, PARTIAL: gl.constexpr,
    HEADS: gl.constexpr, DEPTH: gl.constexpr, WARPS: gl.constexpr, KEYS: gl.constexpr, FOLLOWERS: gl.constexpr, REGISTERS: gl.constexpr,
):  # fmt: skip
    """Attention of rows of few heads to picked records; with `PARTIAL`, of parts of the lists."""
    tile_layout: gl.constexpr = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16)
    q_tile = gl.allocate_shared_memory(gl.bfloat16, [HEADS, 512], q_desc.layout)
    k_ring = gl.allocate_shared_memory(gl.bfloat16, [DEPTH, 64, 512], tile_layout)
    p_ring = gl.allocate_shared_memory(gl.bfloat16, [2, HEADS, 64], tile_layout)
    f_ring = gl.allocate_shared_memory(
        gl.float32, [2, HEADS], gl.SwizzledSharedLayout(1, 1, 1, [0])
    )
    raw_ring = gl.allocate_shared_memory(
        gl.int32, [2, KEYS, 128], gl.SwizzledSharedLayout(4, 1, 8, [1, 0])
    )
    scale_ring = gl.allocate_shared_memory(
        gl.int32, [2, KEYS, 8], gl.SwizzledSharedLayout(4, 1, 1, [1, 0])
    )
    bias_ring = gl.allocate_shared_memory(
        gl.float32, [DEPTH, 64], gl.SwizzledSharedLayout(1, 1, 1, [0])
    )
    q_full = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    q_empty = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    full = gl.allocate_shared_memory(gl.int64, [DEPTH, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [DEPTH, 1], mbarrier.MBarrierLayout())
    p_full = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    p_empty = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    mbarrier.init(q_full, count=1)
    mbarrier.init(q_empty, count=1)
    for i in gl.static_range(DEPTH):
        mbarrier.init(full.index(i), count=1)
        mbarrier.init(empty.index(i), count=1)
    for i in gl.static_range(2):
        mbarrier.init(p_full.index(i), count=1)
        mbarrier.init(p_empty.index(i), count=1)
    gl.warp_specialize(
        [
            (
                _lead,
                (
                    lse, sink, lengths, extra_lengths, q_tile, q_full, q_empty, k_ring, bias_ring, full, p_ring, f_ring,
                    p_full, p_empty, units, splits, tiles_a_split, heads, width, extra_width, scale,
                    stride_lt, stride_ls, stride_lh, HEADS, LENGTHS, EXTRA_LENGTHS, SINK, PARTIAL, DEPTH,
                ),
            ),
            (
                _follow,
                (
                    out, phases, phase_index, entries, lengths, extra_lengths, k_ring, full, empty, p_ring, f_ring, p_full,
                    p_empty, units, splits, tiles_a_split, heads, width, extra_width, stride_ot, stride_os, stride_oh,
                    HEADS, LENGTHS, EXTRA_LENGTHS, ROTATE, INDEXED, DEPTH,
                ),
            ),
            (
                copy_records,
                (
                    q_desc, words, scales, index, lengths, limit, page16, width, stride_i,
                    extra_words, extra_scales, extra_index, extra_lengths, extra_limit, extra_page16, extra_width,
                    stride_e, raw_ring, scale_ring, q_tile, q_full, q_empty, k_ring, bias_ring, full, empty, units,
                    splits, tiles_a_split, heads,
                    HEADS, FP4, PAGE, LENGTHS, EXTRA, EXTRA_FP4, EXTRA_PAGE, EXTRA_LENGTHS, WARPS, KEYS, DEPTH,
                ),
            ),
        ],
        [4, WARPS],
        [FOLLOWERS, REGISTERS],
    )  # fmt: skip
