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
    fence_async_shared,
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from deepinfer.kernels.triton.gluon_names import block_barrier, copy_elements, load_tile
from deepinfer.kernels.triton.grouped_tiles import power_of_byte

__all__ = ["decode_half", "grouped_folded_kernel", "rows_of_group"]

# $2: eight codes, the magnitudes of the first four in the low half; their signs are the high bits of the bytes, those of
# the last four stand four bits below. $6: the e4m3 byte of 0.5 at this step. $0, $1: four e4m3 bytes each.
_UNFOLD = gl.constexpr("""{
.reg .b32 lo, hi, m, n, s;
mad.lo.u32 lo, $6, 0x01010100, 0x0C080000;
mad.lo.u32 hi, $6, 0x01010101, 0x1C181410;
and.b32 m, $2, 0x77777777;
shr.u32 n, m, 16;
shl.b32 s, $2, 4;
prmt.b32 m, lo, hi, m;
prmt.b32 n, lo, hi, n;
lop3.b32 $0, $2, 0x80808080, m, 0xEA;
lop3.b32 $1, s, 0x80808080, n, 0xEA;
}""")


@gluon.jit
def rows_of_group(counts, group, num_groups, max_m, MODE: gl.constexpr):
    """Tokens of a group."""
    return gl.load(counts + gl.minimum(group, num_groups - 1)) if MODE == 2 else max_m


@gluon.jit
def unfold(words, steps, a_layout: gl.constexpr, wide: gl.constexpr, PURE: gl.constexpr = True):
    """Words of eight codes [64, 4] and the byte of 0.5 of each row to an operand [64, 32] of e4m3."""
    words = gl.convert_layout(words, gl.SliceLayout(2, wide), assert_trivial=True)
    words = words.expand_dims(2).broadcast_to([64, 4, 4])
    steps = steps.expand_dims(1).expand_dims(2).broadcast_to([64, 4, 4])
    low, high = gl.inline_asm_elementwise(
        _UNFOLD, "=r,=r,r,r,r,r,r,r,r,r", [words, steps], dtype=(gl.uint8, gl.uint8), is_pure=PURE, pack=4
    )  # fmt: skip
    a = gl.join(low, high).permute((0, 3, 1, 2)).reshape([64, 32])
    return gl.convert_layout(a.to(gl.float8e4nv, bitcast=True), a_layout, assert_trivial=True)


@gluon.jit
def load_words(w, HALF: gl.constexpr):
    """The words [64, 4] of each group of 32 of 128 channels of a tile in shared memory."""
    layout: gl.constexpr = gl.DistributedLinearLayout(
        [[0, 1], [0, 2], [8, 0]],
        [[0, 4], [0, 8], [1, 0], [2, 0], [4, 0]],
        [[16, 0], [32, 0]],
        [],
        [64, 16],
    )
    p = w.slice(16 * HALF, 16, dim=1).load(layout)
    even, odd = gl.split(p.reshape([64, 4, 2, 2]))
    w0, w2 = gl.split(even)
    w1, w3 = gl.split(odd)
    return w0, w1, w2, w3


@gluon.jit
def _group(words, t, x, part, add, AT: gl.constexpr, acc_layout: gl.constexpr, wide: gl.constexpr):
    """Begins the product of 32 channels, added to `part` if `add`."""
    a_layout: gl.constexpr = gl.DotOperandLayout(0, acc_layout, 4)
    a = unfold(words, (t >> (8 * AT)) & 255, a_layout, wide)
    b = x.slice(32 * AT, 32, dim=1).permute((1, 0))
    return warpgroup_mma(a, b, part, use_acc=add, is_async=True)


@gluon.jit
def decode_half(w, t, HALF: gl.constexpr, wide: gl.constexpr, PURE: gl.constexpr = True):
    """128 channels of a tile as e4m3, [64, 128], in registers."""
    a_layout: gl.constexpr = gl.DotOperandLayout(
        0, gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 64, 32]), 4
    )
    words = load_words(w, HALF)
    a0 = unfold(words[0], t & 255, a_layout, wide, PURE)
    a1 = unfold(words[1], (t >> 8) & 255, a_layout, wide, PURE)
    a2 = unfold(words[2], (t >> 16) & 255, a_layout, wide, PURE)
    a3 = unfold(words[3], (t >> 24) & 255, a_layout, wide, PURE)
    low = gl.join(a0, a1).permute((0, 2, 1)).reshape([64, 64])
    high = gl.join(a2, a3).permute((0, 2, 1)).reshape([64, 64])
    return gl.join(low, high).permute((0, 2, 1)).reshape([64, 128])


