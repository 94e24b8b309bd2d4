"""The casts and SwiGLU as operations: their references, and their kernels in Triton."""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

from deepinfer.kernels import contract
from deepinfer.kernels.reference import cast as reference
from deepinfer.kernels.reference import swiglu as swiglu_reference
from deepinfer.kernels.reference.cast import decode_ue8m0
from deepinfer.kernels.reference.swiglu import CastFormat
from deepinfer.kernels.registry import Operation

__all__ = ["FLOATS", "FORMATS", "NAMES", "refusal"]

FORMATS = {"fp8": 1, "mxfp4": 2, "nvfp4": 3}
NAMES: dict[int, CastFormat] = {1: "fp8", 2: "mxfp4", 3: "nvfp4"}
FLOATS = (torch.float32, torch.bfloat16, torch.float16)

PER_TOKEN_FP8 = Operation(
    "per_token_cast_to_fp8", "Tensor x, int group, Tensor(a!) q, Tensor(b!) scale"
)
PER_BLOCK_FP8 = Operation(
    "per_block_cast_to_fp8", "Tensor w, int rows, int columns, Tensor(a!) q, Tensor(b!) scale"
)
PER_TOKEN_FP4 = Operation(
    "per_token_cast_to_fp4", "Tensor x, int group, Tensor(a!) q, Tensor(b!) scale"
)
CAST_BACK = Operation(
    "cast_back", "Tensor q, Tensor scale, int rows, int columns, bool e4m3_scale, Tensor(a!) out"
)
SWIGLU = Operation(
    "silu_and_mul_quant",
    "Tensor x, Tensor? weights, float limit, int format, int group, Tensor(a!) q, Tensor(b!) scale",
)


def _always(*args: object) -> None:
    """The references serve every call."""


def _put(q: Tensor, scale: Tensor, codes: Tensor, factors: Tensor) -> None:
    """Writes what a reference made."""
    q.copy_(codes.view(torch.uint8).view(q.shape))
    if scale.dtype == torch.float32:
        scale.copy_(decode_ue8m0(factors).view(scale.shape))
    else:
        scale.copy_(factors.view(torch.uint8).view(scale.shape))


@PER_TOKEN_FP8.register("torch", supports=_always)
def _fp8_torch(x: Tensor, group: int, q: Tensor, scale: Tensor) -> None:
    _put(q, scale, *reference.per_token_cast_to_fp8(x, group))


@PER_BLOCK_FP8.register("torch", supports=_always)
def _blocks_torch(w: Tensor, rows: int, columns: int, q: Tensor, scale: Tensor) -> None:
    _put(q, scale, *reference.per_block_cast_to_fp8(w, (rows, columns)))


@PER_TOKEN_FP4.register("torch", supports=_always)
def _fp4_torch(x: Tensor, group: Literal[16, 32], q: Tensor, scale: Tensor) -> None:
    _put(q, scale, *reference.per_token_cast_to_fp4(x, group))


@CAST_BACK.register("torch", supports=_always)
def _back_torch(
    q: Tensor, scale: Tensor, rows: int, columns: int, e4m3_scale: bool, out: Tensor
) -> None:
    codes = q if q.shape[-1] != out.shape[-1] else q.view(torch.float8_e4m3fn)
    factors = scale.view(torch.float8_e4m3fn) if e4m3_scale else scale
    down = -(-out.shape[1] // rows)
    factors = factors.view(out.shape[0], down, -1)
    out.copy_(reference.cast_back(codes, factors, block=(rows, columns)))


@SWIGLU.register("torch", supports=_always)
def _swiglu_torch(
    x: Tensor,
    weights: Tensor | None,
    limit: float,
    format: int,
    group: int,
    q: Tensor,
    scale: Tensor,
) -> None:
    values = swiglu_reference.silu_and_mul(x, weights, limit)
    if format == 0:
        q.copy_(values)
    else:
        _put(q, scale, *swiglu_reference.cast_rows(values, NAMES[format], group))


def refusal(x: Tensor, group: int, *others: Tensor | None) -> str | None:
    """Why the Triton kernels cannot cast groups of these rows."""
    if x.dtype not in FLOATS:
        return f"the values are {x.dtype}, and it takes fp32, bf16 and fp16"
    if group & (group - 1) or not 2 <= group <= 1024:
        return f"a group of {group} is not a power of two in [2, 1024]"
    if x.stride(-1) != 1 and x.shape[-1] > 1:
        return "the channels of a row do not lie side by side"
    return contract.triton_refusal(x, *(t for t in others if t is not None))


def _groups_refusal(x: Tensor, group: int, q: Tensor, scale: Tensor) -> str | None:
    return refusal(x, group, q, scale)


@PER_TOKEN_FP8.register("triton", supports=_groups_refusal, priority=10)
def _fp8_triton(x: Tensor, group: int, q: Tensor, scale: Tensor) -> None:
    import deepinfer.kernels.triton.quant_launch as launch

    launch.cast_groups(x, q, scale, 1, group)


@PER_TOKEN_FP4.register("triton", supports=_groups_refusal, priority=10)
def _fp4_triton(x: Tensor, group: int, q: Tensor, scale: Tensor) -> None:
    import deepinfer.kernels.triton.quant_launch as launch

    launch.cast_groups(x, q, scale, 2 if group == 32 else 3, group)


def _blocks_refusal(w: Tensor, rows: int, columns: int, q: Tensor, scale: Tensor) -> str | None:
    if rows & (rows - 1) or rows * columns > 32768:
        return f"a block of {rows}x{columns} is not one of powers of two with at most 32,768 values"
    return refusal(w, columns, q, scale)


@PER_BLOCK_FP8.register("triton", supports=_blocks_refusal, priority=10)
def _blocks_triton(w: Tensor, rows: int, columns: int, q: Tensor, scale: Tensor) -> None:
    import deepinfer.kernels.triton.quant_launch as launch

    launch.cast_blocks(w, q, scale, rows, columns)


def _back_refusal(
    q: Tensor, scale: Tensor, rows: int, columns: int, e4m3_scale: bool, out: Tensor
) -> str | None:
    return refusal(out, columns, q, scale)


@CAST_BACK.register("triton", supports=_back_refusal, priority=10)
def _back_triton(
    q: Tensor, scale: Tensor, rows: int, columns: int, e4m3_scale: bool, out: Tensor
) -> None:
    import deepinfer.kernels.triton.quant_launch as launch

    n, k = out.shape[-2:]
    kind = 0 if scale.dtype == torch.float32 else 2 if e4m3_scale else 1
    packed = q.shape[-1] != k
    launch.cast_back(
        q.view(-1, q.shape[-1]), scale, out.view(-1, k), packed, kind, rows, columns, n
    )


def _swiglu_refusal(
    x: Tensor,
    weights: Tensor | None,
    limit: float,
    format: int,
    group: int,
    q: Tensor,
    scale: Tensor,
) -> str | None:
    if x.shape[1] // 2 % group:
        return f"{x.shape[1] // 2} channels are not a multiple of a group of {group}"
    return refusal(x, group, weights, q, scale)


@SWIGLU.register("triton", supports=_swiglu_refusal, priority=10)
def _swiglu_triton(
    x: Tensor,
    weights: Tensor | None,
    limit: float,
    format: int,
    group: int,
    q: Tensor,
    scale: Tensor,
) -> None:
    import deepinfer.kernels.triton.quant_launch as launch

    launch.swiglu_cast(x, weights, limit, q, scale, format, group)
