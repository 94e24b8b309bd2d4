"""Products of many tokens on Hopper: two or three warpgroups multiply 64 tokens each, one warp copies ahead."""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    mbarrier,
)

from deepinfer.kernels.triton.gemm_tiles import place_tile, plain_tile, scaled_tile, store_tile
from deepinfer.kernels.triton.gluon_names import load_tile

__all__ = ["gemm_tall_kernel"]


@gluon.jit
def _copies(
    x_desc,
    w_desc,
    layout,
    x_ring,
    w_ring,
    full,
    empty,
    M,
    N,
    steps,
    GROUPED: gl.constexpr,
    PARTS: gl.constexpr,
    BLOCK_N: gl.constexpr,
    BLOCK_K: gl.constexpr,
    BYTES: gl.constexpr,
    BAND: gl.constexpr,
    DEPTH: gl.constexpr,
):
    BLOCK_M: gl.constexpr = 64 * PARTS
    slot = 0
    phase = 1
    tiles = gl.cdiv(M, BLOCK_M) * gl.cdiv(N, BLOCK_N)
    for tile in range(gl.program_id(0), tiles, gl.num_programs(0)):
        m, n = place_tile(tile, M, N, BLOCK_M, BLOCK_N, BAND)
        group = 0
        if GROUPED:
            group = gl.load(layout + m)
        if group >= 0:
            for step in range(steps):
                mbarrier.wait(empty.index(slot), phase)
                bar = full.index(slot)
                mbarrier.expect(bar, (BLOCK_M + BLOCK_N) * BLOCK_K * BYTES)
                k = step * BLOCK_K
                for part in gl.static_range(PARTS):
                    load_tile(x_desc, [m + 64 * part, k], bar, x_ring.index(slot * PARTS + part))
                load_tile(w_desc, [group * N + n, k], bar, w_ring.index(slot))
                slot += 1
                if slot == DEPTH:
                    slot = 0
                    phase ^= 1