@gluon.jit
def _shared_block(w, t, x, a, part, never, HALF: gl.constexpr, wide: gl.constexpr):
    """Begins the product of 128 channels, by way of a decoded tile in shared memory."""
    a.store(decode_half(w, t, HALF, wide))
    fence_async_shared()
    block_barrier()
    return warpgroup_mma(a, x.permute((1, 0)), part, use_acc=never, is_async=True)


@gluon.jit
def _block(w, t, x, part, never, HALF: gl.constexpr, acc_layout: gl.constexpr, wide: gl.constexpr):
    """Begins the product of 128 channels; `never` is false, but hides from the compiler that `part` is not needed."""
    words = load_words(w, HALF)
    for i in gl.static_range(4):
        part = _group(words[i], t, x, part, never if i == 0 else True, i, acc_layout, wide)
    return part


@gluon.jit
def _scaled_block(
    w, t, x, codes, acc, HALF: gl.constexpr, BLOCK_M: gl.constexpr, acc_layout: gl.constexpr,
    wide: gl.constexpr,
):  # fmt: skip
    """Adds the product of 128 channels, whose tokens have a scale for 32."""
    words = load_words(w, HALF)
    zero = gl.zeros((64, BLOCK_M), gl.float32, acc_layout)
    p0 = _group(words[0], t, x, zero, False, 0, acc_layout, wide)
    p1 = _group(words[1], t, x, zero, False, 1, acc_layout, wide)
    if BLOCK_M > 32:  # two products at a time are as many as the registers hold
        p0 = warpgroup_mma_wait(1, [p0])
        acc += p0 * power_of_byte(codes, 0)[None, :]
        acc = warpgroup_mma_wait(1, [acc])
        p2 = _group(words[2], t, x, zero, False, 2, acc_layout, wide)
        p1 = warpgroup_mma_wait(1, [p1])
        acc += p1 * power_of_byte(codes, 1)[None, :]
        acc = warpgroup_mma_wait(1, [acc])
        p3 = _group(words[3], t, x, zero, False, 3, acc_layout, wide)
    else:
        p2 = _group(words[2], t, x, zero, False, 2, acc_layout, wide)
        p3 = _group(words[3], t, x, zero, False, 3, acc_layout, wide)
        p0 = warpgroup_mma_wait(3, [p0])
        acc += p0 * power_of_byte(codes, 0)[None, :]
        p1 = warpgroup_mma_wait(2, [p1])
        acc += p1 * power_of_byte(codes, 1)[None, :]
    p2 = warpgroup_mma_wait(1, [p2])
    acc += p2 * power_of_byte(codes, 2)[None, :]
    p3 = warpgroup_mma_wait(0, [p3])
    return acc + p3 * power_of_byte(codes, 3)[None, :]


