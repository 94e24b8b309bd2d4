"""Rotation of the last channels of heads by the positions of their tokens."""

from __future__ import annotations

import triton
import triton.language as tl

__all__ = ["rope_kernel"]


@triton.jit(do_not_specialize=["rows"])
def rope_kernel(
    x, phases, positions, out, rows, heads, x_token, x_head, out_token, out_head,
    CHANNELS: tl.constexpr, ROPE: tl.constexpr, BLOCK: tl.constexpr, REST: tl.constexpr,
    INVERSE: tl.constexpr, HAS_POSITIONS: tl.constexpr, COPY: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """Rotates the last ROPE channels of rows, and copies the others with COPY; a row is a head of a token."""
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)[:, None]
    there = row < rows
    token = (row // heads).to(tl.int64)
    head = (row % heads).to(tl.int64)
    place = token
    if HAS_POSITIONS:
        place = tl.load(positions + token, mask=there, other=0).to(tl.int64)
    kind = out.dtype.element_ty
    START: tl.constexpr = CHANNELS - ROPE
    start = x + token * x_token + head * x_head
    to = out + token * out_token + head * out_head
    c = tl.arange(0, BLOCK)[None, :]
    inside = there & (c < ROPE)
    v = tl.load(start + START + c, mask=inside, other=0.0).to(tl.float32)
    phase = tl.load(phases + place * ROPE + c, mask=inside, other=0.0)
    cos, sin = tl.split(tl.reshape(phase, [ROWS, BLOCK // 2, 2]))
    if INVERSE:
        sin = -sin
    even, odd = tl.split(tl.reshape(v, [ROWS, BLOCK // 2, 2]))
    left, right = even * cos - odd * sin, even * sin + odd * cos
    v = tl.reshape(tl.join(left, right), [ROWS, BLOCK])
    if COPY and START > 0:
        d = tl.arange(0, REST)[None, :]
        before = there & (d < START)
        tl.store(to + d, tl.load(start + d, mask=before, other=0.0).to(kind), mask=before)
    tl.store(to + START + c, v.to(kind), mask=inside)
