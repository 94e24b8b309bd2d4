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
    quotients,
    scale_e4m3,
)
from deepinfer.kernels.triton.e2m1_codes import packed, power_pairs, quotient_pairs
from deepinfer.kernels.triton.small_floats import through

__all__ = ["cache_insert_kernel"]


@triton.jit
def _rotate(
    v, phases, at, inside, WIDTH: tl.constexpr, ROPE: tl.constexpr, KIND: tl.constexpr, PAIRS: tl.constexpr
):  # fmt: skip
    """Turns the last ROPE of WIDTH channels, adjacent pairs; values pass through their dtype."""
    ROWS: tl.constexpr = v.shape[0]
    even, odd = tl.split(v.reshape(ROWS, WIDTH // 2, 2))
    pair = tl.arange(0, WIDTH // 2)[None, :] - (WIDTH - ROPE) // 2
    turned = inside & (pair >= 0)
    cos = tl.load(phases + at + 2 * pair, mask=turned, other=1.0)
    sin = tl.load(phases + at + 2 * pair + 1, mask=turned, other=0.0)
    left = through(even * cos - odd * sin, KIND, PAIRS)
    right = through(even * sin + odd * cos, KIND, PAIRS)
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


@triton.jit
def _write(
    v, to, scales_to, keep, FIRST: tl.constexpr, COUNT: tl.constexpr, PADDED: tl.constexpr, BITS: tl.constexpr,
    GROUP: tl.constexpr, SCALE: tl.constexpr, NATIVE: tl.constexpr, FUSED: tl.constexpr, PAIRS: tl.constexpr,
):  # fmt: skip
    """Quantises COUNT channels from FIRST on and writes their codes and scales; PADDED writes 0 for scales of none.

    PAIRS: values are those of bf16, and the chip makes codes of four bits from two of them at a time.
    """
    ROWS: tl.constexpr = v.shape[0]
    WIDTH: tl.constexpr = v.shape[1]
    GROUPS: tl.constexpr = WIDTH // GROUP
    grouped = v.reshape(ROWS, GROUPS, GROUP)
    most = tl.max(magnitude_bits(grouped), 2)
    g = tl.arange(0, GROUPS)[None, :]
    good = keep & (g < COUNT // GROUP)
    scales_to += FIRST // GROUP * (4 if SCALE == 2 else 1)
    if SCALE == 1:
        byte, factor = scale_e4m3(most, FUSED)
        tl.store(scales_to + g, byte.to(tl.uint8), mask=good)
    else:
        byte = power_of_two_scale(most, BITS)
        factor = inverse_e8m0(byte)
        if SCALE == 2:
            tl.store(scales_to.to(tl.pointer_type(tl.float32)) + g, decode_e8m0(byte), mask=good)
        elif PADDED:
            tl.store(scales_to + g, tl.where(g < COUNT // GROUP, byte, 0).to(tl.uint8), mask=keep)
        else:
            tl.store(scales_to + g, byte.to(tl.uint8), mask=good)
    if BITS == 8:
        y = (grouped * factor[:, :, None]).reshape(ROWS, WIDTH)
        c = tl.arange(0, WIDTH)[None, :]
        tl.store(to + (FIRST + c), encode_e4m3(y, NATIVE), mask=keep & (c < COUNT))
    else:
        if PAIRS:
            w = packed(v.reshape(ROWS * GROUPS, GROUP), ROWS * GROUPS, GROUP)
            each = factor.reshape(ROWS * GROUPS)[:, None]
            if SCALE == 1:
                broken = (byte == 0x7F).reshape(ROWS * GROUPS)[:, None]
                code = quotient_pairs(w, each, broken)
            else:
                code = power_pairs(w, each)
            code = code.reshape(ROWS, WIDTH // 2)
        else:
            if SCALE == 1:
                y = quotients(grouped, factor[:, :, None], FUSED)
            else:
                y = grouped * factor[:, :, None]
            y = y.reshape(ROWS, WIDTH)
            low, high = tl.split(encode_e2m1(y).reshape(ROWS, WIDTH // 2, 2))
            code = (low | (high << 4)).to(tl.uint8)
        c = tl.arange(0, WIDTH // 2)[None, :]
        tl.store(to + (FIRST // 2 + c), code, mask=keep & (c < COUNT // 2))


@triton.jit(do_not_specialize=["num_rows", "num_tokens", "num_pages", "num_requests", "num_phases"])
def cache_insert_kernel(
    x, gates, state, requests, last, weight, phases, phase_index, positions, floors, slots, latents, cache,
    num_rows, num_tokens, num_pages, num_requests, num_phases, eps, stride_x, stride_gates, stride_slot, stride_tail, tail_size, stride_latents, stride_phases,
    stride_page,
    PAIR: tl.constexpr, HAS_LAST: tl.constexpr, HAS_NORM: tl.constexpr, HAS_FLOOR: tl.constexpr,
    HAS_LATENTS: tl.constexpr, HAS_PHASE_INDEX: tl.constexpr, ROPE: tl.constexpr, KIND: tl.constexpr,
    CODED: tl.constexpr, TAIL: tl.constexpr, BITS: tl.constexpr, GROUP: tl.constexpr,
    SCALE: tl.constexpr, ROW_STRIDE: tl.constexpr, TAIL_AT: tl.constexpr, SCALE_STRIDE: tl.constexpr,
    SCALES_AT: tl.constexpr, PAGE: tl.constexpr, NATIVE: tl.constexpr, FUSED: tl.constexpr, ROWS: tl.constexpr,
    ALIGNED: tl.constexpr, PAIRS: tl.constexpr,
):  # fmt: skip
    """Writes the rows that have a slot; see the launcher for the arguments.

    An index outside of what it points into is none: no memory is touched there.
    """
    r = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    inside = r < num_rows
    slot = tl.load(slots + r, mask=inside, other=-1).to(tl.int64)
    token = r
    if HAS_LAST:
        token = tl.load(last + r, mask=inside, other=-1).to(tl.int64)
    read = inside & (token >= 0) & (token < num_tokens)
    token = tl.where(read, token, 0)
    request = tl.zeros((ROWS,), tl.int64)
    place = request
    if PAIR:
        request = tl.load(requests + token, mask=read, other=-1).to(tl.int64)
        place = tl.load(positions + token, mask=read, other=-1).to(tl.int64)
        read = read & (request >= 0) & (request < num_requests) & (place >= 0)
        request = tl.where(read, request, 0)
        place = tl.where(read, place, 0)
    page_of_slot = slot // PAGE
    kept = read & (slot >= 0) & (page_of_slot < num_pages)
    if HAS_FLOOR:
        position = tl.load(positions + token, mask=read, other=0).to(tl.int64)
        kept = kept & (position >= tl.load(floors + token, mask=read, other=0).to(tl.int64))
    if not HAS_LATENTS:
        read = kept
    slot = tl.where(kept, slot, 0)
    page_of_slot = tl.where(kept, page_of_slot, 0)
    at = (token * stride_x)[:, None]
    before = at
    other_x = x
    other_gates = gates
    if PAIR:
        # The first token of a pair came just before in the batch, or waits in the ring of its request.
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
        if ALIGNED:
            # What a choice of two pointers is a multiple of, the compiler does not see.
            other_x = tl.multiple_of(other_x, [16, 16])
            other_gates = tl.multiple_of(other_gates, [16, 16])
        before = tl.zeros((ROWS, 1), tl.int64)
    gate_rows = gates
    if PAIR:
        gate_rows = gates + (token * (stride_gates - stride_x))[:, None]
    # The turned channels are a tile of their own, where no scale holds both turned and other channels.
    APART: tl.constexpr = TAIL if TAIL > 0 else (ROPE if ROPE % GROUP == 0 else 0)
    MAIN: tl.constexpr = CODED + TAIL - APART
    WIDTH: tl.constexpr = triton.next_power_of_2(MAIN)
    c = tl.arange(0, WIDTH)[None, :]
    mask = read[:, None]
    if MAIN < WIDTH:
        mask = mask & (c < MAIN)
    v = _load(x, gate_rows, other_x, other_gates, at, before, c, mask, PAIR)
    if APART > 0:
        d = MAIN + tl.arange(0, APART)[None, :]
        tail = _load(x, gate_rows, other_x, other_gates, at, before, d, read[:, None], PAIR)
    if HAS_NORM:
        v = through(v, KIND, PAIRS)
        square = tl.sum(v * v, 1)
        if APART > 0:
            tail = through(tail, KIND, PAIRS)
            square += tl.sum(tail * tail, 1)
        # A latent of no token is 0, also without eps.
        factor = tl.where(read, tl.rsqrt(square / (CODED + TAIL) + eps), 0.0)[:, None]
        gain = tl.load(weight + c, mask=c < MAIN, other=0.0).to(tl.float32)
        v = through(v * factor * gain, KIND, PAIRS)
        if APART > 0:
            tail = through(tail * factor * tl.load(weight + d).to(tl.float32), KIND, PAIRS)
    if HAS_LATENTS:
        to = latents + (r * stride_latents)[:, None]
        tl.store(to + c, v.to(KIND), mask=inside[:, None] & (c < MAIN))
        if APART > 0:
            tl.store(to + d, tail.to(KIND), mask=inside[:, None])
    if ROPE > 0:
        turn = r
        if HAS_PHASE_INDEX:
            turn = tl.load(phase_index + r, mask=read, other=-1).to(tl.int64)
        turns = read & (turn >= 0) & (turn < num_phases)
        turn = (turn * stride_phases)[:, None]
        if APART > 0:
            tail = _rotate(tail, phases, turn, turns[:, None], APART, ROPE, KIND, PAIRS)
        else:
            v = _rotate(v, phases, turn, turns[:, None], WIDTH, ROPE, KIND, PAIRS)
    page = cache + page_of_slot * stride_page
    row = (slot % PAGE).to(tl.int32)
    to = (page + row * ROW_STRIDE)[:, None]
    scales_to = (page + (SCALES_AT + row * SCALE_STRIDE))[:, None]
    keep = kept[:, None]
    _write(v, to, scales_to, keep, 0, MAIN, TAIL > 0, BITS, GROUP, SCALE, NATIVE, FUSED, PAIRS)
    if TAIL > 0:
        bf16 = (to + TAIL_AT).to(tl.pointer_type(tl.bfloat16))
        tl.store(bf16 + tl.arange(0, TAIL)[None, :], tail.to(tl.bfloat16), mask=keep)
    elif APART > 0:
        _write(
            tail, to, scales_to, keep, MAIN, APART, False, BITS, GROUP, SCALE, NATIVE, FUSED, PAIRS
        )
