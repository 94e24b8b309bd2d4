"""Index queries from their projection to what scores are made of, in one launch."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from deepinfer.kernels import contract
from deepinfer.kernels.triton.launches import launch
from deepinfer.kernels.triton.rounding import round_groups
from deepinfer.kernels.triton.small_floats import e4m3_codes, magnitudes, power_scale

__all__ = ["index_queries"]

_ROWS = 16


@triton.jit(do_not_specialize=["rows"])
def index_queries_kernel(
    x, phases, weights, codes, scaled, rows, heads, x_token, w_token, factor, CHANNELS: tl.constexpr,
    ROPE: tl.constexpr, HARDWARE: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """Rotates some heads, rounds them to MXFP4 and writes them as e4m3; the scale goes into the weight of the head."""
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    there = row < rows
    token, head = (row // heads).to(tl.int64), row % heads
    c = tl.arange(0, CHANNELS)[None, :]
    at = x + (token * x_token + head * CHANNELS)[:, None]
    kind = x.dtype.element_ty
    START: tl.constexpr = CHANNELS - ROPE
    inside = there[:, None] & (c < CHANNELS)
    turned = inside & (c >= START)
    v = tl.load(at + c, mask=inside, other=0.0).to(tl.float32)
    other = tl.load(at + (c ^ 1), mask=turned, other=0.0).to(tl.float32)
    pair = phases + (token * ROPE)[:, None] + ((c - START) // 2) * 2
    cos = tl.load(pair, mask=turned, other=1.0)
    sin = tl.load(pair + 1, mask=turned, other=0.0)
    sin = tl.where((c & 1) == 1, sin, -sin)
    v = tl.where(turned, (v * cos + other * sin).to(kind).to(tl.float32), v)
    v = tl.reshape(round_groups(tl.reshape(v, [ROWS * CHANNELS // 32, 32]), 2), [ROWS, CHANNELS])
    v = v.to(kind).to(tl.float32)
    exponent, inverse = power_scale(tl.max(magnitudes(v), axis=1), 448.0, 1e-4)
    to = codes + row.to(tl.int64)[:, None] * CHANNELS + c
    tl.store(to, e4m3_codes(v * inverse[:, None], HARDWARE), mask=inside)
    bits = tl.where(exponent == 255, 0x7FC00000, exponent << 23)
    weight = tl.load(weights + token * w_token + head, mask=there, other=0.0).to(tl.float32)
    tl.store(scaled + row, weight * factor * bits.to(tl.float32, bitcast=True), mask=there)


def index_queries(
    x: Tensor, phases: Tensor, weights: Tensor, factor: float
) -> tuple[Tensor, Tensor]:
    """Codes of index queries and weights; see `deepinfer.kernels.reference.index_queries.index_queries`."""
    tokens, heads, channels = x.shape
    codes = torch.empty(x.shape, dtype=torch.uint8, device=x.device)
    scaled = torch.empty(tokens, heads, dtype=torch.float32, device=x.device)
    if codes.numel():
        rows = tokens * heads
        hardware = x.is_cuda and contract.capability(x.device) >= (8, 9)
        launch(
            index_queries_kernel, triton.cdiv(rows, _ROWS),
            x, phases, weights, codes, scaled, rows, heads, x.stride(0), weights.stride(0), factor,
            CHANNELS=channels, ROPE=2 * phases.shape[1], HARDWARE=hardware, ROWS=_ROWS, num_warps=4,
        )  # fmt: skip
    return codes.view(torch.float8_e4m3fn), scaled