@gluon.jit
def _tile_ahead(rings, bars, steps, slot, phase, never, PART: gl.constexpr, PARTS: gl.constexpr,
                BLOCK_M: gl.constexpr, DEPTH: gl.constexpr, acc_layout: gl.constexpr):  # fmt: skip
    """One tile in steps of 256 channels; 128 channels are decoded while those before them are multiplied."""
    w_ring, x_ring, t_ring, s_ring, _a = rings
    full, empty = bars
    wide: gl.constexpr = gl.DistributedLinearLayout(
        [[0, 0, 1], [0, 0, 2], [8, 0, 0]],
        [[0, 1, 0], [0, 2, 0], [1, 0, 0], [2, 0, 0], [4, 0, 0]],
        [[16, 0, 0], [32, 0, 0]],
        [],
        [64, 4, 4],
    )
    a_layout: gl.constexpr = gl.DotOperandLayout(0, acc_layout, 4)
    t_layout: gl.constexpr = gl.SliceLayout(1, gl.SliceLayout(2, wide))
    m_layout: gl.constexpr = gl.SliceLayout(0, acc_layout)
    acc = gl.zeros((64, BLOCK_M), gl.float32, acc_layout)
    part = acc
    last = acc
    mbarrier.wait(full.index(slot), phase)
    at = slot * PARTS + PART
    t = t_ring.index(at * 2).load(t_layout)
    a = gl.convert_layout(decode_half(w_ring.index(at), t, 0, wide, False), a_layout)
    for step in range(steps):
        part = warpgroup_mma(
            a, x_ring.index(slot * 2).permute((1, 0)), part, use_acc=never, is_async=True
        )
        at = slot * PARTS + PART
        t = t_ring.index(at * 2 + 1).load(t_layout)
        b = gl.convert_layout(decode_half(w_ring.index(at), t, 1, wide, False), a_layout)
        last = warpgroup_mma(
            b, x_ring.index(slot * 2 + 1).permute((1, 0)), last, use_acc=never, is_async=True
        )
        xs = s_ring.index(slot * 2).load(m_layout)
        part = warpgroup_mma_wait(1, [part])
        acc += part * xs[None, :]
        # The last step decodes its own first channels again, for nothing, so that there is no branch.
        is_last = step == steps - 1
        wraps = slot == DEPTH - 1
        following = gl.where(is_last, slot, gl.where(wraps, 0, slot + 1))
        turn = phase ^ gl.where(is_last, 0, wraps.to(gl.int32))
        mbarrier.wait(full.index(following), turn)
        at = following * PARTS + PART
        t = t_ring.index(at * 2).load(t_layout)
        a = gl.convert_layout(decode_half(w_ring.index(at), t, 0, wide, False), a_layout)
        xs = s_ring.index(slot * 2 + 1).load(m_layout)
        last, acc = warpgroup_mma_wait(0, [last, acc])
        mbarrier.arrive(empty.index(slot), count=1)
        acc += last * xs[None, :]
        slot += 1
        if slot == DEPTH:
            slot = 0
            phase ^= 1
    return acc, slot, phase


@gluon.jit
def _tile(rings, bars, steps, slot, phase, never, X_GROUP: gl.constexpr, FORM: gl.constexpr, SPAN: gl.constexpr, PART: gl.constexpr,
          PARTS: gl.constexpr, BLOCK_M: gl.constexpr, DEPTH: gl.constexpr, acc_layout: gl.constexpr):  # fmt: skip
    """One tile; a step is 128 or 256 channels."""
    w_ring, x_ring, t_ring, s_ring, a_ring = rings
    full, empty = bars
    wide: gl.constexpr = gl.DistributedLinearLayout(
        [[0, 0, 1], [0, 0, 2], [8, 0, 0]],
        [[0, 1, 0], [0, 2, 0], [1, 0, 0], [2, 0, 0], [4, 0, 0]],
        [[16, 0, 0], [32, 0, 0]],
        [],
        [64, 4, 4],
    )
    t_layout: gl.constexpr = gl.SliceLayout(1, gl.SliceLayout(2, wide))
    m_layout: gl.constexpr = gl.SliceLayout(0, acc_layout)
    acc = gl.zeros((64, BLOCK_M), gl.float32, acc_layout)
    part = acc
    last = acc
    for _ in range(steps):
        mbarrier.wait(full.index(slot), phase)
        w = w_ring.index(slot * PARTS + PART)
        at = (slot * PARTS + PART) * SPAN
        if X_GROUP == 32:
            for half in gl.static_range(SPAN):
                t = t_ring.index(at + half).load(t_layout)
                codes = s_ring.index(slot * SPAN + half).load(m_layout)
                x = x_ring.index(slot * SPAN + half)
                acc = _scaled_block(w, t, x, codes, acc, half, BLOCK_M, acc_layout, wide)
            mbarrier.arrive(empty.index(slot), count=1)
        elif FORM == 2:
            t = t_ring.index(at).load(t_layout)
            x = x_ring.index(slot * 2)
            part = _shared_block(w, t, x, a_ring.index(2 * PART), part, never, 0, wide)
            t = t_ring.index(at + 1).load(t_layout)
            x = x_ring.index(slot * 2 + 1)
            last = _shared_block(w, t, x, a_ring.index(2 * PART + 1), last, never, 1, wide)
            xs = s_ring.index(slot * 2).load(m_layout)
            part = warpgroup_mma_wait(1, [part])
            acc += part * xs[None, :]
            xs = s_ring.index(slot * 2 + 1).load(m_layout)
            last = warpgroup_mma_wait(0, [last])
            mbarrier.arrive(empty.index(slot), count=1)
            acc += last * xs[None, :]
        else:
            t = t_ring.index(at).load(t_layout)
            part = _block(w, t, x_ring.index(slot * SPAN), part, never, 0, acc_layout, wide)
            xs = s_ring.index(slot * SPAN).load(m_layout)
            if SPAN == 2:
                t = t_ring.index(at + 1).load(t_layout)
                last = _block(w, t, x_ring.index(slot * SPAN + 1), last, never, 1, acc_layout, wide)
                part = warpgroup_mma_wait(4, [part])
                acc += part * xs[None, :]
                xs = s_ring.index(slot * SPAN + 1).load(m_layout)
                last = warpgroup_mma_wait(0, [last])
                mbarrier.arrive(empty.index(slot), count=1)
                acc += last * xs[None, :]
            else:
                part = warpgroup_mma_wait(0, [part])
                mbarrier.arrive(empty.index(slot), count=1)
                acc += part * xs[None, :]
        slot += 1
        if slot == DEPTH:
            slot = 0
            phase ^= 1
    return acc, slot, phase


