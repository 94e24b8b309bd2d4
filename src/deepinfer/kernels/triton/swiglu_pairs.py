"""SwiGLU of bf16 with the cast of its result two values at a time, for chips with packed arithmetic."""

from __future__ import annotations

import triton
import triton.language as tl

from deepinfer.kernels.triton.bf16_pairs import even, odd, pair_codes, pair_of
from deepinfer.kernels.triton.swiglu_cast import swiglu_value

__all__ = ["swiglu_pairs_kernel"]


@triton.jit(do_not_specialize=["groups"])
def swiglu_pairs_kernel(
    x, weights, q, scale, groups, x_row, limit, CHANNELS: tl.constexpr, HAS_LIMIT: tl.constexpr,
    HAS_WEIGHTS: tl.constexpr, MODE: tl.constexpr, FORMAT: tl.constexpr, GROUPS: tl.constexpr,
    GROUP: tl.constexpr,
):  # fmt: skip
    """As `swiglu_cast_kernel`, with scales as bytes.

    Args:
        x: Pairs of bf16 as int32, the even one in the low half.
        weights: As there.
        q: Two codes of e4m3 as int16, or of e2m1 as uint8.
        scale: Bytes.
        groups: Groups of all rows.
        x_row: Distance of rows, in pairs.
        limit: Of the clamp.
        CHANNELS: Channels of a result, a multiple of the group.
        HAS_LIMIT: Whether there is one.
        HAS_WEIGHTS: Whether there are weights.
        MODE: How exact the steps are.
        FORMAT: As in `small_floats`.
        GROUPS: Groups of a program.
        GROUP: Channels of a group.
    """
    A_ROW: tl.constexpr = CHANNELS // GROUP
    PAIRS: tl.constexpr = GROUP // 2
    f = tl.program_id(0) * GROUPS + tl.arange(0, GROUPS)
    there = f < groups
    row = (f // A_ROW).to(tl.int64)
    c = tl.arange(0, PAIRS)[None, :]
    inside = there[:, None] & (c < PAIRS)
    start = (x + row * x_row + f % A_ROW * PAIRS)[:, None] + c
    gate = tl.load(start, mask=inside, other=0)
    up = tl.load(start + CHANNELS // 2, mask=inside, other=0)
    a = swiglu_value(even(gate), even(up), limit, HAS_LIMIT, MODE)
    b = swiglu_value(odd(gate), odd(up), limit, HAS_LIMIT, MODE)
    if HAS_WEIGHTS:
        w = tl.load(weights + row, mask=there, other=0.0)[:, None]
        a, b = a * w, b * w
    codes, byte = pair_codes(pair_of(a, b), FORMAT)
    tl.store(scale + f[:, None], byte, mask=there[:, None])
    to = (q + row * (A_ROW * PAIRS) + f % A_ROW * PAIRS)[:, None] + c
    tl.store(to, codes, mask=inside)
