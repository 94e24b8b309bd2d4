"""Row-wise steps between the matrix products of a layer; one program a row."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from deepinfer.kernels.reference.rows import RoundingFormat
from deepinfer.kernels.triton.launches import cdiv, launch, next_power_of_2
from deepinfer.kernels.triton.rounding import FORMATS, round_groups

__all__ = ["norm_rope_round", "scatter_rows", "swiglu_round"]

_BLOCK = 1024


@triton.jit
def _scatter(table, index, rows, row_stride, CHANNELS: tl.constexpr, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    to = tl.load(index + row)
    c = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    kept = (c < CHANNELS) & (to >= 0)
    value = tl.load(rows + row * row_stride + c, mask=kept, other=0)
    tl.store(table + to * CHANNELS + c, value.to(table.dtype.element_ty), mask=kept)


def scatter_rows(table: Tensor, index: Tensor, rows: Tensor) -> None:
    """Writes rows of a table in place; see `deepinfer.kernels.reference.rows.scatter_rows`."""
    if not len(index):
        return
    rows = rows.reshape(len(index), -1)
    channels = rows.shape[1]
    block = min(_BLOCK, triton.next_power_of_2(channels))
    _scatter[(len(index), triton.cdiv(channels, block))](
        table, index, rows, rows.stride(0), CHANNELS=channels, BLOCK=block
    )


@triton.jit
def _norm_rope_round(
    x, weight, phases, out, index, x_token, x_head, out_token, out_head, heads, eps,
    CHANNELS: tl.constexpr, ROPE: tl.constexpr, INVERSE: tl.constexpr, HAS_NORM: tl.constexpr,
    HAS_INDEX: tl.constexpr, FORMAT: tl.constexpr, GROUPS: tl.constexpr, GROUP: tl.constexpr,
):  # fmt: skip
    program = tl.program_id(0)
    token, head = (program // heads).to(tl.int64), program % heads
    c = tl.arange(0, GROUPS)[:, None] * GROUP + tl.arange(0, GROUP)[None, :]
    inside = c < CHANNELS
    at = x + token * x_token + head * x_head
    kind = x.dtype.element_ty
    v = tl.load(at + c, mask=inside, other=0.0).to(tl.float32)
    factor = 1.0
    if HAS_NORM:
        factor = tl.rsqrt(tl.sum(tl.sum(v * v, axis=1), axis=0) / CHANNELS + eps)
        gain = tl.load(weight + c, mask=inside, other=0.0).to(tl.float32)
        v = (v * factor * gain).to(kind).to(tl.float32)
    if ROPE > 0:
        START: tl.constexpr = CHANNELS - ROPE
        turned = inside & (c >= START)
        other = tl.load(at + (c ^ 1), mask=turned, other=0.0).to(tl.float32)
        if HAS_NORM:
            gain = tl.load(weight + (c ^ 1), mask=turned, other=0.0).to(tl.float32)
            other = (other * factor * gain).to(kind).to(tl.float32)
        pair = phases + token * ROPE + ((c - START) // 2) * 2
        cos = tl.load(pair, mask=turned, other=1.0)
        sin = tl.load(pair + 1, mask=turned, other=0.0)
        if INVERSE:
            sin = -sin
        sin = tl.where((c & 1) == 1, sin, -sin)
        v = tl.where(turned, (v * cos + other * sin).to(kind).to(tl.float32), v)
        # The result may lie where the values do: every partner is read before any is overwritten.
        tl.debug_barrier()
    v = round_groups(v, FORMAT)
    to = token
    if HAS_INDEX:
        to = tl.load(index + token)
        inside = inside & (to >= 0)
    tl.store(out + to * out_token + head * out_head + c, v.to(out.dtype.element_ty), mask=inside)


def norm_rope_round(
    x: Tensor,
    weight: Tensor | None = None,
    eps: float = 0.0,
    phases: Tensor | None = None,
    *,
    inverse: bool = False,
    rounding: RoundingFormat = "none",
    out: Tensor | None = None,
    index: Tensor | None = None,
) -> Tensor:
    """RMS norm, rotation and rounding; see `deepinfer.kernels.reference.rows.norm_rope_round`."""
    tokens, heads, channels = x.shape
    if out is None:
        out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    if not tokens:
        return out
    group = 16 if rounding == "nvfp4" else 32
    groups = triton.next_power_of_2(triton.cdiv(channels, group))
    strides = (out.stride(0), 0) if index is not None else (out.stride(0), out.stride(1))
    launch(
        _norm_rope_round, tokens * heads,
        x, x if weight is None else weight, x if phases is None else phases, out,
        x if index is None else index, x.stride(0), x.stride(1), *strides, heads, eps,
        CHANNELS=channels, ROPE=0 if phases is None else 2 * phases.shape[1], INVERSE=inverse,
        HAS_NORM=weight is not None, HAS_INDEX=index is not None, FORMAT=FORMATS[rounding],
        GROUPS=groups, GROUP=group, num_warps=1 if groups * group <= 256 else 4,
    )  # fmt: skip
    return out


@triton.jit
def _swiglu_round(
    gate, up, weights, out, gate_row, up_row, limit, CHANNELS: tl.constexpr,
    HAS_WEIGHTS: tl.constexpr, FORMAT: tl.constexpr, GROUPS: tl.constexpr, GROUP: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    c = (tl.program_id(1) * GROUPS + tl.arange(0, GROUPS))[:, None] * GROUP
    c += tl.arange(0, GROUP)[None, :]
    inside = c < CHANNELS
    left = tl.load(gate + row * gate_row + c, mask=inside, other=0.0).to(tl.float32)
    right = tl.load(up + row * up_row + c, mask=inside, other=0.0).to(tl.float32)
    left = tl.minimum(left, limit, propagate_nan=tl.PropagateNan.ALL)
    right = tl.minimum(right, limit, propagate_nan=tl.PropagateNan.ALL)
    right = tl.maximum(right, -limit, propagate_nan=tl.PropagateNan.ALL)
    v = left / (1.0 + tl.exp(-left)) * right
    if HAS_WEIGHTS:
        v = v * tl.load(weights + row)
    v = round_groups(v.to(out.dtype.element_ty).to(tl.float32), FORMAT)
    tl.store(out + row * CHANNELS + c, v.to(out.dtype.element_ty), mask=inside)


def swiglu_round(
    gate: Tensor, up: Tensor, weights: Tensor | None, limit: float, *, rounding: RoundingFormat
) -> Tensor:
    """Clamped SwiGLU and rounding; see `deepinfer.kernels.reference.rows.swiglu_round`."""
    rows, channels = gate.shape
    out = torch.empty(rows, channels, dtype=gate.dtype, device=gate.device)
    if not rows:
        return out
    groups = min(16, next_power_of_2(cdiv(channels, 32)))
    launch(
        _swiglu_round, (rows, cdiv(channels, groups * 32), 1),
        gate, up, gate if weights is None else weights, out, gate.stride(0), up.stride(0), limit,
        CHANNELS=channels, HAS_WEIGHTS=weights is not None, FORMAT=FORMATS[rounding],
        GROUPS=groups, GROUP=32, num_warps=1 if groups <= 8 else 4,
    )  # fmt: skip
    return out
