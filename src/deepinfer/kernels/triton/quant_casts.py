"""Casts of rows and blocks to small float formats, and back; a program takes some groups and nothing else."""

from __future__ import annotations

import triton
import triton.language as tl

from deepinfer.kernels.triton.small_floats import (
    e2m1_values,
    e4m3_codes,
    e4m3_values,
    e8m0_values,
    magnitudes,
    power_scale,
    write_groups,
)

__all__ = ["cast_back_kernel", "cast_blocks_kernel", "cast_groups_kernel"]


@triton.jit(do_not_specialize=["groups"])
def cast_groups_kernel(
    x, q, scale, groups, x_row, CHANNELS: tl.constexpr, FORMAT: tl.constexpr,
    SCALE_FP32: tl.constexpr, HARDWARE: tl.constexpr, GROUPS: tl.constexpr, GROUP: tl.constexpr,
):  # fmt: skip
    """Quantises groups of rows; the groups of all rows are counted through."""
    A_ROW: tl.constexpr = (CHANNELS + GROUP - 1) // GROUP
    Q_ROW: tl.constexpr = CHANNELS if FORMAT == 1 else CHANNELS // 2
    Q_GROUP: tl.constexpr = GROUP if FORMAT == 1 else GROUP // 2
    f = tl.program_id(0) * GROUPS + tl.arange(0, GROUPS)
    there = f < groups
    row = (f // A_ROW).to(tl.int64)
    at = f % A_ROW
    inside = there[:, None]
    if CHANNELS % GROUP != 0:
        inside = inside & ((at * GROUP)[:, None] + tl.arange(0, GROUP)[None, :] < CHANNELS)
    else:
        inside = inside & (tl.arange(0, GROUP) < GROUP)[None, :]
    start = x + row * x_row + at * GROUP
    v = tl.load(start[:, None] + tl.arange(0, GROUP)[None, :], mask=inside, other=0.0)
    write_groups(
        v.to(tl.float32), q + row * Q_ROW + at * Q_GROUP, scale + f, there, inside, FORMAT,
        SCALE_FP32, HARDWARE, x.dtype.element_ty == tl.bfloat16, GROUPS, GROUP,
    )  # fmt: skip


@triton.jit
def cast_blocks_kernel(
    x, q, scale, x_batch, x_row, N: tl.constexpr, K: tl.constexpr, SCALE_FP32: tl.constexpr,
    HARDWARE: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, SIDE: tl.constexpr,
):  # fmt: skip
    """Quantises blocks of rows and columns to e4m3; a program takes SIDE blocks side by side."""
    DOWN: tl.constexpr = (N + ROWS - 1) // ROWS
    ACROSS: tl.constexpr = (K + COLUMNS - 1) // COLUMNS
    STEPS: tl.constexpr = (ACROSS + SIDE - 1) // SIDE
    f = tl.program_id(0)
    batch = (f // (DOWN * STEPS)).to(tl.int64)
    down = f // STEPS % DOWN
    row = down * ROWS + tl.arange(0, ROWS)
    first = f % STEPS * SIDE
    column = first * COLUMNS + tl.arange(0, SIDE * COLUMNS)
    inside = (row < N)[:, None] & (column < K)[None, :]
    start = x + batch * x_batch + row.to(tl.int64) * x_row
    v = tl.load(start[:, None] + column[None, :], mask=inside, other=0.0).to(tl.float32)
    v = tl.reshape(v, [ROWS, SIDE, COLUMNS])
    exponent, inverse = power_scale(tl.max(tl.max(magnitudes(v), axis=2), axis=0), 448.0, 1e-4)
    place = first + tl.arange(0, SIDE)
    to = scale + (batch * DOWN + down) * ACROSS + place
    if SCALE_FP32:
        bits = tl.where(exponent == 255, 0x7FC00000, exponent << 23)
        tl.store(to, bits.to(tl.float32, bitcast=True), mask=place < ACROSS)
    else:
        tl.store(to, exponent.to(tl.uint8), mask=place < ACROSS)
    codes = e4m3_codes(v * inverse[None, :, None], HARDWARE)
    at = q + (batch * N + row)[:, None] * K + column[None, :]
    tl.store(at, tl.reshape(codes, [ROWS, SIDE * COLUMNS]), mask=inside)


@triton.jit(do_not_specialize=["groups"])
def cast_back_kernel(
    q, scale, out, groups, q_row, N: tl.constexpr, K: tl.constexpr, PACKED: tl.constexpr,
    SCALE: tl.constexpr, HARDWARE: tl.constexpr, ROWS: tl.constexpr, GROUPS: tl.constexpr,
    GROUP: tl.constexpr,
):  # fmt: skip
    """Dequantises groups of rows. SCALE: 0 for fp32, 1 for e8m0, 2 for e4m3; a scale serves ROWS rows."""
    A_ROW: tl.constexpr = (K + GROUP - 1) // GROUP
    f = tl.program_id(0) * GROUPS + tl.arange(0, GROUPS)
    there = f < groups
    row = (f // A_ROW).to(tl.int64)
    at = f % A_ROW
    s = scale + row * A_ROW + at
    if ROWS > 1:
        s = scale + (row // N * ((N + ROWS - 1) // ROWS) + row % N // ROWS) * A_ROW + at
    factor = tl.load(s, mask=there, other=0)
    if SCALE == 1:
        factor = e8m0_values(factor)
    elif SCALE == 2:
        factor = e4m3_values(factor, HARDWARE)
    c = tl.arange(0, GROUP)[None, :]
    inside = there[:, None] & ((at * GROUP)[:, None] + c < K)
    if PACKED:
        pairs = tl.arange(0, GROUP // 2)[None, :]
        start = q + row * q_row + at * (GROUP // 2)
        packed = tl.load(start[:, None] + pairs, mask=there[:, None], other=0).to(tl.int32)
        codes = tl.reshape(tl.join(packed & 15, packed >> 4), [GROUPS, GROUP])
        v = e2m1_values(codes)
    else:
        start = q + row * q_row + at * GROUP
        v = e4m3_values(tl.load(start[:, None] + c, mask=inside, other=0), HARDWARE)
    v = v * factor[:, None]
    to = out + row * K + at * GROUP
    tl.store(to[:, None] + c, v.to(out.dtype.element_ty), mask=inside)
