"""Rows into a paged cache: pool of two tokens, norm, rotation and quantisation on the way, in one pass."""

from __future__ import annotations

import triton
import triton.language as tl

from deepinfer.kernels.triton.cache_codes import (
    decode_e8m0,
    encode_e2m1,
    encode_e4m3,
    inverse_e8m0,
    magnitude_bits,
    power_of_two_scale,
    scale_e4m3,
)

__all__ = ["cache_insert_kernel"]


@triton.jit
def _rotate(v, phases, at, inside, WIDTH: tl.constexpr, ROPE: tl.constexpr, KIND: tl.constexpr):
    """Turns the last ROPE of WIDTH channels, adjacent pairs; values pass through their dtype."""
    ROWS: tl.constexpr = v.shape[0]
    even, odd = tl.split(v.reshape(ROWS, WIDTH // 2, 2))
    pair = tl.arange(0, WIDTH // 2)[None, :] - (WIDTH - ROPE) // 2
    turned = inside & (pair >= 0)
    cos = tl.load(phases + at + 2 * pair, mask=turned, other=1.0)
    sin = tl.load(phases + at + 2 * pair + 1, mask=turned, other=0.0)
    left = (even * cos - odd * sin).to(KIND).to(tl.float32)
    right = (even * sin + odd * cos).to(KIND).to(tl.float32)
    return tl.join(tl.where(turned, left, even), tl.where(turned, right, odd)).reshape(ROWS, WIDTH)


@triton.jit
def _load(x, gates, other_x, other_gates, at, other_at, c, mask, PAIR: tl.constexpr):
    """Rows of x, or the pools of pairs of rows by a softmax over the two gates of each channel."""
    second = tl.load(x + at + c, mask=mask, other=0.0).to(tl.float32)
    if PAIR:
        first = tl.load(other_x + other_at + c, mask=mask, other=0.0)
        gate = tl.load(other_gates + other_at + c, mask=mask, other=0.0)
        gate -= tl.load(gates + at + c, mask=mask, other=0.0)
        share = tl.sigmoid(gate)
        second = share * first + (1.0 - share) * second
    return second


@triton.jit(do_not_specialize=["num_rows"])
def cache_insert_kernel(
    x, gates, state, requests, last, weight, phases, phase_index, positions, floors, slots, latents, cache,
    num_rows, eps, stride_x, stride_gates, stride_slot, stride_tail, tail_size, stride_latents, stride_phases,
    stride_page,
    PAIR: tl.constexpr, HAS_LAST: tl.constexpr, HAS_NORM: tl.constexpr, HAS_FLOOR: tl.constexpr,
    HAS_LATENTS: tl.constexpr, HAS_PHASE_INDEX: tl.constexpr, ROPE: tl.constexpr, KIND: tl.constexpr,
    CODED: tl.constexpr, WIDTH: tl.constexpr, TAIL: tl.constexpr, BITS: tl.constexpr, GROUP: tl.constexpr,
    SCALE: tl.constexpr, ROW_STRIDE: tl.constexpr, TAIL_AT: tl.constexpr, SCALE_STRIDE: tl.constexpr,
    SCALES_AT: tl.constexpr, PAGE: tl.constexpr, NATIVE: tl.constexpr, FUSED: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """Writes the rows whose slot is not negative; see the launcher for the arguments."""
    r = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    inside = r < num_rows
    slot = tl.load(slots + r, mask=inside, other=-1).to(tl.int64)
    token = r
    if HAS_LAST:
        token = tl.load(last + r, mask=inside, other=-1).to(tl.int64)
    read = inside & (token >= 0)
    kept = read & (slot >= 0)
    token = tl.maximum(token, 0)
    if HAS_FLOOR:
        position = tl.load(positions + token, mask=read, other=0).to(tl.int64)
        kept = kept & (position >= tl.load(floors + token, mask=read, other=0).to(tl.int64))
    if not HAS_LATENTS:
        read = kept
    slot = tl.maximum(slot, 0)
    at = (token * stride_x)[:, None]
    before = at
    other_x = x
    other_gates = gates
    if PAIR:
        # The first token of a pair came just before in the batch, or waits in the ring of its request.
        request = tl.load(requests + token, mask=read, other=0).to(tl.int64)
        place = tl.load(positions + token, mask=read, other=0).to(tl.int64)
        earlier = tl.maximum(token - 1, 0)
        near = (token > 0) & (
            tl.load(requests + earlier, mask=read, other=-1).to(tl.int64) == request
        )
        near = near & (tl.load(positions + earlier, mask=read, other=-1).to(tl.int64) == place - 1)
        ring = request * stride_slot + ((place + tail_size - 1) % tail_size) * stride_tail
        other_x = tl.where(near, x + earlier * stride_x, state + ring)[:, None]
        other_gates = tl.where(near, gates + earlier * stride_gates, state + ring + CODED + TAIL)[
            :, None
        ]
        before = tl.zeros((ROWS, 1), tl.int64)
    gate_rows = gates
    if PAIR:
        gate_rows = gates + (token * (stride_gates - stride_x))[:, None]
    c = tl.arange(0, WIDTH)[None, :]
    mask = read[:, None]
    if CODED < WIDTH:
        mask = mask & (c < CODED)
    v = _load(x, gate_rows, other_x, other_gates, at, before, c, mask, PAIR)
    if TAIL > 0:
        d = CODED + tl.arange(0, TAIL)[None, :]
        tail = _load(x, gate_rows, other_x, other_gates, at, before, d, read[:, None], PAIR)
    if HAS_NORM:
        v = v.to(KIND).to(tl.float32)
        square = tl.sum(v * v, 1)
        if TAIL > 0:
            tail = tail.to(KIND).to(tl.float32)
            square += tl.sum(tail * tail, 1)
        factor = tl.rsqrt(square / (CODED + TAIL) + eps)[:, None]
        gain = tl.load(weight + c, mask=c < CODED, other=0.0).to(tl.float32)
        v = (v * factor * gain).to(KIND).to(tl.float32)
        if TAIL > 0:
            tail = (tail * factor * tl.load(weight + d).to(tl.float32)).to(KIND).to(tl.float32)
    if HAS_LATENTS:
        to = latents + (r * stride_latents)[:, None]
        written = inside[:, None] & (c < CODED)
        tl.store(to + c, v.to(KIND), mask=written)
        if TAIL > 0:
            tl.store(to + d, tail.to(KIND), mask=inside[:, None])
    if ROPE > 0:
        turn = token
        if HAS_LAST:
            turn = r
        if HAS_PHASE_INDEX:
            turn = tl.load(phase_index + turn, mask=read, other=0).to(tl.int64)
        turn = (turn * stride_phases)[:, None]
        if TAIL > 0:
            tail = _rotate(tail, phases, turn, read[:, None], TAIL, ROPE, KIND)
        else:
            v = _rotate(v, phases, turn, read[:, None], WIDTH, ROPE, KIND)
    GROUPS: tl.constexpr = WIDTH // GROUP
    grouped = v.reshape(ROWS, GROUPS, GROUP)
    most = tl.max(magnitude_bits(grouped), 2)
    page = cache + (slot // PAGE) * stride_page
    row = (slot % PAGE).to(tl.int32)
    to = (page + row * ROW_STRIDE)[:, None]
    g = tl.arange(0, GROUPS)[None, :]
    scales_to = (page + (SCALES_AT + row * SCALE_STRIDE))[:, None]
    keep = kept[:, None]
    if SCALE == 1:
        byte, factor = scale_e4m3(most)
        factor = factor[:, :, None]
        if FUSED:
            # A quotient to nearest: a product with the inverse, corrected once by its remainder.
            inverse = tl.math.div_rn(1.0, factor)
            y = grouped * inverse
            y = tl.fma(tl.fma(-y, factor, grouped), inverse, y)
        else:
            y = tl.math.div_rn(grouped, factor)
        tl.store(scales_to + g, byte.to(tl.uint8), mask=keep)
    else:
        byte = power_of_two_scale(most, BITS)
        y = grouped * inverse_e8m0(byte)[:, :, None]
        good = keep & (g < CODED // GROUP)
        if SCALE == 2:
            tl.store(scales_to.to(tl.pointer_type(tl.float32)) + g, decode_e8m0(byte), mask=good)
        else:
            # A scale of channels that there are none of is padding, and 0.
            tl.store(scales_to + g, tl.where(g < CODED // GROUP, byte, 0).to(tl.uint8), mask=keep)
    y = y.reshape(ROWS, WIDTH)
    if BITS == 8:
        tl.store(to + c, encode_e4m3(y, NATIVE), mask=keep & (c < CODED))
    else:
        low, high = tl.split(encode_e2m1(y).reshape(ROWS, WIDTH // 2, 2))
        tl.store(
            to + tl.arange(0, WIDTH // 2)[None, :], (low | (high << 4)).to(tl.uint8), mask=keep
        )
    if TAIL > 0:
        bf16 = (to + TAIL_AT).to(tl.pointer_type(tl.bfloat16))
        tl.store(bf16 + tl.arange(0, TAIL)[None, :], tail.to(tl.bfloat16), mask=keep)
