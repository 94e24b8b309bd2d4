"""SwiGLU of two halves of a row, its clamp and weight, and the cast of the result; a program takes some groups."""

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra import libdevice

from deepinfer.kernels.triton.small_floats import through, write_groups

__all__ = ["swiglu_cast_kernel", "swiglu_value"]


@triton.jit
def swiglu_value(gate, up, limit, HAS_LIMIT: tl.constexpr, MODE: tl.constexpr):
    """`silu(gate) * up` in fp32.

    MODE 2 rounds every step as torch does; 1 has a fast exponential and quotient; 0 needs no library of the chip.
    """
    if HAS_LIMIT:
        gate = tl.minimum(gate, limit, propagate_nan=tl.PropagateNan.ALL)
        up = tl.minimum(up, limit, propagate_nan=tl.PropagateNan.ALL)
        up = tl.maximum(up, -limit, propagate_nan=tl.PropagateNan.ALL)
    if MODE == 2:
        return tl.math.div_rn(gate, 1.0 + libdevice.exp(-gate)) * up
    if MODE == 1:
        # gate / (1 + 2^(-gate * log2(e))), by the approximations of the chip; they flush what is tiny, and keep NaN.
        share = tl.inline_asm_elementwise(
            "{ .reg .f32 t; mul.f32 t, $1, 0fBFB8AA3B; ex2.approx.ftz.f32 t, t; "
            "add.f32 t, t, 0f3F800000; rcp.approx.ftz.f32 $0, t; }",
            "=f,f", [gate], dtype=tl.float32, is_pure=True, pack=1,
        )  # fmt: skip
        return gate * share * up
    return gate / (1.0 + tl.exp(-gate)) * up


@triton.jit(do_not_specialize=["groups"])
def swiglu_cast_kernel(
    x, weights, q, scale, groups, x_row, limit, CHANNELS: tl.constexpr, HAS_LIMIT: tl.constexpr,
    HAS_WEIGHTS: tl.constexpr, MODE: tl.constexpr, FORMAT: tl.constexpr,
    SCALE_FP32: tl.constexpr, HARDWARE: tl.constexpr, GROUPS: tl.constexpr, GROUP: tl.constexpr,
):  # fmt: skip
    """SwiGLU of rows of 2 * CHANNELS values, gate first. FORMAT 0 stores values in the dtype of `q`."""
    A_ROW: tl.constexpr = CHANNELS // GROUP
    f = tl.program_id(0) * GROUPS + tl.arange(0, GROUPS)
    there = f < groups
    row = (f // A_ROW).to(tl.int64)
    at = f % A_ROW
    c = tl.arange(0, GROUP)[None, :]
    inside = there[:, None] & (c < GROUP)
    start = (x + row * x_row + at * GROUP)[:, None] + c
    gate = tl.load(start, mask=inside, other=0.0)
    up = tl.load(start + CHANNELS, mask=inside, other=0.0)
    v = swiglu_value(gate.to(tl.float32), up.to(tl.float32), limit, HAS_LIMIT, MODE)
    if HAS_WEIGHTS:
        v = v * tl.load(weights + row, mask=there, other=0.0)[:, None]
    if FORMAT == 0:
        to = (q + row * CHANNELS + at * GROUP)[:, None] + c
        tl.store(to, v.to(q.dtype.element_ty), mask=inside)
    else:
        Q_ROW: tl.constexpr = CHANNELS if FORMAT == 1 else CHANNELS // 2
        Q_GROUP: tl.constexpr = GROUP if FORMAT == 1 else GROUP // 2
        write_groups(
            through(v, x.dtype.element_ty, HARDWARE), q + row * Q_ROW + at * Q_GROUP, scale + f, there, inside, FORMAT,
            SCALE_FP32, HARDWARE, x.dtype.element_ty == tl.bfloat16, GROUPS, GROUP,
        )  # fmt: skip
