"""Products of many tokens on Hopper: one or two warpgroups multiply 64 tokens each, one warp copies ahead."""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import async_copy, mbarrier

from deepinfer.kernels.triton.gemm_tiles import (
    group_of_tile,
    known_group,
    parts_tile,
    place_tile,
    plain_tile,
    scaled_tile,
    send_tile,
    store_tile,
)
from deepinfer.kernels.triton.gemm_tiles_register import register_tile
from deepinfer.kernels.triton.gemm_tiles_small import small_groups_tile
from deepinfer.kernels.triton.gluon_names import copy_elements, load_tile, written_tiles
from deepinfer.kernels.triton.rings import advance

__all__ = ["gemm_tall_kernel"]


@gluon.jit
def _copies(given, SCALED: gl.constexpr, GROUPED: gl.constexpr, PARTS: gl.constexpr, BLOCK_N: gl.constexpr, BAND: gl.constexpr,
            GROUP: gl.constexpr, DEPTH: gl.constexpr, SPREAD: gl.constexpr):  # fmt: skip
    """Fills the ring, tile after tile."""
    x_desc, w_desc, x_scale, w_scale, layout, rings, bars, sizes, strides = given
    x_ring, w_ring, s_ring, f_ring = rings
    full, empty = bars
    M, N, steps, num_groups = sizes
    stride_xm, stride_xk, stride_wg, stride_wn = strides
    BLOCK_M: gl.constexpr = 64 * PARTS
    BLOCK_K: gl.constexpr = 128 if SCALED else 64
    SPREAD_BYTES: gl.constexpr = 1024 * PARTS + 128 if SPREAD else 0
    lanes: gl.constexpr = gl.BlockedLayout([1], [32], [1], [0])
    row = gl.arange(0, 64, layout=lanes)
    # Columns that each of four scales of weights is for
    EACH: gl.constexpr = 64 if BLOCK_N == 256 else GROUP
    block = EACH * (gl.arange(0, 4, layout=lanes) % ((BLOCK_N + EACH - 1) // EACH))
    slot = 0
    phase = 1
    tiles = gl.cdiv(M, BLOCK_M) * gl.cdiv(N, BLOCK_N)
    after = 0
    if GROUPED:
        after = group_of_tile(layout, num_groups, gl.program_id(0), M, N, BLOCK_M, BLOCK_N, BAND)
    for tile in range(gl.program_id(0), tiles, gl.num_programs(0)):
        m, n = place_tile(tile, M, N, BLOCK_M, BLOCK_N, BAND)
        group = after
        if GROUPED:
            following = tile + gl.num_programs(0)
            after = group_of_tile(layout, num_groups, following, M, N, BLOCK_M, BLOCK_N, BAND)
        if group >= 0:
            if SCALED and not SPREAD:
                xp = x_scale + m.to(gl.int64) * stride_xm
                fp = w_scale + gl.minimum(n + block, N - 1) // GROUP * stride_wn
                if GROUPED:
                    fp += group.to(gl.int64) * stride_wg  # type: ignore[attr-defined]
            for step in range(steps):
                mbarrier.wait(empty.index(slot), phase)
                bar = full.index(slot)
                mbarrier.expect(bar, (BLOCK_M + BLOCK_N) * 128 + SPREAD_BYTES)
                k = step * BLOCK_K
                for part in gl.static_range(PARTS):
                    load_tile(x_desc, [m + 64 * part, k], bar, x_ring.index(slot * PARTS + part))
                load_tile(w_desc, [group * N + n, k], bar, w_ring.index(slot))
                if SPREAD:
                    for part in gl.static_range(PARTS):
                        at = (step * M + m + 64 * part) * 4
                        load_tile(x_scale, [at], bar, s_ring.index(slot * PARTS + part))
                    at = step * stride_wn + group * stride_wg + n // 128 * 16
                    load_tile(w_scale, [at], bar, f_ring.index(slot))
                elif SCALED:
                    for part in gl.static_range(PARTS):
                        at = gl.minimum(row + 64 * part, M - 1 - m) * stride_xm + step * stride_xk
                        copy_elements(s_ring.index(slot * PARTS + part), xp + at)
                    copy_elements(f_ring.index(slot), fp + step)
                    async_copy.mbarrier_arrive(bar, increment_count=False)
                slot, phase = advance(slot, phase, DEPTH)


@gluon.jit
def _products(given, PART: gl.constexpr, SCALED: gl.constexpr, GROUPED: gl.constexpr, PARTS: gl.constexpr, BLOCK_N: gl.constexpr,
              BAND: gl.constexpr, SPLIT: gl.constexpr, GROUP: gl.constexpr, CUT: gl.constexpr, DEPTH: gl.constexpr,
              SPREAD: gl.constexpr, ROOMS: gl.constexpr):  # fmt: skip
    """Multiplies, scales and writes 64 rows of every tile."""
    out, out_desc, rooms, layout, sums, part_steps, rings, bars, sizes, stride_om = given
    M, N, steps, num_groups = sizes
    BLOCK_M: gl.constexpr = 64 * PARTS
    WIDTH: gl.constexpr = (128 if BLOCK_N == 128 else 64) if SCALED else BLOCK_N
    acc_layout: gl.constexpr = gl.NVMMADistributedLayout(
        [3, 0], [4, 1], [16, WIDTH, 32 if SCALED else 16]
    )
    slot = 0
    phase = 0
    tiles = gl.cdiv(M, BLOCK_M) * gl.cdiv(N, BLOCK_N)
    row = gl.arange(0, 64, layout=gl.BlockedLayout([1], [32], [4], [0]))
    after = 0
    if GROUPED:
        after = group_of_tile(layout, num_groups, gl.program_id(0), M, N, BLOCK_M, BLOCK_N, BAND)
    for tile in range(gl.program_id(0), tiles, gl.num_programs(0)):
        m, n = place_tile(tile, M, N, BLOCK_M, BLOCK_N, BAND)
        group = after
        groups = row
        m += 64 * PART
        if GROUPED:
            # What the next tile, and the end of this one, ask for comes while this tile is multiplied.
            following = tile + gl.num_programs(0)
            after = group_of_tile(layout, num_groups, following, M, N, BLOCK_M, BLOCK_N, BAND)
            groups = known_group(gl.load(layout + gl.minimum(m + row, M - 1)), num_groups)
        if group >= 0:
            if SCALED and GROUP == 32:
                acc, slot, phase = small_groups_tile(
                    rings,
                    bars,
                    steps,
                    slot,
                    phase,
                    N < 0,
                    PART,
                    PARTS,
                    WIDTH,
                    DEPTH,
                    SPREAD,
                    acc_layout,
                )
                store_tile(acc, out, groups, m, n, M, N, stride_om, GROUPED, WIDTH)
            elif SCALED and BLOCK_N == 256:
                s0, s1, s2, s3, slot, phase = register_tile(
                    rings, bars, steps, slot, phase, N < 0, PART, PARTS, DEPTH, acc_layout
                )
                if ROOMS > 0:
                    whole = gl.min(groups, axis=0) >= 0
                    parts = (s0, s1, s2, s3)
                    for i in gl.static_range(4):
                        send_tile(
                            parts[i], out, out_desc, rooms, whole, groups, m, n + 64 * i, M, N, stride_om, GROUPED,
                            PART, ROOMS, i,
                        )  # fmt: skip
                else:
                    store_tile(s0, out, groups, m, n, M, N, stride_om, GROUPED, 64)
                    store_tile(s1, out, groups, m, n + 64, M, N, stride_om, GROUPED, 64)
                    store_tile(s2, out, groups, m, n + 128, M, N, stride_om, GROUPED, 64)
                    store_tile(s3, out, groups, m, n + 192, M, N, stride_om, GROUPED, 64)
            elif SCALED:
                acc, slot, phase = scaled_tile(
                    rings, bars, steps, slot, phase, N < 0, PART, PARTS, SPLIT, DEPTH, acc_layout
                )
                store_tile(acc, out, groups, m, n, M, N, stride_om, GROUPED, WIDTH)
            elif CUT:
                own = sums + (gl.program_id(0) * PARTS + PART) * 64 * BLOCK_N
                acc, slot, phase = parts_tile(
                    own, part_steps, rings, bars, steps, slot, phase, PART, PARTS, BLOCK_N, DEPTH, acc_layout
                )  # fmt: skip
                store_tile(acc, out, groups, m, n, M, N, stride_om, GROUPED, WIDTH)
            else:
                acc, slot, phase = plain_tile(
                    rings, bars, steps, slot, phase, PART, PARTS, BLOCK_N, DEPTH, acc_layout
                )
                store_tile(acc, out, groups, m, n, M, N, stride_om, GROUPED, WIDTH)
    if ROOMS > 0:
        written_tiles(0)


@gluon.jit(do_not_specialize=["M", "num_groups"])
def gemm_tall_kernel(
    x_desc,
    w_desc,
    out,
    x_scale,
    w_scale,
    layout,
    sums,
    M,
    N,
    steps,
    num_groups,
    part_steps,
    stride_om,
    stride_xm,
    stride_xk,
    stride_wg,
    stride_wn,
    out_desc,
    SCALED: gl.constexpr,
    GROUPED: gl.constexpr,
    PARTS: gl.constexpr,
    BLOCK_N: gl.constexpr,
    BAND: gl.constexpr,
    SPLIT: gl.constexpr,
    GROUP: gl.constexpr,
    CUT: gl.constexpr,
    DEPTH: gl.constexpr,
    SPREAD: gl.constexpr,
    ROOMS: gl.constexpr,
):
    """`out[m, n] = sum over k of x[m, k] * weight[group of m, n, k]`; GROUP as in `grouped_swapped_kernel`.

    CUT, for bf16: every `part_steps` steps are added up apart, and their sums from the first to the last; those of a
    program so far lie in its own place of `sums`, fp32.
    SPREAD, for groups of 32: scales are descriptors of what `spread_powers` makes. ROOMS, for 256 columns of groups of
    128: bulk copies write the results, through so many rooms of 64 x 64 a warpgroup, to the descriptor `out_desc`.
    """
    BLOCK_K: gl.constexpr = 128 if SCALED else 64
    x_ring = gl.allocate_shared_memory(x_desc.dtype, [DEPTH * PARTS, 64, BLOCK_K], x_desc.layout)
    w_ring = gl.allocate_shared_memory(w_desc.dtype, [DEPTH, BLOCK_N, BLOCK_K], w_desc.layout)
    s_ring = x_ring
    f_ring = x_ring
    if SPREAD:
        s_ring = gl.allocate_shared_memory(gl.float32, [DEPTH * PARTS, 256], x_scale.layout)
        f_ring = gl.allocate_shared_memory(gl.float32, [DEPTH, 32], w_scale.layout)
    elif SCALED:
        flat: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
        kind: gl.constexpr = gl.int32 if GROUP == 32 else gl.float32
        s_ring = gl.allocate_shared_memory(kind, [DEPTH * PARTS, 64], flat)
        f_ring = gl.allocate_shared_memory(kind, [DEPTH, 4], flat)
    full = gl.allocate_shared_memory(gl.int64, [DEPTH, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [DEPTH, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(DEPTH):
        # Bulk copies count as one; each lane of the copying warp adds one when its scales are there.
        mbarrier.init(full.index(i), count=33 if SCALED and not SPREAD else 1)
        mbarrier.init(empty.index(i), count=PARTS)
    rings = (x_ring, w_ring, s_ring, f_ring)
    bars = (full, empty)
    sizes = (M, N, steps, num_groups)
    rooms = x_ring
    if ROOMS > 0:
        rooms = gl.allocate_shared_memory(out_desc.dtype, [PARTS * ROOMS, 64, 64], out_desc.layout)
    multiply = (out, out_desc, rooms, layout, sums, part_steps, rings, bars, sizes, stride_om)
    strides = (stride_xm, stride_xk, stride_wg, stride_wn)
    copy = (x_desc, w_desc, x_scale, w_scale, layout, rings, bars, sizes, strides)
    # fmt: off
    if PARTS == 1:
        gl.warp_specialize(
            [
                (_products, (multiply, 0, SCALED, GROUPED, PARTS, BLOCK_N, BAND, SPLIT, GROUP, CUT, DEPTH, SPREAD, ROOMS)),
                (_copies, (copy, SCALED, GROUPED, PARTS, BLOCK_N, BAND, GROUP, DEPTH, SPREAD)),
            ],
            [1], [24],
        )
    else:
        gl.warp_specialize(
            [
                (_products, (multiply, 0, SCALED, GROUPED, PARTS, BLOCK_N, BAND, SPLIT, GROUP, CUT, DEPTH, SPREAD, ROOMS)),
                (_products, (multiply, 1, SCALED, GROUPED, PARTS, BLOCK_N, BAND, SPLIT, GROUP, CUT, DEPTH, SPREAD, ROOMS)),
                (_copies, (copy, SCALED, GROUPED, PARTS, BLOCK_N, BAND, GROUP, DEPTH, SPREAD)),
            ],
            [4, 1], [240, 24],
        )
    # fmt: on
