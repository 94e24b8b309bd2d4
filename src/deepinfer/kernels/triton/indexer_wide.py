"""Index scores of many queries on Hopper: keys are the tall operand, all heads of a few queries the wide one.

A program keeps its queries in shared memory and lets the keys pass by; three warpgroups take tiles of 64 keys in turn.
The scores of all heads are weighted and summed in registers, in one order.
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

__all__ = ["index_scores_kernel"]


@gluon.jit
def _bounds(starts, ends, block, T, QUERIES: gl.constexpr):
    """First and last key that any query of a block sees, and those that all see."""
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
    q_desc,
    k_desc,
    starts,
    ends,
    q_ring,
    k_ring,
    q_full,
    q_empty,
    full,
    empty,
    T,
    S,
    QUERIES: gl.constexpr,
    HEADS: gl.constexpr,
    CHUNK: gl.constexpr,
    DEPTH: gl.constexpr,
):
    slot = 0
    phase = 1
    turn = 0
    blocks = gl.cdiv(T, QUERIES)
    units = blocks * gl.cdiv(S, CHUNK)
    for unit in range(gl.program_id(0), units, gl.num_programs(0)):
        block = unit % blocks
        low = (unit // blocks) * CHUNK
        first, end, _, _ = _bounds(starts, ends, block, T, QUERIES)
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
def _sums(acc, w, QUERIES: gl.constexpr, HEADS: gl.constexpr):
    """[64, QUERIES * HEADS] products to weighted sums [64, QUERIES]."""
    y = gl.maximum(acc, 0.0) * w[None, :]
    return gl.sum(y.reshape([64, QUERIES, HEADS]), axis=2)


@gluon.jit
def _write(y, to, s, start, end, inside, sf, S):
    """Scores of 64 keys, where the query sees them."""
    seen = (s[:, None] >= start[None, :]) & (s[:, None] < end[None, :])
    y = gl.where(seen, y * sf[:, None], float("-inf"))
    gl.store(to + s[:, None], y.to(to.dtype.element_ty), mask=(s < S)[:, None] & inside[None, :])


@gluon.jit
def _products(
    out,
    weights,
    k_scale,
    starts,
    ends,
    q_ring,
    k_ring,
    q_full,
    q_empty,
    full,
    empty,
    T,
    S,
    stride_ot,
    stride_wt,
    PART: gl.constexpr,
    QUERIES: gl.constexpr,
    HEADS: gl.constexpr,
    CHUNK: gl.constexpr,
    DEPTH: gl.constexpr,
):
    COLUMNS: gl.constexpr = QUERIES * HEADS
    PARTS: gl.constexpr = 3
    acc_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, COLUMNS, 32])
    zero = gl.zeros((64, COLUMNS), gl.float32, acc_layout)
    column = gl.arange(0, COLUMNS, layout=gl.SliceLayout(0, acc_layout))
    sum_layout: gl.constexpr = _sums(
        zero, gl.zeros((COLUMNS,), gl.float32, gl.SliceLayout(0, acc_layout)), QUERIES, HEADS
    ).type.layout
    key_layout: gl.constexpr = gl.SliceLayout(1, sum_layout)
    query_layout: gl.constexpr = gl.SliceLayout(0, sum_layout)
    s = gl.arange(0, 64, layout=key_layout)
    blocks = gl.cdiv(T, QUERIES)
    units = blocks * gl.cdiv(S, CHUNK)
    turn = 0
    passed = 0
    for unit in range(gl.program_id(0), units, gl.num_programs(0)):
        block = unit % blocks
        low = (unit // blocks) * CHUNK
        first, last, late, early = _bounds(starts, ends, block, T, QUERIES)
        high = gl.minimum(low + CHUNK, S)
        first = gl.maximum(first, low) // 64
        last = gl.cdiv(gl.minimum(last, high), 64)
        t = block * QUERIES + column // HEADS
        w = gl.load(weights + t * stride_wt + column % HEADS, mask=t < T, other=0.0)
        t = block * QUERIES + gl.arange(0, QUERIES, layout=query_layout)
        inside = t < T
        start = gl.load(starts + t, mask=inside, other=0)
        end = gl.load(ends + t, mask=inside, other=0)
        to = (out + t.to(gl.int64) * stride_ot)[None, :]
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
                sf = gl.load(k_scale + at + gl.minimum(s, S - 1 - at))
                acc = warpgroup_mma_wait(0, [acc])
                mbarrier.arrive(empty.index(slot), count=1)
                y = _sums(acc, w, QUERIES, HEADS)
                if (tile >= plain_from) & (tile < plain_to):
                    gl.store((to + at) + s[:, None], (y * sf[:, None]).to(to.dtype.element_ty))
                else:
                    _write(y, to + at, s, start - at, end - at, inside, sf, S - at)
            mbarrier.arrive(q_empty.index(q_slot), count=1)
            turn += 1
            passed += last - first
        # Keys that no query of the block sees.
        unseen = gl.zeros((64, QUERIES), gl.float32, sum_layout)
        sf = gl.zeros((64,), gl.float32, key_layout)
        top = gl.cdiv(high, 64)
        first = gl.minimum(gl.maximum(first, low // 64), top)
        for tile in range(low // 64 + PART, first, PARTS):
            at = tile * 64
            _write(unseen, to + at, s, start - at, end - at, inside, sf, S - at)
        for tile in range(gl.maximum(last, first) + PART, top, PARTS):
            at = tile * 64
            _write(unseen, to + at, s, start - at, end - at, inside, sf, S - at)


@gluon.jit(do_not_specialize=["T", "S"])
def index_scores_kernel(
    q_desc,
    k_desc,
    out,
    weights,
    k_scale,
    starts,
    ends,
    T,
    S,
    stride_ot,
    stride_wt,
    QUERIES: gl.constexpr,
    HEADS: gl.constexpr,
    CHUNK: gl.constexpr,
    DEPTH: gl.constexpr,
):
    """`out[t, s] = k_scale[s] * sum over h of weights[t, h] * max(q[t, h] . k[s], 0)`, -inf outside of t's keys."""
    q_ring = gl.allocate_shared_memory(gl.float8e4nv, [2, QUERIES * HEADS, 128], q_desc.layout)
    k_ring = gl.allocate_shared_memory(gl.float8e4nv, [DEPTH, 64, 128], k_desc.layout)
    q_full = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    q_empty = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    full = gl.allocate_shared_memory(gl.int64, [DEPTH, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [DEPTH, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(2):
        mbarrier.init(q_full.index(i), count=1)
        mbarrier.init(q_empty.index(i), count=3)
    for i in gl.static_range(DEPTH):
        mbarrier.init(full.index(i), count=1)
        mbarrier.init(empty.index(i), count=1)
    gl.warp_specialize(
        [
            (
                _products,
                (
                    out,
                    weights,
                    k_scale,
                    starts,
                    ends,
                    q_ring,
                    k_ring,
                    q_full,
                    q_empty,
                    full,
                    empty,
                    T,
                    S,
                    stride_ot,
                    stride_wt,
                    0,
                    QUERIES,
                    HEADS,
                    CHUNK,
                    DEPTH,
                ),
            ),
            (
                _products,
                (
                    out,
                    weights,
                    k_scale,
                    starts,
                    ends,
                    q_ring,
                    k_ring,
                    q_full,
                    q_empty,
                    full,
                    empty,
                    T,
                    S,
                    stride_ot,
                    stride_wt,
                    1,
                    QUERIES,
                    HEADS,
                    CHUNK,
                    DEPTH,
                ),
            ),
            (
                _products,
                (
                    out,
                    weights,
                    k_scale,
                    starts,
                    ends,
                    q_ring,
                    k_ring,
                    q_full,
                    q_empty,
                    full,
                    empty,
                    T,
                    S,
                    stride_ot,
                    stride_wt,
                    2,
                    QUERIES,
                    HEADS,
                    CHUNK,
                    DEPTH,
                ),
            ),
            (
                _copies,
                (
                    q_desc,
                    k_desc,
                    starts,
                    ends,
                    q_ring,
                    k_ring,
                    q_full,
                    q_empty,
                    full,
                    empty,
                    T,
                    S,
                    QUERIES,
                    HEADS,
                    CHUNK,
                    DEPTH,
                ),
            ),
        ],
        [4, 4, 1],
        [160, 160, 24],
    )
