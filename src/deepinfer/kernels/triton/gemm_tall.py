"""Products of many tokens on Hopper: tokens are the tall operand, two warpgroups multiply, one warp copies ahead."""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)

__all__ = ["gemm_tall_kernel"]


@gluon.jit
def _place(tile, M, N, BLOCK_M: gl.constexpr, BLOCK_N: gl.constexpr, BAND: gl.constexpr):
    """First row and column of a tile; a band of row tiles is passed by all columns before the next band."""
    tiles_m = gl.cdiv(M, BLOCK_M)
    tiles_n = gl.cdiv(N, BLOCK_N)
    band = tile // (BAND * tiles_n)
    height = gl.minimum(tiles_m - band * BAND, BAND)
    at = tile - band * BAND * tiles_n
    return (band * BAND + at % height) * BLOCK_M, (at // height) * BLOCK_N


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
    BLOCK_M: gl.constexpr,
    BLOCK_N: gl.constexpr,
    BLOCK_K: gl.constexpr,
    BYTES: gl.constexpr,
    BAND: gl.constexpr,
    DEPTH: gl.constexpr,
):
    slot = 0
    phase = 1
    tiles = gl.cdiv(M, BLOCK_M) * gl.cdiv(N, BLOCK_N)
    for tile in range(gl.program_id(0), tiles, gl.num_programs(0)):
        m, n = _place(tile, M, N, BLOCK_M, BLOCK_N, BAND)
        group = 0
        if GROUPED:
            group = gl.load(layout + m)
        if group >= 0:
            for step in range(steps):
                mbarrier.wait(empty.index(slot), phase)
                bar = full.index(slot)
                mbarrier.expect(bar, (BLOCK_M + BLOCK_N) * BLOCK_K * BYTES)
                tma.async_copy_global_to_shared(
                    x_desc, [m, step * BLOCK_K], bar, x_ring.index(slot)
                )
                tma.async_copy_global_to_shared(
                    w_desc, [group * N + n, step * BLOCK_K], bar, w_ring.index(slot)
                )
                slot += 1
                if slot == DEPTH:
                    slot = 0
                    phase ^= 1


