"""Sparse attention of many query rows with 8 to 32 heads on Hopper: keys are the tall operand, heads the wide one.

Four warps copy the keys of a tile, row by row, into a ring; one warpgroup multiplies: logits as [keys, heads], outputs
as [channels, heads], so that no multiplication is spent on heads that are not there. The grid is as large as the chip.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from deepinfer.kernels.triton.gluon_names import block_barrier
from deepinfer.kernels.triton.mla_prefill_lists import (
    copy_rows,
    release,
    release_tile,
    scope_lengths,
)

__all__ = ["mla_prefill_few_kernel"]

# Called _reinterpret up to Triton 3.6; the same arguments.
_view = (
    getattr(gl.shared_memory_descriptor, "reinterpret", None)
    or gl.shared_memory_descriptor._reinterpret
)


@gluon.jit
def _sum_keys(p, HEADS: gl.constexpr):
    """Sums over the keys that a thread holds: [64, heads] to [4, 8, heads]."""
    return gl.sum(p.reshape([4, 2, 8, HEADS]), 1)


@gluon.jit
def _share(s, mask, scale, highest, base, sums, tops, p_tile, HEADS: gl.constexpr):
    """Shares of a tile's keys to shared memory; new maximum, base and sums, and the factor of what was summed before."""
    layout: gl.constexpr = gl.SliceLayout(0, s.type.layout)
    sums_layout: gl.constexpr = gl.SliceLayout(0, gl.SliceLayout(1, sums.type.layout))
    s = s * scale + mask[:, None]
    tops.store(gl.max(s.reshape([4, 16, HEADS]), axis=1).reshape([4 * HEADS]))
    top = tops.slice(0, HEADS).load(layout)
    for warp in gl.static_range(1, 4):
        top = gl.maximum(top, tops.slice(warp * HEADS, HEADS).load(layout))
    highest = gl.maximum(highest, top)
    # The base follows the highest logit only when the shares would get large.
    raised = gl.where(top > base + 8.0, top, base)
    origin = gl.where(raised == float("-inf"), 0.0, raised)
    fade = gl.exp2(base - origin)
    p = gl.exp2(s - origin[None, :])
    p_tile.store(gl.permute(p.to(gl.bfloat16), (1, 0)))
    fence_async_shared()
    sums = sums * gl.convert_layout(fade, sums_layout)[None, None, :] + _sum_keys(p, HEADS)
    return highest, raised, sums, fade


@gluon.jit
def _finish(
    highest, base, sums, sink, max_logits, lse, row, head, heads, SINK: gl.constexpr, HEADS: gl.constexpr
):  # fmt: skip
    """Writes maximum and log-sum-exp, and returns the factor of the outputs."""
    layout: gl.constexpr = highest.type.layout
    share = gl.convert_layout(gl.sum(gl.sum(sums, 0), 0), layout)
    origin = gl.where(base == float("-inf"), 0.0, base)
    h = head + gl.arange(0, HEADS, layout=layout)
    nothing = share == 0.0
    whole = gl.where(nothing, 1.0, share)
    factor = 1.0 / whole
    if SINK:
        # Far above all logits it leaves nothing; neither it nor its share may overflow.
        more = gl.load(sink + h, mask=h < heads, other=0.0)
        more = gl.minimum(gl.maximum(more, -1e37), 1e37) * 1.4426950408889634 - origin
        factor = 1.0 / (whole + gl.exp2(gl.minimum(more, 126.0)))
        factor = gl.where(more > 126.0, 0.0, factor)
    at = row.to(gl.int64) * heads + h
    highest = gl.where(share == share, highest, share)  # maxima pass over NaN
    gl.store(max_logits + at, highest * 0.6931471805599453, mask=h < heads)
    ln_sum = (origin + gl.log2(whole)) * 0.6931471805599453
    gl.store(lse + at, gl.where(nothing, float("inf"), ln_sum), mask=h < heads)
    return gl.where(nothing, 0.0, factor)


