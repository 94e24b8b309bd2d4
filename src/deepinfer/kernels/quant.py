"""Casts to and from the byte layouts of DeepSeek-V4.1, and SwiGLU with its cast.

| format | codes | scales |
| --- | --- | --- |
| "fp8" | e4m3, one byte a value | e8m0 per group of channels, or per block of a weight; fp32 on request |
| "mxfp4" | e2m1, two a byte, the even one in the low half | e8m0 per 32 channels |
| "nvfp4" | e2m1, two a byte | e4m3 per 16 channels |

Rounding is to nearest, ties to even; zeros keep their sign. A power-of-two scale is the smallest that is at least
max|x| / 448 (or / 6), found from the exponent bits, with max|x| at least 1e-4 (fp8), so that a group of zeros has a scale.
A group with a NaN or an infinity has a NaN scale (byte 255, or 0x7F for e4m3), so that all of it reads back as NaN.

Every group is computed alone: its bytes are the same on every device and in every batch. No function here has gradients.
"""

from __future__ import annotations

import math
from typing import Literal

import torch
from torch import Tensor
from torch.nn import functional as F

from deepinfer.core.errors import ShapeError
from deepinfer.kernels import contract
from deepinfer.kernels import quant_backends as backends
from deepinfer.kernels.host import is_plain
from deepinfer.kernels.reference import cast as reference
from deepinfer.kernels.reference import swiglu as swiglu_reference
from deepinfer.kernels.reference.cast import decode_ue8m0 as decode_ue8m0
from deepinfer.kernels.reference.cast import encode_ue8m0 as encode_ue8m0
from deepinfer.kernels.reference.quant import ceil_to_ue8m0 as ceil_to_ue8m0
from deepinfer.kernels.reference.swiglu import CastFormat as CastFormat

__all__ = [
    "CastFormat",
    "cast_back",
    "pack_ue8m0",
    "per_block_cast_to_fp8",
    "per_token_cast_to_fp4",
    "per_token_cast_to_fp8",
    "silu_and_mul",
    "silu_and_mul_quant",
]

OPERATIONS = (
    backends.PER_TOKEN_FP8,
    backends.PER_BLOCK_FP8,
    backends.PER_TOKEN_FP4,
    backends.CAST_BACK,
    backends.SWIGLU,
)

_E8M0 = torch.float8_e8m0fnu
_GROUPS = (32, 16, 8, 4, 2, 1)
_SCALES = (_E8M0, torch.uint8, torch.float8_e4m3fn, torch.float32, torch.bfloat16, torch.float16)


def per_token_cast_to_fp8(
    x: Tensor, group: int = 32, *, scale_dtype: torch.dtype = _E8M0, backend: str | None = None
) -> tuple[Tensor, Tensor]:
    """Casts to e4m3 with one power-of-two scale per `group` channels.

    Args:
        x: Values, shape [..., channels], any float dtype; the last group may be short.
        group: Channels that share a scale.
        scale_dtype: float8_e8m0fnu, or float32 for products that read fp32 scales; the values are the same.
        backend: "torch" or "triton"; None for the best that serves the call.

    Returns:
        Codes, shape [..., channels], float8_e4m3fn; scales, shape [..., ceil(channels / group)].

    Raises:
        ShapeError: `scale_dtype` is another one.
        UnsupportedHardware: The backend asked for cannot serve the call.
    """
    check_scale_dtype(scale_dtype)
    contract.check_floats("x", x)
    contract.check_sizes("group", group)
    if is_plain(x, backend):
        return swiglu_reference.cast_rows(x, "fp8", group, scale_dtype)
    rows = _rows(x)
    q, scale = empty_codes(x.shape, "fp8", group, scale_dtype, x.device)
    if q.numel():
        backends.PER_TOKEN_FP8(backend, rows, group, q.view(rows.shape), _flat(scale))
    return views(q, scale, "fp8")


