"""What is left to do at the end of a row of sparse attention, for each of two warpgroups."""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier

from deepinfer.kernels.triton.gluon_names import block_barrier

__all__ = ["finish_row", "origin", "turn_back", "write_nothing", "write_row"]


@gluon.jit
def origin(base):
    """What is taken off the logits: 0 while there is no key."""
    return gl.where(base == float("-inf"), 0.0, base)


@gluon.jit
def finish_row(
    highest, base, sums, sink, max_logits, lse, row, head, heads, totals, tops, met, turn, SINK: gl.constexpr,
    PART: gl.constexpr,
):  # fmt: skip
    """Joins maximum and sum of both warpgroups, writes them, and returns the factor of the outputs."""
    layout: gl.constexpr = highest.type.layout
    share = gl.convert_layout(gl.sum(sums, 1), layout)
    totals.index(PART).store(share)
    tops.index(PART).store(highest)
    block_barrier()
    mbarrier.arrive(met, count=1)
    mbarrier.wait(met, turn & 1)
    # In the same order in both.
    share = totals.index(0).load(layout) + totals.index(1).load(layout)
    highest = gl.maximum(tops.index(0).load(layout), tops.index(1).load(layout))
    taken_off = origin(base)
    h = head + gl.arange(0, 64, layout=layout)
    nothing = share == 0.0
    whole = gl.where(nothing, 1.0, share)
    factor = 1.0 / whole
    if SINK:
        # Far above all logits it leaves nothing; neither it nor its share may overflow.
        more = gl.load(sink + h, mask=h < heads, other=0.0)
        more = gl.minimum(gl.maximum(more, -1e37), 1e37) * 1.4426950408889634 - taken_off
        factor = 1.0 / (whole + gl.exp2(gl.minimum(more, 126.0)))
        factor = gl.where(more > 126.0, 0.0, factor)
    if PART == 0:
        at = row.to(gl.int64) * heads + h
        highest = gl.where(share == share, highest, share)  # maxima pass over NaN
        gl.store(max_logits + at, highest * 0.6931471805599453, mask=h < heads)
        ln_sum = (taken_off + gl.log2(whole)) * 0.6931471805599453
        gl.store(lse + at, gl.where(nothing, float("inf"), ln_sum), mask=h < heads)
    return gl.where(nothing, 0.0, factor)


@gluon.jit
def turn_back(acc, phases):
    """Rotates the last 64 of 256 channels back."""
    layout: gl.constexpr = acc.type.layout
    even, odd = gl.split(acc.reshape([64, 128, 2]))
    pair = gl.arange(0, 128, layout=gl.SliceLayout(0, even.type.layout)) - 96
    cos = gl.load(phases + 2 * pair, mask=pair >= 0, other=1.0)[None, :]
    sin = gl.load(phases + 2 * pair + 1, mask=pair >= 0, other=0.0)[None, :]
    turned = gl.join(even * cos + odd * sin, odd * cos - even * sin)
    return gl.convert_layout(turned.reshape([64, 256]), layout)


@gluon.jit
def write_row(acc, to, stage, head, heads, stride_oh):
    """A warpgroup's outputs as bf16, through its half of the last tile's space."""
    layout: gl.constexpr = gl.BlockedLayout([1, 8], [1, 32], [4, 1], [1, 0])
    d = gl.arange(0, 256, layout=gl.SliceLayout(0, layout))
    r = gl.arange(0, 16, layout=gl.SliceLayout(1, layout))
    stage.store(acc.to(gl.bfloat16))
    for step in gl.static_range(4):
        h = head + step * 16 + r
        y = stage.slice(step * 16, 16, dim=0).load(layout)
        place = to + (h * stride_oh)[:, None] + d[None, :]
        gl.store(place, y, mask=(h < heads)[:, None] & (d < 256)[None, :])


@gluon.jit
def write_nothing(out, max_logits, lse, row, head, heads, stride_oh, PART: gl.constexpr):
    """Results of a row without keys."""
    layout: gl.constexpr = gl.BlockedLayout([1, 8], [1, 32], [4, 1], [1, 0])
    d = gl.arange(0, 256, layout=gl.SliceLayout(0, layout))
    h = head + gl.arange(0, 64, layout=gl.SliceLayout(1, layout))
    place = out + (h * stride_oh)[:, None] + d[None, :]
    zero = gl.zeros([64, 256], gl.bfloat16, layout)
    gl.store(place, zero, mask=(h < heads)[:, None] & (d < 256)[None, :])
    if PART == 0:
        at = row.to(gl.int64) * heads + h
        empty = gl.full([64], float("inf"), gl.float32, gl.SliceLayout(1, layout))
        gl.store(max_logits + at, -empty, mask=h < heads)
        gl.store(lse + at, empty, mask=h < heads)
