"""Rows into a paged cache two values at a time, with the place of every value in registers set by hand.

For chips with packed bf16 arithmetic. A thread holds sixteen channels of a row, all of one group, so that pools, the norm, the
rotation of neighbours and most of the search for the largest need no other thread.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from deepinfer.kernels.triton.bf16_pairs import even, odd, pair_codes, pair_of, squares
from deepinfer.kernels.triton.norm_pairs import lanes

__all__ = ["cache_pairs_kernel"]


@gluon.jit
def _floats(words):
    """The two fp32 values of each int64."""
    low, high = words.to(gl.int32), (words >> 32).to(gl.int32)
    return low.to(gl.float32, bitcast=True), high.to(gl.float32, bitcast=True)


@gluon.jit
def _share(gate):
    """1 / (1 + e^-gate), by the approximations of the chip."""
    return gl.inline_asm_elementwise(
        "{ .reg .f32 t; mul.f32 t, $1, 0fBFB8AA3B; ex2.approx.ftz.f32 t, t; add.f32 t, t, 0f3F800000; "
        "rcp.approx.ftz.f32 $0, t; }", "=f,f", [gate], dtype=gl.float32, is_pure=True, pack=1,
    )  # fmt: skip


@gluon.jit
def _pooled(first, second, gate, other_gate):
    """Pools of pairs of values, each with its own gates: a softmax over the two."""
    a, b = _floats(first)
    c, d = _floats(second)
    e, f = _floats(gate)
    g, h = _floats(other_gate)
    left, right = _share(g - e), _share(h - f)
    return pair_of(gl.fma(left, a, (1.0 - left) * c), gl.fma(right, b, (1.0 - right) * d))


@gluon.jit(do_not_specialize=["num_rows", "num_tokens", "num_pages", "num_requests", "num_phases"])
def cache_pairs_kernel(
    x, gates, state, requests, last, gains, phases, phase_index, positions, floors, slots, latents, codes, scales,
    num_rows, num_tokens, num_pages, num_requests, num_phases, eps, stride_x, stride_gates, stride_slot, stride_tail,
    tail_size, stride_latents, stride_phases, stride_codes, stride_scales,
    WIDE: gl.constexpr, PAIR: gl.constexpr, HAS_LAST: gl.constexpr, HAS_NORM: gl.constexpr, HAS_FLOOR: gl.constexpr,
    HAS_LATENTS: gl.constexpr, HAS_PHASE_INDEX: gl.constexpr, ROPE: gl.constexpr, CHANNELS: gl.constexpr,
    FORMAT: gl.constexpr, GROUP: gl.constexpr, ROW_STRIDE: gl.constexpr, SCALE_STRIDE: gl.constexpr,
    SCALES_AT: gl.constexpr, PAGE: gl.constexpr, ROWS: gl.constexpr, EACH: gl.constexpr, EARLY: gl.constexpr,
    SHARED: gl.constexpr,
):  # fmt: skip
    """As `cache_insert_kernel`, for rows of a power of two of groups whose scales are bytes.

    Pairs of bf16 are int32, the even one in the low half; pairs of fp32 are int64. All distances count pairs, but those of the
    cache.

    Args:
        x: Rows: pairs of bf16, or of fp32 with WIDE.
        gates: Pairs of fp32, with PAIR.
        state: Pairs of fp32, with PAIR.
        requests: As there.
        last: As there.
        gains: Pairs of bf16.
        phases: Cosine and sine of a pair as int64, the cosine in the low half.
        phase_index: As there.
        positions: As there.
        floors: As there.
        slots: As there.
        latents: Pairs of bf16.
        codes: The cache: two codes of e4m3 as int16, or two of e2m1 as uint8.
        scales: The cache as bytes.
        num_rows: Rows.
        num_tokens: Tokens.
        num_pages: Pages.
        num_requests: Requests.
        num_phases: Entries of the phases.
        eps: Added to the mean square.
        stride_x: Distance of rows.
        stride_gates: Distance of gates.
        stride_slot: Distance of requests in the state.
        stride_tail: Distance of tokens in the state.
        tail_size: Tokens of a request in the state.
        stride_latents: Distance of latents.
        stride_phases: Distance of phases.
        stride_codes: Distance of pages, in codes as above.
        stride_scales: Distance of pages, in bytes.
        WIDE: Whether rows are fp32.
        PAIR: Whether rows are pools of two tokens.
        HAS_LAST: As there.
        HAS_NORM: As there.
        HAS_FLOOR: As there.
        HAS_LATENTS: As there.
        HAS_PHASE_INDEX: As there.
        ROPE: Rotated channels.
        CHANNELS: Channels.
        FORMAT: As in `small_floats`.
        GROUP: Channels of a group.
        ROW_STRIDE: Bytes from row to row.
        SCALE_STRIDE: Bytes from scales to scales.
        SCALES_AT: Where a page's scales begin.
        PAGE: Rows of a page.
        ROWS: Rows of a program.
        EACH: Pairs of a thread side by side.
        EARLY: Whether the next launch may begin while this one ends.
        SHARED: Whether turned channels, a power of two, are spread over all threads of a warp.
    """
    if EARLY:
        gl.inline_asm_elementwise(
            "griddepcontrol.launch_dependents; // $0",
            "=r",
            [],
            dtype=gl.int32,
            is_pure=False,
            pack=1,
        )
    PAIRS: gl.constexpr = GROUP // 2
    SPAN: gl.constexpr = CHANNELS // GROUP
    layout: gl.constexpr = lanes(EACH, SPAN, PAIRS, gl.num_warps())
    row_layout: gl.constexpr = gl.SliceLayout(1, gl.SliceLayout(2, layout))
    group = gl.arange(0, SPAN, layout=gl.SliceLayout(0, gl.SliceLayout(2, layout)))[None, :]
    c = gl.arange(0, PAIRS, layout=gl.SliceLayout(0, gl.SliceLayout(1, layout)))[None, None, :]
    at = (group * PAIRS)[:, :, None] + c
    r = (gl.program_id(0) * ROWS + gl.arange(0, ROWS, layout=row_layout)).to(gl.int64)
    inside = r < num_rows
    slot = gl.load(slots + r, mask=inside, other=-1).to(gl.int64)
    token = r
    if HAS_LAST:
        token = gl.load(last + r, mask=inside, other=-1).to(gl.int64)
    read = inside & (token >= 0) & (token < num_tokens)
    token = gl.where(read, token, 0)
    # All loads come first, each behind as few others as it can: rows without a slot or a request are read all the same.
    there = read[:, None][:, :, None] & (c < PAIRS)
    w = gl.load(x + (token * stride_x)[:, None][:, :, None] + at, mask=there, other=0)
    if PAIR:
        earlier = gl.maximum(token - 1, 0)
        gate = gl.load(
            gates + (token * stride_gates)[:, None][:, :, None] + at, mask=there, other=0
        )
        first = gl.load(x + (earlier * stride_x)[:, None][:, :, None] + at, mask=there, other=0)
        other_gate = gl.load(
            gates + (earlier * stride_gates)[:, None][:, :, None] + at, mask=there, other=0
        )
        request = gl.load(requests + token, mask=read, other=-1).to(gl.int64)
        place = gl.load(positions + token, mask=read, other=-1).to(gl.int64)
        before = gl.load(requests + earlier, mask=read, other=-1).to(gl.int64)
        place_before = gl.load(positions + earlier, mask=read, other=-1).to(gl.int64)
    if HAS_FLOOR:
        position = gl.load(positions + token, mask=read, other=0).to(gl.int64)
        floor = gl.load(floors + token, mask=read, other=0).to(gl.int64)
    if ROPE > 0:
        START: gl.constexpr = (CHANNELS - ROPE) // 2
        turn = r
        if HAS_PHASE_INDEX:
            turn = gl.load(phase_index + r, mask=read, other=-1).to(gl.int64)
        if SHARED:
            # A pair a thread: those at the end of a row are spread over the warp by way of shared memory.
            turns: gl.constexpr = gl.BlockedLayout([1, 1], [1, 32], [gl.num_warps(), 1], [1, 0])
            turn = gl.convert_layout(turn, gl.SliceLayout(1, turns))
            n = gl.arange(0, ROPE // 2, layout=gl.SliceLayout(0, turns))[None, :]
            r2 = gl.program_id(0) * ROWS + gl.arange(0, ROWS, layout=gl.SliceLayout(1, turns))
            turned = (r2 < num_rows) & (turn >= 0) & (turn < num_phases)
            turned = turned[:, None] & (n < ROPE // 2)
            phase = gl.load(phases + (turn * stride_phases)[:, None] + n, mask=turned, other=0)
        else:
            turned = (inside & (turn >= 0) & (turn < num_phases))[:, None][:, :, None]
            turned = turned & (at >= START)
            phase = phases + (turn * stride_phases - START)[:, None][:, :, None] + at
            phase = gl.load(phase, mask=turned, other=0)
    if HAS_NORM:
        g = gl.load(gains + at)
    if PAIR:
        read = read & (request >= 0) & (request < num_requests) & (place >= 0)
        request = gl.where(read, request, 0)
        place = gl.where(read, place, 0)
        # The first token of a pair came just before in the batch, or waits in the ring of its request.
        waits = read & ((before != request) | (place_before != place - 1))
        ring = request * stride_slot + ((place + tail_size - 1) % tail_size) * stride_tail
        ring = (state + ring)[:, None][:, :, None]
        waits = waits[:, None][:, :, None] & (c < PAIRS)
        first = gl.load(ring + at, mask=waits, other=first)
        other_gate = gl.load(ring + CHANNELS // 2 + at, mask=waits, other=other_gate)
        w = _pooled(first, w, gate, other_gate)
        w = gl.where(read[:, None][:, :, None], w, 0)
    elif WIDE:
        a, b = _floats(w)
        w = pair_of(a, b)
    # Quotients of powers of two are shifts without a sign; pages of one row keep it.
    slot = slot.to(gl.uint64)
    page = (slot // PAGE).to(gl.int64)
    kept = read & (page >= 0) & (page < num_pages)
    if HAS_FLOOR:
        kept = kept & (position >= floor)
    if HAS_NORM:
        square = gl.convert_layout(squares(w, EACH == 8), row_layout)
        # A latent of no token is 0, also without eps.
        factor = gl.where(read, gl.rsqrt(square / CHANNELS + eps), 0.0)[:, None][:, :, None]
        w = pair_of(even(w) * factor * even(g), odd(w) * factor * odd(g))
    if HAS_LATENTS:
        to = latents + (r * stride_latents)[:, None][:, :, None] + at
        gl.store(to, w, mask=inside[:, None][:, :, None] & (c < PAIRS))
    if ROPE > 0:
        cos, sin = _floats(phase)
        if SHARED:
            flat = gl.reshape(w, [ROWS, CHANNELS // 2])
            words = gl.allocate_shared_memory(
                gl.int32, [ROWS, CHANNELS // 2], gl.SwizzledSharedLayout(1, 1, 1, [1, 0])
            )
            words.store(flat)
            last_words = words.slice(START, ROPE // 2, dim=1)
            v = last_words.load(turns)
            a, b = even(v), odd(v)
            v = gl.where(turned, pair_of(a * cos - b * sin, a * sin + b * cos), v)
            last_words.store(v)
            w = gl.reshape(words.load(flat.type.layout), [ROWS, SPAN, PAIRS])
            w = gl.convert_layout(w, layout)
        else:
            a, b = even(w), odd(w)
            w = gl.where(turned, pair_of(a * cos - b * sin, a * sin + b * cos), w)
    word, byte = pair_codes(w, FORMAT)
    BYTES: gl.constexpr = 2 if FORMAT == 1 else 1
    page = gl.where(kept, page, 0)
    row = gl.where(kept, (slot % PAGE).to(gl.int64), 0)
    to = codes + (page * stride_codes + row * (ROW_STRIDE // BYTES))[:, None][:, :, None] + at
    gl.store(to, word, mask=kept[:, None][:, :, None] & (c < PAIRS))
    to = scales + (page * stride_scales + row * SCALE_STRIDE + SCALES_AT)[:, None] + group
    gl.store(to, gl.max(byte, axis=2), mask=kept[:, None] & (group < SPAN))
