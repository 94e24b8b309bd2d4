"""Casts of bf16 rows to e2m1 two values at a time, for chips with packed bf16 arithmetic (compute capability 9.0)."""

from __future__ import annotations

import triton
import triton.language as tl

from deepinfer.kernels.triton.bf16_pairs import pair_codes

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
    codes, byte = pair_codes(w, 2 if POWER else 3)
    tl.store(scale + f[:, None], byte, mask=there[:, None])
    to = q + row * (CHANNELS // 2) + at * PAIRS
    tl.store(to[:, None] + c, codes, mask=inside)
