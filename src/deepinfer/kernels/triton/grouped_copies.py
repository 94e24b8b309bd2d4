"""The warp of the products of few tokens that copies ahead, and the list of tiles that all warps walk."""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import async_copy, mbarrier

from deepinfer.kernels.triton.gluon_names import copy_elements, load_tile
from deepinfer.kernels.triton.rings import advance

__all__ = ["copy_tiles", "group_rows", "group_tiles"]


@gluon.jit
def group_rows(counts, group, num_groups, max_m, COUNTED: gl.constexpr):
    """Tokens of a group; a count outside of 0 to `max_m` stands for the next that is not."""
    if COUNTED == 1:
        count = gl.load(counts + gl.minimum(group, num_groups - 1))
        return gl.minimum(gl.maximum(count, 0), max_m)
    return max_m


@gluon.jit
def group_tiles(
    counts, tiles, group, num_groups, max_m, COUNTED: gl.constexpr, BLOCK_M: gl.constexpr
):
    """Tiles of tokens of a group; with a group for each row, all that were listed."""
    if COUNTED == 2:
        return gl.load(tiles)
    return gl.cdiv(group_rows(counts, group, num_groups, max_m, COUNTED), BLOCK_M)


@gluon.jit
def copy_tiles(
    given,
    COUNTED: gl.constexpr,
    GROUP: gl.constexpr,
    BLOCK_N: gl.constexpr,
    BLOCK_M: gl.constexpr,
    DEPTH: gl.constexpr,
):
    """Fills the ring, tile after tile."""
    w_desc, x_desc, x_scale, w_scale, counts, tiles, rings, bars, sizes, strides = given
    w_ring, x_ring, s_ring, f_ring = rings
    full, empty = bars
    num_groups, N, max_m, steps = sizes
    stride_wg, stride_wn, stride_xg, stride_xm, stride_xk = strides
    size: gl.constexpr = (BLOCK_N + BLOCK_M) * 128
    lanes: gl.constexpr = gl.BlockedLayout([1], [32], [1], [0])
    token = gl.arange(0, BLOCK_M, layout=lanes)
    # Scales for 128 channels: one of each 64 rows, or a word of powers of each 32.
    EACH: gl.constexpr = 32 if GROUP == 32 else 64
    part = gl.arange(0, 4, layout=lanes)
    tiles_n = gl.cdiv(N, BLOCK_N)
    tile = gl.program_id(0)
    group = gl.to_tensor(0)
    first = 0
    slot = 0
    phase = 1
    width = group_tiles(counts, tiles, 0, num_groups, max_m, COUNTED, BLOCK_M) * tiles_n
    while group < num_groups:
        if tile < first + width:
            tiles_m = width // tiles_n
            at = tile - first
            m0 = (at % tiles_m) * BLOCK_M
            n0 = (at // tiles_m) * BLOCK_N
            of = group
            if COUNTED == 2:
                m0 = gl.load(tiles + 1 + at % tiles_m)
                of = gl.load(counts + m0)
            m = group * max_m + m0
            n = of * N + n0
            g = of.to(gl.int64)  # type: ignore[attr-defined]
            xs = (
                x_scale
                + group.to(gl.int64) * stride_xg
                + gl.minimum(m0 + token, max_m - 1).to(gl.int64) * stride_xm
            )
            ws = (
                w_scale + g * stride_wg + (gl.minimum(n0 + EACH * part, N - 1) // GROUP) * stride_wn
            )
            for step in range(steps):
                mbarrier.wait(empty.index(slot), phase)
                bar = full.index(slot)
                mbarrier.expect(bar, size)
                load_tile(w_desc, [n, step * 128], bar, w_ring.index(slot))
                load_tile(x_desc, [m, step * 128], bar, x_ring.index(slot))
                copy_elements(s_ring.index(slot), xs + step * stride_xk)
                copy_elements(f_ring.index(slot), ws + step)
                async_copy.mbarrier_arrive(bar, increment_count=False)
                slot, phase = advance(slot, phase, DEPTH)
            tile += gl.num_programs(0)
        else:
            first += width
            group += 1
            width = group_tiles(counts, tiles, group, num_groups, max_m, COUNTED, BLOCK_M) * tiles_n
