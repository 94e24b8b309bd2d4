"""Products of a few rows of FP8 codes with FP8 weights, scaled for 32 channels: bound by the reading of the weights.

A weight of some thousand rows has too few tiles for all processors, and one with many channels is a long wait for each: the
channels are shared out among programs whose sums are added in their order.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from deepinfer.core.errors import ShapeError
from deepinfer.kernels.triton.wide_products import wide_sums

__all__ = ["CodeTuning", "code_linear"]

_STEP = 128
_ROWS = 64


@dataclass(frozen=True)
class CodeTuning:
    """How the work is cut; but for `pieces` nothing of it changes the order of a sum.

    Attributes:
        pieces: Programs that share the input channels.
        tokens: Rows at once, at most: 16, 32 or 64.
        stages: Reads of 128 channels in flight.
    """

    pieces: int
    tokens: int = 64
    stages: int = 4


@triton.jit
def _power(codes, at: tl.constexpr):
    """2^(code - 127) of one of four e8m0 bytes; 0 for byte 0."""
    return (((codes >> (8 * at)) & 255) << 23).to(tl.float32, bitcast=True)


@triton.jit(do_not_specialize=["count"])
def code_products_kernel(
    x, x_scale, weight, w_scale, sums, count, x_stride, xs_stride, ws_stride, span, outputs,
    channels, ROWS: tl.constexpr, TOKENS: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Sums over a piece of the channels: 64 outputs of some rows."""
    n = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    piece = tl.program_id(1)
    t = tl.program_id(2) * TOKENS + tl.arange(0, TOKENS)
    there, is_out = t < count, n < outputs
    c = tl.arange(0, 32)
    at = weight + n[:, None] * channels + c[None, :]
    rows = x + t[None, :].to(tl.int64) * x_stride + c[:, None]
    first = piece * span
    last = min(first + span, channels)
    w_at = w_scale + (n // 32) * ws_stride
    x_at = x_scale + t * xs_stride
    w_next = tl.load(w_at + first // 128, mask=is_out, other=0)
    x_next = tl.load(x_at + first // 128, mask=there, other=0)
    acc = tl.zeros([ROWS, TOKENS], tl.float32)
    for k in tl.range(first, last, 128, num_stages=STAGES):
        w_codes, x_codes = w_next, x_next
        more = k + 128 < last
        w_next = tl.load(w_at + k // 128 + 1, mask=is_out & more, other=0)
        x_next = tl.load(x_at + k // 128 + 1, mask=there & more, other=0)
        for j in tl.static_range(4):
            a = tl.load(at + (k + 32 * j), mask=is_out[:, None], other=0.0)
            b = tl.load(rows + (k + 32 * j), mask=there[None, :], other=0.0)
            scale = _power(w_codes, j)[:, None] * _power(x_codes, j)[None, :]
            acc += tl.dot(a, b) * scale
    to = sums + (piece.to(tl.int64) * count + t[None, :]) * outputs + n[:, None]
    tl.store(to, acc.to(sums.dtype.element_ty), mask=is_out[:, None] & there[None, :])


def tuning_for(count: int, out_channels: int, channels: int) -> CodeTuning:
    """Sizes for a product; `pieces` follow from the weight alone."""
    tiles, steps = triton.cdiv(out_channels, _ROWS), channels // _STEP
    pieces = max(1, min(triton.cdiv(264, tiles), steps // 4))
    return CodeTuning(pieces, min(64, max(16, triton.next_power_of_2(count))))


def code_linear(
    x: tuple[Tensor, Tensor],
    weight: tuple[Tensor, Tensor],
    out: Tensor,
    tuning: CodeTuning | None = None,
) -> Tensor:
    """Product of codes with the codes of a weight.

    Args:
        x: Codes, shape [tokens, channels], e4m3, and their powers of two, [tokens, channels / 32], e8m0; rows contiguous.
        weight: Codes, shape [out_channels, channels], e4m3 or uint8, contiguous, and powers, [out_channels / 32, channels / 32], e8m0
            or uint8. Channels are a multiple of 128.
        out: Shape [tokens, out_channels], bf16 or fp32, contiguous, written and returned.
        tuning: Sizes; None for those that follow from the shapes.

    Raises:
        ShapeError: Channels are no multiple of 128, or rows do not lie as above.
    """
    (codes, powers), (w_codes, w_powers) = x, weight
    count, channels = codes.shape
    outputs = len(w_codes)
    if (
        channels % _STEP
        or codes.stride(1) != 1
        or not (w_codes.is_contiguous() and out.is_contiguous())
    ):
        raise ShapeError(
            f"x is {tuple(codes.shape)} with strides {codes.stride()}; channels must be a multiple of {_STEP}, side by side, "
            "weight and out contiguous. Use fp8_gemm_nt.",
            argument="x", expected=f"multiple of {_STEP}", found=channels,
        )  # fmt: skip
    if not out.numel():
        return out
    tuning = tuning or tuning_for(count, outputs, channels)
    span = triton.cdiv(channels // _STEP, tuning.pieces) * _STEP
    pieces = triton.cdiv(channels, span)
    sums = out
    if pieces > 1:
        sums = torch.empty((pieces, *out.shape), dtype=torch.float32, device=out.device)
    if w_codes.dtype == torch.uint8:
        w_codes = w_codes.view(torch.float8_e4m3fn)
    words = [p.view(torch.uint8).view(torch.int32) for p in (powers, w_powers)]
    grid = triton.cdiv(outputs, _ROWS), pieces, triton.cdiv(count, tuning.tokens)
    code_products_kernel[grid](
        codes, words[0], w_codes, words[1], sums, count, codes.stride(0),
        words[0].stride(0), words[1].stride(0), span, outputs, channels, ROWS=_ROWS,
        TOKENS=tuning.tokens, STAGES=tuning.stages, num_warps=4,
    )  # fmt: skip
    if pieces > 1:
        wide_sums(sums, out)
    return out
