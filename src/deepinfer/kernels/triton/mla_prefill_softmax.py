"""Softmax of a tile of logits on Hopper, and what is left to do at the end of a row."""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier

from deepinfer.kernels.triton.gluon_names import block_barrier

__all__ = [
    "finish_row",
    "release",
    "release_tile",
    "rescale",
    "share_tile",
    "sum_columns",
    "turn_back",
]


@gluon.jit
def release(empty, place):
    """Hands space back once every warp has done with it."""
    block_barrier()
    mbarrier.arrive(empty.index(place), count=1)


@gluon.jit
def release_tile(empty, slot, PARTS: gl.constexpr):
    """Hands the space of all pieces of a tile back."""
    block_barrier()
    for part in gl.static_range(PARTS):
        mbarrier.arrive(empty.index(slot * PARTS + part), count=1)


@gluon.jit
def sum_columns(p):
    """Sums over the columns that a thread holds: [64, 64] to [64, 2, 4]."""
    return gl.sum(gl.sum(p.reshape([64, 2, 4, 4, 2]), 4), 2)


@gluon.jit
def share_tile(s, mask, scale, highest, base, sums, tops, rises, p_tile, LAZY: gl.constexpr):
    """Shares of a tile's keys to shared memory.

    New maximum, base and sums, the factor of what was summed before, and whether it differs from one for any head.
    """
    s_layout: gl.constexpr = s.type.layout
    head_layout: gl.constexpr = gl.SliceLayout(1, s_layout)
    sums_head_layout: gl.constexpr = gl.SliceLayout(1, gl.SliceLayout(2, sums.type.layout))
    s = s * scale + mask[None, :]
    # Each warpgroup has the highest logits of its half of the keys.
    halves = gl.max(s.reshape([64, 2, 32]), axis=2)
    if LAZY:
        rise = halves - gl.convert_layout(base, gl.SliceLayout(1, halves.type.layout))[:, None]
        rises.store(gl.max(rise.reshape([4, 16, 2]), axis=1).reshape([8]))
    tops.store(gl.permute(halves, (1, 0)).reshape([128]))
    top = gl.maximum(tops.slice(0, 64).load(head_layout), tops.slice(64, 64).load(head_layout))
    highest = gl.maximum(highest, top)
    # The base follows the highest logit only when the shares would get large.
    raised = gl.where(top > base + 8.0, top, base)
    origin = gl.where(raised == float("-inf"), 0.0, raised)
    fade = gl.exp2(base - origin)
    p = gl.exp2(s - origin[:, None])
    p_tile.store(p.to(gl.bfloat16))
    fence_async_shared()
    sums = sums * gl.convert_layout(fade, sums_head_layout)[:, None, None] + sum_columns(p)
    moved = 8.5
    if LAZY:
        moved = gl.max(rises.load(gl.BlockedLayout([8], [32], [8], [0])), 0)
    return highest, raised, sums, fade, moved


@gluon.jit
def rescale(acc, fade, moved, LAZY: gl.constexpr):
    """Outputs times the factor of each head."""
    factor = gl.convert_layout(fade, gl.SliceLayout(1, acc.type.layout))[:, None]
    if LAZY:
        if moved > 8.0:
            acc = acc * factor
    else:
        acc = acc * factor
    return acc


@gluon.jit
def finish_row(highest, base, sums, sink, max_logits, lse, row, head, heads, SINK: gl.constexpr):
    """Writes maximum and log-sum-exp, and returns the factor of the outputs."""
    layout: gl.constexpr = highest.type.layout
    share = gl.convert_layout(gl.sum(gl.sum(sums, 2), 1), layout)
    origin = gl.where(base == float("-inf"), 0.0, base)
    h = head + gl.arange(0, 64, layout=layout)
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
    gl.store(max_logits + at, highest * 0.6931471805599453, mask=h < heads)
    ln_sum = (origin + gl.log2(whole)) * 0.6931471805599453
    gl.store(lse + at, gl.where(nothing, float("inf"), ln_sum), mask=h < heads)
    return gl.where(nothing, 0.0, factor)


@gluon.jit
def turn_back(acc, phases):
    """Rotates the last 64 of 512 channels back."""
    layout: gl.constexpr = acc.type.layout
    even, odd = gl.split(acc.reshape([64, 256, 2]))
    pair = gl.arange(0, 256, layout=gl.SliceLayout(0, even.type.layout)) - 224
    cos = gl.load(phases + 2 * pair, mask=pair >= 0, other=1.0)[None, :]
    sin = gl.load(phases + 2 * pair + 1, mask=pair >= 0, other=0.0)[None, :]
    turned = gl.join(even * cos + odd * sin, odd * cos - even * sin)
    return gl.convert_layout(turned.reshape([64, 512]), layout)
