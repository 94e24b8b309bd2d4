"""Products with fp32 weights in torch."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor

__all__ = ["wide_linear"]


def wide_linear(x: Tensor, weight: Tensor) -> Tensor:
    """Product of rows with an fp32 weight, summed in fp32.

    Args:
        x: Shape [tokens, in_channels], bf16 or fp32; rows may lie apart.
        weight: Shape [out_channels, in_channels], fp32, contiguous.

    Returns:
        Shape [tokens, out_channels], fp32. Kernels split a coefficient into three numbers of the dtype of `x`, which for bf16
        leaves less than 2^-24 of it out, and add in another order; that order hangs on the weight's shape alone.
    """
    return F.linear(x.float(), weight)
