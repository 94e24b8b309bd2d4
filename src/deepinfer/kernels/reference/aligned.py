"""Casts to e4m3 by groups of 32 channels, brought to one scale for 128, in plain torch."""

from __future__ import annotations

import torch
from torch import Tensor

from deepinfer.kernels.reference.cast import decode_ue8m0, per_token_cast_to_fp8

__all__ = ["align_groups"]


def align_groups(x: Tensor, q: Tensor, scale: Tensor) -> None:
    """Casts to e4m3 with a power of two for 32 channels, then brings each four groups to the largest of their powers.

    A code keeps its value where that is a code of the larger power: but for values below 2^-6 of it, which are rounded to
    steps of 2^-9, to nearest, ties to even.

    Args:
        x: Shape [rows, channels], channels a multiple of 128.
        q: Codes, shape [rows, channels], float8_e4m3fn or uint8 for the same bytes; written.
        scale: Shape [rows, channels / 128], fp32, written; NaN where a group is not finite.
    """
    codes, powers = per_token_cast_to_fp8(x, 32)
    byte = powers.view(torch.uint8).int().unflatten(-1, (-1, 4))
    top = byte.amax(-1)
    scale.copy_(decode_ue8m0(top.to(torch.uint8)))
    lower = byte - top[..., None]
    down = torch.ldexp(torch.ones_like(lower, dtype=torch.float32), lower)
    values = codes.float().unflatten(-1, (-1, 4, 32)) * down[..., None]
    q.view(torch.uint8).copy_(values.flatten(-3).to(torch.float8_e4m3fn).view(torch.uint8))
