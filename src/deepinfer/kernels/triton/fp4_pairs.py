"""Casts of bf16 rows to e2m1 two values at a time, for chips with packed bf16 arithmetic (compute capability 9.0)."""

from __future__ import annotations

import triton
import triton.language as tl

from deepinfer.kernels.triton.e2m1_codes import power_pairs, quotient_pairs
from deepinfer.kernels.triton.small_floats import e4m3_scale, e4m3_values, power_scale

__all__ = ["cast_pairs_kernel"]


@triton.jit(do_not_specialize=["groups"])
def cast_pairs_kernel(
    x, q, scale, groups, x_row, CHANNELS: tl.constexpr, POWER: tl.constexpr, GROUPS: tl.constexpr,
    GROUP: tl.constexpr,
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
    """
    A_ROW: tl.constexpr = CHANNELS // GROUP
    PAIRS: tl.constexpr = GROUP // 2
    f = tl.program_id(0) * GROUPS + tl.arange(0, GROUPS)
    there = f < groups
    row = (f // A_ROW).to(tl.int64)
    at = f % A_ROW
    c = tl.arange(0, PAIRS)[None, :]
    inside = there[:, None] & (c < PAIRS)
    w = tl.load((x + row * x_row + at * PAIRS)[:, None] + c, mask=inside, other=0)
    size = w & 0x7FFF7FFF
    highest = tl.max(tl.maximum(size >> 16, size & 0xFFFF), axis=1) << 16
    if POWER:
        byte, inverse = power_scale(highest, 6.0, 7.052966104933725e-38)
        pairs = power_pairs(w, inverse)
    else:
        byte = e4m3_scale(highest, True)
        pairs = quotient_pairs(w, e4m3_values(byte, False), byte == 0x7F)
    tl.store(scale + f, byte.to(tl.uint8), mask=there)
    to = q + row * (CHANNELS // 2) + at * PAIRS
    tl.store(to[:, None] + c, pairs.to(tl.uint8), mask=inside)
