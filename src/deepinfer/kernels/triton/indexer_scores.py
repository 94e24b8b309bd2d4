"""Index scores of many queries on Hopper: keys are the tall operand, all heads of a few queries the wide one.

A program keeps its queries in shared memory and lets the keys pass by; its warpgroups take tiles of 64 keys in turn. The
products of all heads are weighted and summed in registers, in one order, and a thread writes only sums of its own.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from deepinfer.kernels.triton.gluon_names import load_tile
from deepinfer.kernels.triton.indexer_quads import head_sums, output_index

__all__ = ["index_scores_kernel"]


@gluon.jit
def _bounds(bounds, block, T, QUERIES: gl.constexpr):
    """First and last key that any query of a block sees, and those that all see."""
    starts, ends = bounds
    first = gl.load(starts + gl.minimum(block * QUERIES, T - 1))
    end = gl.load(ends + gl.minimum(block * QUERIES, T - 1))
    late = first
    early = end
    for i in gl.static_range(1, QUERIES):
        t = gl.minimum(block * QUERIES + i, T - 1)
        start = gl.load(starts + t)
        stop = gl.load(ends + t)
        first = gl.minimum(first, start)
        end = gl.maximum(end, stop)
        late = gl.maximum(late, start)
        early = gl.minimum(early, stop)
    return first, end, late, early


@gluon.jit
def _copies(
    copy, QUERIES: gl.constexpr, HEADS: gl.constexpr, CHUNK: gl.constexpr, DEPTH: gl.constexpr
):
    q_desc, k_desc, bounds, rings, bars, T, S = copy
    q_ring, k_ring = rings
    q_full, q_empty, full, empty = bars
    slot = 0
    phase = 1
    turn = 0
    blocks = gl.cdiv(T, QUERIES)
    units = blocks * gl.cdiv(S, CHUNK)
    for unit in range(gl.program_id(0), units, gl.num_programs(0)):
        block = unit % blocks
        low = (unit // blocks) * CHUNK
        first, end, _, _ = _bounds(bounds, block, T, QUERIES)
        first = gl.maximum(first, low) // 64
        last = gl.cdiv(gl.minimum(end, gl.minimum(low + CHUNK, S)), 64)
        if first < last:
            q_slot = turn % 2
            mbarrier.wait(q_empty.index(q_slot), ((turn // 2) & 1) ^ 1)
            mbarrier.expect(q_full.index(q_slot), QUERIES * HEADS * 128)
            load_tile(
                q_desc, [block * QUERIES * HEADS, 0], q_full.index(q_slot), q_ring.index(q_slot)
            )
            turn += 1
            for tile in range(first, last):
                mbarrier.wait(empty.index(slot), phase)
                mbarrier.expect(full.index(slot), 64 * 128)
                load_tile(k_desc, [tile * 64, 0], full.index(slot), k_ring.index(slot))
                slot += 1
                if slot == DEPTH:
                    slot = 0
                    phase ^= 1


@gluon.jit
def _products(
    multiply, PART: gl.constexpr, PARTS: gl.constexpr,
    QUERIES: gl.constexpr, HEADS: gl.constexpr, CHUNK: gl.constexpr, DEPTH: gl.constexpr, RELU: gl.constexpr,
):  # fmt: skip
    out, weights, k_scale, bounds, rings, bars, T, S, stride_ot, stride_wt = multiply
    COLUMNS: gl.constexpr = QUERIES * HEADS
    OUTPUTS: gl.constexpr = (2 * QUERIES + 3) // 4
    q_ring, k_ring = rings
    q_full, q_empty, full, empty = bars
    starts, ends = bounds
    acc_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, COLUMNS, 32])
    zero = gl.zeros((64, COLUMNS), gl.float32, acc_layout)
    column = gl.arange(0, COLUMNS, layout=gl.SliceLayout(0, acc_layout))
    layout: gl.constexpr = head_sums(
        zero, gl.zeros((COLUMNS,), gl.float32, gl.SliceLayout(0, acc_layout)), QUERIES, HEADS, RELU
    )[0].type.layout
    blocks = gl.cdiv(T, QUERIES)
    units = blocks * gl.cdiv(S, CHUNK)
    turn = 0
    passed = 0
    kind: gl.constexpr = out.dtype.element_ty
    for unit in range(gl.program_id(0), units, gl.num_programs(0)):
        block = unit % blocks
        low = (unit // blocks) * CHUNK
        first, last, late, early = _bounds(bounds, block, T, QUERIES)
        high = gl.minimum(low + CHUNK, S)
        first = gl.maximum(first, low) // 64
        last = gl.cdiv(gl.minimum(last, high), 64)
        of = block * QUERIES + column // HEADS
        w = gl.load(weights + of * stride_wt + column % HEADS, mask=of < T, other=0.0)
        if RELU == 1:
            w = w * 0.5
        # Tiles that all queries of the block see need no comparison.
        plain_from = gl.where((block + 1) * QUERIES <= T, gl.cdiv(late, 64), last)
        plain_to = gl.minimum(early, high) // 64
        if first < last:
            q_slot = turn % 2
            q = q_ring.index(q_slot).permute((1, 0))
            mbarrier.wait(q_full.index(q_slot), (turn // 2) & 1)
            skip = (PART + PARTS - passed % PARTS) % PARTS
            for tile in range(first + skip, last, PARTS):
                count = passed + tile - first
                slot = count % DEPTH
                mbarrier.wait(full.index(slot), (count // DEPTH) & 1)
                acc = warpgroup_mma(k_ring.index(slot), q, zero, use_acc=False, is_async=True)
                at = tile * 64
                scales = ()
                for i in gl.static_range(OUTPUTS if QUERIES == 2 else 2):
                    key, _ = output_index(i, QUERIES, layout)
                    one = gl.load(k_scale + at + key, mask=key < S - at, other=0.0)
                    scales = scales + (one,)  # noqa: RUF005 - Gluon has no unpacking
                acc = warpgroup_mma_wait(0, [acc])
                mbarrier.arrive(empty.index(slot), count=1)
                found = head_sums(acc, w, QUERIES, HEADS, RELU)
                if (tile >= plain_from) & (tile < plain_to):
                    for i in gl.static_range(OUTPUTS):
                        key, query = output_index(i, QUERIES, layout)
                        to = out + (block * QUERIES + query).to(gl.int64) * stride_ot + key
                        gl.store(to + at, (found[i] * scales[i % 2]).to(kind))
                else:
                    for i in gl.static_range(OUTPUTS):
                        key, query = output_index(i, QUERIES, layout)
                        t = block * QUERIES + query
                        to = out + t.to(gl.int64) * stride_ot + key
                        start = gl.load(starts + t, mask=t < T, other=0) - at
                        end = gl.load(ends + t, mask=t < T, other=0) - at
                        y = gl.where(
                            (key >= start) & (key < end), found[i] * scales[i % 2], float("-inf")
                        )
                        gl.store(to + at, y.to(kind), mask=(key < S - at) & (t < T))
            mbarrier.arrive(q_empty.index(q_slot), count=1)
            turn += 1
            passed += last - first
        # Keys that no query of the block sees.
        top = gl.cdiv(high, 64)
        first = gl.minimum(gl.maximum(first, low // 64), top)
        last = gl.maximum(last, first)
        gap = last - first
        count = top - low // 64 - gap
        for step in range(PART, count, PARTS):
            tile = low // 64 + step
            tile = gl.where(tile >= first, tile + gap, tile)
            for i in gl.static_range(OUTPUTS):
                key, query = output_index(i, QUERIES, layout)
                t = block * QUERIES + query
                to = out + t.to(gl.int64) * stride_ot + key
                none = gl.full([4, 8, 4], float("-inf"), gl.float32, layout)
                gl.store(to + tile * 64, none.to(kind), mask=(key < S - tile * 64) & (t < T))


@gluon.jit(do_not_specialize=["T", "S"])
def index_scores_kernel(
    q_desc, k_desc, out, weights, k_scale, starts, ends, T, S, stride_ot, stride_wt, PARTS: gl.constexpr,
    QUERIES: gl.constexpr, HEADS: gl.constexpr, CHUNK: gl.constexpr, DEPTH: gl.constexpr, RELU: gl.constexpr,
):  # fmt: skip
    """`out[t, s] = k_scale[s] * sum over h of weights[t, h] * max(q[t, h] . k[s], 0)`, -inf outside of t's keys."""
    q_ring = gl.allocate_shared_memory(gl.float8e4nv, [2, QUERIES * HEADS, 128], q_desc.layout)
    k_ring = gl.allocate_shared_memory(gl.float8e4nv, [DEPTH, 64, 128], k_desc.layout)
    q_full = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    q_empty = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    full = gl.allocate_shared_memory(gl.int64, [DEPTH, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [DEPTH, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(2):
        mbarrier.init(q_full.index(i), count=1)
        mbarrier.init(q_empty.index(i), count=PARTS)
    for i in gl.static_range(DEPTH):
        mbarrier.init(full.index(i), count=1)
        mbarrier.init(empty.index(i), count=1)
    bounds = (starts, ends)
    rings = (q_ring, k_ring)
    bars = (q_full, q_empty, full, empty)
    multiply = (out, weights, k_scale, bounds, rings, bars, T, S, stride_ot, stride_wt)
    copy = (q_desc, k_desc, bounds, rings, bars, T, S)
    if PARTS == 2:
        gl.warp_specialize(
            [
                (_products, (multiply, 0, PARTS, QUERIES, HEADS, CHUNK, DEPTH, RELU)),
                (_products, (multiply, 1, PARTS, QUERIES, HEADS, CHUNK, DEPTH, RELU)),
                (_copies, (copy, QUERIES, HEADS, CHUNK, DEPTH)),
            ],
            [4, 1],
            [240, 24],
        )  # fmt: skip
    else:
        gl.warp_specialize(
            [
                (_products, (multiply, 0, PARTS, QUERIES, HEADS, CHUNK, DEPTH, RELU)),
                (_products, (multiply, 1, PARTS, QUERIES, HEADS, CHUNK, DEPTH, RELU)),
                (_products, (multiply, 2, PARTS, QUERIES, HEADS, CHUNK, DEPTH, RELU)),
                (_copies, (copy, QUERIES, HEADS, CHUNK, DEPTH)),
            ],
            [4, 4, 1],
            [160, 160, 24],
        )  # fmt: skip
