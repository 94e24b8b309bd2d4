"""Where DeepSeek-V4.1 rounds: the three levels as one object.

`"none"` rounds nothing. `"cache"` rounds what the caches hold and what is compared with it: window rows (FP8),
pool rows (FP4 with e4m3 scales), index keys and queries (MXFP4). `"full"` also rounds the inputs of the FP8 and
FP4 linears to FP8, which is what inference does.
"""

from __future__ import annotations

from typing import Literal

import numpy as np
import torch
from torch import Tensor

from deepinfer.core.errors import ConfigError
from deepinfer.kernels import round_fp8, round_mxfp4, round_nvfp4

__all__ = ["Rounding", "RoundingLevel", "round_small_fp8", "round_small_mxfp4"]

RoundingLevel = Literal["none", "cache", "full"]


class Rounding:
    """Rounding functions of one level; each takes and returns a tensor of the same shape and dtype.

    Attributes:
        level: "none", "cache" or "full".
    """

    def __init__(self, level: RoundingLevel) -> None:
        if level not in ("none", "cache", "full"):
            raise ConfigError(
                f"rounding is {level!r}; it must be 'none', 'cache' or 'full'.",
                field="rounding", value=level, limit="'none', 'cache' or 'full'",
            )  # fmt: skip
        self.level = level
        self._cache = level != "none"
        self._inputs = level == "full"

    def activation(self, x: Tensor) -> Tensor:
        """Input of an FP8 or FP4 linear, shape [..., channels]."""
        if not self._inputs:
            return x
        return round_small_fp8(x) if _is_small(x) else round_fp8(x)

    def window(self, x: Tensor) -> Tensor:
        """Window rows after rotation, shape [..., head_dim]."""
        if not self._cache:
            return x
        return round_small_fp8(x) if _is_small(x) else round_fp8(x)

    def pool(self, x: Tensor) -> Tensor:
        """Pool rows after rotation, shape [..., head_dim]."""
        return round_nvfp4(x) if self._cache else x

    def index(self, x: Tensor) -> Tensor:
        """Index keys and queries after rotation, shape [..., index_head_dim]."""
        if not self._cache:
            return x
        return round_small_mxfp4(x) if _is_small(x) else round_mxfp4(x)

    def __repr__(self) -> str:
        return f"Rounding({self.level!r})"


_SMALL = 4096
_EXPONENT = np.int32(0x7F800000)


def _is_small(x: Tensor) -> bool:
    """Whether calls, not values, are the cost: a few tokens on the CPU, outside autograd."""
    return (
        x.device.type == "cpu"
        and x.dtype == torch.float32
        and x.numel() <= _SMALL
        and not x.requires_grad
    )


def round_small_fp8(x: Tensor) -> Tensor:
    """`round_fp8` for a few tokens: the same bits from fewer and cheaper calls.

    Args:
        x: Values, shape [..., channels], fp32, on the CPU; channels divisible by 32.

    Returns:
        The rounded values, same shape.
    """
    return _round_small(x, 1e-4, carry=0x1FFFFF, floor=2.0**-14, magic=1.5 * 2**20)


def round_small_mxfp4(x: Tensor) -> Tensor:
    """`round_mxfp4` for a few tokens: the same bits from fewer and cheaper calls.

    Args:
        x: Values, shape [..., channels], fp32, on the CPU; channels divisible by 32.

    Returns:
        The rounded values, same shape.
    """
    return _round_small(x, 6 * 2.0**-126, carry=0x3FFFFF, floor=2.0**-2, magic=1.5 * 2**22)


def _round_small(x: Tensor, smallest: float, carry: int, floor: float, magic: float) -> Tensor:
    """Rounds groups of 32 to a few mantissa bits above a floor that hangs on the group's largest value.

    `carry` lifts the exponent where the largest value exceeds the format's largest mantissa, so the masked
    bits are the group's power of two; below `floor` times it, values have the fixed step of subnormals.
    Adding and taking away 1.5 * 2^23 steps rounds to nearest, ties to even.
    """
    groups = x.numpy().reshape(-1, 32)
    largest = np.maximum(np.abs(groups).max(-1, keepdims=True), np.float32(smallest))
    bound = ((largest.view(np.int32) + np.int32(carry)) & _EXPONENT).view(np.float32)
    anchor = np.maximum(
        (groups.view(np.int32) & _EXPONENT).view(np.float32), bound * np.float32(floor)
    )
    anchor *= np.float32(magic)
    rounded = groups + anchor
    rounded -= anchor
    return torch.from_numpy(rounded.reshape(x.shape))
