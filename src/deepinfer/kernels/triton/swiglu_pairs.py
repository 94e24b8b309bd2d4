"""SwiGLU of bf16 with the cast of its result to e2m1 two values at a time, for chips with packed arithmetic."""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from deepinfer.kernels.triton.bf16_pairs import even, least, most, odd, pair_codes, pair_of
from deepinfer.kernels.triton.fp4_pairs import group_lanes
from deepinfer.kernels.triton.swiglu_cast import swiglu_value

__all__ = ["swiglu_pairs_kernel"]


@gluon.jit(do_not_specialize=["groups"])
def swiglu_pairs_kernel(
    x, weights, q, scale, groups, x_row, limit, bound, CHANNELS: gl.constexpr, HAS_LIMIT: gl.constexpr,
    HAS_WEIGHTS: gl.constexpr, MODE: gl.constexpr, FORMAT: gl.constexpr, GROUPS: gl.constexpr,
    GROUP: gl.constexpr, EACH: gl.constexpr,
):  # fmt: skip
    """As `swiglu_cast_kernel`, with scales as bytes.

    Args:
        x: Pairs of bf16 as int32, the even one in the low half.
        weights: As there.
        q: Two codes of e2m1 as uint8.
        scale: Bytes.
        groups: Groups of all rows.
        x_row: Distance of rows, in pairs.
        limit: Of the clamp.
        bound: It as a pair of bf16, when it is a number of bf16.
        CHANNELS: Channels of a result, a multiple of the group.
        HAS_LIMIT: 1 when there is one, 2 when it is a number of bf16, else 0.
        HAS_WEIGHTS: Whether there are weights.
        MODE: How exact the steps are.
        FORMAT: As in `small_floats`.
        GROUPS: Groups of a program.
        GROUP: Channels of a group.
        EACH: Pairs of a group that a thread has at most.
    """
    A_ROW: gl.constexpr = CHANNELS // GROUP
    PAIRS: gl.constexpr = GROUP // 2
    layout: gl.constexpr = group_lanes(GROUPS, PAIRS, EACH, gl.num_warps())
    f = gl.program_id(0) * GROUPS + gl.arange(0, GROUPS, layout=gl.SliceLayout(1, layout))
    there = f < groups
    row = (f // A_ROW).to(gl.int64)
    c = gl.arange(0, PAIRS, layout=gl.SliceLayout(0, layout))[None, :]
    inside = there[:, None] & (c < PAIRS)
    start = (x + row * x_row + f % A_ROW * PAIRS)[:, None] + c
    gate = gl.load(start, mask=inside, other=0)
    up = gl.load(start + CHANNELS // 2, mask=inside, other=0)
    if HAS_LIMIT == 2:
        gate, up = least(gate, bound), most(least(up, bound), bound ^ -2147450880)
    a = swiglu_value(even(gate), even(up), limit, HAS_LIMIT == 1, MODE)
    b = swiglu_value(odd(gate), odd(up), limit, HAS_LIMIT == 1, MODE)
    if HAS_WEIGHTS:
        w = gl.load(weights + row, mask=there, other=0.0)[:, None]
        a, b = a * w, b * w
    codes, byte = pair_codes(pair_of(a, b), FORMAT)
    gl.store(scale + f, gl.max(byte, axis=1), mask=there)
    to = (q + row * (A_ROW * PAIRS) + f % A_ROW * PAIRS)[:, None] + c
    gl.store(to, codes, mask=inside)
