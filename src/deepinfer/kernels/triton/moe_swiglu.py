"""SwiGLU of the rows of pairs between the two products of experts, weighted and cast; other places are not touched."""

from __future__ import annotations

import triton
import triton.language as tl

from deepinfer.kernels.triton.aligned_groups import write_aligned
from deepinfer.kernels.triton.small_floats import through, write_groups
from deepinfer.kernels.triton.swiglu_cast import swiglu_value

__all__ = ["swiglu_pairs_kernel"]


@triton.jit(do_not_specialize=["total"])
def swiglu_pairs_kernel(
    x,
    topk_weights,
    places,
    q,
    scale,
    total,
    x_row,
    limit,
    CHANNELS: tl.constexpr,
    HAS_LIMIT: tl.constexpr,
    MODE: tl.constexpr,
    CAST: tl.constexpr,
    ALIGNED: tl.constexpr,
    SCALE_FP32: tl.constexpr,
    HARDWARE: tl.constexpr,
    GROUPS: tl.constexpr,
    GROUP: tl.constexpr,
):
    """Some groups of channels of the pairs, counted through pair by pair; ALIGNED: one fp32 scale for four groups of 32."""
    EACH: tl.constexpr = CHANNELS // GROUP
    f = tl.program_id(0) * GROUPS + tl.arange(0, GROUPS)
    there = f < total
    pair = f // EACH
    at = f % EACH
    row = tl.load(places + pair, mask=there, other=-1).to(tl.int64)
    there = row >= 0
    c = tl.arange(0, GROUP)[None, :]
    inside = there[:, None] & (c < GROUP)
    start = (x + row * x_row + at * GROUP)[:, None] + c
    gate = tl.load(start, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(start + CHANNELS, mask=inside, other=0.0).to(tl.float32)
    v = swiglu_value(gate, up, limit, HAS_LIMIT, MODE)
    v = v * tl.load(topk_weights + pair, mask=there, other=0.0)[:, None]
    to = q + row * CHANNELS + at * GROUP
    if CAST:
        v = through(v, x.dtype.element_ty, HARDWARE)
    if ALIGNED:
        of_four = tl.program_id(0) * (GROUPS // 4) + tl.arange(0, GROUPS // 4)
        FOURS: tl.constexpr = EACH // 4
        rows = tl.load(places + of_four // FOURS, mask=of_four < total // 4, other=-1).to(tl.int64)
        to_scale = scale + rows * FOURS + of_four % FOURS
        write_aligned(v, to, to_scale, there, rows >= 0, HARDWARE, GROUPS)
    elif CAST:
        narrow: tl.constexpr = x.dtype.element_ty != tl.float32
        write_groups(
            v,
            to,
            scale + row * EACH + at,
            there,
            inside,
            1,
            SCALE_FP32,
            HARDWARE,
            narrow,
            GROUPS,
            GROUP,
        )
    else:
        tl.store(to[:, None] + c, v.to(q.dtype.element_ty), mask=inside)
