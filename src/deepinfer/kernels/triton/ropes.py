"""Rotation of the last channels of heads by the positions of their tokens."""

from __future__ import annotations

import triton
import triton.language as tl

__all__ = ["rope_kernel"]


@triton.jit(do_not_specialize=["rows", "places"])
def rope_kernel(
    x, phases, positions, out, rows, places, heads, x_token, x_head, out_token, out_head,
    CHANNELS: tl.constexpr, ROPE: tl.constexpr, BLOCK: tl.constexpr, REST: tl.constexpr,
    INVERSE: tl.constexpr, HAS_POSITIONS: tl.constexpr, COPY: tl.constexpr, ROWS: tl.constexpr,
    ALIKE: tl.constexpr,
):  # fmt: skip
    """Rotates the last ROPE channels of rows, and copies the others with COPY; a row is a head of a token.

    A place that the table does not have turns nothing. ALIKE: the rows of a program are heads of one token.
    """
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)[:, None]
    there = row < rows
    if ALIKE:
        token = tl.program_id(0) * ROWS // heads
        head = (row - token * heads).to(tl.int64)
        token = token.to(tl.int64)
        turned = token >= 0
    else:
        token = (row // heads).to(tl.int64)
        head = (row % heads).to(tl.int64)
        turned = there
    place = token
    if HAS_POSITIONS:
        place = tl.load(positions + token, mask=turned, other=-1).to(tl.int64)
        turned = (place >= 0) & (place < places)
    kind = out.dtype.element_ty
    START: tl.constexpr = CHANNELS - ROPE
    start = x + token * x_token + head * x_head
    to = out + token * out_token + head * out_head
    c = tl.arange(0, BLOCK)[None, :]
    inside = there & (c < ROPE)
    v = tl.load(start + START + c, mask=inside, other=0.0).to(tl.float32)
    phase = tl.load(phases + place * ROPE + c, mask=turned & (c < ROPE), other=0.0)
    cos, sin = tl.split(tl.reshape(phase, [1 if ALIKE else ROWS, BLOCK // 2, 2]))
    if INVERSE:
        sin = -sin
    even, odd = tl.split(tl.reshape(v, [ROWS, BLOCK // 2, 2]))
    left, right = even * cos - odd * sin, even * sin + odd * cos
    if HAS_POSITIONS:
        left, right = tl.where(turned, left, even), tl.where(turned, right, odd)
    v = tl.reshape(tl.join(left, right), [ROWS, BLOCK])
    if COPY and START > 0:
        d = tl.arange(0, REST)[None, :]
        before = there & (d < START)
        tl.store(to + d, tl.load(start + d, mask=before, other=0.0).to(kind), mask=before)
    tl.store(to + START + c, v.to(kind), mask=inside)
