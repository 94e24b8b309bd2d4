"""Products of 64 or more e4m3 tokens with prepared MXFP4 weights on Hopper: decoded once into shared memory.

Tiles are 64 tokens by 256 rows of weights, or 128 by 128. Two warpgroups multiply 64 tokens with 128 rows each; two decode,
128 rows each, or the same 128 rows in turn. Tokens are the
tall operand. The order of every sum, and so every bit, is that of `grouped_folded`.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    async_copy,
    fence_async_shared,
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from deepinfer.kernels.triton.folded_words import WIDE, decode_half
from deepinfer.kernels.triton.gemm_tiles import known_group, place_tile
from deepinfer.kernels.triton.gluon_names import copy_elements, load_tile
from deepinfer.kernels.triton.grouped_folded import rows_of_group
from deepinfer.kernels.triton.grouped_tiles import power_of_byte
from deepinfer.kernels.triton.rings import advance

__all__ = ["folded_decoded_kernel"]


@gluon.jit
def _find(rows_of, tile, group, first, num_groups, max_m, tiles_n, MODE: gl.constexpr, BLOCK_M: gl.constexpr):  # fmt: skip
    """The group of a tile, its first tile and its tokens; `num_groups` behind the last tile."""
    rows = rows_of_group(rows_of, group, num_groups, max_m, MODE)
    width = gl.cdiv(rows, BLOCK_M) * tiles_n
    if MODE == 2:
        while (group < num_groups) & (tile >= first + width):
            first += width
            group += 1
            rows = rows_of_group(rows_of, group, num_groups, max_m, MODE)
            width = gl.cdiv(rows, BLOCK_M) * tiles_n
    else:
        group = gl.where(tile < width, 0, num_groups)
    return group, first, rows


@gluon.jit
def _place(rows_of, tile, group, first, rows, N, num_groups, tiles_n, MODE: gl.constexpr, BLOCK_M: gl.constexpr,
           BLOCK_N: gl.constexpr):  # fmt: skip
    """First token and first row of weights of a tile, and the group of the weights, -1 for none."""
    at = tile - first
    g = group
    if MODE == 2:
        tiles_m = gl.cdiv(rows, BLOCK_M)
        m = (at % tiles_m) * BLOCK_M
        n = (at // tiles_m) * BLOCK_N
    else:
        m, n = place_tile(at, rows, N, BLOCK_M, BLOCK_N, 16)
        if MODE == 1:
            g = known_group(gl.load(rows_of + m), num_groups)
    return m, n, g


@gluon.jit
def _copies(given, MODE: gl.constexpr, TM: gl.constexpr, TN: gl.constexpr, DEPTH: gl.constexpr):
    """Fills the ring, tile after tile."""
    w_desc, x_desc, t_desc, x_scale, rows_of, rings, bars, sizes, strides = given
    w_ring, x_ring, t_ring, s_ring, _b = rings
    full, empty, _ready, _freed = bars
    num_groups, N, max_m, steps = sizes
    stride_tg, stride_tk, stride_xg, stride_xm, stride_xk = strides
    BLOCK_M: gl.constexpr = 64 * TM
    BLOCK_N: gl.constexpr = 128 * TN
    size: gl.constexpr = BLOCK_N * (64 + 4) + BLOCK_M * 128
    token = gl.arange(0, BLOCK_M, layout=gl.BlockedLayout([1], [32], [1], [0]))
    tiles_n = gl.cdiv(N, BLOCK_N)
    tile = gl.program_id(0)
    slot = 0
    phase = 1
    group = gl.to_tensor(0)
    first = 0
    group, first, rows = _find(
        rows_of, tile, group, first, num_groups, max_m, tiles_n, MODE, BLOCK_M
    )
    while group < num_groups:
        m0, n0, g = _place(
            rows_of, tile, group, first, rows, N, num_groups, tiles_n, MODE, BLOCK_M, BLOCK_N
        )
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
                for i in gl.static_range(2 * TN):
                    n = gl.minimum(n0 + 64 * i, (N - 1) // 64 * 64)
                    at = slot * 2 * TN + i
                    load_tile(w_desc, [g * N + n, step * 16], bar, w_ring.index(at))
                    load_tile(t_desc, [g * stride_tg + step * stride_tk + n], bar, t_ring.index(at))
                for i in gl.static_range(TM):
                    load_tile(x_desc, [m + 64 * i, step * 128], bar, x_ring.index(slot * TM + i))
                copy_elements(s_ring.index(slot), xs + step * stride_xk)
                async_copy.mbarrier_arrive(bar, increment_count=False)
                slot, phase = advance(slot, phase, DEPTH)
        tile += gl.num_programs(0)
        group, first, rows = _find(
            rows_of, tile, group, first, num_groups, max_m, tiles_n, MODE, BLOCK_M
        )


@gluon.jit
def _decode(given, MODE: gl.constexpr, TM: gl.constexpr, TN: gl.constexpr, DEPTH: gl.constexpr,
            COLUMNS: gl.constexpr, WHICH: gl.constexpr):  # fmt: skip
    """Decodes 128 rows of weights of every step into two tiles in turn; with TM 2, every other step into one of the two."""
    rows_of, rings, bars, sizes = given
    w_ring, _x, t_ring, _s, b_ring = rings
    full, empty, ready, freed = bars
    num_groups, N, max_m, steps = sizes
    BLOCK_M: gl.constexpr = 64 * TM
    BLOCK_N: gl.constexpr = 128 * TN
    t_layout: gl.constexpr = gl.SliceLayout(1, gl.SliceLayout(2, WIDE))
    tiles_n = gl.cdiv(N, BLOCK_N)
    tile = gl.program_id(0)
    slot = 0
    phase = 0
    side = 0
    turn = 1
    group = gl.to_tensor(0)
    first = 0
    group, first, rows = _find(
        rows_of, tile, group, first, num_groups, max_m, tiles_n, MODE, BLOCK_M
    )
    while group < num_groups:
        _m, _n, g = _place(
            rows_of, tile, group, first, rows, N, num_groups, tiles_n, MODE, BLOCK_M, BLOCK_N
        )
        if g >= 0:
            for _step in range(steps):
                b = b_ring.index(2 * COLUMNS + side)
                at = (slot * TN + COLUMNS) * 2
                if TM == 1:
                    mbarrier.wait(full.index(slot), phase)
                    mbarrier.wait(freed.index(2 * COLUMNS + side), turn)
                    for half in gl.static_range(2):
                        t = t_ring.index(at + half).load(t_layout)
                        decoded = decode_half(w_ring.index(at + half), t, 0)
                        if half == 1:
                            mbarrier.arrive(empty.index(slot), count=1)
                        b.slice(64 * half, 64).store(decoded)
                    fence_async_shared()
                    mbarrier.arrive(ready.index(2 * COLUMNS + side), count=1)
                elif side == WHICH:
                    mbarrier.wait(full.index(slot), phase)
                    low = decode_half(w_ring.index(at), t_ring.index(at).load(t_layout), 0)
                    high = decode_half(w_ring.index(at + 1), t_ring.index(at + 1).load(t_layout), 0)
                    mbarrier.arrive(empty.index(slot), count=1)
                    # Two have the time to decode while the room is in use, and wait only then.
                    mbarrier.wait(freed.index(2 * COLUMNS + side), turn)
                    b.slice(0, 64).store(low)
                    b.slice(64, 64).store(high)
                    fence_async_shared()
                    mbarrier.arrive(ready.index(2 * COLUMNS + side), count=1)
                turn ^= side
                side ^= 1
                slot, phase = advance(slot, phase, DEPTH)
        tile += gl.num_programs(0)
        group, first, rows = _find(
            rows_of, tile, group, first, num_groups, max_m, tiles_n, MODE, BLOCK_M
        )


@gluon.jit
def _start(x, w, part, never, FIRST: gl.constexpr, WIDTH: gl.constexpr):
    """Begins the product of some channels; `never` as in `gemm_tiles`."""
    a = x.slice(FIRST, WIDTH, dim=1)
    b = w.slice(FIRST, WIDTH, dim=1).permute((1, 0))
    return warpgroup_mma(a, b, part, use_acc=never, is_async=True)


@gluon.jit
def _products(given, MODE: gl.constexpr, X_GROUP: gl.constexpr, TM: gl.constexpr, TN: gl.constexpr, DEPTH: gl.constexpr,
              ROWS: gl.constexpr, COLUMNS: gl.constexpr):  # fmt: skip
    """Multiplies 64 tokens with 128 rows of weights of every tile."""
    out, factors, rows_of, rings, bars, sizes, strides = given
    _w, x_ring, _t, s_ring, b_ring = rings
    full, empty, ready, freed = bars
    num_groups, N, max_m, steps = sizes
    stride_og, stride_om, stride_fg = strides
    BLOCK_M: gl.constexpr = 64 * TM
    BLOCK_N: gl.constexpr = 128 * TN
    acc_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 128, 32])
    row_layout: gl.constexpr = gl.SliceLayout(1, acc_layout)
    out_layout: gl.constexpr = gl.BlockedLayout([1, 8], [2, 16], [4, 1], [1, 0])
    column = gl.arange(0, 128, layout=gl.BlockedLayout([1], [32], [4], [0]))
    tiles_n = gl.cdiv(N, BLOCK_N)
    tile = gl.program_id(0)
    slot = 0
    phase = 0
    side = 0
    turn = 0
    never = N < 0
    group = gl.to_tensor(0)
    first = 0
    group, first, rows = _find(
        rows_of, tile, group, first, num_groups, max_m, tiles_n, MODE, BLOCK_M
    )
    while group < num_groups:
        m, n, g = _place(
            rows_of, tile, group, first, rows, N, num_groups, tiles_n, MODE, BLOCK_M, BLOCK_N
        )
        if g >= 0:
            m += 64 * ROWS
            n += 128 * COLUMNS
            live = m < rows
            if MODE == 1:
                live = live & (gl.load(rows_of + gl.minimum(m, rows - 1)) == g)
            if ROWS > 0:
                # Half a tile without a row: its rooms are given back unread, and nothing is multiplied.
                for _step in range(gl.where(live, 0, steps)):
                    mbarrier.wait(full.index(slot), phase)
                    mbarrier.wait(ready.index(2 * COLUMNS + side), turn)
                    mbarrier.arrive(freed.index(2 * COLUMNS + side), count=1)
                    mbarrier.arrive(empty.index(slot), count=1)
                    turn ^= side
                    side ^= 1
                    slot, phase = advance(slot, phase, DEPTH)
            at_n = gl.minimum(n + column, N - 1)
            factor = gl.load(factors + g.to(gl.int64) * stride_fg + at_n)  # type: ignore[attr-defined]
            acc = gl.zeros((64, 128), gl.float32, acc_layout)
            part = acc
            for _step in range(gl.where(live, steps, 0) if ROWS > 0 else steps):
                mbarrier.wait(full.index(slot), phase)
                xs = s_ring.index(slot).slice(64 * ROWS, 64).load(row_layout)
                mbarrier.wait(ready.index(2 * COLUMNS + side), turn)
                x = x_ring.index(slot * TM + ROWS)
                b = b_ring.index(2 * COLUMNS + side)
                if X_GROUP == 32:
                    for i in gl.static_range(3):
                        part = _start(x, b, part, never, 32 * i, 32)
                        part = warpgroup_mma_wait(0, [part])
                        acc += part * power_of_byte(xs, i)[:, None]
                        acc = warpgroup_mma_wait(0, [acc])
                    part = _start(x, b, part, never, 96, 32)
                    part = warpgroup_mma_wait(0, [part])
                    done = part
                else:
                    part = _start(x, b, part, never, 0, 128)
                    part = warpgroup_mma_wait(0, [part])
                    done = part
                mbarrier.arrive(freed.index(2 * COLUMNS + side), count=1)
                mbarrier.arrive(empty.index(slot), count=1)
                if X_GROUP == 32:
                    acc += done * power_of_byte(xs, 3)[:, None]
                else:
                    acc += done * xs[:, None]
                turn ^= side
                side ^= 1
                slot, phase = advance(slot, phase, DEPTH)
            acc *= gl.convert_layout(factor, gl.SliceLayout(0, acc_layout))[None, :]
            y = gl.convert_layout(acc.to(out.dtype.element_ty), out_layout)
            mo = m + gl.arange(0, 64, layout=gl.SliceLayout(1, out_layout))
            no = n + gl.arange(0, 128, layout=gl.SliceLayout(0, out_layout))
            used = mo < rows
            if MODE == 1:
                used = used & (gl.load(rows_of + gl.minimum(mo, rows - 1)) == g)
            to = out + mo.to(gl.int64)[:, None] * stride_om + no[None, :]
            if MODE == 2:
                to += group.to(gl.int64) * stride_og  # type: ignore[attr-defined]
            gl.store(to, y, mask=used[:, None] & (no < N)[None, :])
        tile += gl.num_programs(0)
        group, first, rows = _find(
            rows_of, tile, group, first, num_groups, max_m, tiles_n, MODE, BLOCK_M
        )


@gluon.jit(do_not_specialize=["num_groups", "max_m"])
def folded_decoded_kernel(
    w_desc,
    x_desc,
    t_desc,
    out,
    factors,
    x_scale,
    rows_of,
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
    TM: gl.constexpr,
    TN: gl.constexpr,
    DEPTH: gl.constexpr,
):
    """`out[g, m, n] = sum over k of x[g, m, k] * weight[g, n, k]`; MODE and X_GROUP as in `grouped_folded`."""
    flat: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    w_ring = gl.allocate_shared_memory(w_desc.dtype, [DEPTH * TN * 2, 64, 16], w_desc.layout)
    x_ring = gl.allocate_shared_memory(gl.float8e4nv, [DEPTH * TM, 64, 128], x_desc.layout)
    t_ring = gl.allocate_shared_memory(gl.int32, [DEPTH * TN * 2, 64], t_desc.layout)
    kind: gl.constexpr = gl.int32 if X_GROUP == 32 else gl.float32
    s_ring = gl.allocate_shared_memory(kind, [DEPTH, 64 * TM], flat)
    b_ring = gl.allocate_shared_memory(gl.float8e4nv, [2 * TN, 128, 128], x_desc.layout)
    full = gl.allocate_shared_memory(gl.int64, [DEPTH, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [DEPTH, 1], mbarrier.MBarrierLayout())
    ready = gl.allocate_shared_memory(gl.int64, [2 * TN, 1], mbarrier.MBarrierLayout())
    freed = gl.allocate_shared_memory(gl.int64, [2 * TN, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(DEPTH):
        # Bulk copies count as one; each lane of the copying warp adds one when its scales are there.
        mbarrier.init(full.index(i), count=33)
        mbarrier.init(empty.index(i), count=TN + TM * TN)
    for i in gl.static_range(2 * TN):
        mbarrier.init(ready.index(i), count=1)
        mbarrier.init(freed.index(i), count=TM)
    rings = (w_ring, x_ring, t_ring, s_ring, b_ring)
    bars = (full, empty, ready, freed)
    sizes = (num_groups, N, max_m, steps)
    multiply = (out, factors, rows_of, rings, bars, sizes, (stride_og, stride_om, stride_fg))
    decode = (rows_of, rings, bars, sizes)
    of = (stride_tg, stride_tk, stride_xg, stride_xm, stride_xk)
    copy = (w_desc, x_desc, t_desc, x_scale, rows_of, rings, bars, sizes, of)
    if TN == 2:
        gl.warp_specialize(
            [
                (_products, (multiply, MODE, X_GROUP, TM, TN, DEPTH, 0, 0)),
                (_products, (multiply, MODE, X_GROUP, TM, TN, DEPTH, 0, 1)),
                (_decode, (decode, MODE, TM, TN, DEPTH, 0, 0)),
                (_decode, (decode, MODE, TM, TN, DEPTH, 1, 0)),
                (_copies, (copy, MODE, TM, TN, DEPTH)),
            ],
            [4, 4, 4, 1],
            [152, 72, 72, 24],
        )
    else:
        gl.warp_specialize(
            [
                (_products, (multiply, MODE, X_GROUP, TM, TN, DEPTH, 0, 0)),
                (_products, (multiply, MODE, X_GROUP, TM, TN, DEPTH, 1, 0)),
                (_decode, (decode, MODE, TM, TN, DEPTH, 0, 0)),
                (_decode, (decode, MODE, TM, TN, DEPTH, 0, 1)),
                (_copies, (copy, MODE, TM, TN, DEPTH)),
            ],
            [4, 4, 4, 1],
            [152, 72, 72, 24],
        )
