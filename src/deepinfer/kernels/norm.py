"""RMS norm of rows, alone, after the addition to a residual, or before rotation and a cast.

Sums are fp32, in one order for a width: the bits of a row do not depend on the other rows. A NaN stays in its row.
"""

from __future__ import annotations

import torch
from torch import Tensor

from deepinfer.core.errors import ShapeError
from deepinfer.kernels import contract
from deepinfer.kernels import quant as casts
from deepinfer.kernels.host import is_plain
from deepinfer.kernels.quant_backends import FLOATS, FORMATS, NAMES
from deepinfer.kernels.reference import norm as reference
from deepinfer.kernels.registry import Operation
from deepinfer.kernels.rope import check_phases

__all__ = ["fused_add_rms_norm", "rms_norm", "rms_norm_rope_quant"]

NORM = Operation("rms_norm", "Tensor x, Tensor weight, float eps, Tensor(a!) out")
ADD_NORM = Operation(
    "fused_add_rms_norm", "Tensor(a!) x, Tensor(b!) residual, Tensor weight, float eps"
)
NORM_ROPE_QUANT = Operation(
    "rms_norm_rope_quant",
    "Tensor x, Tensor? weight, float eps, Tensor? phases, Tensor? positions, int format, Tensor(a!) q, "
    "Tensor(b!) scale",
)
OPERATIONS = (NORM, ADD_NORM, NORM_ROPE_QUANT)

_WIDEST = 32768


def rms_norm(
    x: Tensor,
    weight: Tensor,
    eps: float = 1e-6,
    *,
    out: Tensor | None = None,
    backend: str | None = None,
) -> Tensor:
    """`x * rsqrt(mean(x^2) + eps) * weight` over the last axis, in fp32, then in the dtype of `x`.

    Args:
        x: Shape [..., channels], any float dtype; rows may lie apart.
        weight: Gains, shape [channels], any float dtype.
        eps: Added to the mean square.
        out: Where the result goes, shape and dtype of `x`, contiguous; it may be `x`. A new tensor when None.
        backend: "torch" or "triton"; None for the best that serves the call.

    Returns:
        Shape and dtype of `x`.

    Raises:
        ShapeError: A shape or dtype is not as above.
        UnsupportedHardware: The backend asked for cannot serve the call.
    """
    contract.check_floats("x", x)
    contract.check_shape("weight", weight, (x.shape[-1],), "channels")
    if out is not None and (
        out.shape != x.shape or out.dtype != x.dtype or not out.is_contiguous()
    ):
        raise ShapeError(
            f"out is {tuple(out.shape)} of {out.dtype}; it must be {tuple(x.shape)} of {x.dtype} and contiguous.",
            argument="out", expected=tuple(x.shape), found=tuple(out.shape),
        )  # fmt: skip
    if is_plain(x, backend):
        result = reference.rms_norm(x, weight, eps)
        return result if out is None else out.copy_(result)
    result = torch.empty_like(x, memory_format=torch.contiguous_format) if out is None else out
    if x.numel():
        rows = x if x.dim() == 2 else x.reshape(-1, x.shape[-1])
        NORM(backend, rows, weight, eps, result.view(rows.shape))
    return result


def fused_add_rms_norm(
    x: Tensor, residual: Tensor, weight: Tensor, eps: float = 1e-6, *, backend: str | None = None
) -> tuple[Tensor, Tensor]:
    """Adds `x` to `residual` in place, and norms the sum into `x`.

    The sum is made in fp32 and rounded to the dtype of `residual`; the norm sees the rounded sum.

    Args:
        x: Shape [..., channels]; contiguous, or two axes with rows apart. Becomes the normed sum.
        residual: Same shape and dtype, of other memory. Becomes the sum.
        weight: Gains, shape [channels], any float dtype.
        eps: Added to the mean square.
        backend: "torch" or "triton"; None for the best that serves the call.

    Returns:
        `x` and `residual`.

    Raises:
        ShapeError: A shape, dtype or stride is not as above.
        UnsupportedHardware: The backend asked for cannot serve the call.
    """
    contract.check_floats("x", x)
    contract.check_shape("weight", weight, (x.shape[-1],), "channels")
    contract.check_shape("residual", residual, tuple(x.shape), "as x")
    contract.check_dtype("residual", residual, x.dtype)
    if residual is x:
        raise ShapeError(
            "residual is x itself; both are written, so they must be two tensors. Call .clone() on one.",
            argument="residual", expected="another tensor than x", found="x",
        )  # fmt: skip
    if is_plain(x, backend):
        reference.fused_add_rms_norm(x, residual, weight, eps)
    elif x.numel():
        ADD_NORM(backend, _in_place(x, "x"), _in_place(residual, "residual"), weight, eps)
    return x, residual


