"""Casts to e4m3 whose groups of 32 channels are brought to one scale for 128, for products that scale 128 channels at once."""

from __future__ import annotations

import triton
import triton.language as tl

from deepinfer.kernels.triton.small_floats import (
    e4m3_codes,
    e4m3_values,
    magnitudes,
    power_scale,
)

__all__ = ["cast_aligned_kernel", "write_aligned"]


@triton.jit
def write_aligned(v, q, scale, inside, there, HARDWARE: tl.constexpr, GROUPS: tl.constexpr):
    """Quantises groups of 32 and stores them with the largest scale of each four.

    Args:
        v: fp32 values, shape [GROUPS, 32], zero outside; four groups of a row lie side by side.
        q: Where the codes of each group go, shape [GROUPS].
        scale: Where the scale of each four goes, shape [GROUPS / 4].
        inside: Which groups there are, shape [GROUPS].
        there: Which fours there are, shape [GROUPS / 4].
        HARDWARE: As in `small_floats`.
        GROUPS: Groups, a multiple of 4.
    """
    exponent, inverse = power_scale(tl.max(magnitudes(v), axis=1), 448.0, 1e-4)
    fours = tl.reshape(exponent, [GROUPS // 4, 4])
    top = tl.max(fours, axis=1)
    bits = tl.where(top == 255, 0x7FC00000, top << 23)
    tl.store(scale, bits.to(tl.float32, bitcast=True), mask=there)
    # How far a group lies below the highest of its four, as a power of two; what falls below 2^-9 is rounded.
    down = tl.maximum(127 + fours - top[:, None], 0) << 23
    down = tl.reshape(down, [GROUPS]).to(tl.float32, bitcast=True)
    codes = e4m3_codes(v * inverse[:, None], HARDWARE)
    codes = e4m3_codes(e4m3_values(codes, HARDWARE) * down[:, None], HARDWARE)
    tl.store(q[:, None] + tl.arange(0, 32)[None, :], codes, mask=inside[:, None])


@triton.jit(do_not_specialize=["fours"])
def cast_aligned_kernel(
    x, q, scale, fours, x_row, CHANNELS: tl.constexpr, HARDWARE: tl.constexpr, GROUPS: tl.constexpr
):
    """Some groups of 32 channels of rows, counted through row by row; CHANNELS is a multiple of 128."""
    A_ROW: tl.constexpr = CHANNELS // 32
    f = tl.program_id(0) * GROUPS + tl.arange(0, GROUPS)
    of_four = tl.program_id(0) * (GROUPS // 4) + tl.arange(0, GROUPS // 4)
    inside = f < fours * 4
    row = (f // A_ROW).to(tl.int64)
    at = f % A_ROW * 32
    start = (x + row * x_row + at)[:, None] + tl.arange(0, 32)[None, :]
    v = tl.load(start, mask=inside[:, None], other=0.0).to(tl.float32)
    write_aligned(
        v, q + row * CHANNELS + at, scale + of_four, inside, of_four < fours, HARDWARE, GROUPS
    )
