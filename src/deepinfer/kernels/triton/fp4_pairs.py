"""Casts of bf16 rows to e2m1 two values at a time, for chips with packed bf16 arithmetic (compute capability 9.0)."""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from deepinfer.kernels.triton.bf16_pairs import pair_codes

__all__ = ["cast_pairs_kernel", "group_lanes"]


@gluon.constexpr_function
def group_lanes(groups, pairs, each, warps):
    """A tile of groups and pairs: a thread has at most `each` pairs of a group, and groups side by side."""
    each = min(each, pairs)
    wide = min(32, pairs // each)
    tall = 32 // wide
    return gl.BlockedLayout(
        [max(1, groups // (warps * tall)), each], [tall, wide], [warps, 1], [1, 0]
    )


@gluon.jit(do_not_specialize=["groups"])
def cast_pairs_kernel(
    x, q, scale, groups, x_row, CHANNELS: gl.constexpr, POWER: gl.constexpr, GROUPS: gl.constexpr,
    GROUP: gl.constexpr, EACH: gl.constexpr,
):  # fmt: skip
    """Quantises groups of rows of pairs to e2m1; POWER: power-of-two scales, else e4m3.

    Args:
        x: Pairs of bf16 as int32, the even one in the low half.
        q: Codes, two a byte.
        scale: Bytes.
        groups: Groups of all rows.
        x_row: Distance of rows, in pairs.
        CHANNELS: Channels of a row, a multiple of the group.
        POWER: See above.
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
    at = f % A_ROW
    c = gl.arange(0, PAIRS, layout=gl.SliceLayout(0, layout))[None, :]
    inside = there[:, None] & (c < PAIRS)
    w = gl.load((x + row * x_row + at * PAIRS)[:, None] + c, mask=inside, other=0)
    codes, byte = pair_codes(w, 2 if POWER else 3)
    gl.store(scale + f, gl.max(byte, axis=1), mask=there)
    to = q + row * (CHANNELS // 2) + at * PAIRS
    gl.store(to[:, None] + c, codes, mask=inside)