@gluon.jit
def _products(
    out,
    x_scale,
    w_scale,
    layout,
    x_ring,
    w_ring,
    full,
    empty,
    M,
    N,
    steps,
    stride_om,
    stride_xm,
    stride_xk,
    stride_wg,
    stride_wn,
    PART: gl.constexpr,
    SCALED: gl.constexpr,
    GROUPED: gl.constexpr,
    PARTS: gl.constexpr,
    BLOCK_N: gl.constexpr,
    BAND: gl.constexpr,
    DEPTH: gl.constexpr,
):
    BLOCK_M: gl.constexpr = 64 * PARTS
    acc_layout: gl.constexpr = gl.NVMMADistributedLayout(
        [3, 0], [4, 1], [16, BLOCK_N, 32 if SCALED else 16]
    )
    slot = 0
    phase = 0
    tiles = gl.cdiv(M, BLOCK_M) * gl.cdiv(N, BLOCK_N)
    row = gl.arange(0, 64, layout=gl.SliceLayout(1, acc_layout))
    for tile in range(gl.program_id(0), tiles, gl.num_programs(0)):
        m, n = place_tile(tile, M, N, BLOCK_M, BLOCK_N, BAND)
        group = 0
        if GROUPED:
            group = gl.load(layout + m)
        if group >= 0:
            m += 64 * PART
            if SCALED:
                xp = x_scale + gl.minimum(m, M - 1).to(gl.int64) * stride_xm
                xp += gl.minimum(row, gl.maximum(M - 1 - m, 0)) * stride_xm
                wp = w_scale + (n // 128) * stride_wn
                if GROUPED:
                    wp += group.to(gl.int64) * stride_wg  # type: ignore[attr-defined]
                acc, slot, phase = scaled_tile(
                    x_ring,
                    w_ring,
                    full,
                    empty,
                    xp,
                    wp,
                    steps,
                    stride_xk,
                    slot,
                    phase,
                    PART,
                    PARTS,
                    BLOCK_N,
                    DEPTH,
                    acc_layout,
                )
            else:
                acc, slot, phase = plain_tile(
                    x_ring,
                    w_ring,
                    full,
                    empty,
                    steps,
                    slot,
                    phase,
                    PART,
                    PARTS,
                    BLOCK_N,
                    DEPTH,
                    acc_layout,
                )
            store_tile(acc, out, layout, m, n, M, N, stride_om, GROUPED, BLOCK_N)


@gluon.jit(do_not_specialize=["M"])
def gemm_tall_kernel(
    x_desc,
    w_desc,
    out,
    x_scale,
    w_scale,
    layout,
    M,
    N,
    steps,
    stride_om,
    stride_xm,
    stride_xk,
    stride_wg,
    stride_wn,
    SCALED: gl.constexpr,
    GROUPED: gl.constexpr,
    PARTS: gl.constexpr,
    BLOCK_N: gl.constexpr,
    BAND: gl.constexpr,
    DEPTH: gl.constexpr,
):
    """`out[m, n] = sum over k of x[m, k] * weight[group of m, n, k]`."""
    BLOCK_K: gl.constexpr = 128 if SCALED else 64
    BYTES: gl.constexpr = 1 if SCALED else 2
    x_ring = gl.allocate_shared_memory(x_desc.dtype, [DEPTH * PARTS, 64, BLOCK_K], x_desc.layout)
    w_ring = gl.allocate_shared_memory(w_desc.dtype, [DEPTH, BLOCK_N, BLOCK_K], w_desc.layout)
    full = gl.allocate_shared_memory(gl.int64, [DEPTH, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [DEPTH, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(DEPTH):
        mbarrier.init(full.index(i), count=1)
        mbarrier.init(empty.index(i), count=PARTS)
    if PARTS == 2:
        gl.warp_specialize(
            [
                (
                    _products,
                    (
                        out,
                        x_scale,
                        w_scale,
                        layout,
                        x_ring,
                        w_ring,
                        full,
                        empty,
                        M,
                        N,
                        steps,
                        stride_om,
                        stride_xm,
                        stride_xk,
                        stride_wg,
                        stride_wn,
                        0,
                        SCALED,
                        GROUPED,
                        PARTS,
                        BLOCK_N,
                        BAND,
                        DEPTH,
                    ),
                ),
                (
                    _products,
                    (
                        out,
                        x_scale,
                        w_scale,
                        layout,
                        x_ring,
                        w_ring,
                        full,
                        empty,
                        M,
                        N,
                        steps,
                        stride_om,
                        stride_xm,
                        stride_xk,
                        stride_wg,
                        stride_wn,
                        1,
                        SCALED,
                        GROUPED,
                        PARTS,
                        BLOCK_N,
                        BAND,
                        DEPTH,
                    ),
                ),
                (
                    _copies,
                    (
                        x_desc,
                        w_desc,
                        layout,
                        x_ring,
                        w_ring,
                        full,
                        empty,
                        M,
                        N,
                        steps,
                        GROUPED,
                        PARTS,
                        BLOCK_N,
                        BLOCK_K,
                        BYTES,
                        BAND,
                        DEPTH,
                    ),
                ),
            ],
            [4, 1],
            [240, 24],
        )
    else:
        gl.warp_specialize(
            [
                (
                    _products,
                    (
                        out,
                        x_scale,
                        w_scale,
                        layout,
                        x_ring,
                        w_ring,
                        full,
                        empty,
                        M,
                        N,
                        steps,
                        stride_om,
                        stride_xm,
                        stride_xk,
                        stride_wg,
                        stride_wn,
                        0,
                        SCALED,
                        GROUPED,
                        PARTS,
                        BLOCK_N,
                        BAND,
                        DEPTH,
                    ),
                ),
                (
                    _products,
                    (
                        out,
                        x_scale,
                        w_scale,
                        layout,
                        x_ring,
                        w_ring,
                        full,
                        empty,
                        M,
                        N,
                        steps,
                        stride_om,
                        stride_xm,
                        stride_xk,
                        stride_wg,
                        stride_wn,
                        1,
                        SCALED,
                        GROUPED,
                        PARTS,
                        BLOCK_N,
                        BAND,
                        DEPTH,
                    ),
                ),
                (
                    _products,
                    (
                        out,
                        x_scale,
                        w_scale,
                        layout,
                        x_ring,
                        w_ring,
                        full,
                        empty,
                        M,
                        N,
                        steps,
                        stride_om,
                        stride_xm,
                        stride_xk,
                        stride_wg,
                        stride_wn,
                        2,
                        SCALED,
                        GROUPED,
                        PARTS,
                        BLOCK_N,
                        BAND,
                        DEPTH,
                    ),
                ),
                (
                    _copies,
                    (
                        x_desc,
                        w_desc,
                        layout,
                        x_ring,
                        w_ring,
                        full,
                        empty,
                        M,
                        N,
                        steps,
                        GROUPED,
                        PARTS,
                        BLOCK_N,
                        BLOCK_K,
                        BYTES,
                        BAND,
                        DEPTH,
                    ),
                ),
            ],
            [4, 4, 1],
            [160, 160, 24],
        )