@gluon.jit
def _products(given, MODE: gl.constexpr, X_GROUP: gl.constexpr, FORM: gl.constexpr, SPAN: gl.constexpr,
              PARTS: gl.constexpr, BLOCK_M: gl.constexpr, DEPTH: gl.constexpr, PART: gl.constexpr):  # fmt: skip
    """Multiplies, scales and writes 64 rows of weights of every tile."""
    out, factors, rows_of, rings, bars, sizes, strides = given
    num_groups, N, max_m, steps = sizes
    stride_og, stride_om, stride_fg = strides
    BLOCK_N: gl.constexpr = 64 * PARTS
    acc_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_M, 32])
    out_layout: gl.constexpr = gl.BlockedLayout([8, 1], [8, 4], [1, 4], [0, 1])
    row = gl.arange(0, 64, layout=gl.SliceLayout(1, acc_layout))
    tiles_n = gl.cdiv(N, BLOCK_N)
    tile = gl.program_id(0)
    group = 0
    first = 0
    slot = 0
    phase = 0
    rows = rows_of_group(rows_of, 0, num_groups, max_m, MODE)
    width = gl.cdiv(rows, BLOCK_M) * tiles_n
    while group < num_groups:
        if tile < first + width:
            tiles_m = width // tiles_n
            at = tile - first
            m0 = (at % tiles_m) * BLOCK_M
            n0 = (at // tiles_m) * BLOCK_N + 64 * PART
            g = group
            if MODE == 1:
                g = gl.load(rows_of + m0)
            if g >= 0:
                at_n = gl.minimum(n0 + row, N - 1)
                factor = gl.load(factors + g.to(gl.int64) * stride_fg + at_n)  # type: ignore[attr-defined]
                if FORM == 3:
                    acc, slot, phase = _tile_ahead(
                        rings,
                        bars,
                        steps,
                        slot,
                        phase,
                        N < 0,
                        PART,
                        PARTS,
                        BLOCK_M,
                        DEPTH,
                        acc_layout,
                    )
                else:
                    acc, slot, phase = _tile(
                        rings, bars, steps, slot, phase, N < 0, X_GROUP, FORM, SPAN, PART, PARTS, BLOCK_M, DEPTH,
                        acc_layout,
                    )  # fmt: skip
                acc *= factor[:, None]
                y = gl.convert_layout(acc.to(out.dtype.element_ty), out_layout)
                mo = m0 + gl.arange(0, BLOCK_M, layout=gl.SliceLayout(0, out_layout))
                no = n0 + gl.arange(0, 64, layout=gl.SliceLayout(1, out_layout))
                used = mo < rows
                if MODE == 1:
                    used = used & (gl.load(rows_of + gl.minimum(mo, rows - 1)) >= 0)
                to = out + mo.to(gl.int64)[None, :] * stride_om + no[:, None]
                if MODE == 2:
                    to += group.to(gl.int64) * stride_og  # type: ignore[attr-defined]
                gl.store(to, y, mask=used[None, :] & (no < N)[:, None])
            tile += gl.num_programs(0)
        else:
            first += width
            group += 1
            rows = rows_of_group(rows_of, group, num_groups, max_m, MODE)
            width = gl.cdiv(rows, BLOCK_M) * tiles_n


@gluon.jit
def _copies(given, MODE: gl.constexpr, SPAN: gl.constexpr, PARTS: gl.constexpr, BLOCK_M: gl.constexpr,
            DEPTH: gl.constexpr):  # fmt: skip
    """Fills the ring, tile after tile."""
    w_desc, x_desc, t_desc, x_scale, rows_of, rings, bars, sizes, strides = given
    w_ring, x_ring, t_ring, s_ring, _a = rings
    full, empty = bars
    num_groups, N, max_m, steps = sizes
    stride_tg, stride_tk, stride_xg, stride_xm, stride_xk = strides
    BLOCK_N: gl.constexpr = 64 * PARTS
    size: gl.constexpr = SPAN * (BLOCK_N * (64 + 4) + BLOCK_M * 128)
    token = gl.arange(0, BLOCK_M, layout=gl.BlockedLayout([1], [32], [1], [0]))
    tiles_n = gl.cdiv(N, BLOCK_N)
    tile = gl.program_id(0)
    group = 0
    first = 0
    slot = 0
    phase = 1
    width = gl.cdiv(rows_of_group(rows_of, 0, num_groups, max_m, MODE), BLOCK_M) * tiles_n
    while group < num_groups:
        if tile < first + width:
            tiles_m = width // tiles_n
            at = tile - first
            m0 = (at % tiles_m) * BLOCK_M
            n0 = (at // tiles_m) * BLOCK_N
            g = group
            if MODE == 1:
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
                    slot += 1
                    if slot == DEPTH:
                        slot = 0
                        phase ^= 1
            tile += gl.num_programs(0)
        else:
            first += width
            group += 1
            width = (
                gl.cdiv(rows_of_group(rows_of, group, num_groups, max_m, MODE), BLOCK_M) * tiles_n
            )


@gluon.jit(do_not_specialize=["num_groups", "max_m"])
def grouped_folded_kernel(
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
    FORM: gl.constexpr,
    SPAN: gl.constexpr,
    PARTS: gl.constexpr,
    BLOCK_M: gl.constexpr,
    DEPTH: gl.constexpr,
    REGISTERS: gl.constexpr,
):
    """`out[g, m, n] = sum over k of x[g, m, k] * weight[g, n, k]`; MODE 0 dense, 1 a group for each row, 2 counts."""
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
    a_ring = x_ring
    if FORM == 2:
        a_ring = gl.allocate_shared_memory(gl.float8e4nv, [2 * PARTS, 64, 128], x_desc.layout)
    rings = (w_ring, x_ring, t_ring, s_ring, a_ring)
    bars = (full, empty)
    sizes = (num_groups, N, max_m, steps)
    to = (stride_og, stride_om, stride_fg)
    multiply = (out, factors, rows_of, rings, bars, sizes, to)
    of = (stride_tg, stride_tk, stride_xg, stride_xm, stride_xk)
    copy = (w_desc, x_desc, t_desc, x_scale, rows_of, rings, bars, sizes, of)
    if PARTS == 1:
        gl.warp_specialize(
            [
                (_products, (multiply, MODE, X_GROUP, FORM, SPAN, PARTS, BLOCK_M, DEPTH, 0)),
                (_copies, (copy, MODE, SPAN, PARTS, BLOCK_M, DEPTH)),
            ],
            [1],
            [24],
        )
    elif PARTS == 2:
        gl.warp_specialize(
            [
                (_products, (multiply, MODE, X_GROUP, FORM, SPAN, PARTS, BLOCK_M, DEPTH, 0)),
                (_products, (multiply, MODE, X_GROUP, FORM, SPAN, PARTS, BLOCK_M, DEPTH, 1)),
                (_copies, (copy, MODE, SPAN, PARTS, BLOCK_M, DEPTH)),
            ],
            [4, 1],
            [REGISTERS, 24],
        )
    else:
        gl.warp_specialize(
            [
                (_products, (multiply, MODE, X_GROUP, FORM, SPAN, PARTS, BLOCK_M, DEPTH, 0)),
                (_products, (multiply, MODE, X_GROUP, FORM, SPAN, PARTS, BLOCK_M, DEPTH, 1)),
                (_products, (multiply, MODE, X_GROUP, FORM, SPAN, PARTS, BLOCK_M, DEPTH, 2)),
                (_products, (multiply, MODE, X_GROUP, FORM, SPAN, PARTS, BLOCK_M, DEPTH, 3)),
                (_copies, (copy, MODE, SPAN, PARTS, BLOCK_M, DEPTH)),
            ],
            [4, 4, 4, 1],
            [REGISTERS, REGISTERS, REGISTERS, 24],
        )