@gluon.jit
def _store(acc, out, layout, m, n, M, N, stride_om, GROUPED: gl.constexpr, BLOCK_N: gl.constexpr):
    THREADS: gl.constexpr = BLOCK_N // 8 if BLOCK_N < 256 else 32
    to_layout: gl.constexpr = gl.BlockedLayout([1, 8], [32 // THREADS, THREADS], [4, 1], [1, 0])
    y = gl.convert_layout(acc.to(out.dtype.element_ty), to_layout)
    rows = m + gl.arange(0, 64, layout=gl.SliceLayout(1, to_layout))
    columns = n + gl.arange(0, BLOCK_N, layout=gl.SliceLayout(0, to_layout))
    used = rows < M
    if GROUPED:
        used = used & (gl.load(layout + gl.minimum(rows, M - 1)) >= 0)
    to = out + rows.to(gl.int64)[:, None] * stride_om + columns[None, :]
    gl.store(to, y, mask=used[:, None] & (columns < N)[None, :])


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
    HALVES: gl.constexpr,
    BLOCK_N: gl.constexpr,
    BAND: gl.constexpr,
    DEPTH: gl.constexpr,
):
    BLOCK_M: gl.constexpr = 128 * HALVES
    K: gl.constexpr = 32 if SCALED else 16
    acc_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_N, K])
    slot = 0
    phase = 0
    tiles = gl.cdiv(M, BLOCK_M) * gl.cdiv(N, BLOCK_N)
    row = gl.arange(0, 64, layout=gl.SliceLayout(1, acc_layout))
    zero = gl.zeros((64, BLOCK_N), gl.float32, acc_layout)
    for tile in range(gl.program_id(0), tiles, gl.num_programs(0)):
        m, n = _place(tile, M, N, BLOCK_M, BLOCK_N, BAND)
        group = 0
        if GROUPED:
            group = gl.load(layout + m)
        if group >= 0:
            m += 64 * HALVES * PART
            acc0 = gl.zeros((64, BLOCK_N), gl.float32, acc_layout)
            acc1 = acc0
            if SCALED:
                xp = x_scale + gl.minimum(m, M - 1).to(gl.int64) * stride_xm
                most = gl.maximum(M - 1 - m, 0)
                row0 = gl.minimum(row, most) * stride_xm
                row1 = gl.minimum(row + 64, most) * stride_xm
                wp = (
                    w_scale + group.to(gl.int64) * stride_wg + (n // 128) * stride_wn
                    if GROUPED
                    else w_scale + (n // 128) * stride_wn
                )
                xs0 = gl.load(xp + row0)
                xs1 = xs0
                if HALVES == 2:
                    xs1 = gl.load(xp + row1)
                ws = gl.load(wp)
                for step in range(steps):
                    ahead = gl.minimum(step + 1, steps - 1)
                    mbarrier.wait(full.index(slot), phase)
                    w = w_ring.index(slot).permute((1, 0))
                    part = warpgroup_mma(
                        x_ring.index(slot).slice(64 * HALVES * PART, 64),
                        w,
                        zero,
                        use_acc=False,
                        is_async=True,
                    )
                    scale0 = xs0 * ws
                    scale1 = xs1 * ws
                    xs0 = gl.load(xp + ahead * stride_xk + row0)
                    if HALVES == 2:
                        xs1 = gl.load(xp + ahead * stride_xk + row1)
                    ws = gl.load(wp + ahead)
                    part = warpgroup_mma_wait(0, [part])
                    if HALVES == 2:
                        acc0 += part * scale0[:, None]
                        part = warpgroup_mma(
                            x_ring.index(slot).slice(128 * PART + 64, 64),
                            w,
                            zero,
                            use_acc=False,
                            is_async=True,
                        )
                        part = warpgroup_mma_wait(0, [part])
                        mbarrier.arrive(empty.index(slot), count=1)
                        acc1 += part * scale1[:, None]
                    else:
                        mbarrier.arrive(empty.index(slot), count=1)
                        acc0 += part * scale0[:, None]
                    slot += 1
                    if slot == DEPTH:
                        slot = 0
                        phase ^= 1
            else:
                last = slot
                for step in range(steps):
                    mbarrier.wait(full.index(slot), phase)
                    x = x_ring.index(slot).slice(64 * PART, 64)
                    acc0 = warpgroup_mma(
                        x, w_ring.index(slot).permute((1, 0)), acc0, use_acc=step > 0, is_async=True
                    )
                    acc0 = warpgroup_mma_wait(1, [acc0])
                    # The products of the step before are done, so its slot is free.
                    mbarrier.arrive(empty.index(last), count=1, pred=step > 0)
                    last = slot
                    slot += 1
                    if slot == DEPTH:
                        slot = 0
                        phase ^= 1
                acc0 = warpgroup_mma_wait(0, [acc0])
                mbarrier.arrive(empty.index(last), count=1)
            _store(acc0, out, layout, m, n, M, N, stride_om, GROUPED, BLOCK_N)
            if HALVES == 2:
                _store(acc1, out, layout, m + 64, n, M, N, stride_om, GROUPED, BLOCK_N)


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
    HALVES: gl.constexpr,
    BLOCK_N: gl.constexpr,
    BAND: gl.constexpr,
    DEPTH: gl.constexpr,
):
    """`out[m, n] = sum over k of x[m, k] * weight[group of m, n, k]`."""
    BLOCK_M: gl.constexpr = 128 * HALVES
    BLOCK_K: gl.constexpr = 128 if SCALED else 64
    BYTES: gl.constexpr = 1 if SCALED else 2
    x_ring = gl.allocate_shared_memory(x_desc.dtype, [DEPTH, BLOCK_M, BLOCK_K], x_desc.layout)
    w_ring = gl.allocate_shared_memory(w_desc.dtype, [DEPTH, BLOCK_N, BLOCK_K], w_desc.layout)
    full = gl.allocate_shared_memory(gl.int64, [DEPTH, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [DEPTH, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(DEPTH):
        mbarrier.init(full.index(i), count=1)
        mbarrier.init(empty.index(i), count=2)
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
                    HALVES,
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
                    HALVES,
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
                    BLOCK_M,
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