def per_block_cast_to_fp8(
    w: Tensor,
    block: int | tuple[int, int] = 32,
    *,
    scale_dtype: torch.dtype = _E8M0,
    backend: str | None = None,
) -> tuple[Tensor, Tensor]:
    """Casts a weight to e4m3 with one power-of-two scale a block.

    Args:
        w: Weight, shape [..., N, K], any float dtype; the last blocks may be short.
        block: Rows and columns of a block, or one number for both.
        scale_dtype: float8_e8m0fnu, or float32 for products that read fp32 scales.
        backend: "torch" or "triton"; None for the best that serves the call.

    Returns:
        Codes, shape [..., N, K], float8_e4m3fn; scales, shape [..., ceil(N / rows), ceil(K / columns)].

    Raises:
        ShapeError: `w` has fewer than two axes, or `scale_dtype` is another one.
        UnsupportedHardware: The backend asked for cannot serve the call.
    """
    check_scale_dtype(scale_dtype)
    contract.check_floats("w", w)
    contract.check_sizes("block", *((block,) if isinstance(block, int) else block))
    if w.dim() < 2 or is_plain(w, backend):
        q, scale = reference.per_block_cast_to_fp8(w, block)
        return q, scale if scale_dtype == _E8M0 else decode_ue8m0(scale)
    rows, columns = (block, block) if isinstance(block, int) else block
    n, k = w.shape[-2:]
    batch = w if w.dim() == 3 else w.reshape(-1, n, k)
    q = torch.empty(batch.shape, dtype=torch.uint8, device=w.device)
    kind = torch.float32 if scale_dtype == torch.float32 else torch.uint8
    shape = (*w.shape[:-2], -(-n // rows), -(-k // columns))
    scale = torch.empty(shape, dtype=kind, device=w.device)
    if q.numel():
        backends.PER_BLOCK_FP8(
            backend, batch, rows, columns, q, scale.view(len(batch), *shape[-2:])
        )
    return views(q.view(w.shape), scale, "fp8")


def per_token_cast_to_fp4(
    x: Tensor, group: Literal[16, 32] = 32, *, backend: str | None = None
) -> tuple[Tensor, Tensor]:
    """Casts to packed e2m1: MXFP4 with e8m0 scales per 32 channels, or the KV pool's format with e4m3 scales per 16.

    Ties go to the even code, as hardware does: 0.75, 1.75 and 3.5 times the scale go up, 0.25, 1.25, 2.5 and 5 go down.

    Args:
        x: Values, shape [..., channels], any float dtype; channels divisible by `group`.
        group: 32 (e8m0 scales) or 16 (e4m3 scales).
        backend: "torch" or "triton"; None for the best that serves the call.

    Returns:
        Bytes, shape [..., channels / 2], uint8; scales, shape [..., channels / group], float8_e8m0fnu or float8_e4m3fn.

    Raises:
        ShapeError: `channels` is not a multiple of `group`, or `group` is neither 16 nor 32.
        UnsupportedHardware: The backend asked for cannot serve the call.
    """
    contract.check_floats("x", x)
    if group not in (16, 32) or x.shape[-1] % group or is_plain(x, backend):
        return reference.per_token_cast_to_fp4(x, group)  # or its error
    rows, format = _rows(x), backends.NAMES[2 if group == 32 else 3]
    q, scale = empty_codes(x.shape, format, group, _E8M0, x.device)
    if q.numel():
        backends.PER_TOKEN_FP4(backend, rows, group, _flat(q), _flat(scale))
    return views(q, scale, format)


def cast_back(
    q: Tensor,
    scale: Tensor,
    *,
    block: int | tuple[int, int] = (1, 32),
    dtype: torch.dtype = torch.float32,
    backend: str | None = None,
) -> Tensor:
    """Dequantises what one of the casts made.

    Args:
        q: Codes: float8_e4m3fn [..., K], or packed e2m1 as uint8 or int8 [..., K / 2].
        scale: One scale a block, shape [..., ceil(N / rows), ceil(K / columns)]; float8_e8m0fnu, uint8 (e8m0 bytes),
            float8_e4m3fn, or fp32. The axis N is the one before K; with one row a block it needs no such axis.
        block: Rows and columns that share a scale, or one number for both: 32 for dense weights, (1, 32) for Engram
            tables and MXFP4, (1, 16) for KV pool rows.
        dtype: Of the result, any float dtype; the product is made in fp32.
        backend: "torch" or "triton"; None for the best that serves the call.

    Returns:
        Values, shape [..., K]; NaN where the scale is NaN.

    Raises:
        ShapeError: The shapes of codes and scales do not fit together, or `q` has another dtype.
        UnsupportedHardware: The backend asked for cannot serve the call.
    """
    block = (block, block) if isinstance(block, int) else block
    contract.check_sizes("block", *block)
    contract.check_float_dtype("dtype", dtype)
    contract.check_dtype("scale", scale, *_SCALES)
    packed = q.dtype in (torch.uint8, torch.int8)
    known = packed or q.dtype == torch.float8_e4m3fn
    if not known or dtype not in backends.FLOATS or is_plain(q, backend):
        return reference.cast_back(q, scale, block=block, dtype=dtype)
    k = q.shape[-1] * (2 if packed else 1)
    n = q.shape[-2] if q.dim() > 1 else 1
    rows, columns = block[0] if q.dim() > 1 else 1, block[1]
    expected = [*q.shape[:-1], -(-k // columns)]
    if rows > 1:
        expected[-2] = -(-n // rows)
    if list(scale.shape) != expected:
        return reference.cast_back(q, scale, block=block, dtype=dtype)  # its error
    out = torch.empty((*q.shape[:-1], k), dtype=dtype, device=q.device)
    if out.numel():
        codes = q if q.dtype == torch.float8_e4m3fn else q.view(torch.uint8)
        codes = (codes if codes.is_contiguous() else codes.contiguous()).view(torch.uint8)
        # Matrices, so that a block of rows has its place; one byte a scale, unless it is wider.
        codes, values = codes.view(-1, n, codes.shape[-1]), out.view(-1, n, k)
        wide = scale.float() if scale.dtype.itemsize > 1 else scale.view(torch.uint8)
        backends.CAST_BACK(
            backend, codes, wide.contiguous(), rows, columns, scale.dtype == torch.float8_e4m3fn, values
        )  # fmt: skip
    return out


def pack_ue8m0(scale: Tensor) -> Tensor:
    """Four e8m0 scales in an int32, the first in the lowest byte, as matrix products of newer GPUs read them.

    For other libraries: the products of this one take the scales unpacked.

    Args:
        scale: Shape [..., groups], float8_e8m0fnu, or uint8 with the same bytes.

    Returns:
        Shape [..., ceil(groups / 4)], int32; bytes behind the last group are 0.

    Raises:
        ShapeError: `scale` has another dtype, or no groups.
    """
    contract.check_dtype("scale", scale, _E8M0, torch.uint8)
    if scale.dim() == 0 or not scale.shape[-1]:
        raise ShapeError(
            f"scale has shape {tuple(scale.shape)}; there must be at least one group to pack.",
            argument="scale", expected="[..., groups]", found=tuple(scale.shape),
        )  # fmt: skip
    bytes_ = scale.view(torch.uint8)
    missing = -scale.shape[-1] % 4
    padded = F.pad(bytes_, (0, missing)) if missing else bytes_.contiguous()
    return padded.view(torch.int32)


def silu_and_mul(
    x: Tensor,
    weights: Tensor | None = None,
    *,
    limit: float | None = None,
    backend: str | None = None,
) -> Tensor:
    """`silu(min(gate, limit)) * clamp(up, -limit, limit)` in fp32, times a weight a row.

    Args:
        x: Gates, then values: shape [..., 2 * channels], any float dtype; rows may lie apart.
        weights: Routing weights, shape [...], fp32, or None.
        limit: Clamp of both, at least 0; the gate has no lower limit. None for no clamp.
        backend: "torch" or "triton"; None for the best that serves the call.

    Returns:
        Shape [..., channels], contiguous, in the dtype of `x`. The exponential of the Triton kernel is good to a few
        units in the last place of fp32.

    Raises:
        ShapeError: `x` has an odd number of channels, or `weights` another shape or dtype.
        UnsupportedHardware: The backend asked for cannot serve the call.
    """
    _check_swiglu(x, weights)
    contract.check_limit(limit)
    if is_plain(x, backend):
        return swiglu_reference.silu_and_mul(x, weights, limit)
    out = x.new_empty((*x.shape[:-1], x.shape[-1] // 2))
    if out.numel():
        none = torch.empty(0, dtype=torch.uint8, device=x.device)
        most = math.inf if limit is None else limit
        group = next(group for group in _GROUPS if out.shape[-1] % group == 0)
        backends.SWIGLU(backend, _rows(x), _column(weights), most, 0, group, _flat(out), none)
    return out


def silu_and_mul_quant(
    x: Tensor,
    weights: Tensor | None = None,
    *,
    limit: float | None = None,
    format: CastFormat = "fp8",
    group: int = 32,
    scale_dtype: torch.dtype = _E8M0,
    backend: str | None = None,
) -> tuple[Tensor, Tensor]:
    """`silu_and_mul`, rounded to the dtype of `x`, and the cast of its rows, in one pass.

    Args:
        x: Gates, then values: shape [..., 2 * channels], any float dtype; rows may lie apart.
        weights: Routing weights, shape [...], fp32, or None.
        limit: Clamp of both, at least 0; the gate has no lower limit. None for no clamp.
        format: Of the codes.
        group: Channels that share a scale, for "fp8"; the FP4 formats have their own.
        scale_dtype: float8_e8m0fnu, or float32 for "fp8" and products that read fp32 scales.
        backend: "torch" or "triton"; None for the best that serves the call.

    Returns:
        Codes and scales as the casts give them.

    Raises:
        ShapeError: `x` has an odd number of channels, or `weights` another shape or dtype; the format is unknown or does
            not divide the channels.
        UnsupportedHardware: The backend asked for cannot serve the call.
    """
    _check_swiglu(x, weights)
    contract.check_limit(limit)
    check_scale_dtype(scale_dtype)
    check_format(format)
    contract.check_sizes("group", group)
    if is_plain(x, backend):
        return swiglu_reference.silu_and_mul_quant(x, weights, limit, format, group, scale_dtype)
    group = group if format == "fp8" else 32 if format == "mxfp4" else 16
    shape = (*x.shape[:-1], x.shape[-1] // 2)
    q, scale = empty_codes(shape, format, group, scale_dtype, x.device)
    if q.numel():
        most = math.inf if limit is None else limit
        kind = backends.FORMATS[format]
        backends.SWIGLU(
            backend, _rows(x), _column(weights), most, kind, group, _flat(q), _flat(scale)
        )
    return views(q, scale, format)


def check_scale_dtype(dtype: torch.dtype) -> None:
    """Refuses scales that are neither e8m0 nor fp32."""
    if dtype not in (_E8M0, torch.float32):
        raise ShapeError(
            f"scale_dtype is {dtype}; power-of-two scales are float8_e8m0fnu or float32.",
            argument="scale_dtype", expected="float8_e8m0fnu or float32", found=dtype,
        )  # fmt: skip


def check_format(format: str) -> None:
    """Refuses a format that there is not."""
    if format not in backends.FORMATS:
        raise ShapeError(
            f"format is {format!r}; there are {', '.join(map(repr, backends.FORMATS))}.",
            argument="format", expected=tuple(backends.FORMATS), found=format,
        )  # fmt: skip


def empty_codes(
    shape: tuple[int, ...] | torch.Size,
    format: CastFormat,
    group: int,
    scale_dtype: torch.dtype,
    device: torch.device,
) -> tuple[Tensor, Tensor]:
    """Room for codes and scales of values, as bytes (scales as fp32 when asked)."""
    channels = shape[-1]
    if format != "fp8" and channels % group:
        raise ShapeError(
            f"x has {channels} channels; groups of {group} need a multiple of {group}. Pad the last axis.",
            argument="x", expected=f"[..., multiple of {group}]", found=tuple(shape),
        )  # fmt: skip
    width = channels if format == "fp8" else channels // 2
    q = torch.empty((*shape[:-1], width), dtype=torch.uint8, device=device)
    kind = torch.float32 if scale_dtype == torch.float32 and format == "fp8" else torch.uint8
    return q, torch.empty((*shape[:-1], -(-channels // group)), dtype=kind, device=device)


def views(q: Tensor, scale: Tensor, format: CastFormat) -> tuple[Tensor, Tensor]:
    """Bytes as the dtypes that they stand for."""
    codes = q.view(torch.float8_e4m3fn) if format == "fp8" else q
    if scale.dtype == torch.float32:
        return codes, scale
    return codes, scale.view(torch.float8_e4m3fn if format == "nvfp4" else _E8M0)


def _rows(x: Tensor) -> Tensor:
    """Rows of a tensor, shape [rows, channels], without a copy where that is possible."""
    return x if x.dim() == 2 else x.reshape(-1, x.shape[-1])


def _flat(x: Tensor) -> Tensor:
    return x.view(-1, x.shape[-1])


def _column(weights: Tensor | None) -> Tensor | None:
    return None if weights is None else weights.reshape(-1).contiguous()


def _check_swiglu(x: Tensor, weights: Tensor | None) -> None:
    contract.check_floats("x", x)
    if x.shape[-1] % 2:
        raise ShapeError(
            f"x has {x.shape[-1]} channels; it must hold gates and as many values.",
            argument="x", expected="[..., 2 * channels]", found=tuple(x.shape),
        )  # fmt: skip
    if weights is not None:
        contract.check_dtype("weights", weights, torch.float32)
        contract.check_shape("weights", weights, tuple(x.shape[:-1]), "..., as x without channels")
