"""Grouped products of few tokens with many weights on Hopper: weights are the tall operand, bulk copies run ahead.

One warp copies tiles of weights and tokens into a ring in shared memory; one to three warpgroups multiply, each 64
rows of weights with all tokens of the tile. The grid is as large as the chip, and every program walks the same list
of tiles; a group without tokens adds nothing to it. The order of every sum hangs on K alone.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier

from deepinfer.kernels.triton.grouped_copies import copy_tiles, group_rows, group_tiles
from deepinfer.kernels.triton.grouped_tiles import ahead_tile, fp8_tile, powers_tile

__all__ = ["grouped_swapped_kernel"]


@gluon.jit
def _products(
    given,
    COUNTED: gl.constexpr,
    GROUP: gl.constexpr,
    BLOCK_N: gl.constexpr,
    BLOCK_M: gl.constexpr,
    DEPTH: gl.constexpr,
    PART: gl.constexpr,
    SPLIT: gl.constexpr,
    AHEAD: gl.constexpr,
):
    """Multiplies, scales and writes 64 rows of every tile, or adds up every other step of the same rows."""
    out, counts, tiles, rings, bars, sizes, strides, meeting = given
    shared, done, taken = meeting
    num_groups, N, max_m, steps = sizes
    stride_og, stride_om = strides
    acc_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_M, 32])
    out_layout: gl.constexpr = gl.BlockedLayout([8, 1], [8, 4], [1, 4], [0, 1])
    tiles_n = gl.cdiv(N, BLOCK_N)
    tile = gl.program_id(0)
    group = gl.to_tensor(0)
    first = 0
    slot = 0
    phase = 0
    turn = 0
    rows = group_rows(counts, 0, num_groups, max_m, COUNTED)
    width = group_tiles(counts, tiles, 0, num_groups, max_m, COUNTED, BLOCK_M) * tiles_n
    while group < num_groups:
        if tile < first + width:
            tiles_m = width // tiles_n
            at = tile - first
            m0 = (at % tiles_m) * BLOCK_M
            n0 = (at // tiles_m) * BLOCK_N + (64 * PART if SPLIT == 1 else 0)
            if COUNTED == 2:
                m0 = gl.load(tiles + 1 + at % tiles_m)
            g = group.to(gl.int64)  # type: ignore[attr-defined]
            if GROUP == 32:
                acc, slot, phase = powers_tile(
                    rings, bars, steps, slot, phase, PART, BLOCK_M, DEPTH, acc_layout
                )
            elif AHEAD:
                acc, slot, phase = ahead_tile(
                    rings, bars, steps, slot, phase, N < 0, PART, BLOCK_M, DEPTH, acc_layout
                )
            else:
                acc, slot, phase = fp8_tile(
                    rings, bars, steps, slot, phase, PART, SPLIT, BLOCK_M, DEPTH, acc_layout
                )
            if SPLIT == 2:
                if PART == 1:
                    mbarrier.wait(taken, turn ^ 1)
                    shared.store(acc)
                    mbarrier.arrive(done, count=1)
                else:
                    mbarrier.wait(done, turn)
                    acc += shared.load(acc_layout)
                    mbarrier.arrive(taken, count=1)
                turn ^= 1
            if SPLIT == 1 or PART == 0:
                y = gl.convert_layout(acc.to(out.dtype.element_ty), out_layout)
                mo = m0 + gl.arange(0, BLOCK_M, layout=gl.SliceLayout(0, out_layout))
                no = n0 + gl.arange(0, 64, layout=gl.SliceLayout(1, out_layout))
                to = out + g * stride_og + mo.to(gl.int64)[None, :] * stride_om + no[:, None]
                used = mo < rows
                if COUNTED == 2:
                    own = gl.load(counts + gl.minimum(mo, rows - 1))
                    used = used & (own == gl.load(counts + m0))
                gl.store(to, y, mask=used[None, :] & (no < N)[:, None])
            tile += gl.num_programs(0)
        else:
            first += width
            group += 1
            rows = group_rows(counts, group, num_groups, max_m, COUNTED)
            width = group_tiles(counts, tiles, group, num_groups, max_m, COUNTED, BLOCK_M) * tiles_n


@gluon.jit(do_not_specialize=["num_groups", "max_m"])
def grouped_swapped_kernel(
    w_desc,
    x_desc,
    out,
    w_scale,
    x_scale,
    counts,
    tiles,
    num_groups,
    N,
    max_m,
    steps,
    stride_og,
    stride_om,
    stride_wg,
    stride_wn,
    stride_xg,
    stride_xm,
    stride_xk,
    COUNTED: gl.constexpr,
    GROUP: gl.constexpr,
    PARTS: gl.constexpr,
    BLOCK_M: gl.constexpr,
    SPLIT: gl.constexpr,
    DEPTH: gl.constexpr,
    REGISTERS: gl.constexpr,
    AHEAD: gl.constexpr,
):
    """`out[g, m, n] = sum over k of x[g, m, k] * weight[g, n, k]` for m below `counts[g]`.

    COUNTED: 0 all rows; 1 as said; 2 one group of rows, `counts` is the group of each, and `tiles` holds the number of
    tiles that have rows and the first row of each.

    GROUP: channels that share a scale, for e4m3 weights (rows share it too): 128 (fp32) or 32 (e8m0, four to a word).
    SPLIT 2: two warpgroups add up the even and the odd steps of the same 64 rows, and the sums of the odd ones are added
    last.
    """
    BLOCK_N: gl.constexpr = 64 * PARTS // SPLIT
    flat: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    kind: gl.constexpr = gl.int32 if GROUP == 32 else gl.float32
    w_ring = gl.allocate_shared_memory(gl.float8e4nv, [DEPTH, BLOCK_N, 128], w_desc.layout)
    x_ring = gl.allocate_shared_memory(gl.float8e4nv, [DEPTH, BLOCK_M, 128], x_desc.layout)
    s_ring = gl.allocate_shared_memory(kind, [DEPTH, BLOCK_M], flat)
    f_ring = gl.allocate_shared_memory(kind, [DEPTH, 4], flat)
    full = gl.allocate_shared_memory(gl.int64, [DEPTH, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [DEPTH, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(DEPTH):
        # Bulk copies count as one; each lane of the copying warp adds one when its scales are there.
        mbarrier.init(full.index(i), count=33)
        mbarrier.init(empty.index(i), count=PARTS // SPLIT)
    shared = full
    done = full
    taken = full
    if SPLIT == 2:
        mixed: gl.constexpr = gl.SwizzledSharedLayout(2, 1, 8, [1, 0])
        shared = gl.allocate_shared_memory(gl.float32, [64, BLOCK_M], mixed)
        done = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
        taken = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
        mbarrier.init(done, count=1)
        mbarrier.init(taken, count=1)
    rings = (w_ring, x_ring, s_ring, f_ring)
    bars = (full, empty)
    sizes = (num_groups, N, max_m, steps)
    to = (stride_og, stride_om)
    multiply = (out, counts, tiles, rings, bars, sizes, to, (shared, done, taken))
    of = (stride_wg, stride_wn, stride_xg, stride_xm, stride_xk)
    copy = (w_desc, x_desc, x_scale, w_scale, counts, tiles, rings, bars, sizes, of)
    if PARTS == 1:
        gl.warp_specialize(
            [
                (
                    _products,
                    (multiply, COUNTED, GROUP, BLOCK_N, BLOCK_M, DEPTH, 0, SPLIT, AHEAD),
                ),
                (copy_tiles, (copy, COUNTED, GROUP, BLOCK_N, BLOCK_M, DEPTH)),
            ],
            [1],
            [24],
        )
    else:
        gl.warp_specialize(
            [
                (
                    _products,
                    (multiply, COUNTED, GROUP, BLOCK_N, BLOCK_M, DEPTH, 0, SPLIT, AHEAD),
                ),
                (
                    _products,
                    (multiply, COUNTED, GROUP, BLOCK_N, BLOCK_M, DEPTH, 1, SPLIT, AHEAD),
                ),
                (copy_tiles, (copy, COUNTED, GROUP, BLOCK_N, BLOCK_M, DEPTH)),
            ],
            [4, 1],
            [REGISTERS, 24],
        )
