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


@triton.jit(do_not_specialize=["rows"])
def rms_norm_kernel(
    x, residual, weight, out, rows, x_row, residual_row, out_row, eps, CHANNELS: tl.constexpr,
    MAIN: tl.constexpr, REST: tl.constexpr, ADD: tl.constexpr, ROWS: tl.constexpr,
    EVICT: tl.constexpr, HARDWARE: tl.constexpr,
):  # fmt: skip
    """Norms ROWS rows; a row is cut into MAIN channels and at most REST more.

    Both are powers of two, so that hardly a thread idles: 5120 is 4096 and 1024.
    """
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)[:, None]
    there = row < rows
    row = row.to(tl.int64)
    at, more = x + row * x_row, residual + row * residual_row
    kind = out.dtype.element_ty
    c = tl.arange(0, MAIN)[None, :]
    inside = there & (c < CHANNELS)
    v = _piece(at, more, c, inside, ADD, EVICT, HARDWARE)
    gain = tl.load(weight + c, mask=c < CHANNELS, other=0.0)
    if REST > 0:
        d = MAIN + tl.arange(0, REST)[None, :]
        inside_rest = there & (d < CHANNELS)
        w = _piece(at, more, d, inside_rest, ADD, EVICT, HARDWARE)
        gain_of_rest = tl.load(weight + d, mask=d < CHANNELS, other=0.0)
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


@triton.jit
def _heads(x, row, group, there, heads, x_token, x_head, GROUP: tl.constexpr):
    """Groups of rows in fp32; a row is a head of a token."""
    c = tl.arange(0, GROUP)[None, :]
    token, head = (row // heads).to(tl.int64), (row % heads).to(tl.int64)
    at = x + token * x_token + head * x_head + group * GROUP
    return tl.load(at[:, None] + c, mask=there[:, None] & (c < GROUP), other=0.0).to(tl.float32)


@triton.jit
def _with_gain(
    v, weight, group, there, kind, HARDWARE: tl.constexpr, GROUP: tl.constexpr
):  # fmt: skip
    """Groups times their gains, rounded to a dtype."""
    c = tl.arange(0, GROUP)[None, :]
    at = (weight + group * GROUP)[:, None] + c
    gain = tl.load(at, mask=there[:, None] & (c < GROUP), other=0.0)
    return through(v * gain.to(tl.float32), kind, HARDWARE)


@triton.jit
def _put_heads(
    v, q, scale, row, group, there, REAL: tl.constexpr, FORMAT: tl.constexpr,
    HARDWARE: tl.constexpr, NARROW: tl.constexpr, GROUPS: tl.constexpr, GROUP: tl.constexpr,
):  # fmt: skip
    """Stores codes and scales of groups of rows."""
    Q_GROUP: tl.constexpr = GROUP if FORMAT == 1 else GROUP // 2
    at = row.to(tl.int64) * REAL + group
    inside = there[:, None] & (tl.arange(0, GROUP)[None, :] < GROUP)
    write_groups(
        v, q + at * Q_GROUP, scale + at, there, inside, FORMAT, False, HARDWARE, NARROW, GROUPS,
        GROUP,
    )  # fmt: skip


@triton.jit(do_not_specialize=["rows", "places"])
def norm_rope_cast_kernel(
    x, weight, phases, positions, q, scale, rows, places, heads, x_token, x_head, eps,
    CHANNELS: tl.constexpr, ROPE: tl.constexpr, HAS_NORM: tl.constexpr,
    HAS_POSITIONS: tl.constexpr, FORMAT: tl.constexpr, HARDWARE: tl.constexpr, ROWS: tl.constexpr,
    SPAN: tl.constexpr, TURNED: tl.constexpr, GROUP: tl.constexpr,
):  # fmt: skip
    """Norms rows, rotates their last ROPE channels and quantises them.

    A row is a head of a token: SPAN groups, a power of two that holds its channels, all in one place of a row of the tile.
    With a norm the groups that are rotated, TURNED of them, have a tile of their own; they are read twice. A token whose
    place is not one of `places` is not rotated.
    """
    REAL: tl.constexpr = CHANNELS // GROUP
    f = tl.arange(0, ROWS * SPAN)
    group = f % SPAN
    row = tl.program_id(0) * ROWS + f // SPAN
    there = (row < rows) & (group < REAL)
    kind = x.dtype.element_ty
    v = _heads(x, row, group, there, heads, x_token, x_head, GROUP)
    factor = 1.0
    if HAS_NORM:
        square = tl.sum(tl.reshape(tl.sum(v * v, axis=1), [ROWS, SPAN]), axis=1, keep_dims=True)
        factor = tl.rsqrt(square / CHANNELS + eps)
        v = v * tl.reshape(tl.broadcast_to(factor, [ROWS, SPAN]), [ROWS * SPAN])[:, None]
        v = _with_gain(v, weight, group, there, kind, HARDWARE, GROUP)
    last = REAL - TURNED
    _put_heads(
        v, q, scale, row, group, there & (group < last), REAL, FORMAT, HARDWARE, kind == tl.bfloat16,
        ROWS * SPAN, GROUP,
    )  # fmt: skip
    if ROPE > 0:
        f = tl.arange(0, ROWS * TURNED)
        group = last + f % TURNED
        row = tl.program_id(0) * ROWS + f // TURNED
        there = (row < rows) & (group >= 0)
        v = _heads(x, row, group, there, heads, x_token, x_head, GROUP)
        if HAS_NORM:
            v = v * tl.reshape(tl.broadcast_to(factor, [ROWS, TURNED]), [ROWS * TURNED])[:, None]
            v = _with_gain(v, weight, group, there, kind, HARDWARE, GROUP)
        place = (row // heads).to(tl.int64)
        if HAS_POSITIONS:
            place = tl.load(positions + place, mask=there, other=0).to(tl.int64)
        c = tl.arange(0, GROUP)[None, :]
        known = there & (place >= 0) & (place < places)
        turned = known[:, None] & ((group * GROUP)[:, None] + c >= CHANNELS - ROPE)
        phase = (phases + place * ROPE + group * GROUP - (CHANNELS - ROPE))[:, None] + c
        phase = tl.load(phase, mask=turned, other=0.0)
        cos, sin = tl.split(tl.reshape(phase, [ROWS * TURNED, GROUP // 2, 2]))
        even, odd = tl.split(tl.reshape(v, [ROWS * TURNED, GROUP // 2, 2]))
        both = tl.join(even * cos - odd * sin, even * sin + odd * cos)
        both = through(tl.reshape(both, [ROWS * TURNED, GROUP]), kind, HARDWARE)
        _put_heads(
            tl.where(turned, both, v), q, scale, row, group, there, REAL, FORMAT, HARDWARE,
            kind == tl.bfloat16, ROWS * TURNED, GROUP,
        )  # fmt: skip
