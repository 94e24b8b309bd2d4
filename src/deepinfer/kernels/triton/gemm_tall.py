"""Products of many tokens on Hopper: tokens are the tall operand, two or three warpgroups
multiply 64 rows each, one warp copies ahead.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_init,
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
        m, n = _place(tile, M, N, BLOCK_M, BLOCK_N, BAND)
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
                    tma.async_copy_global_to_shared(
                        x_desc, [m + 64 * part, k], bar, x_ring.index(slot * PARTS + part)
                    )
                tma.async_copy_global_to_shared(w_desc, [group * N + n, k], bar, w_ring.index(slot))
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
def _start(x_ring, w_ring, slot, zero, PART: gl.constexpr, PARTS: gl.constexpr):
    """Begins the product of 128 channels."""
    x, w = x_ring.index(slot * PARTS + PART), w_ring.index(slot).permute((1, 0))
    return warpgroup_mma(x, w, zero, use_acc=False, is_async=True)


@gluon.jit
def _scaled(
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
    PART: gl.constexpr,
    PARTS: gl.constexpr,
    BLOCK_N: gl.constexpr,
    DEPTH: gl.constexpr,
    acc_layout: gl.constexpr,
):
    """One tile of e4m3, its blocks of 128 channels one after the other."""
    acc = gl.zeros((64, BLOCK_N), gl.float32, acc_layout)
    zero = gl.zeros((64, BLOCK_N), gl.float32, acc_layout)
    xs = gl.load(xp)
    ws = gl.load(wp)
    for step in range(steps):
        mbarrier.wait(full.index(slot), phase)
        part = _start(x_ring, w_ring, slot, zero, PART, PARTS)
        scale = xs * ws
        ahead = gl.minimum(step + 1, steps - 1)
        xs = gl.load(xp + ahead * stride_xk)
        ws = gl.load(wp + ahead)
        part = warpgroup_mma_wait(0, [part])
        mbarrier.arrive(empty.index(slot), count=1)
        acc += part * scale[:, None]
        slot += 1
        if slot == DEPTH:
            slot = 0
            phase ^= 1
    return acc, slot, phase


@gluon.jit
def _scaled_in_pairs(
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
    PART: gl.constexpr,
    PARTS: gl.constexpr,
    BLOCK_N: gl.constexpr,
    DEPTH: gl.constexpr,
    acc_layout: gl.constexpr,
):
    """The same sums, each block scaled while the next one is multiplied; an even number of blocks."""
    acc = gl.zeros((64, BLOCK_N), gl.float32, acc_layout)
    zero = gl.zeros((64, BLOCK_N), gl.float32, acc_layout)
    xs = gl.load(xp)
    ws = gl.load(wp)
    odd = warpgroup_mma_init(zero)
    odd_scale = gl.full((64,), 0.0, gl.float32, xs.type.layout)
    for pair in range(steps // 2):
        mbarrier.wait(full.index(slot), phase)
        even = _start(x_ring, w_ring, slot, zero, PART, PARTS)
        even_scale = xs * ws
        xs = gl.load(xp + (2 * pair + 1) * stride_xk)
        ws = gl.load(wp + 2 * pair + 1)
        done = warpgroup_mma_wait(1, [odd])
        mbarrier.arrive(
            empty.index(gl.where(slot == 0, DEPTH - 1, slot - 1)), count=1, pred=pair > 0
        )
        acc += done * odd_scale[:, None]
        mbarrier.wait(full.index(slot + 1), phase)
        odd = _start(x_ring, w_ring, slot + 1, zero, PART, PARTS)
        odd_scale = xs * ws
        ahead = gl.minimum(2 * pair + 2, steps - 1)
        xs = gl.load(xp + ahead * stride_xk)
        ws = gl.load(wp + ahead)
        part = warpgroup_mma_wait(1, [even])
        mbarrier.arrive(empty.index(slot), count=1)
        acc += part * even_scale[:, None]
        slot += 2
        if slot == DEPTH:
            slot = 0
            phase ^= 1
    done = warpgroup_mma_wait(0, [odd])
    mbarrier.arrive(empty.index(gl.where(slot == 0, DEPTH - 1, slot - 1)), count=1)
    acc += done * odd_scale[:, None]
    return acc, slot, phase


@gluon.jit
def _plain(
    x_ring,
    w_ring,
    full,
    empty,
    steps,
    slot,
    phase,
    PART: gl.constexpr,
    PARTS: gl.constexpr,
    BLOCK_N: gl.constexpr,
    DEPTH: gl.constexpr,
    acc_layout: gl.constexpr,
):
    """One tile of bf16."""
    acc = gl.zeros((64, BLOCK_N), gl.float32, acc_layout)
    for step in range(steps):
        mbarrier.wait(full.index(slot), phase)
        x, w = x_ring.index(slot * PARTS + PART), w_ring.index(slot).permute((1, 0))
        acc = warpgroup_mma(x, w, acc, is_async=True)
        acc = warpgroup_mma_wait(1, [acc])
        # The products of the step before are done, so its slot is free.
        mbarrier.arrive(
            empty.index(gl.where(slot == 0, DEPTH - 1, slot - 1)), count=1, pred=step > 0
        )
        slot += 1
        if slot == DEPTH:
            slot = 0
            phase ^= 1
    acc = warpgroup_mma_wait(0, [acc])
    mbarrier.arrive(empty.index(gl.where(slot == 0, DEPTH - 1, slot - 1)), count=1)
    return acc, slot, phase


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
    PAIRS: gl.constexpr,
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
        m, n = _place(tile, M, N, BLOCK_M, BLOCK_N, BAND)
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
                    wp += group.to(gl.int64) * stride_wg
                if PAIRS:
                    acc, slot, phase = _scaled_in_pairs(
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
                    acc, slot, phase = _scaled(
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
                acc, slot, phase = _plain(
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
            _store(acc, out, layout, m, n, M, N, stride_om, GROUPED, BLOCK_N)


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
    PAIRS: gl.constexpr,
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
                        PAIRS,
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
                        PAIRS,
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
                        PAIRS,
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
                        PAIRS,
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
                        PAIRS,
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
