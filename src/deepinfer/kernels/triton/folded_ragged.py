"""Products of many e4m3 tokens by groups with prepared MXFP4 weights on Hopper: tiles as wide as a group has tokens.

Weights are the tall operand: each of two warpgroups decodes 64 rows of them in registers, those of the next step while the
tensor cores are at the present one, and multiplies them with 64, 80, 96, 128, 144 or 160 tokens. So a group of 130 tokens
costs 144 columns, where tiles of 128 tokens cost 256. The order of every sum, and so every bit, is that of `grouped_folded`.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    async_copy,
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from deepinfer.kernels.triton.folded_words import WIDE, load_words
from deepinfer.kernels.triton.gluon_names import copy_elements, load_tile

__all__ = ["folded_ragged_kernel"]


# `_UNFOLD` of `folded_words` in two parts: the magnitudes of four codes as e4m3 bytes, twice; and with their signs.
_MAGNITUDES = gl.constexpr("""{
.reg .b32 lo, hi, m, n;
mad.lo.u32 lo, $3, 0x01010100, 0x0C080000;
mad.lo.u32 hi, $3, 0x01010101, 0x1C181410;
and.b32 m, $2, 0x77777777;
shr.u32 n, m, 16;
prmt.b32 $0, lo, hi, m;
prmt.b32 $1, lo, hi, n;
}""")
_SIGNS = gl.constexpr("""{
.reg .b32 s;
shl.b32 s, $2, 4;
lop3.b32 $0, $2, 0x80808080, $3, 0xEA;
lop3.b32 $1, s, 0x80808080, $4, 0xEA;
}""")


@gluon.jit
def _magnitudes(words, steps):
    """Two words of four magnitudes for each word of eight codes, and the codes."""
    steps = steps.expand_dims(1).broadcast_to([64, 4])
    words = gl.convert_layout(words, gl.SliceLayout(2, WIDE), assert_trivial=True)
    low, high = gl.inline_asm_elementwise(
        _MAGNITUDES, "=r,=r,r,r", [words, steps], dtype=(gl.int32, gl.int32), is_pure=True, pack=1
    )
    return words, low, high


@gluon.jit
def _next(w_ring, t_ring, slot, PART: gl.constexpr):
    """64 rows of weights and 128 channels, decoded but for their signs, as words.

    The signs come when no product is in flight: the assembler begins the next product only after the present one if the
    operand in registers is made meanwhile.
    """
    words = load_words(w_ring.index(2 * slot + PART), 0)
    t = t_ring.index(2 * slot + PART).load(gl.SliceLayout(1, gl.SliceLayout(2, WIDE)))
    w0, l0, h0 = _magnitudes(words[0], t & 255)
    w1, l1, h1 = _magnitudes(words[1], (t >> 8) & 255)
    w2, l2, h2 = _magnitudes(words[2], (t >> 16) & 255)
    w3, l3, h3 = _magnitudes(words[3], (t >> 24) & 255)
    return w0, l0, h0, w1, l1, h1, w2, l2, h2, w3, l3, h3


@gluon.jit
def _bytes(word):
    """The four bytes of each word."""
    four = word.expand_dims(2).broadcast_to([64, 4, 4])
    return gl.inline_asm_elementwise(
        "mov.b32 $0, $1;", "=r,r,r,r,r", [four], dtype=gl.uint8, is_pure=True, pack=4
    )


@gluon.jit
def _group(words, low, high):
    """32 channels of e4m3, [64, 32]."""
    low, high = gl.inline_asm_elementwise(
        _SIGNS, "=r,=r,r,r,r", [words, low, high], dtype=(gl.int32, gl.int32), is_pure=True, pack=1
    )
    a = gl.join(_bytes(low), _bytes(high)).permute((0, 3, 1, 2)).reshape([64, 32])
    a_layout: gl.constexpr = gl.DotOperandLayout(
        0, gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 64, 32]), 4
    )
    return gl.convert_layout(a.to(gl.float8e4nv, bitcast=True), a_layout, assert_trivial=True)


@gluon.jit
def _left(words, acc_layout: gl.constexpr):
    """64 rows of weights and 128 channels as the left operand."""
    w0, l0, h0, w1, l1, h1, w2, l2, h2, w3, l3, h3 = words
    low = gl.join(_group(w0, l0, h0), _group(w1, l1, h1)).permute((0, 2, 1)).reshape([64, 64])
    high = gl.join(_group(w2, l2, h2), _group(w3, l3, h3)).permute((0, 2, 1)).reshape([64, 64])
    a = gl.join(low, high).permute((0, 2, 1)).reshape([64, 128])
    return gl.convert_layout(a, gl.DotOperandLayout(0, acc_layout, 4))


@gluon.jit
def _begin(a, x_ring, more_ring, slot, part, rest, never, WIDTH: gl.constexpr, MORE: gl.constexpr,
           more_layout: gl.constexpr):  # fmt: skip
    """Begins the products of 128 channels; `never` is false, but hides from the compiler that `part` is not needed."""
    x = x_ring.index(slot)
    part = warpgroup_mma(a, x.slice(0, WIDTH).permute((1, 0)), part, use_acc=never, is_async=True)
    if MORE > 0:
        b = gl.convert_layout(a, gl.DotOperandLayout(0, more_layout, 4), assert_trivial=True)
        y = x.slice(64, MORE) if WIDTH == 64 else more_ring.index(slot).slice(0, MORE)
        rest = warpgroup_mma(b, y.permute((1, 0)), rest, use_acc=never, is_async=True)
    return part, rest


@gluon.jit
def _add(s_ring, after_ring, slot, acc, more, part, rest, WIDTH: gl.constexpr, MORE: gl.constexpr,
         acc_layout: gl.constexpr, more_layout: gl.constexpr):  # fmt: skip
    """Waits for products and adds them up with the scales of the tokens."""
    s = s_ring.index(slot)
    if MORE == 0:
        scale = s.slice(0, WIDTH).load(gl.SliceLayout(0, acc_layout))
        part = warpgroup_mma_wait(0, [part])
        acc += part * scale[None, :]
    else:
        after = s.slice(64, MORE) if WIDTH == 64 else after_ring.index(slot).slice(0, MORE)
        if WIDTH + MORE > 128:  # the registers do not hold the scales meanwhile
            part, rest = warpgroup_mma_wait(0, [part, rest])
        scale = s.slice(0, WIDTH).load(gl.SliceLayout(0, acc_layout))
        other = after.load(gl.SliceLayout(0, more_layout))
        if WIDTH + MORE <= 128:
            part, rest = warpgroup_mma_wait(0, [part, rest])
        acc += part * scale[None, :]
        more += rest * other[None, :]
    return acc, more, part, rest


@gluon.jit
def _store(acc, factor, to, m0, n0, rows, N, WIDTH: gl.constexpr, acc_layout: gl.constexpr):
    """Writes the sums of 64 rows of weights and some tokens; no data leave their warp before."""
    out, stride_om = to
    to_layout: gl.constexpr = gl.BlockedLayout([8, 1], [2, 16], [4, 1], [0, 1])
    acc *= gl.convert_layout(factor, gl.SliceLayout(1, acc_layout), assert_trivial=True)[:, None]
    y = gl.convert_layout(acc.to(out.dtype.element_ty), to_layout)
    i = gl.arange(0, WIDTH, layout=gl.SliceLayout(0, to_layout))
    no = n0 + gl.arange(0, 64, layout=gl.SliceLayout(1, to_layout))
    at = out + (m0 + i).to(gl.int64)[None, :] * stride_om + no[:, None]
    gl.store(at, y, mask=(i < rows)[None, :] & (no < N)[:, None])


@gluon.jit
def _step(rings, bars, words, slot, phase, turn, acc, more, part, rest, never, WIDTH: gl.constexpr, MORE: gl.constexpr,
          PART: gl.constexpr, DEPTH: gl.constexpr, ORDER: gl.constexpr, acc_layout: gl.constexpr, more_layout: gl.constexpr):  # fmt: skip
    """Multiplies a step, whose weights are decoded, and decodes the next while the tensor cores are at it."""
    w_ring, x_ring, more_ring, t_ring, s_ring, after_ring = rings
    full, empty, turns = bars
    at = slot
    slot += 1
    if slot == DEPTH:
        slot = 0
        phase ^= 1
    mbarrier.wait(full.index(slot), phase)
    a = _left(words, acc_layout)
    if ORDER:
        mbarrier.wait(turns.index(PART), turn)
        turn ^= 1
    part, rest = _begin(a, x_ring, more_ring, at, part, rest, never, WIDTH, MORE, more_layout)
    if ORDER:
        mbarrier.arrive(turns.index(1 - PART), count=1)
    words = _next(w_ring, t_ring, slot, PART)
    acc, more, part, rest = _add(
        s_ring, after_ring, at, acc, more, part, rest, WIDTH, MORE, acc_layout, more_layout
    )
    mbarrier.arrive(empty.index(at), count=1)
    return words, slot, phase, turn, acc, more, part, rest


@gluon.jit
def _tile(rings, bars, to, factors, m, n, rows, sizes, slot, phase, turn, never, WIDTH: gl.constexpr, MORE: gl.constexpr,
          PART: gl.constexpr, DEPTH: gl.constexpr, ORDER: gl.constexpr):  # fmt: skip
    """One tile of WIDTH tokens and MORE others behind them, of which `rows` are used."""
    w_ring, x_ring, more_ring, t_ring, s_ring, after_ring = rings
    full, empty, turns = bars
    _M, N, steps = sizes
    acc_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, WIDTH, 32])
    more_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, MORE or 32, 32])
    row = n + gl.arange(0, 64, layout=gl.SliceLayout(1, acc_layout))
    factor = gl.load(factors + gl.minimum(row, N - 1))
    acc = gl.zeros((64, WIDTH), gl.float32, acc_layout)
    part = acc
    more = gl.zeros((64, MORE or 32), gl.float32, more_layout)
    rest = more
    mbarrier.wait(full.index(slot), phase)
    words = _next(w_ring, t_ring, slot, PART)
    for _ in range(steps - 1):
        words, slot, phase, turn, acc, more, part, rest = _step(
            rings, bars, words, slot, phase, turn, acc, more, part, rest, never, WIDTH, MORE, PART, DEPTH, ORDER, acc_layout, more_layout
        )  # fmt: skip
    if ORDER:
        mbarrier.wait(turns.index(PART), turn)
        turn ^= 1
    part, rest = _begin(
        _left(words, acc_layout),
        x_ring,
        more_ring,
        slot,
        part,
        rest,
        never,
        WIDTH,
        MORE,
        more_layout,
    )
    if ORDER:
        mbarrier.arrive(turns.index(1 - PART), count=1)
    acc, more, part, rest = _add(
        s_ring, after_ring, slot, acc, more, part, rest, WIDTH, MORE, acc_layout, more_layout
    )
    mbarrier.arrive(empty.index(slot), count=1)
    slot += 1
    if slot == DEPTH:
        slot = 0
        phase ^= 1
    _store(acc, factor, to, m, n, rows, N, WIDTH, acc_layout)
    if MORE > 0:
        _store(more, factor, to, m + WIDTH, n, rows - WIDTH, N, MORE, more_layout)
    return slot, phase, turn


@gluon.jit
def _products(given, DEPTH: gl.constexpr, ORDER: gl.constexpr, PART: gl.constexpr):
    """Multiplies, scales and writes 64 rows of weights of every tile."""
    out, factors, layout, tiles, rings, bars, sizes, strides = given
    _M, N, _steps = sizes
    stride_om, stride_fg = strides
    to = (out, stride_om)
    never = N < 0
    tiles_n = gl.cdiv(N, 128)
    count = gl.load(tiles) * tiles_n
    slot = 0
    phase = 0
    turn = 1 - PART
    after = gl.load(tiles + 1 + gl.minimum(gl.program_id(0), count - 1) // tiles_n)
    for tile in range(gl.program_id(0), count, gl.num_programs(0)):
        # What the next tile asks for comes while this one is multiplied.
        found = after
        after = gl.load(tiles + 1 + gl.minimum(tile + gl.num_programs(0), count - 1) // tiles_n)
        m = found // 256 * 128
        rows = found % 256
        n = (tile % tiles_n) * 128 + 64 * PART
        of = factors + gl.load(layout + m).to(gl.int64) * stride_fg
        if rows <= 64:
            slot, phase, turn = _tile(
                rings,
                bars,
                to,
                of,
                m,
                n,
                rows,
                sizes,
                slot,
                phase,
                turn,
                never,
                64,
                0,
                PART,
                DEPTH,
                ORDER,
            )
        elif rows <= 80:
            slot, phase, turn = _tile(
                rings,
                bars,
                to,
                of,
                m,
                n,
                rows,
                sizes,
                slot,
                phase,
                turn,
                never,
                64,
                16,
                PART,
                DEPTH,
                ORDER,
            )
        elif rows <= 96:
            slot, phase, turn = _tile(
                rings,
                bars,
                to,
                of,
                m,
                n,
                rows,
                sizes,
                slot,
                phase,
                turn,
                never,
                64,
                32,
                PART,
                DEPTH,
                ORDER,
            )
        elif rows <= 128:
            slot, phase, turn = _tile(
                rings,
                bars,
                to,
                of,
                m,
                n,
                rows,
                sizes,
                slot,
                phase,
                turn,
                never,
                128,
                0,
                PART,
                DEPTH,
                ORDER,
            )
        elif rows <= 144:
            slot, phase, turn = _tile(
                rings,
                bars,
                to,
                of,
                m,
                n,
                rows,
                sizes,
                slot,
                phase,
                turn,
                never,
                128,
                16,
                PART,
                DEPTH,
                ORDER,
            )
        else:
            slot, phase, turn = _tile(
                rings,
                bars,
                to,
                of,
                m,
                n,
                rows,
                sizes,
                slot,
                phase,
                turn,
                never,
                128,
                32,
                PART,
                DEPTH,
                ORDER,
            )


@gluon.jit
def _copies(given, DEPTH: gl.constexpr):
    """Fills the ring, tile after tile."""
    (
        w_desc,
        x_desc,
        half_desc,
        more_desc,
        t_desc,
        x_scale,
        layout,
        tiles,
        rings,
        bars,
        sizes,
        strides,
    ) = given
    w_ring, x_ring, more_ring, t_ring, s_ring, after_ring = rings
    full, empty, _turns = bars
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
            slot += 1
            if slot == DEPTH:
                slot = 0
                phase ^= 1


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
    ORDER: gl.constexpr,
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
    turns = gl.allocate_shared_memory(gl.int64, [2, 1], bar_layout)
    mbarrier.init(turns.index(0), count=1)
    mbarrier.init(turns.index(1), count=1)
    for i in gl.static_range(DEPTH):
        # Bulk copies count as one; each lane of the copying warp adds one when its scales are there.
        mbarrier.init(full.index(i), count=33)
        mbarrier.init(empty.index(i), count=2)
    rings = (w_ring, x_ring, more_ring, t_ring, s_ring, after_ring)
    bars = (full, empty, turns)
    sizes = (M, N, steps)
    multiply = (out, factors, layout, tiles, rings, bars, sizes, (stride_om, stride_fg))
    of = (stride_tg, stride_tk, stride_xm, stride_xk)
    copy = (
        w_desc,
        x_desc,
        half_desc,
        more_desc,
        t_desc,
        x_scale,
        layout,
        tiles,
        rings,
        bars,
        sizes,
        of,
    )
    gl.warp_specialize(
        [
            (_products, (multiply, DEPTH, ORDER, 0)),
            (_products, (multiply, DEPTH, ORDER, 1)),
            (_copies, (copy, DEPTH)),
        ],
        [4, 1],
        [240, 24],
    )
