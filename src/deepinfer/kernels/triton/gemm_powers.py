"""Scales as the products of many tokens read them: those of a step side by side, fp32."""

from __future__ import annotations

import triton
import triton.language as tl

__all__ = ["spread_powers_kernel"]


@triton.jit
def _power(code):
    """2^(code - 127); 0 for byte 0."""
    return (code.to(tl.int32) << 23).to(tl.float32, bitcast=True)


@triton.jit(do_not_specialize=["M"])
def spread_powers_kernel(
    x_codes, w_codes, x_powers, w_powers, M, N, steps, x_programs, blocks, stride_xm, stride_wg, stride_wn,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """The powers of tokens, [steps, M, 4], and of blocks of 128 rows of weights, [steps, blocks, 4 groups, 4 parts].

    BLOCK rows of tokens, or BLOCK / 4 blocks of weights, and eight steps a program; the first `x_programs` programs
    have tokens. `blocks` are those of all groups of weights.
    """
    program = tl.program_id(0)
    step = tl.program_id(1) * 8 + tl.arange(0, 8)[:, None]
    at = tl.arange(0, 4 * BLOCK)[None, :]
    if program < x_programs:
        row = program * BLOCK + at // 4
        used = (row < M) & (step < steps)
        code = tl.load(x_codes + row.to(tl.int64) * stride_xm + step * 4 + at % 4, mask=used)
        tl.store(x_powers + (step.to(tl.int64) * M + row) * 4 + at % 4, _power(code), mask=used)
    else:
        block = (program - x_programs) * (BLOCK // 4) + at // 16
        each = tl.cdiv(N, 128)
        row = tl.minimum((block % each) * 4 + at % 4, (N - 1) // 32)
        used = (block < blocks) & (step < steps)
        of = (block // each).to(tl.int64) * stride_wg + row * stride_wn
        code = tl.load(w_codes + of + step * 4 + (at // 4) % 4, mask=used)
        tl.store(w_powers + (step.to(tl.int64) * blocks + block) * 16 + at % 16, _power(code), mask=used)  # fmt: skip
