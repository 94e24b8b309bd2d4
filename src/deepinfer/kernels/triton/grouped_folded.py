"""Products of e4m3 tokens with MXFP4 weights whose scales were folded into steps of a row, on Hopper.

A group of 32 weights of a row is its codes, times a power of two (the step), times the factor of the row. The step and
the code together are one e4m3 byte, found in a table of eight bytes that two multiplications make: so 128 channels are
summed by the tensor cores alone, as for FP8 weights. Weights are the tall operand, decoded in registers.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    async_copy,
    mbarrier,
)

from deepinfer.kernels.triton.folded_tiles import folded_tile
from deepinfer.kernels.triton.gluon_names import copy_elements, load_tile
from deepinfer.kernels.triton.rings import advance

__all__ = ["grouped_folded_kernel", "rows_of_group"]


@gluon.jit
def _num_tiles(rows_of, tiles, group, num_groups, max_m, MODE: gl.constexpr, BLOCK_M: gl.constexpr):
    """Tiles of tokens of a group; with a group for each row, all that were listed."""
    if MODE == 1:
        return gl.load(tiles)
    return gl.cdiv(rows_of_group(rows_of, group, num_groups, max_m, MODE), BLOCK_M)


@gluon.jit
def rows_of_group(counts, group, num_groups, max_m, MODE: gl.constexpr):
    """Tokens of a group; a count outside of 0 to `max_m` stands for the next that is not."""
    if MODE == 2:
        count = gl.load(counts + gl.minimum(group, num_groups - 1))
        return gl.minimum(gl.maximum(count, 0), max_m)
    return max_m


@gluon.jit
def _store(acc, factor, to, m0, n0, group, g, rows, N, MODE: gl.constexpr, BLOCK_M: gl.constexpr):
    """Writes the sums of 64 rows of weights and some tokens."""
    out, rows_of, stride_og, stride_om = to
    out_layout: gl.constexpr = gl.BlockedLayout([8, 1], [2, 16], [4, 1], [0, 1])
    acc *= factor[:, None]
    y = gl.convert_layout(acc.to(out.dtype.element_ty), out_layout)
    mo = m0 + gl.arange(0, BLOCK_M, layout=gl.SliceLayout(0, out_layout))
    no = n0 + gl.arange(0, 64, layout=gl.SliceLayout(1, out_layout))
    used = mo < rows
    if MODE == 1:
        used = used & (gl.load(rows_of + gl.minimum(mo, rows - 1)) == g)
    at = out + mo.to(gl.int64)[None, :] * stride_om + no[:, None]
    if MODE == 2:
        at += group.to(gl.int64) * stride_og  # type: ignore[attr-defined]
    gl.store(at, y, mask=used[None, :] & (no < N)[:, None])


@gluon.jit
def _products(given, MODE: gl.constexpr, X_GROUP: gl.constexpr, SPAN: gl.constexpr,
              PARTS: gl.constexpr, BLOCK_M: gl.constexpr, DEPTH: gl.constexpr, PART: gl.constexpr):  # fmt: skip
    """Multiplies, scales and writes 64 rows of weights of every tile."""
    out, factors, rows_of, tiles, rings, bars, sizes, strides = given
    num_groups, N, max_m, steps = sizes
    stride_og, stride_om, stride_fg = strides
    BLOCK_N: gl.constexpr = 64 * PARTS
    to = (out, rows_of, stride_og, stride_om)
    acc_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_M, 32])
    row = gl.arange(0, 64, layout=gl.SliceLayout(1, acc_layout))
    tiles_n = gl.cdiv(N, BLOCK_N)
    tile = gl.program_id(0)
    group = gl.to_tensor(0)
    first = 0
    slot = 0
    phase = 0
    rows = rows_of_group(rows_of, 0, num_groups, max_m, MODE)
    width = _num_tiles(rows_of, tiles, 0, num_groups, max_m, MODE, BLOCK_M) * tiles_n
    while group < num_groups:
        if tile < first + width:
            tiles_m = width // tiles_n
            at = tile - first
            m0 = (at % tiles_m) * BLOCK_M
            n0 = (at // tiles_m) * BLOCK_N + 64 * PART
            g = group
            if MODE == 1:
                # All weights of a group one after the other: its tokens then stay in the L2 cache.
                m0 = gl.load(tiles + 1 + at // tiles_n)
                n0 = (at % tiles_n) * BLOCK_N + 64 * PART
                g = gl.load(rows_of + m0)
            if g >= 0:
                at_n = gl.minimum(n0 + row, N - 1)
                factor = gl.load(factors + g.to(gl.int64) * stride_fg + at_n)  # type: ignore[attr-defined]
                acc, slot, phase = folded_tile(
                    rings, bars, steps, slot, phase, N < 0, X_GROUP, SPAN, PART, PARTS, BLOCK_M, DEPTH, acc_layout
                )  # fmt: skip
                _store(acc, factor, to, m0, n0, group, g, rows, N, MODE, BLOCK_M)
            tile += gl.num_programs(0)
        else:
            first += width
            group += 1
            rows = rows_of_group(rows_of, group, num_groups, max_m, MODE)
            width = _num_tiles(rows_of, tiles, group, num_groups, max_m, MODE, BLOCK_M) * tiles_n


@gluon.jit
def _copies(given, MODE: gl.constexpr, SPAN: gl.constexpr, PARTS: gl.constexpr, BLOCK_M: gl.constexpr,
            DEPTH: gl.constexpr):  # fmt: skip
    """Fills the ring, tile after tile."""
    w_desc, x_desc, t_desc, x_scale, rows_of, tiles, rings, bars, sizes, strides = given
    w_ring, x_ring, t_ring, s_ring = rings
    full, empty = bars
    num_groups, N, max_m, steps = sizes
    stride_tg, stride_tk, stride_xg, stride_xm, stride_xk = strides
    BLOCK_N: gl.constexpr = 64 * PARTS
    size: gl.constexpr = SPAN * (BLOCK_N * (64 + 4) + BLOCK_M * 128)
    token = gl.arange(0, BLOCK_M, layout=gl.BlockedLayout([1], [32], [1], [0]))
    tiles_n = gl.cdiv(N, BLOCK_N)
    tile = gl.program_id(0)
    group = gl.to_tensor(0)
    first = 0
    slot = 0
    phase = 1
    width = _num_tiles(rows_of, tiles, 0, num_groups, max_m, MODE, BLOCK_M) * tiles_n
    while group < num_groups:
        if tile < first + width:
            tiles_m = width // tiles_n
            at = tile - first
            m0 = (at % tiles_m) * BLOCK_M
            n0 = (at // tiles_m) * BLOCK_N
            g = group
            if MODE == 1:
                m0 = gl.load(tiles + 1 + at // tiles_n)
                n0 = (at % tiles_n) * BLOCK_N
                g = gl.load(rows_of + m0)
            if g >= 0:
                xs = x_scale + gl.minimum(m0 + token, max_m - 1).to(gl.int64) * stride_xm
                m = m0
                if MODE == 2:
                    xs += group.to(gl.int64) * stride_xg  # type: ignore[attr-defined]
                    m = group * max_m + m0
                for step in range(steps):
                    mbarrier.wait(empty.index(slot), phase)
                    bar = full.index(slot)
                    mbarrier.expect(bar, size)
                    for part in gl.static_range(PARTS):
                        n = gl.minimum(n0 + 64 * part, (N - 1) // 64 * 64)
                        load_tile(
                            w_desc, [g * N + n, step * 16 * SPAN], bar, w_ring.index(slot * PARTS + part)
                        )  # fmt: skip
                        for i in gl.static_range(SPAN):
                            load_tile(
                                t_desc, [g * stride_tg + (step * SPAN + i) * stride_tk + n], bar,
                                t_ring.index((slot * PARTS + part) * SPAN + i),
                            )  # fmt: skip
                    for i in gl.static_range(SPAN):
                        load_tile(
                            x_desc, [m, (step * SPAN + i) * 128], bar, x_ring.index(slot * SPAN + i)
                        )
                        copy_elements(
                            s_ring.index(slot * SPAN + i), xs + (step * SPAN + i) * stride_xk
                        )
                    async_copy.mbarrier_arrive(bar, increment_count=False)
                    slot, phase = advance(slot, phase, DEPTH)
            tile += gl.num_programs(0)
        else:
            first += width
            group += 1
            width = _num_tiles(rows_of, tiles, group, num_groups, max_m, MODE, BLOCK_M) * tiles_n


@gluon.jit(do_not_specialize=["num_groups", "max_m"])
def grouped_folded_kernel(
    w_desc,
    x_desc,
    t_desc,
    out,
    factors,
    x_scale,
    rows_of,
    tiles,
    num_groups,
    N,
    max_m,
    steps,
    stride_og,
    stride_om,
    stride_fg,
    stride_tg,
    stride_tk,
    stride_xg,
    stride_xm,
    stride_xk,
    MODE: gl.constexpr,
    X_GROUP: gl.constexpr,
    SPAN: gl.constexpr,
    PARTS: gl.constexpr,
    BLOCK_M: gl.constexpr,
    DEPTH: gl.constexpr,
    REGISTERS: gl.constexpr,
):
    """`out[g, m, n] = sum over k of x[g, m, k] * weight[g, n, k]`; MODE 0 dense, 1 a group for each row, 2 counts.

    With MODE 1, `tiles` holds the number of tiles of rows and the first row of each.
    """
    w_ring = gl.allocate_shared_memory(w_desc.dtype, [DEPTH * PARTS, 64, 16 * SPAN], w_desc.layout)
    x_ring = gl.allocate_shared_memory(gl.float8e4nv, [DEPTH * SPAN, BLOCK_M, 128], x_desc.layout)
    t_ring = gl.allocate_shared_memory(gl.int32, [DEPTH * PARTS * SPAN, 64], t_desc.layout)
    # The scales of the tokens for 128 channels: one fp32, or four bytes of e8m0 in a word.
    s_ring = gl.allocate_shared_memory(
        gl.float32 if X_GROUP == 128 else gl.int32,
        [DEPTH * SPAN, BLOCK_M],
        gl.SwizzledSharedLayout(1, 1, 1, [0]),
    )
    full = gl.allocate_shared_memory(gl.int64, [DEPTH, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [DEPTH, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(DEPTH):
        # Bulk copies count as one; each lane of the copying warp adds one when its scales are there.
        mbarrier.init(full.index(i), count=33)
        mbarrier.init(empty.index(i), count=PARTS)
    rings = (w_ring, x_ring, t_ring, s_ring)
    bars = (full, empty)
    sizes = (num_groups, N, max_m, steps)
    to = (stride_og, stride_om, stride_fg)
    multiply = (out, factors, rows_of, tiles, rings, bars, sizes, to)
    of = (stride_tg, stride_tk, stride_xg, stride_xm, stride_xk)
    copy = (w_desc, x_desc, t_desc, x_scale, rows_of, tiles, rings, bars, sizes, of)
    if PARTS == 1:
        gl.warp_specialize(
            [
                (_products, (multiply, MODE, X_GROUP, SPAN, PARTS, BLOCK_M, DEPTH, 0)),
                (_copies, (copy, MODE, SPAN, PARTS, BLOCK_M, DEPTH)),
            ],
            [1],
            [24],
        )
    else:
        gl.warp_specialize(
            [
                (_products, (multiply, MODE, X_GROUP, SPAN, PARTS, BLOCK_M, DEPTH, 0)),
                (_products, (multiply, MODE, X_GROUP, SPAN, PARTS, BLOCK_M, DEPTH, 1)),
                (_copies, (copy, MODE, SPAN, PARTS, BLOCK_M, DEPTH)),
            ],
            [4, 1],
            [REGISTERS, 24],
        )