@gluon.jit
def _write(
    acc, to, phases, stage, head, heads, stride_oh, filled, ROPE: gl.constexpr, HEADS: gl.constexpr
):
    """Outputs [channels, heads] of a row, turned around in shared memory."""
    layout: gl.constexpr = gl.BlockedLayout([1, 8], [1, 32], [4, 1], [1, 0])
    ROWS: gl.constexpr = 8
    d = gl.arange(0, 512, layout=gl.SliceLayout(0, layout))
    r = gl.arange(0, ROWS, layout=gl.SliceLayout(1, layout))
    if filled:
        stage.store(gl.permute(acc, (1, 0)))
    for step in gl.static_range(HEADS // ROWS):
        h = head + step * ROWS + r
        y = gl.zeros([ROWS, 512], gl.float32, layout)
        if filled:
            y = stage.slice(step * ROWS, ROWS, dim=0).load(layout)
        if ROPE:
            even, odd = gl.split(y.reshape([ROWS, 256, 2]))
            pair = gl.arange(0, 256, layout=gl.SliceLayout(0, even.type.layout)) - 224
            cos = gl.load(phases + 2 * pair, mask=pair >= 0, other=1.0)[None, :]
            sin = gl.load(phases + 2 * pair + 1, mask=pair >= 0, other=0.0)[None, :]
            turned = gl.join(even * cos + odd * sin, odd * cos - even * sin)
            y = gl.convert_layout(turned.reshape([ROWS, 512]), layout)
        place = to + (h * stride_oh)[:, None] + d[None, :]
        gl.store(place, y.to(gl.bfloat16), mask=(h < heads)[:, None] & (d < 512)[None, :])


@gluon.jit
def _products(
    lengths,
    extra_lengths,
    sink,
    phases,
    out,
    max_logits,
    lse,
    q_tile,
    ring,
    masks,
    p_tile,
    tops,
    q_full,
    q_empty,
    full,
    empty,
    s_q,
    heads,
    width,
    extra_width,
    scale,
    stride_ot,
    stride_oh,
    COUNTED: gl.constexpr,
    EXTRA: gl.constexpr,
    EXTRA_COUNTED: gl.constexpr,
    SINK: gl.constexpr,
    ROPE: gl.constexpr,
    HEADS: gl.constexpr,
    PARTS: gl.constexpr,
    DEPTH: gl.constexpr,
):
    TILE: gl.constexpr = 64
    SPAN: gl.constexpr = TILE // PARTS
    layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, HEADS, 16])
    head_layout: gl.constexpr = gl.SliceLayout(0, layout)
    stage_layout: gl.constexpr = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=32)
    mask_layout: gl.constexpr = gl.SliceLayout(1, layout)
    blocks = gl.cdiv(heads, HEADS)
    no_logits = gl.zeros([TILE, HEADS], gl.float32, layout)
    slot = 0
    phase = 0
    turn = 0
    for unit in range(gl.program_id(0), s_q * blocks, gl.num_programs(0)):
        row = unit // blocks
        first, more = scope_lengths(
            lengths, extra_lengths, row, width, extra_width, COUNTED, EXTRA, EXTRA_COUNTED
        )
        total = gl.cdiv(first, TILE) + gl.cdiv(more, TILE)
        highest = gl.full([HEADS], float("-inf"), gl.float32, head_layout)
        base = highest
        sums = _sum_keys(no_logits, HEADS)
        acc = gl.zeros([512, HEADS], gl.float32, layout)
        if total > 0:
            mbarrier.wait(q_full, turn & 1)
            turn += 1
        for tile in range(total):
            for part in gl.static_range(PARTS):
                mbarrier.wait(full.index(slot * PARTS + part), phase)
            fence_async_shared()
            mask = masks.index(slot).load(mask_layout)
            keys = ring.index(slot)
            s = warpgroup_mma(keys, q_tile.permute((1, 0)), no_logits, use_acc=False, is_async=True)
            s = warpgroup_mma_wait(0, [s])
            if tile == total - 1:
                block_barrier()
                mbarrier.arrive(q_empty, count=1)
            highest, base, sums, fade = _share(
                s, mask, scale, highest, base, sums, tops, p_tile, HEADS
            )
            acc = acc * fade[None, :]
            block_barrier()
            for part in gl.static_range(PARTS):
                acc = warpgroup_mma(
                    keys.slice(part * SPAN, SPAN, dim=0).permute((1, 0)),
                    p_tile.slice(part * SPAN, SPAN, dim=1).permute((1, 0)),
                    acc,
                    is_async=True,
                )
            for part in gl.static_range(PARTS):
                acc = warpgroup_mma_wait(PARTS - 1 - part, [acc])
                if tile < total - 1:
                    release(empty, slot * PARTS + part)
            if tile < total - 1:
                slot += 1
                if slot == DEPTH:
                    slot = 0
                    phase ^= 1
        head = (unit % blocks) * HEADS
        factor = _finish(highest, base, sums, sink, max_logits, lse, row, head, heads, SINK, HEADS)
        acc = acc * factor[None, :]
        # The last tile's space holds the outputs before it goes back.
        stage = _view(ring.index(slot), gl.float32, [32, 512], stage_layout).slice(0, HEADS, dim=0)
        to = out + row.to(gl.int64) * stride_ot
        turns = phases + row.to(gl.int64) * 64
        _write(acc, to, turns, stage, head, heads, stride_oh, total > 0, ROPE, HEADS)
        if total > 0:
            release_tile(empty, slot, PARTS)
            slot += 1
            if slot == DEPTH:
                slot = 0
                phase ^= 1


