"""RMS norm of rows, alone, after an addition, or before rotation and a cast; a row is summed in one order."""

from __future__ import annotations

import triton
import triton.language as tl

from deepinfer.kernels.triton.small_floats import through, write_groups

__all__ = ["norm_rope_cast_kernel", "rms_norm_kernel"]


@triton.jit
def _piece(x, residual, c, inside, ADD: tl.constexpr, EVICT: tl.constexpr, HARDWARE: tl.constexpr):
    """A piece of rows in fp32; with ADD the sum with the residual, which is stored there."""
    v = tl.load(x + c, mask=inside, other=0.0, eviction_policy=EVICT).to(tl.float32)
    if ADD:
        kind = residual.dtype.element_ty
        at = residual + c
        v += tl.load(at, mask=inside, other=0.0, eviction_policy=EVICT).to(tl.float32)
        v = through(v, kind, HARDWARE)
        tl.store(at, v.to(kind), mask=inside)
    return v


@triton.jit(do_not_specialize=["rows", "steps"])
def rms_norm_kernel(
    x, residual, weight, out, rows, steps, x_row, residual_row, out_row, eps, CHANNELS: tl.constexpr,
    MAIN: tl.constexpr, REST: tl.constexpr, ADD: tl.constexpr, ROWS: tl.constexpr,
    EVICT: tl.constexpr, HARDWARE: tl.constexpr,
):  # fmt: skip
    """Norms rows, ROWS at once and `steps` times; a row is cut into MAIN channels and at most REST more.

    Both are powers of two, so that hardly a thread idles: 5120 is 4096 and 1024.
    """
    c = tl.arange(0, MAIN)[None, :]
    kind = out.dtype.element_ty
    gain = tl.load(weight + c, mask=c < CHANNELS, other=0.0)
    if REST > 0:
        d = MAIN + tl.arange(0, REST)[None, :]
        gain_of_rest = tl.load(weight + d, mask=d < CHANNELS, other=0.0)
    for step in range(steps):
        row = (tl.program_id(0) * steps + step) * ROWS + tl.arange(0, ROWS)[:, None]
        there = row < rows
        row = row.to(tl.int64)
        at = x + row * x_row
        inside = there & (c < CHANNELS)
        v = _piece(at, residual + row * residual_row, c, inside, ADD, EVICT, HARDWARE)
        if REST > 0:
            inside_rest = there & (d < CHANNELS)
            w = _piece(at, residual + row * residual_row, d, inside_rest, ADD, EVICT, HARDWARE)
            square = tl.sum(tl.reshape(v * v, [ROWS, MAIN // REST, REST]), axis=1) + w * w
            square = tl.sum(square, axis=1, keep_dims=True)
        else:
            square = tl.sum(v * v, axis=1, keep_dims=True)
        factor = tl.rsqrt(square / CHANNELS + eps)
        to = out + row * out_row
        tl.store(to + c, (v * factor * gain.to(tl.float32)).to(kind), mask=inside)
        if REST > 0:
            w = w * factor * gain_of_rest.to(tl.float32)
            tl.store(to + d, w.to(kind), mask=inside_rest)


@triton.jit(do_not_specialize=["rows"])
def norm_rope_cast_kernel(
    x, weight, phases, positions, q, scale, rows, heads, x_token, x_head, eps,
    CHANNELS: tl.constexpr, ROPE: tl.constexpr, HAS_NORM: tl.constexpr,
    HAS_POSITIONS: tl.constexpr, FORMAT: tl.constexpr, HARDWARE: tl.constexpr, ROWS: tl.constexpr,
    SPAN: tl.constexpr, GROUP: tl.constexpr,
):  # fmt: skip
    """Norms rows, rotates their last ROPE channels and quantises them.

    A row is a head of a token: SPAN groups, a power of two that holds its channels, all in one place of a row of the tile.
    """
    REAL: tl.constexpr = CHANNELS // GROUP
    Q_GROUP: tl.constexpr = GROUP if FORMAT == 1 else GROUP // 2
    f = tl.arange(0, ROWS * SPAN)
    row = tl.program_id(0) * ROWS + f // SPAN
    group = f % SPAN
    there = (row < rows) & (group < REAL)
    token = (row // heads).to(tl.int64)
    c = tl.arange(0, GROUP)[None, :]
    inside = there[:, None] & (c < GROUP)
    kind = x.dtype.element_ty
    at = x + token * x_token + (row % heads).to(tl.int64) * x_head + group * GROUP
    v = tl.load(at[:, None] + c, mask=inside, other=0.0).to(tl.float32)
    if HAS_NORM:
        square = tl.sum(tl.reshape(tl.sum(v * v, axis=1), [ROWS, SPAN]), axis=1, keep_dims=True)
        factor = tl.rsqrt(square / CHANNELS + eps)
        factor = tl.reshape(tl.broadcast_to(factor, [ROWS, SPAN]), [ROWS * SPAN])
        gain = tl.load((weight + group * GROUP)[:, None] + c, mask=inside, other=0.0)
        v = through(v * factor[:, None] * gain.to(tl.float32), kind, HARDWARE)
    if ROPE > 0:
        place = token
        if HAS_POSITIONS:
            place = tl.load(positions + token, mask=there, other=0).to(tl.int64)
        turned = inside & ((group * GROUP)[:, None] + c >= CHANNELS - ROPE)
        phase = (phases + place * ROPE + group * GROUP - (CHANNELS - ROPE))[:, None] + c
        phase = tl.load(phase, mask=turned, other=0.0)
        cos, sin = tl.split(tl.reshape(phase, [ROWS * SPAN, GROUP // 2, 2]))
        even, odd = tl.split(tl.reshape(v, [ROWS * SPAN, GROUP // 2, 2]))
        both = tl.join(even * cos - odd * sin, even * sin + odd * cos)
        both = through(tl.reshape(both, [ROWS * SPAN, GROUP]), kind, HARDWARE)
        v = tl.where(turned, both, v)
    row = row.to(tl.int64)
    write_groups(
        v, q + (row * REAL + group) * Q_GROUP, scale + row * REAL + group, there, inside, FORMAT,
        False, HARDWARE, kind != tl.float32, ROWS * SPAN, GROUP,
    )  # fmt: skip
