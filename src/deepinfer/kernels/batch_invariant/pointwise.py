"""Elementwise functions and short sums that give an element the same bits wherever it stands.

Vector code of a CPU library treats the last few elements of an array by other instructions than the rest, and its
sigmoid then differs in the last bit. The functions here are made of exactly rounded operations and `exp`. Sums over
a short axis add one slice after the other.
"""

from __future__ import annotations

import torch
from torch import Tensor

__all__ = ["ordered_sum", "sigmoid", "silu", "softplus"]


def sigmoid(x: Tensor) -> Tensor:
    """Logistic function of `x`, any shape, fp32."""
    return torch.exp(-x).add_(1).reciprocal_()


def silu(x: Tensor) -> Tensor:
    """`x * sigmoid(x)` of `x`, any shape, fp32."""
    return x / torch.exp(-x).add_(1)


def softplus(x: Tensor) -> Tensor:
    """`log(1 + exp(x))` of `x`, any shape, fp32, without overflow."""
    return torch.log1p(torch.exp(-x.abs())).add_(x.clamp_min(0))


def ordered_sum(x: Tensor, dim: int) -> Tensor:
    """Sum over one axis, from its first slice to its last.

    Args:
        x: Values, any shape, any float dtype; the axis has at least one slice.
        dim: The axis; meant for a few slices, one addition each.

    Returns:
        The sum, shape of `x` without the axis, in the dtype of `x`.
    """
    first, *rest = x.unbind(dim)
    total = first.clone()
    for part in rest:
        total += part
    return total