@gluon.jit(do_not_specialize=["s_q", "s_kv", "s_extra", "width", "extra_width"])
def mla_prefill_few_kernel(
    q,
    kv,
    indices,
    lengths,
    extra_kv,
    extra_indices,
    extra_lengths,
    sink,
    phases,
    out,
    max_logits,
    lse,
    s_q,
    heads,
    s_kv,
    s_extra,
    width,
    extra_width,
    scale,
    stride_qt,
    stride_qh,
    stride_kv,
    stride_extra,
    stride_i,
    stride_ei,
    stride_ot,
    stride_oh,
    BAND: gl.constexpr,
    COUNTED: gl.constexpr,
    EXTRA: gl.constexpr,
    EXTRA_COUNTED: gl.constexpr,
    SINK: gl.constexpr,
    ROPE: gl.constexpr,
    HEADS: gl.constexpr,
    PARTS: gl.constexpr,
    DEPTH: gl.constexpr,
    COPY_ROWS: gl.constexpr,
    COPY_WARPS: gl.constexpr,
    COPY_REGISTERS: gl.constexpr,
):
    """Attention of 8, 16 or 32 heads a program to the keys that each query row picks; keys are values."""
    tile_layout: gl.constexpr = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16)
    q_tile = gl.allocate_shared_memory(gl.bfloat16, [HEADS, 512], tile_layout)
    ring = gl.allocate_shared_memory(gl.bfloat16, [DEPTH, 64, 512], tile_layout)
    p_tile = gl.allocate_shared_memory(gl.bfloat16, [HEADS, 64], tile_layout)
    plain: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    keys = gl.allocate_shared_memory(gl.int32, [DEPTH, 64], plain)
    masks = gl.allocate_shared_memory(gl.float32, [DEPTH, 64], plain)
    tops = gl.allocate_shared_memory(gl.float32, [4 * HEADS], plain)
    bar: gl.constexpr = mbarrier.MBarrierLayout()
    q_full = gl.allocate_shared_memory(gl.int64, [1], bar)
    q_empty = gl.allocate_shared_memory(gl.int64, [1], bar)
    full = gl.allocate_shared_memory(gl.int64, [DEPTH * PARTS, 1], bar)
    empty = gl.allocate_shared_memory(gl.int64, [DEPTH * PARTS, 1], bar)
    mbarrier.init(q_full, count=32 * COPY_WARPS)
    mbarrier.init(q_empty, count=1)
    for i in gl.static_range(DEPTH * PARTS):
        mbarrier.init(full.index(i), count=32 * COPY_WARPS + 1)
        mbarrier.init(empty.index(i), count=1)
    gl.warp_specialize(
        [
            (
                _products,
                (
                    lengths,
                    extra_lengths,
                    sink,
                    phases,
                    out,
                    max_logits,
                    lse,
                    q_tile,
                    ring,
                    masks,
                    p_tile,
                    tops,
                    q_full,
                    q_empty,
                    full,
                    empty,
                    s_q,
                    heads,
                    width,
                    extra_width,
                    scale,
                    stride_ot,
                    stride_oh,
                    COUNTED,
                    EXTRA,
                    EXTRA_COUNTED,
                    SINK,
                    ROPE,
                    HEADS,
                    PARTS,
                    DEPTH,
                ),
            ),
            (
                copy_rows,
                (
                    q,
                    kv,
                    indices,
                    lengths,
                    extra_kv,
                    extra_indices,
                    extra_lengths,
                    q_tile,
                    ring,
                    keys,
                    masks,
                    q_full,
                    q_empty,
                    full,
                    empty,
                    s_q,
                    heads,
                    s_kv,
                    s_extra,
                    width,
                    extra_width,
                    stride_qt,
                    stride_qh,
                    stride_kv,
                    stride_extra,
                    stride_i,
                    stride_ei,
                    BAND,
                    COUNTED,
                    EXTRA,
                    EXTRA_COUNTED,
                    HEADS,
                    PARTS,
                    DEPTH,
                    1,
                    COPY_ROWS,
                    COPY_WARPS,
                ),
            ),
        ],
        [COPY_WARPS],
        [COPY_REGISTERS],
    )
