"""Sparse attention of many query rows on Hopper: 64 heads a program, keys gathered by index into shared memory.

Four warps copy the keys of a tile into a ring of two; two warpgroups multiply. Each takes logits and softmax of every other
tile and the outputs of half of the channels, and hands its shares to the other: while one is at its exponentials, the
tensor cores have the products of the other. Messages go back and forth: the base of the exponentials and the shares of
the first tile of a pair from the first warpgroup to the second, those of the second tile back. The grid is as large as
the chip, and copies of the next row start while the last one is still multiplied.
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
from deepinfer.kernels.triton.mla_prefill_ends import (
    finish_row,
    turn_back,
    write_nothing,
    write_row,
)
from deepinfer.kernels.triton.mla_prefill_lists import copy_rows, release, scope_lengths
from deepinfer.kernels.triton.mla_prefill_shares import follow, send, sum_columns

__all__ = ["mla_prefill_paired_kernel"]


@gluon.jit
def _pair(
    s,
    mask,
    acc,
    sums,
    highest,
    base,
    scale,
    ring,
    first_shares,
    last_shares,
    bases,
    first_sent,
    last_sent,
    full,
    empty,
    pair,
    PART: gl.constexpr,
):
    """Two tiles: the shares of its own one, and the values of both; those of the second are left in flight."""
    phase = pair & 1
    firsts = first_shares.index(phase)
    same = pair >> 30
    first_values = ring.index(same).slice(256 * PART, 256, dim=1)
    last_values = ring.index(1 + same).slice(256 * PART, 256, dim=1)
    head_layout: gl.constexpr = highest.type.layout
    if PART == 0:
        highest, new, p = send(s, mask, scale, highest, base, bases, firsts, first_sent, 0)
        acc, sums, base = follow(acc, sums, base, new)
        acc = warpgroup_mma(firsts, first_values, acc, is_async=True)
        sums += sum_columns(p)
        mbarrier.wait(full.index(1), phase)
        mbarrier.wait(last_sent, phase)
        fence_async_shared()
        new = bases.index(1).load(head_layout)
        acc = warpgroup_mma_wait(0, [acc])
        release(empty, 0)
        acc, sums, base = follow(acc, sums, base, new)
    else:
        mbarrier.wait(full.index(0), phase)
        mbarrier.wait(first_sent, phase)
        fence_async_shared()
        new = bases.index(0).load(head_layout)
        acc, sums, base = follow(acc, sums, base, new)
        acc = warpgroup_mma(firsts, first_values, acc, is_async=True)
        highest, new, p = send(s, mask, scale, highest, base, bases, last_shares, last_sent, 1)
        acc = warpgroup_mma_wait(0, [acc])
        release(empty, 0)
        acc, sums, base = follow(acc, sums, base, new)
        sums += sum_columns(p)
    acc = warpgroup_mma(last_shares, last_values, acc, is_async=True)
    return acc, sums, highest, base


@gluon.jit
def _logits(q_tile, ring, masks, full, pair, zero, mask_layout: gl.constexpr, PART: gl.constexpr):
    """Logits of this warpgroup's tile of a pair, and its mask."""
    mbarrier.wait(full.index(PART), pair & 1)
    fence_async_shared()
    # Zero, which the compiler does not know: it would keep all addresses of the loop in registers, and spill them.
    same = pair >> 30
    keys = ring.index(PART + same).permute((1, 0))
    s = warpgroup_mma(q_tile.index(same), keys, zero, use_acc=False, is_async=True)
    mask = masks.index(PART).load(mask_layout)
    return warpgroup_mma_wait(0, [s]), mask


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
    masks,
    first_shares,
    last_shares,
    bases,
    totals,
    tops,
    q_full,
    q_empty,
    first_sent,
    last_sent,
    met,
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
    PART: gl.constexpr,
):
    """Softmax of every other tile, outputs of 256 channels."""
    s_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 64, 16])
    o_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 256, 16])
    head_layout: gl.constexpr = gl.SliceLayout(1, s_layout)
    mask_layout: gl.constexpr = gl.SliceLayout(0, s_layout)
    blocks = gl.cdiv(heads, 64)
    zero = gl.zeros([64, 64], gl.float32, s_layout)
    pair = 0
    turn = 0
    for unit in range(gl.program_id(0), s_q * blocks, gl.num_programs(0)):
        row = unit // blocks
        head = (unit % blocks) * 64
        first, more = scope_lengths(
            lengths, extra_lengths, row, width, extra_width, COUNTED, EXTRA, EXTRA_COUNTED
        )
        total = gl.cdiv(first, 64) + gl.cdiv(more, 64)
        to = out + row.to(gl.int64) * stride_ot + 256 * PART
        if total > 0:
            highest = gl.full([64], float("-inf"), gl.float32, head_layout)
            base = highest
            sums = sum_columns(zero)
            acc = gl.zeros([64, 256], gl.float32, o_layout)
            mbarrier.wait(q_full, turn & 1)
            s, mask = _logits(q_tile, ring, masks, full, pair, zero, mask_layout, PART)
            for _ in range(gl.cdiv(total, 2) - 1):
                acc, sums, highest, base = _pair(
                    s, mask, acc, sums, highest, base, scale, ring, first_shares, last_shares, bases, first_sent,
                    last_sent, full, empty, pair, PART,
                )  # fmt: skip
                acc = warpgroup_mma_wait(0, [acc])
                release(empty, 1)
                pair += 1
                s, mask = _logits(q_tile, ring, masks, full, pair, zero, mask_layout, PART)
            block_barrier()
            mbarrier.arrive(q_empty, count=1)
            acc, sums, highest, base = _pair(
                s, mask, acc, sums, highest, base, scale, ring, first_shares, last_shares, bases, first_sent,
                last_sent, full, empty, pair, PART,
            )  # fmt: skip
            acc = warpgroup_mma_wait(0, [acc])
            factor = finish_row(
                highest, base, sums, sink, max_logits, lse, row, head, heads, totals, tops, met, turn, SINK, PART
            )  # fmt: skip
            acc = acc * gl.convert_layout(factor, gl.SliceLayout(1, o_layout))[:, None]
            if ROPE and PART == 1:
                acc = turn_back(acc, phases + row.to(gl.int64) * 64)
            stage = ring.index(1).slice(256 * PART, 256, dim=1)
            write_row(acc, to, stage, head, heads, stride_oh)
            release(empty, 1)
            pair += 1
            turn += 1
        else:
            write_nothing(to, max_logits, lse, row, head, heads, stride_oh, PART)


