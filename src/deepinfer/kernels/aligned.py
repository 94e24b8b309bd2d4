"""The cast to e4m3 by groups of 32 channels, brought to one scale for 128, as products that add up 128 channels read it.

Tensor cores of Hopper add up 128 channels in one go; with a scale for each 32 of them a sum ends four times as often. So
the four groups are cast as `per_token_cast_to_fp8` casts them, and then brought to the largest of their four powers of two:

    code'[k] = e4m3(code[k] * 2^(e[g(k)] - max e)),   scale' = 2^(max e)

A code keeps its value, but where that lies below 2^-6 of the scale: there it is rounded to steps of 2^-9 of it, to nearest,
ties to even, so by at most 2^-10 of the scale, where the cast rounds by up to 2^-4 of each value.
"""

from __future__ import annotations

import torch
from torch import Tensor

from deepinfer.core.errors import ShapeError
from deepinfer.kernels import contract
from deepinfer.kernels.host import is_plain
from deepinfer.kernels.quant_backends import refusal
from deepinfer.kernels.reference.aligned import align_groups
from deepinfer.kernels.registry import Operation

__all__ = ["per_token_cast_to_fp8_aligned"]

ALIGNED = Operation("per_token_cast_to_fp8_aligned", "Tensor x, Tensor(a!) q, Tensor(b!) scale")
OPERATIONS = (ALIGNED,)

_WIDE = 128


def per_token_cast_to_fp8_aligned(
    x: Tensor, *, backend: str | None = None
) -> tuple[Tensor, Tensor]:
    """Casts to e4m3 with one power of two per 32 channels, and brings each four groups to the largest of their powers.

    The result is what `fp8_gemm_nt` and the grouped products take as tokens with scales for 128 channels.

    Args:
        x: Values, shape [..., channels], any float dtype, channels a multiple of 128; rows may lie apart.
        backend: "torch" or "triton"; None for the best that serves the call.

    Returns:
        Codes, shape [..., channels], float8_e4m3fn; scales, shape [..., channels / 128], fp32, NaN where a value of the
        128 is not finite. A row's bits hang on the row alone.

    Raises:
        ShapeError: `x` is no float tensor, or its channels are not a multiple of 128.
        UnsupportedHardware: The backend asked for cannot serve the call.
    """
    contract.check_floats("x", x)
    channels = x.shape[-1]
    if channels % _WIDE:
        raise ShapeError(
            f"x has {channels} channels; four groups of 32 share a scale. Pad the last axis to a multiple of {_WIDE}.",
            argument="x", expected=f"[..., multiple of {_WIDE}]", found=tuple(x.shape),
        )  # fmt: skip
    q = torch.empty(x.shape, dtype=torch.float8_e4m3fn, device=x.device)
    scale = torch.empty((*x.shape[:-1], channels // _WIDE), dtype=torch.float32, device=x.device)
    if q.numel():
        rows, flat, scales = x, q, scale
        if x.dim() != 2:
            rows, flat = x.reshape(-1, channels), q.view(-1, channels)
            scales = scale.view(-1, channels // _WIDE)
        if is_plain(x, backend):
            align_groups(rows, flat, scales)
        else:
            ALIGNED(backend, rows, flat, scales)
    return q, scale


def _always(*args: object) -> None:
    """The reference serves every call."""


def _refusal(x: Tensor, q: Tensor, scale: Tensor) -> str | None:
    return refusal(x, 32, q, scale)


ALIGNED.register("torch", supports=_always)(align_groups)


@ALIGNED.register("triton", supports=_refusal, priority=10)
def _triton(x: Tensor, q: Tensor, scale: Tensor) -> None:
    import deepinfer.kernels.triton.moe_launch as launch

    launch.cast_aligned(x, q, scale)
