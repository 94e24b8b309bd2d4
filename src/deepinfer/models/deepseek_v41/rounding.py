"""Where DeepSeek-V4.1 rounds: the three levels as one object.

`"none"` rounds nothing. `"cache"` rounds what the caches hold and what is compared with it: window rows (FP8),
pool rows (FP4 with e4m3 scales), index keys and queries (MXFP4). `"full"` also rounds the inputs of the FP8 and
FP4 linears to FP8, which is what inference does.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal

import numpy as np
import torch
from torch import Tensor

from deepinfer.core.errors import ConfigError
from deepinfer.kernels import round_fp8, round_mxfp4, round_nvfp4
from deepinfer.models.deepseek_v41 import small_cpu

__all__ = ["Rounding", "RoundingLevel"]

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
        return _round(x, small_cpu.round_fp8, round_fp8)

    def window(self, x: Tensor) -> Tensor:
        """Window rows after rotation, shape [..., head_dim]."""
        if not self._cache:
            return x
        return _round(x, small_cpu.round_fp8, round_fp8)

    def pool(self, x: Tensor) -> Tensor:
        """Pool rows after rotation, shape [..., head_dim]."""
        if not self._cache:
            return x
        return _round(x, small_cpu.round_nvfp4, round_nvfp4)

    def index(self, x: Tensor) -> Tensor:
        """Index keys and queries after rotation, shape [..., index_head_dim]."""
        if not self._cache:
            return x
        return _round(x, small_cpu.round_mxfp4, round_mxfp4)

    def __repr__(self) -> str:
        return f"Rounding({self.level!r})"


def _round(
    x: Tensor, small: Callable[[np.ndarray], np.ndarray], large: Callable[[Tensor], Tensor]
) -> Tensor:
    return torch.from_numpy(small(x.numpy())) if small_cpu.fits(x) else large(x)
