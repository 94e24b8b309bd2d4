"""Products of a few rows with fp32 weights, on tensor cores: bound by the reading of the weights.

A coefficient is split into three numbers of the rows' dtype where it is multiplied, so that memory is read once and holds
nothing twice. The channels are shared out among programs whose sums are added in their order.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from deepinfer.core.errors import ShapeError
from deepinfer.kernels import contract
from deepinfer.kernels.triton.launches import cdiv, launch, next_power_of_2

__all__ = ["WideTuning", "wide_linear", "wide_sums"]

_SUMMED = 256


@dataclass(frozen=True)
class WideTuning:
    """How the work is cut; but for `pieces` nothing of it changes the order of a sum.

    Attributes:
        channels: Input channels at once.
        pieces: Programs that share the input channels.
        tokens: Rows at once, at most: 16, 32 or 64; 128 spills before Hopper.
        stages: Reads in flight.
        num_warps: Warps of a program.
    """

    channels: int
    pieces: int
    tokens: int = 64
    stages: int = 4
    num_warps: int = 4


@triton.jit(do_not_specialize=["count"])
def wide_products_kernel(
    x, weight, sums, count, x_stride, span, outputs, channels, ROWS: tl.constexpr, TOKENS: tl.constexpr, BLOCK: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Sums over a piece of the channels: 64 outputs of some rows."""
    n = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    piece = tl.program_id(1)
    t = tl.program_id(2) * TOKENS + tl.arange(0, TOKENS)
    there, is_out = t < count, n < outputs
    at = weight + n[:, None] * channels
    rows = x + t[None, :].to(tl.int64) * x_stride
    kind = x.dtype.element_ty
    acc = tl.zeros([ROWS, TOKENS], tl.float32)
    first = piece * span
    for k in tl.range(first, min(first + span, channels), BLOCK, num_stages=STAGES):
        c = k + tl.arange(0, BLOCK)
        inside = c < channels
        w = tl.load(at + c[None, :], mask=is_out[:, None] & inside[None, :], other=0.0)
        values = tl.load(rows + c[:, None], mask=inside[:, None] & there[None, :], other=0.0)
        large = w.to(kind)
        rest = w - large.to(tl.float32)
        middle = rest.to(kind)
        small = (rest - middle.to(tl.float32)).to(kind)
        acc = tl.dot(small, values, acc, input_precision="ieee")
        acc = tl.dot(middle, values, acc, input_precision="ieee")
        acc = tl.dot(large, values, acc, input_precision="ieee")
        # One, always: the products end within their step, before the next one's parts take the registers that they read.
        acc *= tl.where(k < channels, 1.0, 0.0)
    to = sums + (piece.to(tl.int64) * count + t[None, :]) * outputs + n[:, None]
    tl.store(to, acc, mask=is_out[:, None] & there[None, :])


@triton.jit(do_not_specialize=["size"])
def wide_sums_kernel(sums, out, size, PIECES: tl.constexpr, BLOCK: tl.constexpr):
    """Adds the sums of the pieces, from the first to the last."""
    i = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    total = tl.zeros([BLOCK], tl.float32)
    for piece in tl.static_range(PIECES):
        total += tl.load(sums + piece * size.to(tl.int64) + i, mask=i < size, other=0.0)
    tl.store(out + i, total, mask=i < size)


def tuning_for(count: int, out_channels: int, channels: int, most_tokens: int = 64) -> WideTuning:
    """Sizes for a product; `pieces` follow from the weight alone."""
    tiles, steps = cdiv(out_channels, 64), cdiv(channels, 64)
    pieces = max(1, min(cdiv(128, tiles), steps))
    tokens = min(most_tokens, max(16, next_power_of_2(count)))
    return WideTuning(64, pieces, tokens)


def _most_tokens(x: Tensor) -> int:
    """Rows at once: twice as many where tensor cores read them from shared memory."""
    return 128 if x.is_cuda and contract.capability(x.device) >= (9, 0) else 64


def wide_linear(x: Tensor, weight: Tensor, tuning: WideTuning | None = None) -> Tensor:
    """Product with an fp32 weight; see `deepinfer.kernels.reference.wide_products.wide_linear`.

    Raises:
        ShapeError: Channels do not lie side by side, or the shapes or dtypes differ from those that it names.
    """
    if (
        weight.dtype != torch.float32 or weight.dim() != 2 or not weight.is_contiguous()
        or x.dim() != 2 or x.shape[1] != weight.shape[1] or (x.stride(1) != 1 and x.shape[1] > 1)
    ):  # fmt: skip
        raise ShapeError(
            f"x is {x.dtype} {tuple(x.shape)} with strides {x.stride()}, weight {weight.dtype} {tuple(weight.shape)}; they "
            "must be [tokens, in_channels] and contiguous fp32 [out_channels, in_channels]. Use the reference.",
            argument="weight", expected="[out_channels, in_channels], fp32", found=tuple(weight.shape),
        )  # fmt: skip
    count, (outputs, channels) = len(x), weight.shape
    out = torch.empty(count, outputs, dtype=torch.float32, device=x.device)
    if not out.numel():
        return out
    tuning = tuning or tuning_for(count, outputs, channels, _most_tokens(x))
    steps = cdiv(cdiv(channels, tuning.channels), tuning.pieces)
    span = steps * tuning.channels
    pieces = cdiv(channels, span)
    sums = (
        out
        if pieces == 1
        else torch.empty((pieces, *out.shape), dtype=out.dtype, device=out.device)
    )
    launch(
        wide_products_kernel, (cdiv(outputs, 64), pieces, cdiv(count, tuning.tokens)),
        x, weight, sums, count, x.stride(0), span, outputs, channels, ROWS=64,
        TOKENS=tuning.tokens, BLOCK=tuning.channels, STAGES=tuning.stages, num_warps=tuning.num_warps,
    )  # fmt: skip
    if pieces > 1:
        wide_sums(sums, out)
    return out


def wide_sums(sums: Tensor, out: Tensor) -> None:
    """Adds sums of pieces, shape [pieces, ...], to `out`, shape [...]; both fp32, contiguous."""
    size = out.numel()
    launch(
        wide_sums_kernel,
        cdiv(size, _SUMMED),
        sums,
        out,
        size,
        PIECES=len(sums),
        BLOCK=_SUMMED,
        num_warps=2,
    )