@gluon.jit(do_not_specialize=["s_q", "s_kv", "s_extra", "width", "extra_width"])
def mla_prefill_paired_kernel(
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
    COPY_ROWS: gl.constexpr,
    COPY_WARPS: gl.constexpr,
    COPY_REGISTERS: gl.constexpr,
    REGISTERS: gl.constexpr,
):
    """Attention of 64 heads a program to the keys that each query row picks; keys are values."""
    tile_layout: gl.constexpr = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16)
    q_tile = gl.allocate_shared_memory(gl.bfloat16, [1, 64, 512], tile_layout)
    ring = gl.allocate_shared_memory(gl.bfloat16, [2, 64, 512], tile_layout)
    first_shares = gl.allocate_shared_memory(gl.bfloat16, [2, 64, 64], tile_layout)
    last_shares = gl.allocate_shared_memory(gl.bfloat16, [64, 64], tile_layout)
    plain: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    keys = gl.allocate_shared_memory(gl.int32, [2, 64], plain)
    masks = gl.allocate_shared_memory(gl.float32, [2, 64], plain)
    bases = gl.allocate_shared_memory(gl.float32, [2, 64], plain)
    totals = gl.allocate_shared_memory(gl.float32, [2, 64], plain)
    tops = gl.allocate_shared_memory(gl.float32, [2, 64], plain)
    bar: gl.constexpr = mbarrier.MBarrierLayout()
    q_full = gl.allocate_shared_memory(gl.int64, [1], bar)
    q_empty = gl.allocate_shared_memory(gl.int64, [1], bar)
    first_sent = gl.allocate_shared_memory(gl.int64, [1], bar)
    last_sent = gl.allocate_shared_memory(gl.int64, [1], bar)
    met = gl.allocate_shared_memory(gl.int64, [1], bar)
    full = gl.allocate_shared_memory(gl.int64, [2, 1], bar)
    empty = gl.allocate_shared_memory(gl.int64, [2, 1], bar)
    mbarrier.init(q_full, count=32 * COPY_WARPS)
    mbarrier.init(q_empty, count=2)
    mbarrier.init(first_sent, count=1)
    mbarrier.init(last_sent, count=1)
    mbarrier.init(met, count=2)
    for i in gl.static_range(2):
        mbarrier.init(full.index(i), count=32 * COPY_WARPS + 1)
        mbarrier.init(empty.index(i), count=2)
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
                    masks,
                    first_shares,
                    last_shares,
                    bases,
                    totals,
                    tops,
                    q_full,
                    q_empty,
                    first_sent,
                    last_sent,
                    met,
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
                    0,
                ),
            ),
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
                    masks,
                    first_shares,
                    last_shares,
                    bases,
                    totals,
                    tops,
                    q_full,
                    q_empty,
                    first_sent,
                    last_sent,
                    met,
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
                    1,
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
                    64,
                    1,
                    2,
                    2,
                    COPY_ROWS,
                    COPY_WARPS,
                ),
            ),
        ],
        [4, COPY_WARPS],
        [REGISTERS, COPY_REGISTERS],
    )
