"""Products of many e4m3 tokens by groups with prepared MXFP4 weights on Hopper: tiles as wide as a group has tokens.

Weights are the tall operand: each of two warpgroups decodes 64 rows of them in registers, those of the next step while the
tensor cores are at the present one, and multiplies them with 64, 80, 96, 128, 144 or 160 tokens. So a group of 130 tokens
costs 144 columns, where tiles of 128 tokens cost 256. The order of every sum, and so every bit, is that of `grouped_folded`.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import async_copy, mbarrier

from deepinfer.kernels.triton.folded_ragged_tiles import ragged_tile
from deepinfer.kernels.triton.gluon_names import copy_elements, load_tile
from deepinfer.kernels.triton.rings import advance

__all__ = ["folded_ragged_kernel"]


@gluon.jit
def _products(given, DEPTH: gl.constexpr, PART: gl.constexpr):
    """Multiplies, scales and writes 64 rows of weights of every tile."""
    _out, factors, layout, tiles, _rings, _bars, sizes, strides = given
    _M, N, _steps = sizes
    _stride_om, stride_fg = strides
    tiles_n = gl.cdiv(N, 128)
    count = gl.load(tiles) * tiles_n
    slot = 0
    phase = 0
    after = gl.load(tiles + 1 + gl.minimum(gl.program_id(0), count - 1) // tiles_n)
    for tile in range(gl.program_id(0), count, gl.num_programs(0)):
        # What the next tile asks for comes while this one is multiplied.
        found = after
        after = gl.load(tiles + 1 + gl.minimum(tile + gl.num_programs(0), count - 1) // tiles_n)
        m = found // 256 * 128
        rows = found % 256
        n = (tile % tiles_n) * 128 + 64 * PART
        of = factors + gl.load(layout + m).to(gl.int64) * stride_fg
        place = (m, n, rows, of)
        if rows <= 64:
            slot, phase = ragged_tile(given, place, slot, phase, 64, 0, PART, DEPTH)
        elif rows <= 80:
            slot, phase = ragged_tile(given, place, slot, phase, 64, 16, PART, DEPTH)
        elif rows <= 96:
            slot, phase = ragged_tile(given, place, slot, phase, 64, 32, PART, DEPTH)
        elif rows <= 128:
            slot, phase = ragged_tile(given, place, slot, phase, 128, 0, PART, DEPTH)
        elif rows <= 144:
            slot, phase = ragged_tile(given, place, slot, phase, 128, 16, PART, DEPTH)
        else:
            slot, phase = ragged_tile(given, place, slot, phase, 128, 32, PART, DEPTH)


@gluon.jit
def _copies(given, DEPTH: gl.constexpr):
    """Fills the ring, tile after tile."""
    descriptors, x_scale, layout, tiles, rings, bars, sizes, strides = given
    w_desc, x_desc, half_desc, more_desc, t_desc = descriptors
    w_ring, x_ring, more_ring, t_ring, s_ring, after_ring = rings
    full, empty = bars
    M, N, steps = sizes
    stride_tg, stride_tk, stride_xm, stride_xk = strides
    size: gl.constexpr = 128 * (64 + 4 + 128)
    token = gl.arange(0, 128, layout=gl.BlockedLayout([1], [32], [1], [0]))
    after = gl.arange(128, 160, layout=gl.BlockedLayout([1], [32], [1], [0]))
    tiles_n = gl.cdiv(N, 128)
    count = gl.load(tiles) * tiles_n
    slot = 0
    phase = 1
    for tile in range(gl.program_id(0), count, gl.num_programs(0)):
        found = gl.load(tiles + 1 + tile // tiles_n)
        m = found // 256 * 128
        n0 = (tile % tiles_n) * 128
        g = gl.load(layout + m)
        rows = found % 256
        xs = x_scale + gl.minimum(m + token, M - 1).to(gl.int64) * stride_xm
        xs_after = x_scale + gl.minimum(m + after, M - 1).to(gl.int64) * stride_xm
        for step in range(steps):
            mbarrier.wait(empty.index(slot), phase)
            bar = full.index(slot)
            if rows <= 64:
                mbarrier.expect(bar, size - 64 * 128)
                load_tile(half_desc, [m, step * 128], bar, x_ring.index(slot).slice(0, 64))
            elif rows <= 128:
                mbarrier.expect(bar, size)
                load_tile(x_desc, [m, step * 128], bar, x_ring.index(slot))
            else:
                mbarrier.expect(bar, size + 32 * 128)
                load_tile(x_desc, [m, step * 128], bar, x_ring.index(slot))
                load_tile(more_desc, [m + 128, step * 128], bar, more_ring.index(slot))
                copy_elements(after_ring.index(slot), xs_after + step * stride_xk)
            for part in gl.static_range(2):
                n = gl.minimum(n0 + 64 * part, (N - 1) // 64 * 64)
                load_tile(w_desc, [g * N + n, step * 16], bar, w_ring.index(slot * 2 + part))
                load_tile(
                    t_desc,
                    [g * stride_tg + step * stride_tk + n],
                    bar,
                    t_ring.index(slot * 2 + part),
                )
            copy_elements(s_ring.index(slot), xs + step * stride_xk)
            async_copy.mbarrier_arrive(bar, increment_count=False)
            slot, phase = advance(slot, phase, DEPTH)


@gluon.jit(do_not_specialize=["M"])
def folded_ragged_kernel(
    w_desc,
    x_desc,
    half_desc,
    more_desc,
    t_desc,
    out,
    factors,
    x_scale,
    layout,
    tiles,
    M,
    N,
    steps,
    stride_om,
    stride_fg,
    stride_tg,
    stride_tk,
    stride_xm,
    stride_xk,
    DEPTH: gl.constexpr,
):
    """`out[m, n] = sum over k of x[m, k] * weight[group of m, n, k]`; `tiles` as `ragged_tiles_kernel` writes them."""
    flat: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    bar_layout: gl.constexpr = mbarrier.MBarrierLayout()
    w_ring = gl.allocate_shared_memory(w_desc.dtype, [DEPTH * 2, 64, 16], w_desc.layout)
    x_ring = gl.allocate_shared_memory(gl.float8e4nv, [DEPTH, 128, 128], x_desc.layout)
    more_ring = gl.allocate_shared_memory(gl.float8e4nv, [DEPTH, 32, 128], x_desc.layout)
    t_ring = gl.allocate_shared_memory(gl.int32, [DEPTH * 2, 64], t_desc.layout)
    s_ring = gl.allocate_shared_memory(gl.float32, [DEPTH, 128], flat)
    after_ring = gl.allocate_shared_memory(gl.float32, [DEPTH, 32], flat)
    full = gl.allocate_shared_memory(gl.int64, [DEPTH, 1], bar_layout)
    empty = gl.allocate_shared_memory(gl.int64, [DEPTH, 1], bar_layout)
    for i in gl.static_range(DEPTH):
        # Bulk copies count as one; each lane of the copying warp adds one when its scales are there.
        mbarrier.init(full.index(i), count=33)
        mbarrier.init(empty.index(i), count=2)
    rings = (w_ring, x_ring, more_ring, t_ring, s_ring, after_ring)
    bars = (full, empty)
    sizes = (M, N, steps)
    multiply = (out, factors, layout, tiles, rings, bars, sizes, (stride_om, stride_fg))
    of = (stride_tg, stride_tk, stride_xm, stride_xk)
    descriptors = (w_desc, x_desc, half_desc, more_desc, t_desc)
    copy = (descriptors, x_scale, layout, tiles, rings, bars, sizes, of)
    gl.warp_specialize(
        [
            (_products, (multiply, DEPTH, 0)),
            (_products, (multiply, DEPTH, 1)),
            (_copies, (copy, DEPTH)),
        ],
        [4, 1],
        [240, 24],
    )
