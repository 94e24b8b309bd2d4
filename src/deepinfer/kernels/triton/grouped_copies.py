"""The warp of the products of few tokens that copies ahead, and the list of tiles that all warps walk."""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier

from deepinfer.kernels.triton.gluon_names import load_tile

__all__ = ["copy_tiles", "group_rows"]


@gluon.jit
def group_rows(counts, group, num_groups, max_m, COUNTED: gl.constexpr):
    """Tokens of a group."""
    return gl.load(counts + gl.minimum(group, num_groups - 1)) if COUNTED else max_m


@gluon.jit
def copy_tiles(
    w_desc,
    x_desc,
    s_desc,
    counts,
    w_ring,
    x_ring,
    s_ring,
    full,
    empty,
    num_groups,
    N,
    max_m,
    steps,
    s_stride,
    COUNTED: gl.constexpr,
    WHOLE: gl.constexpr,
    PACKED: gl.constexpr,
    SPAN: gl.constexpr,
    BLOCK_N: gl.constexpr,
    BLOCK_M: gl.constexpr,
    DEPTH: gl.constexpr,
):
    """Fills the ring, tile after tile."""
    WIDE: gl.constexpr = BLOCK_M if BLOCK_M > 32 else 32
    size: gl.constexpr = BLOCK_N * (64 * SPAN if PACKED else 128) + SPAN * (
        BLOCK_M * 128 + (4 * WIDE if WHOLE else 0)
    )
    tiles_n = gl.cdiv(N, BLOCK_N)
    tile = gl.program_id(0)
    group = 0
    first = 0
    slot = 0
    phase = 1
    width = gl.cdiv(group_rows(counts, 0, num_groups, max_m, COUNTED), BLOCK_M) * tiles_n
    while group < num_groups:
        if tile < first + width:
            tiles_m = width // tiles_n
            at = tile - first
            m = group * max_m + (at % tiles_m) * BLOCK_M
            of_scales = group * steps * SPAN * s_stride + (at % tiles_m) * BLOCK_M
            n = group * N + (at // tiles_m) * BLOCK_N
            for step in range(steps):
                mbarrier.wait(empty.index(slot), phase)
                bar = full.index(slot)
                mbarrier.expect(bar, size)
                load_tile(
                    w_desc, [n, step * (16 * SPAN if PACKED else 128)], bar, w_ring.index(slot)
                )
                for i in gl.static_range(SPAN):
                    load_tile(
                        x_desc, [m, (step * SPAN + i) * 128], bar, x_ring.index(slot * SPAN + i)
                    )
                if WHOLE:
                    for i in gl.static_range(SPAN):
                        load_tile(
                            s_desc,
                            [of_scales + (step * SPAN + i) * s_stride],
                            bar,
                            s_ring.index(slot * SPAN + i),
                        )
                slot += 1
                if slot == DEPTH:
                    slot = 0
                    phase ^= 1
            tile += gl.num_programs(0)
        else:
            first += width
            group += 1
            width = (
                gl.cdiv(group_rows(counts, group, num_groups, max_m, COUNTED), BLOCK_M) * tiles_n
            )
