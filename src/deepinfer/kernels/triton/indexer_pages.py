"""Index scores of a few queries a request over paged keys on Hopper.

One warp copies whole pages through tensor descriptors into a ring of shared memory, 128 keys a slot; warpgroups take slots in
turn. Keys are the tall operand of the product and the heads of a request's queries the wide one; the heads are weighted
and summed in registers, in one order whatever the number of queries, requests and programs.
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

from deepinfer.kernels.triton.folded_words import WIDE
from deepinfer.kernels.triton.gluon_names import block_barrier, load_tile
from deepinfer.kernels.triton.indexer_pages_codes import (
    fold,
    key_words,
    largest_power,
    powers,
    split_channels,
    spread,
)
from deepinfer.kernels.triton.indexer_quads import lane_sums, own_sums
from deepinfer.kernels.triton.mla_records import view_memory

__all__ = ["page_scores_kernel"]


@gluon.jit
def _share(meta, each, programs, requests):
    """The request and the split where a program begins, and where it ends; requests that are none are left out."""
    first = gl.minimum(gl.program_id(0) * each, programs)
    last = gl.minimum(first + each, programs)
    b = gl.load(meta + 2 * first)
    last_b = gl.load(meta + 2 * last)
    split = gl.where(b < 0, 0, gl.maximum(gl.load(meta + 2 * first + 1), 0))
    last_split = gl.where(last_b < requests, gl.load(meta + 2 * last + 1), 0)
    return gl.maximum(b, 0), split, gl.minimum(last_b, requests), last_split


@gluon.jit
def _stop(lengths, b, next_n, most, last_b, last_split, QUERIES: gl.constexpr, SPLIT: gl.constexpr):
    """Key behind the last one of a request that a program scores."""
    of = lengths + b.to(gl.int64) * next_n
    found = gl.load(of)
    for i in gl.static_range(1, QUERIES):
        found = gl.maximum(found, gl.load(of + gl.minimum(next_n - 1, i)))
    found = gl.minimum(found, most)
    return gl.where(b == last_b, gl.minimum(found, last_split * SPLIT), found)


@gluon.jit
def _copies(
    given, NEXT: gl.constexpr, PAGE: gl.constexpr, FP4: gl.constexpr, SPLIT: gl.constexpr, DEPTH: gl.constexpr
):  # fmt: skip
    """Fills the ring; pages that are none are copied from behind the cache, as zeros."""
    k_desc, s_desc, lengths, table, meta, k_ring, s_ring, bars, sizes, stride_table = given
    full, empty = bars
    next_n, most, num_pages, each, programs, requests = sizes
    SIZE: gl.constexpr = 128 * (68 if FP4 else 132)
    # Scales lie behind the codes of a page, as words of the row that a page is.
    SCALES: gl.constexpr = PAGE * (16 if FP4 else 32)
    b, split, last_b, last_split = _share(meta, each, programs, requests)
    slot = 0
    phase = 1
    while (b < last_b) | ((b == last_b) & (split < last_split)):
        stop = _stop(lengths, b, next_n, most, last_b, last_split, NEXT, SPLIT)
        pages = table + b.to(gl.int64) * stride_table
        for at in range(split * SPLIT, stop, 128):
            low = gl.load(pages + at // PAGE)
            high = gl.load(pages + (at + 64) // PAGE, mask=at + 64 < stop, other=-1)
            low = gl.where((low >= 0) & (low < num_pages), low, num_pages)
            high = gl.where((high >= 0) & (high < num_pages), high, num_pages)
            mbarrier.wait(empty.index(slot), phase)
            bar = full.index(slot)
            mbarrier.expect(bar, SIZE)
            row = at % PAGE
            load_tile(k_desc, [low, row, 0], bar, k_ring.index(2 * slot))
            load_tile(s_desc, [low, SCALES + row], bar, s_ring.index(2 * slot))
            row = (at + 64) % PAGE
            load_tile(k_desc, [high, row, 0], bar, k_ring.index(2 * slot + 1))
            load_tile(s_desc, [high, SCALES + row], bar, s_ring.index(2 * slot + 1))
            slot += 1
            if slot == DEPTH:
                slot = 0
                phase ^= 1
        b += 1
        split = 0


@gluon.jit
def _operand(keys, scales, like, FP4: gl.constexpr):
    """64 keys as left operands: in shared memory, or in registers, for MXFP4 those of each group of channels or one."""
    if FP4 == 0:
        found = (view_memory(keys, gl.float8e4nv, [64, 128], gl.NVMMASharedLayout(128, 8)),)
    else:
        a_layout: gl.constexpr = gl.DotOperandLayout(0, like.type.layout, 4)
        words = key_words(view_memory(keys, gl.int32, [64, 16], gl.NVMMASharedLayout(64, 32)))
        if FP4 == 1:
            found = (
                spread(words[0], a_layout), spread(words[1], a_layout), spread(words[2], a_layout),
                spread(words[3], a_layout),
            )  # fmt: skip
        else:
            plain: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
            of: gl.constexpr = gl.SliceLayout(1, gl.SliceLayout(2, WIDE))
            found = (fold(words, view_memory(scales, gl.int32, [64], plain).load(of), a_layout),)
    return found


@gluon.jit
def _start(keys, q, zero, FP4: gl.constexpr):
    """Begins the products of 64 keys with the columns of queries: one, or one of each group of channels."""
    if FP4 == 1:
        found = ()
        for g in gl.static_range(4):
            of = q.slice(32 * g, 32, dim=1).permute((1, 0))
            part = warpgroup_mma(keys[g], of, zero, use_acc=False, is_async=True)
            found = found + (part,)  # noqa: RUF005 - Gluon has no unpacking
    else:
        found = (warpgroup_mma(keys[0], q.permute((1, 0)), zero, use_acc=False, is_async=True),)
    return found


@gluon.jit
def _sums(parts, scales, w, QUERIES: gl.constexpr, HEADS: gl.constexpr, FP4: gl.constexpr):
    """Weighted sums over the heads that a thread holds, [4, 2, 8, QUERIES, 4], of finished products."""
    layout: gl.constexpr = parts[0].type.layout
    plain: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    if FP4 == 1:
        s = view_memory(scales, gl.int32, [64], plain).load(gl.SliceLayout(1, layout))
        p0, p1, p2, p3 = powers(s)
        acc = parts[0] * p0[:, None] + parts[1] * p1[:, None]
        acc = acc + parts[2] * p2[:, None] + parts[3] * p3[:, None]
        y = own_sums((acc + gl.abs(acc)) * w[None, :], QUERIES, HEADS, 2)
    else:
        if FP4 == 2:
            s = view_memory(scales, gl.int32, [64], plain).load(gl.SliceLayout(1, layout))
            s = largest_power(s)
        else:
            s = view_memory(scales, gl.float32, [64], plain).load(gl.SliceLayout(1, layout))
        acc = parts[0]
        y = own_sums((acc + gl.abs(acc)) * w[None, :], QUERIES, HEADS, 2)
        of: gl.constexpr = gl.SliceLayout(3, gl.SliceLayout(4, y.type.layout))
        y = y * gl.convert_layout(s.reshape([4, 2, 8]), of).expand_dims(3).expand_dims(4)
    return y


@gluon.jit
def _whole(sums, FP4: gl.constexpr):
    """Sums, NaN where they are infinite: a scale of MXFP4 that is NaN was taken as a power of two."""
    if FP4 != 0:
        sums = gl.where(gl.abs(sums) == float("inf"), float("nan"), sums)
    return sums


@gluon.jit
def _finish(parts, FP4: gl.constexpr):
    """Waits for products that were begun."""
    if FP4 == 1:
        a, b, c, d = warpgroup_mma_wait(0, [parts[0], parts[1], parts[2], parts[3]])
        found = (a, b, c, d)
    else:
        found = (warpgroup_mma_wait(0, [parts[0]]),)
    return found


@gluon.jit
def _finish_two(low, high, FP4: gl.constexpr):
    """Waits for the products of two tiles."""
    if FP4 == 1:
        a, b, c, d, e, f, g, h = warpgroup_mma_wait(
            0, [low[0], low[1], low[2], low[3], high[0], high[1], high[2], high[3]]
        )
        low = (a, b, c, d)
        high = (e, f, g, h)
    else:
        a, b = warpgroup_mma_wait(0, [low[0], high[0]])
        low = (a,)
        high = (b,)
    return low, high


@gluon.jit
def _places(INDEX: gl.constexpr, QUERIES: gl.constexpr, layout: gl.constexpr):
    """Keys, of 128 or 64, and queries of one of the tensors [4, 8, 4] that `lane_sums` returns."""
    warp = gl.arange(0, 4, layout=gl.SliceLayout(1, gl.SliceLayout(2, layout)))[:, None, None]
    row = gl.arange(0, 8, layout=gl.SliceLayout(0, gl.SliceLayout(2, layout)))[None, :, None]
    lane = gl.arange(0, 4, layout=gl.SliceLayout(0, gl.SliceLayout(1, layout)))[None, None, :]
    if QUERIES == 1:
        key = warp * 16 + row + (lane % 2) * 8 + (lane // 2) * 64
        query = lane * 0 + row * 0 + warp * 0
    elif QUERIES == 2:
        key = warp * 16 + row + (lane // 2) * 8
        query = lane % 2 + row * 0 + warp * 0
    else:
        key = warp * 16 + row + lane * 0 + INDEX * 8
        query = lane + row * 0 + warp * 0
    return key, query


@gluon.jit
def _products(
    given, PART: gl.constexpr, PARTS: gl.constexpr, HEADS: gl.constexpr, QUERIES: gl.constexpr, CHUNKS: gl.constexpr,
    PAGE: gl.constexpr, FP4: gl.constexpr, SPLIT: gl.constexpr, DEPTH: gl.constexpr, TOGETHER: gl.constexpr,
):  # fmt: skip
    """Scores every PARTS-th slot."""
    q, weights, lengths, table, meta, out, k_ring, s_ring, q_tiles, bars, sizes, strides = given
    full, empty = bars
    next_n, most, num_pages, each, programs, requests = sizes
    stride_w, stride_table, stride_out = strides
    COLUMNS: gl.constexpr = QUERIES * HEADS
    # Half, for the magnitude that is added; keys of MXFP4 are 2^-6 times as large, or 2^6 times.
    factor: gl.constexpr = 0.0078125 if FP4 == 2 else (32.0 if FP4 == 1 else 0.5)
    NEXT: gl.constexpr = QUERIES * CHUNKS
    OUTPUTS: gl.constexpr = 2 if QUERIES == 4 else 1
    kind: gl.constexpr = out.dtype.element_ty
    acc_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, COLUMNS, 32])
    q_layout: gl.constexpr = gl.BlockedLayout([1, 16], [4, 8], [4, 1], [1, 0])
    zero = gl.zeros((64, COLUMNS), gl.float32, acc_layout)
    column = gl.arange(0, COLUMNS, layout=gl.SliceLayout(0, acc_layout))
    own = own_sums(zero, QUERIES, HEADS, 2)
    layout: gl.constexpr = lane_sums(own, own, QUERIES)[0].type.layout
    q_row = gl.arange(0, COLUMNS, layout=gl.SliceLayout(1, q_layout))
    q_channel = gl.arange(0, 128, layout=gl.SliceLayout(0, q_layout))
    b, split, last_b, last_split = _share(meta, each, programs, requests)
    passed = 0
    while (b < last_b) | ((b == last_b) & (split < last_split)):
        stop = _stop(lengths, b, next_n, most, last_b, last_split, NEXT, SPLIT)
        pages = table + b.to(gl.int64) * stride_table
        of = b.to(gl.int64) * next_n
        first = split * (SPLIT // 128)
        last = gl.maximum(gl.cdiv(stop, 128), first)
        skip = (PART + PARTS - passed % PARTS) % PARTS
        if first + skip < last:
            # Every warpgroup has the queries in a place of its own; all its warps are behind the products with the last ones.
            block_barrier()
            w = ()
            ends = ()
            for chunk in gl.static_range(CHUNKS):
                head = chunk * COLUMNS + q_row
                at = q + (of * HEADS + head)[:, None] * 128 + q_channel[None, :]
                used = (head < next_n * HEADS)[:, None].broadcast_to([COLUMNS, 128])
                codes = gl.load(at, mask=used, other=0)
                if FP4:
                    codes = gl.convert_layout(split_channels(codes, COLUMNS, FP4 == 2), q_layout)
                q_tiles.index(PART * CHUNKS + chunk).store(codes.to(gl.float8e4nv, bitcast=True))
                j = chunk * QUERIES + column // HEADS
                one = gl.load(
                    weights + (of + j) * stride_w + column % HEADS, mask=j < next_n, other=0.0
                )
                w = w + (one * factor,)  # noqa: RUF005
                for i in gl.static_range(OUTPUTS):
                    _, query = _places(i, QUERIES, layout)
                    j = chunk * QUERIES + query
                    ends = ends + (gl.load(lengths + of + j, mask=j < next_n, other=0),)  # noqa: RUF005
            fence_async_shared()
            block_barrier()
            for step in range(first + skip, last, PARTS):
                base = step * 128
                low = gl.load(pages + base // PAGE)
                high = gl.load(pages + (base + 64) // PAGE, mask=base + 64 < stop, other=-1)
                low_is = (low >= 0) & (low < num_pages)
                high_is = (high >= 0) & (high < num_pages)
                count = passed + step - first
                slot = count % DEPTH
                mbarrier.wait(full.index(slot), (count // DEPTH) & 1)
                if TOGETHER and QUERIES == 1:
                    key, query = _places(0, 1, layout)
                    for chunk in gl.static_range(CHUNKS):
                        mine = q_tiles.index(PART * CHUNKS + chunk)
                        lower, upper = s_ring.index(2 * slot), s_ring.index(2 * slot + 1)
                        keys = _operand(k_ring.index(2 * slot), lower, zero, FP4)
                        parts = _start(keys, mine, zero, FP4)
                        keys = _operand(k_ring.index(2 * slot + 1), upper, zero, FP4)
                        more = _start(keys, mine, zero, FP4)
                        parts, more = _finish_two(parts, more, FP4)
                        y = _sums(parts, lower, w[chunk], QUERIES, HEADS, FP4)
                        z = _sums(more, upper, w[chunk], QUERIES, HEADS, FP4)
                        found = _whole(lane_sums(y, z, QUERIES)[0], FP4)
                        seen = gl.where(key < 64, low_is, high_is) & (base + key < ends[chunk])
                        found = gl.where(seen, found, float("-inf"))
                        to = out + (of + chunk + query) * stride_out + (base + key)
                        gl.store(to, found.to(kind), mask=(base + key < stop) & (chunk < next_n))
                else:
                    for half in range(2):
                        scales = s_ring.index(2 * slot + half)
                        keys = _operand(k_ring.index(2 * slot + half), scales, zero, FP4)
                        page_is = gl.where(half == 1, high_is, low_is)
                        for chunk in gl.static_range(CHUNKS):
                            mine = q_tiles.index(PART * CHUNKS + chunk)
                            parts = _finish(_start(keys, mine, zero, FP4), FP4)
                            y = _sums(parts, scales, w[chunk], QUERIES, HEADS, FP4)
                            sums = lane_sums(y, y, QUERIES)
                            for i in gl.static_range(OUTPUTS):
                                key, query = _places(i, QUERIES, layout)
                                # With one query half of the lanes have what the others have, too.
                                mine_is = key < 64
                                key = base + half * 64 + key
                                j = chunk * QUERIES + query
                                seen = page_is & (key < ends[chunk * OUTPUTS + i])
                                found = gl.where(seen, _whole(sums[i], FP4), float("-inf"))
                                to = out + (of + j) * stride_out + key
                                gl.store(
                                    to, found.to(kind), mask=mine_is & (key < stop) & (j < next_n)
                                )
                # Behind the stores, and so behind every use of what was read from the slot.
                block_barrier()
                mbarrier.arrive(empty.index(slot), count=1)
        passed += last - first
        b += 1
        split = 0


@gluon.jit(do_not_specialize=["next_n", "most", "num_pages", "each", "programs", "requests"])
def page_scores_kernel(
    k_desc, s_desc, q, weights, lengths, table, meta, out, next_n, most, num_pages, each, programs, requests,
    stride_w, stride_table, stride_out,
    HEADS: gl.constexpr, QUERIES: gl.constexpr, CHUNKS: gl.constexpr, PAGE: gl.constexpr, FP4: gl.constexpr,
    SPLIT: gl.constexpr, DEPTH: gl.constexpr, PARTS: gl.constexpr, TOGETHER: gl.constexpr,
):  # fmt: skip
    """Scores of `each` shares of the work list a program; a place of it is a request and a split of its keys.

    FP4 is 0 for e4m3 keys, 1 for MXFP4 keys whose groups are multiplied one by one, 2 for those folded into one product.
    """
    # A slot is always taken by the same warpgroup, which so knows the phase that it is in.
    gl.static_assert(DEPTH % PARTS == 0)
    k_type: gl.constexpr = k_desc.dtype
    WIDTH: gl.constexpr = 16 if FP4 else 128
    k_ring = gl.allocate_shared_memory(k_type, [2 * DEPTH, 1, 64, WIDTH], k_desc.layout)
    s_ring = gl.allocate_shared_memory(gl.int32, [2 * DEPTH, 1, 64], s_desc.layout)
    q_tiles = gl.allocate_shared_memory(
        gl.float8e4nv, [PARTS * CHUNKS, QUERIES * HEADS, 128], gl.NVMMASharedLayout(128, 8)
    )
    full = gl.allocate_shared_memory(gl.int64, [DEPTH, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [DEPTH, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(DEPTH):
        mbarrier.init(full.index(i), count=1)
        mbarrier.init(empty.index(i), count=1)
    bars = (full, empty)
    sizes = (next_n, most, num_pages, each, programs, requests)
    strides = (stride_w, stride_table, stride_out)
    multiply = (
        q,
        weights,
        lengths,
        table,
        meta,
        out,
        k_ring,
        s_ring,
        q_tiles,
        bars,
        sizes,
        strides,
    )
    copy = (k_desc, s_desc, lengths, table, meta, k_ring, s_ring, bars, sizes, stride_table)
    NEXT: gl.constexpr = QUERIES * CHUNKS
    if PARTS == 2:
        gl.warp_specialize(
            [
                (_products, (multiply, 0, PARTS, HEADS, QUERIES, CHUNKS, PAGE, FP4, SPLIT, DEPTH, TOGETHER)),
                (_products, (multiply, 1, PARTS, HEADS, QUERIES, CHUNKS, PAGE, FP4, SPLIT, DEPTH, TOGETHER)),
                (_copies, (copy, NEXT, PAGE, FP4, SPLIT, DEPTH)),
            ],
            [4, 1],
            [216, 48],
        )  # fmt: skip
    elif PARTS == 3:
        gl.warp_specialize(
            [
                (_products, (multiply, 0, PARTS, HEADS, QUERIES, CHUNKS, PAGE, FP4, SPLIT, DEPTH, TOGETHER)),
                (_products, (multiply, 1, PARTS, HEADS, QUERIES, CHUNKS, PAGE, FP4, SPLIT, DEPTH, TOGETHER)),
                (_products, (multiply, 2, PARTS, HEADS, QUERIES, CHUNKS, PAGE, FP4, SPLIT, DEPTH, TOGETHER)),
                (_copies, (copy, NEXT, PAGE, FP4, SPLIT, DEPTH)),
            ],
            [4, 4, 1],
            [152, 152, 48],
        )  # fmt: skip
    else:
        gl.warp_specialize(
            [
                (_products, (multiply, 0, PARTS, HEADS, QUERIES, CHUNKS, PAGE, FP4, SPLIT, DEPTH, TOGETHER)),
                (_products, (multiply, 1, PARTS, HEADS, QUERIES, CHUNKS, PAGE, FP4, SPLIT, DEPTH, TOGETHER)),
                (_products, (multiply, 2, PARTS, HEADS, QUERIES, CHUNKS, PAGE, FP4, SPLIT, DEPTH, TOGETHER)),
                (_products, (multiply, 3, PARTS, HEADS, QUERIES, CHUNKS, PAGE, FP4, SPLIT, DEPTH, TOGETHER)),
                (_copies, (copy, NEXT, PAGE, FP4, SPLIT, DEPTH)),
            ],
            [4, 4, 4, 1],
            [112, 112, 112, 48],
        )  # fmt: skip
