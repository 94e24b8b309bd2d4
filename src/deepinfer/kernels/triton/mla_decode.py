"""Sparse MLA decode of 64 heads on Hopper.

A program has one row of 64 heads. Four warps decode records into a ring of two tiles of 64 keys, two warpgroups
multiply: each makes all logits of a tile and half of the output channels, so that neither
waits for the other and shares stay in registers.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from deepinfer.kernels.triton.gluon_names import block_barrier
from deepinfer.kernels.triton.mla_records import read_records, tile_range

__all__ = ["mla_decode_kernel", "store_half"]


@gluon.jit
def _rotate(x, phases):
    """Inverse rotation of pairs of channels: [64, 64]."""
    even, odd = gl.split(x.reshape([64, 32, 2]))
    at = gl.arange(0, 32, layout=gl.SliceLayout(0, even.type.layout))
    c = gl.load(phases + 2 * at)[None, :]
    s = gl.load(phases + 2 * at + 1)[None, :]
    y = gl.join(even * c + odd * s, odd * c - even * s)
    return gl.convert_layout(y.reshape([64, 64]), x.type.layout, assert_trivial=True)


@gluon.jit
def _store(x, to, head, heads, stride_h):
    """Writes 64 channels of 64 heads."""
    if to.dtype.element_ty == gl.float32:
        layout: gl.constexpr = x.type.layout
        y = x
    else:
        # Lanes trade with lanes of their warp, so that each has eight channels side by side.
        layout: gl.constexpr = gl.DistributedLinearLayout(
            [[0, 1], [0, 2], [0, 4], [8, 0], [0, 32]],
            [[0, 8], [0, 16], [1, 0], [2, 0], [4, 0]],
            [[16, 0], [32, 0]],
            [],
            [64, 64],
        )
        y = gl.convert_layout(x.to(to.dtype.element_ty), layout)
    h = gl.arange(0, 64, layout=gl.SliceLayout(1, layout))
    d = gl.arange(0, 64, layout=gl.SliceLayout(0, layout))
    gl.store(to + (h * stride_h)[:, None] + d[None, :], y, mask=(head + h < heads)[:, None])


@gluon.jit
def _quarters(x):
    """[64, 256] to four of [64, 64]."""
    a, b = gl.split(x.reshape([64, 2, 128]).permute((0, 2, 1)))
    a0, a1 = gl.split(a.reshape([64, 2, 64]).permute((0, 2, 1)))
    b0, b1 = gl.split(b.reshape([64, 2, 64]).permute((0, 2, 1)))
    return a0, a1, b0, b1


@gluon.jit
def store_half(
    acc, to, phases, phase_index, row, head, heads, stride_h, ROTATE: gl.constexpr, INDEXED: gl.constexpr
):  # fmt: skip
    """Writes 256 channels of 64 heads, the last 64 rotated back."""
    x0, x1, x2, x3 = _quarters(acc)
    if ROTATE:
        entry = row
        if INDEXED:
            entry = gl.load(phase_index + row)
        x3 = _rotate(x3, phases + entry.to(gl.int64) * 64)
    _store(x0, to, head, heads, stride_h)
    _store(x1, to + 64, head, heads, stride_h)
    _store(x2, to + 128, head, heads, stride_h)
    _store(x3, to + 192, head, heads, stride_h)


@gluon.jit
def _attend(
    out, lse, sink, phases, phase_index, lengths, extra_lengths, q_tile, q_full, q_empty, k_ring, bias_ring, full, empty,
    units, splits, tiles_a_split, heads, width, extra_width, scale,
    stride_ot, stride_os, stride_oh, stride_lt, stride_ls, stride_lh,
    PART: gl.constexpr, LENGTHS: gl.constexpr, EXTRA_LENGTHS: gl.constexpr, SINK: gl.constexpr,
    ROTATE: gl.constexpr, INDEXED: gl.constexpr, PARTIAL: gl.constexpr, DEPTH: gl.constexpr,
):  # fmt: skip
    s_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 64, 16])
    o_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 256, 16])
    row_layout: gl.constexpr = gl.SliceLayout(1, o_layout)
    zero = gl.zeros((64, 64), gl.float32, s_layout)
    slot = 0
    phase = 0
    q_phase = 0
    for unit in range(gl.program_id(0), units, gl.num_programs(0)):
        row, head, split, _, _, first, last, first_more, last_more = tile_range(
            unit, lengths, extra_lengths, width, extra_width, splits, tiles_a_split, heads, 64, LENGTHS, EXTRA_LENGTHS
        )  # fmt: skip
        tiles = last - first + last_more - first_more
        acc = gl.zeros((64, 256), gl.float32, o_layout)
        top = gl.full((64,), -1e30, gl.float32, gl.SliceLayout(1, s_layout))
        total = gl.zeros((64,), gl.float32, gl.SliceLayout(1, s_layout))
        mbarrier.wait(q_full, q_phase)
        q_phase ^= 1
        for _ in range(tiles):
            mbarrier.wait(full.index(slot), phase)
            k = k_ring.index(slot)
            s = warpgroup_mma(q_tile, k.permute((1, 0)), zero, use_acc=False, is_async=True)
            bias = bias_ring.index(slot).load(gl.SliceLayout(0, s_layout))
            s = warpgroup_mma_wait(0, [s])
            s = s * scale + bias[None, :]
            new = gl.maximum(top, gl.max(s, axis=1))
            p = gl.exp2(s - new[:, None])
            fade = gl.exp2(top - new)
            total = total * fade + gl.sum(p, axis=1)
            top = new
            acc = acc * gl.convert_layout(fade, row_layout)[:, None]
            a = gl.convert_layout(p.to(gl.bfloat16), gl.DotOperandLayout(0, o_layout, 2))
            acc = warpgroup_mma(a, k.slice(256 * PART, 256, dim=1), acc, is_async=True)
            acc = warpgroup_mma_wait(0, [acc])
            block_barrier()
            mbarrier.arrive(empty.index(slot), count=1)
            slot += 1
            if slot == DEPTH:
                slot = 0
                phase ^= 1
        block_barrier()
        mbarrier.arrive(q_empty, count=1)
        live = total > 0
        log = top + gl.log2(gl.where(live, total, 1.0))
        h = gl.arange(0, 64, layout=gl.SliceLayout(1, s_layout))
        factor = gl.where(live, 4294967296.0 / gl.where(live, total, 1.0), 0.0)
        if SINK:
            weight = gl.load(sink + head + h, mask=head + h < heads, other=0.0) * 1.4426950408889634
            factor = factor / (1.0 + gl.exp2(weight - log))
        if PART == 0:
            empty_lse: gl.constexpr = float("-inf") if PARTIAL else float("inf")
            y = gl.where(live, log * 0.6931471805599453, empty_lse)
            to = lse + row.to(gl.int64) * stride_lt + split * stride_ls + (head + h) * stride_lh
            gl.store(to, y, mask=head + h < heads)
        acc = acc * gl.convert_layout(factor, row_layout)[:, None]
        to = out + row.to(gl.int64) * stride_ot + split * stride_os + head * stride_oh + 256 * PART
        store_half(
            acc, to, phases, phase_index, row, head, heads, stride_oh, ROTATE and PART == 1, INDEXED
        )  # fmt: skip


@gluon.jit(
    do_not_specialize=[
        "units",
        "splits",
        "tiles_a_split",
        "width",
        "extra_width",
        "limit",
        "extra_limit",
    ]
)
def mla_decode_kernel(
    q_desc, words, scales, index, lengths, extra_words, extra_scales, extra_index, extra_lengths,
    out, lse, sink, phases, phase_index,
    units, splits, tiles_a_split, heads, width, extra_width, limit, extra_limit, page16, extra_page16,
    stride_i, stride_e, stride_ot, stride_os, stride_oh, stride_lt, stride_ls, stride_lh, scale,
    FP4: gl.constexpr, PAGE: gl.constexpr, LENGTHS: gl.constexpr,
    EXTRA: gl.constexpr, EXTRA_FP4: gl.constexpr, EXTRA_PAGE: gl.constexpr, EXTRA_LENGTHS: gl.constexpr,
    SINK: gl.constexpr, ROTATE: gl.constexpr, INDEXED: gl.constexpr, PARTIAL: gl.constexpr, DEPTH: gl.constexpr,
    KEYS: gl.constexpr, REGISTERS: gl.constexpr,
):  # fmt: skip
    """Attention of rows of up to 64 heads to picked records; with `PARTIAL`, of parts of the lists."""
    tile_layout: gl.constexpr = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16)
    q_tile = gl.allocate_shared_memory(gl.bfloat16, [64, 512], q_desc.layout)
    k_ring = gl.allocate_shared_memory(gl.bfloat16, [DEPTH, 64, 512], tile_layout)
    bias_ring = gl.allocate_shared_memory(
        gl.float32, [DEPTH, 64], gl.SwizzledSharedLayout(1, 1, 1, [0])
    )
    q_full = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    q_empty = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    full = gl.allocate_shared_memory(gl.int64, [DEPTH, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [DEPTH, 1], mbarrier.MBarrierLayout())
    mbarrier.init(q_full, count=1)
    mbarrier.init(q_empty, count=2)
    for i in gl.static_range(DEPTH):
        mbarrier.init(full.index(i), count=1)
        mbarrier.init(empty.index(i), count=2)
    gl.warp_specialize(
        [
            (
                _attend,
                (
                    out, lse, sink, phases, phase_index, lengths, extra_lengths, q_tile, q_full, q_empty, k_ring, bias_ring,
                    full, empty, units, splits, tiles_a_split, heads, width, extra_width, scale,
                    stride_ot, stride_os, stride_oh, stride_lt, stride_ls, stride_lh,
                    0, LENGTHS, EXTRA_LENGTHS, SINK, ROTATE, INDEXED, PARTIAL, DEPTH,
                ),
            ),
            (
                _attend,
                (
                    out, lse, sink, phases, phase_index, lengths, extra_lengths, q_tile, q_full, q_empty, k_ring, bias_ring,
                    full, empty, units, splits, tiles_a_split, heads, width, extra_width, scale,
                    stride_ot, stride_os, stride_oh, stride_lt, stride_ls, stride_lh,
                    1, LENGTHS, EXTRA_LENGTHS, SINK, ROTATE, INDEXED, PARTIAL, DEPTH,
                ),
            ),
            (
                read_records,
                (
                    q_desc, words, scales, index, lengths, limit, page16, width, stride_i,
                    extra_words, extra_scales, extra_index, extra_lengths, extra_limit, extra_page16, extra_width,
                    stride_e, q_tile, q_full, q_empty, k_ring, bias_ring, full, empty, units, splits, tiles_a_split, heads,
                    64, FP4, PAGE, LENGTHS, EXTRA, EXTRA_FP4, EXTRA_PAGE, EXTRA_LENGTHS, 4, KEYS, DEPTH,
                ),
            ),
        ],
        [4, 4],
        [REGISTERS, 504 - 2 * REGISTERS],
    )  # fmt: skip