def rms_norm_rope_quant(
    x: Tensor,
    weight: Tensor | None,
    eps: float = 1e-6,
    phases: Tensor | None = None,
    positions: Tensor | None = None,
    *,
    format: casts.CastFormat = "fp8",
    backend: str | None = None,
) -> tuple[Tensor, Tensor]:
    """RMS norm, rotation of the last channels, and cast, in one pass; values are rounded to the dtype of `x` in between.

    Args:
        x: Shape [tokens, heads, channels] or [tokens, channels], any float dtype; rows may lie apart.
        weight: Gains, shape [channels], or None for no norm.
        eps: Added to the mean square.
        phases: Cosine and sine of each pair, shape [places, rope_dim / 2, 2], fp32; None for no rotation.
        positions: Row of `phases` for each token, shape [tokens], int32 or int64; its number when None. A token of a row
            that `phases` does not have is not turned.
        format: Of the codes: "fp8" (scales per 32), "mxfp4" (per 32) or "nvfp4" (per 16).
        backend: "torch" or "triton"; None for the best that serves the call.

    Returns:
        Codes and scales, as the casts of `deepinfer.kernels.quant` give them for values of the shape of `x`.

    Raises:
        ShapeError: A shape, dtype or stride is not as above; the channels are no multiple of the group.
        UnsupportedHardware: The backend asked for cannot serve the call.
    """
    casts.check_format(format)
    contract.check_floats("x", x)
    if weight is not None:
        contract.check_shape("weight", weight, (x.shape[-1],), "channels")
    if phases is not None:
        check_phases(phases, positions, x)
    elif positions is not None:
        raise ShapeError(
            "positions are given without phases; give the cosines and sines that they pick, or neither.",
            argument="positions", expected=None, found=tuple(positions.shape),
        )  # fmt: skip
    group = 16 if format == "nvfp4" else 32
    if x.shape[-1] % group or x.dim() not in (2, 3):
        raise ShapeError(
            f"x has shape {tuple(x.shape)}; {format} needs [tokens, heads, channels] or [tokens, channels] with a multiple "
            f"of {group} channels.",
            argument="x", expected=f"[tokens, heads, multiple of {group}]", found=tuple(x.shape),
        )  # fmt: skip
    if is_plain(x, backend):
        return reference.rms_norm_rope_quant(x, weight, eps, phases, positions, format)
    q, scale = casts.empty_codes(x.shape, format, group, torch.float8_e8m0fnu, x.device)
    if q.numel():
        heads = x if x.dim() == 3 else x.unsqueeze(1)
        table = None if phases is None else phases.contiguous()
        NORM_ROPE_QUANT(backend, heads, weight, eps, table, positions, FORMATS[format], q, scale)
    return casts.views(q, scale, format)


def _in_place(x: Tensor, name: str) -> Tensor:
    """Rows of a tensor that is to be changed."""
    if x.dim() == 2:
        return x
    if not x.is_contiguous():
        raise ShapeError(
            f"{name} has strides {x.stride()}; with {x.dim()} axes it must be contiguous to be changed in place.",
            argument=name, expected="contiguous", found=tuple(x.stride()),
        )  # fmt: skip
    return x.view(-1, x.shape[-1])


def _always(*args: object) -> None:
    """The references serve every call."""


@NORM.register("torch", supports=_always)
def _norm_torch(x: Tensor, weight: Tensor, eps: float, out: Tensor) -> None:
    out.copy_(reference.rms_norm(x, weight, eps))


@ADD_NORM.register("torch", supports=_always)
def _add_norm_torch(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> None:
    reference.fused_add_rms_norm(x, residual, weight, eps)


@NORM_ROPE_QUANT.register("torch", supports=_always)
def _norm_rope_quant_torch(
    x: Tensor,
    weight: Tensor | None,
    eps: float,
    phases: Tensor | None,
    positions: Tensor | None,
    format: int,
    q: Tensor,
    scale: Tensor,
) -> None:
    codes, factors = reference.rms_norm_rope_quant(x, weight, eps, phases, positions, NAMES[format])
    q.copy_(codes.view(torch.uint8).view(q.shape))
    scale.copy_(factors.view(torch.uint8).view(scale.shape))


def _row_refusal(x: Tensor, *others: Tensor | None) -> str | None:
    given = [x, *(t for t in others if t is not None)]
    if x.shape[-1] > _WIDEST:
        return f"a row has {x.shape[-1]} channels, and it takes {_WIDEST}"
    for t in given:
        if t.dtype not in FLOATS and (t is x or t.is_floating_point()):
            return "it takes fp32, bf16 and fp16"
        if t.stride(-1) != 1 and x.shape[-1] > 1:
            return "the channels of a row do not lie side by side"
    return contract.triton_refusal(*given)


def _norm_refusal(x: Tensor, weight: Tensor, eps: float, out: Tensor) -> str | None:
    return _row_refusal(x, weight, out)


@NORM.register("triton", supports=_norm_refusal, priority=10)
def _norm_triton(x: Tensor, weight: Tensor, eps: float, out: Tensor) -> None:
    import deepinfer.kernels.triton.norm_launch as launch

    launch.rms_norm(x, None, weight, eps, out)


def _add_norm_refusal(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> str | None:
    return _row_refusal(x, residual, weight)


@ADD_NORM.register("triton", supports=_add_norm_refusal, priority=10)
def _add_norm_triton(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> None:
    import deepinfer.kernels.triton.norm_launch as launch

    launch.rms_norm(x, residual, weight, eps, x)


def _norm_rope_quant_refusal(
    x: Tensor,
    weight: Tensor | None,
    eps: float,
    phases: Tensor | None,
    positions: Tensor | None,
    format: int,
    q: Tensor,
    scale: Tensor,
) -> str | None:
    if x.shape[-1] > 8192:
        return f"a head has {x.shape[-1]} channels, and it takes 8192"
    return _row_refusal(x, weight) or contract.triton_refusal(
        x, *(t for t in (phases, positions, q, scale) if t is not None)
    )


@NORM_ROPE_QUANT.register("triton", supports=_norm_rope_quant_refusal, priority=10)
def _norm_rope_quant_triton(
    x: Tensor,
    weight: Tensor | None,
    eps: float,
    phases: Tensor | None,
    positions: Tensor | None,
    format: int,
    q: Tensor,
    scale: Tensor,
) -> None:
    import deepinfer.kernels.triton.norm_launch as launch

    places = None if positions is None else positions.contiguous()
    group = 16 if format == 3 else 32
    launch.norm_rope_cast(x, weight, eps, phases, places, q, scale, format, group)
