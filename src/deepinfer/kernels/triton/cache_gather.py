"""Rows out of a paged cache, dequantised."""

from __future__ import annotations

import triton
import triton.language as tl

from deepinfer.kernels.triton.cache_codes import decode_e2m1, decode_e4m3, decode_e8m0

__all__ = ["cache_gather_kernel", "cache_state_kernel"]


@triton.jit(do_not_specialize=["num_rows", "num_pages"])
def cache_gather_kernel(
    cache, slots, out, num_rows, num_pages, stride_page, stride_out,
    CODED: tl.constexpr, WIDTH: tl.constexpr, TAIL: tl.constexpr, BITS: tl.constexpr, GROUP: tl.constexpr,
    SCALE: tl.constexpr, ROW_STRIDE: tl.constexpr, TAIL_AT: tl.constexpr, SCALE_STRIDE: tl.constexpr,
    SCALES_AT: tl.constexpr, PAGE: tl.constexpr, NATIVE: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """Writes every row; zeros where the slot is none of the cache."""
    r = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    inside = r < num_rows
    slot = tl.load(slots + r, mask=inside, other=-1).to(tl.int64)
    page_of_slot = slot // PAGE
    known = (slot >= 0) & (page_of_slot < num_pages)
    slot = tl.where(known, slot, 0)
    page = cache + tl.where(known, page_of_slot, 0) * stride_page
    read = known[:, None]
    row = (slot % PAGE).to(tl.int32)
    at = (page + row * ROW_STRIDE)[:, None]
    GROUPS: tl.constexpr = WIDTH // GROUP
    g = tl.arange(0, GROUPS)[None, :]
    scales = (page + (SCALES_AT + row * SCALE_STRIDE))[:, None]
    some = read & (g < CODED // GROUP)
    if SCALE == 2:
        factor = tl.load(scales.to(tl.pointer_type(tl.float32)) + g, mask=some, other=0.0)
    else:
        byte = tl.load(scales + g, mask=some, other=0).to(tl.int32)
        factor = decode_e4m3(byte, False) if SCALE == 1 else decode_e8m0(byte)
    c = tl.arange(0, WIDTH)[None, :]
    if BITS == 8:
        code = tl.load(at + c, mask=read & (c < CODED), other=0)
        v = decode_e4m3(code, NATIVE)
    else:
        code = tl.load(at + tl.arange(0, WIDTH // 2)[None, :], mask=read, other=0).to(tl.int32)
        v = tl.join(decode_e2m1(code & 15), decode_e2m1(code >> 4)).reshape(ROWS, WIDTH)
    v = (v.reshape(ROWS, GROUPS, GROUP) * factor[:, :, None]).reshape(ROWS, WIDTH)
    to = out + (r * stride_out)[:, None]
    kind = out.dtype.element_ty
    # Zeros times a padded scale may be NaN or negative; a row of no slot is +0.
    v = tl.where(read, v, 0.0)
    tl.store(to + c, v.to(kind), mask=inside[:, None] & (c < CODED))
    if TAIL > 0:
        d = tl.arange(0, TAIL)[None, :]
        tail = tl.load((at + TAIL_AT).to(tl.pointer_type(tl.bfloat16)) + d, mask=read, other=0.0)
        tl.store(to + CODED + d, tail.to(kind), mask=inside[:, None])


@triton.jit
def _wait():
    """Waits until the launch before has ended."""
    tl.inline_asm_elementwise(
        "griddepcontrol.wait; // $0", "=r", [], dtype=tl.int32, is_pure=False, pack=1
    )


@triton.jit(do_not_specialize=["num_tokens", "num_requests"])
def cache_state_kernel(
    x, gates, requests, positions, state, num_tokens, num_requests, stride_x, stride_gates, stride_slot, stride_tail, tail_size,
    CHANNELS: tl.constexpr, BLOCK: tl.constexpr, TOKENS: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """Keeps the last `tail_size` tokens of each request in its ring; most programs find nothing to keep.

    EARLY: the launch before, which reads the state, may not have ended when the program begins.
    """
    token = tl.program_id(0).to(tl.int64) * TOKENS + tl.arange(0, TOKENS)
    inside = token < num_tokens
    request = tl.load(requests + token, mask=inside, other=-1).to(tl.int64)
    later = token + tail_size
    after = tl.load(requests + later, mask=later < num_tokens, other=-1).to(tl.int64)
    kept = (request >= 0) & (request < num_requests) & (after != request)
    if tl.max(kept.to(tl.int32), 0) > 0:
        position = tl.load(positions + token, mask=kept, other=-1).to(tl.int64)
        kept = kept & (position >= 0)
        to = tl.where(kept, request * stride_slot + (position % tail_size) * stride_tail, 0)
        for start in range(0, CHANNELS, BLOCK):
            c = start + tl.arange(0, BLOCK)[None, :]
            mask = kept[:, None] & (c < CHANNELS)
            value = tl.load(x + (token * stride_x)[:, None] + c, mask=mask, other=0.0)
            gate = tl.load(gates + (token * stride_gates)[:, None] + c, mask=mask, other=0.0)
            if EARLY:
                # Only what is written has to wait: the launch before reads it.
                _wait()
            tl.store(state + to[:, None] + c, value, mask=mask)
            tl.store(state + to[:, None] + (CHANNELS + c), gate, mask=mask)
    elif EARLY:
        _wait()
