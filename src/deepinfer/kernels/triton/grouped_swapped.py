"""Grouped products of few tokens with many weights on Hopper: weights are the tall operand, bulk copies run ahead.

One warp copies tiles of weights and tokens into a ring in shared memory; one to three warpgroups multiply, each 64
rows of weights with all tokens of the tile. The grid is as large as the chip, and every program walks the same list
of tiles; a group without tokens adds nothing to it. The order of every sum hangs on K alone.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    mbarrier,
)

from deepinfer.kernels.triton.grouped_copies import copy_tiles, group_rows
from deepinfer.kernels.triton.grouped_tiles import fp8_tile, mxfp4_tile

__all__ = ["grouped_swapped_kernel"]


@gluon.jit
def _products(
    out,
    w_scale,
    x_scale,
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
    stride_og,
    stride_om,
    stride_wg,
    stride_wn,
    stride_xg,
    stride_xm,
    stride_xk,
    PART: gl.constexpr,
    COUNTED: gl.constexpr,
    WHOLE: gl.constexpr,
    PACKED: gl.constexpr,
    SPAN: gl.constexpr,
    BLOCK_N: gl.constexpr,
    BLOCK_M: gl.constexpr,
    DEPTH: gl.constexpr,
):
    """Multiplies, scales and writes 64 rows of every tile."""
    acc_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_M, 32])
    row_layout: gl.constexpr = gl.SliceLayout(1, acc_layout)
    m_layout: gl.constexpr = gl.SliceLayout(0, acc_layout)
    out_layout: gl.constexpr = gl.BlockedLayout([8, 1], [8, 4], [1, 4], [0, 1])
    tiles_n = gl.cdiv(N, BLOCK_N)
    tile = gl.program_id(0)
    group = 0
    first = 0
    slot = 0
    phase = 0
    rows = group_rows(counts, 0, num_groups, max_m, COUNTED)
    width = gl.cdiv(rows, BLOCK_M) * tiles_n
    while group < num_groups:
        if tile < first + width:
            tiles_m = width // tiles_n
            at = tile - first
            m0 = (at % tiles_m) * BLOCK_M
            n0 = (at // tiles_m) * BLOCK_N + 64 * PART
            m = m0 + gl.arange(0, BLOCK_M, layout=m_layout)
            live = m < rows
            g = group.to(gl.int64)  # type: ignore[attr-defined]
            xs = x_scale + g * stride_xg + m0.to(gl.int64) * stride_xm
            of = gl.arange(0, BLOCK_M, layout=m_layout) * stride_xm
            if PACKED:
                ns = gl.minimum(n0, N - 1)
                n = gl.minimum(gl.arange(0, 64, layout=row_layout), N - 1 - ns)
                ws = w_scale + g * stride_wg + ns.to(gl.int64) * stride_wn
                wo = n * stride_wn
                acc, slot, phase = mxfp4_tile(
                    w_ring,
                    x_ring,
                    s_ring,
                    full,
                    empty,
                    ws,
                    wo,
                    xs,
                    of,
                    live,
                    steps,
                    stride_xk,
                    slot,
                    phase,
                    WHOLE,
                    PART,
                    SPAN,
                    BLOCK_M,
                    DEPTH,
                    acc_layout,
                )
            else:
                ws = w_scale + g * stride_wg + (gl.minimum(n0, N - 1) // 128) * stride_wn
                acc, slot, phase = fp8_tile(
                    w_ring,
                    x_ring,
                    s_ring,
                    full,
                    empty,
                    ws,
                    xs,
                    of,
                    live,
                    steps,
                    stride_xk,
                    slot,
                    phase,
                    WHOLE,
                    PART,
                    BLOCK_M,
                    DEPTH,
                    acc_layout,
                )
            y = gl.convert_layout(acc.to(out.dtype.element_ty), out_layout)
            mo = m0 + gl.arange(0, BLOCK_M, layout=gl.SliceLayout(0, out_layout))
            no = n0 + gl.arange(0, 64, layout=gl.SliceLayout(1, out_layout))
            to = out + g * stride_og + mo.to(gl.int64)[None, :] * stride_om + no[:, None]
            gl.store(to, y, mask=(mo < rows)[None, :] & (no < N)[:, None])
            tile += gl.num_programs(0)
        else:
            first += width
            group += 1
            rows = group_rows(counts, group, num_groups, max_m, COUNTED)
            width = gl.cdiv(rows, BLOCK_M) * tiles_n


@gluon.jit(do_not_specialize=["num_groups", "max_m"])
def grouped_swapped_kernel(
    w_desc,
    x_desc,
    s_desc,
    out,
    w_scale,
    x_scale,
    counts,
    num_groups,
    N,
    max_m,
    steps,
    s_stride,
    stride_og,
    stride_om,
    stride_wg,
    stride_wn,
    stride_xg,
    stride_xm,
    stride_xk,
    COUNTED: gl.constexpr,
    WHOLE: gl.constexpr,
    PACKED: gl.constexpr,
    SPAN: gl.constexpr,
    PARTS: gl.constexpr,
    BLOCK_M: gl.constexpr,
    DEPTH: gl.constexpr,
    REGISTERS: gl.constexpr,
):
    """`out[g, m, n] = sum over k of x[g, m, k] * weight[g, n, k]` for m below `counts[g]`."""
    BLOCK_N: gl.constexpr = 64 * PARTS
    w_ring = gl.allocate_shared_memory(
        w_desc.dtype, [DEPTH, BLOCK_N, w_desc.block_type.shape[1]], w_desc.layout
    )
    x_ring = gl.allocate_shared_memory(gl.float8e4nv, [DEPTH * SPAN, BLOCK_M, 128], x_desc.layout)
    s_ring = x_ring
    if WHOLE:
        s_ring = gl.allocate_shared_memory(
            gl.float32, [DEPTH * SPAN, s_desc.block_type.shape[0]], s_desc.layout
        )
    full = gl.allocate_shared_memory(gl.int64, [DEPTH, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [DEPTH, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(DEPTH):
        mbarrier.init(full.index(i), count=1)
        mbarrier.init(empty.index(i), count=PARTS)
    if PARTS == 1:
        gl.warp_specialize(
            [
                (
                    _products,
                    (
                        out,
                        w_scale,
                        x_scale,
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
                        stride_og,
                        stride_om,
                        stride_wg,
                        stride_wn,
                        stride_xg,
                        stride_xm,
                        stride_xk,
                        0,
                        COUNTED,
                        WHOLE,
                        PACKED,
                        SPAN,
                        BLOCK_N,
                        BLOCK_M,
                        DEPTH,
                    ),
                ),
                (
                    copy_tiles,
                    (
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
                        COUNTED,
                        WHOLE,
                        PACKED,
                        SPAN,
                        BLOCK_N,
                        BLOCK_M,
                        DEPTH,
                    ),
                ),
            ],
            [1],
            [24],
        )
    else:
        gl.warp_specialize(
            [
                (
                    _products,
                    (
                        out,
                        w_scale,
                        x_scale,
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
                        stride_og,
                        stride_om,
                        stride_wg,
                        stride_wn,
                        stride_xg,
                        stride_xm,
                        stride_xk,
                        0,
                        COUNTED,
                        WHOLE,
                        PACKED,
                        SPAN,
                        BLOCK_N,
                        BLOCK_M,
                        DEPTH,
                    ),
                ),
                (
                    _products,
                    (
                        out,
                        w_scale,
                        x_scale,
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
                        stride_og,
                        stride_om,
                        stride_wg,
                        stride_wn,
                        stride_xg,
                        stride_xm,
                        stride_xk,
                        1,
                        COUNTED,
                        WHOLE,
                        PACKED,
                        SPAN,
                        BLOCK_N,
                        BLOCK_M,
                        DEPTH,
                    ),
                ),
                (
                    copy_tiles,
                    (
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
                        COUNTED,
                        WHOLE,
                        PACKED,
                        SPAN,
                        BLOCK_N,
                        BLOCK_M,
                        DEPTH,
                    ),
                ),
            ],
            [4, 1],
            [REGISTERS, 24],
        )
