"""Tensors made of what users hand over."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from deepinfer.core import _checks as checks
from deepinfer.core.errors import ShapeError

__all__ = ["as_integers", "as_tensor", "check_within"]


def as_tensor(argument: str, values: Any) -> Tensor:
    """A tensor, or an error.

    Args:
        argument: Name of the argument.
        values: A tensor, an array, or numbers in lists.

    Returns:
        The tensor; a tensor is itself.

    Raises:
        ShapeError: It cannot be made one.
    """
    try:
        return torch.as_tensor(values)
    except (RuntimeError, TypeError, ValueError) as error:
        raise ShapeError(
            f"{argument} is {checks.show(values)}, of which no tensor can be made ({error}); give a tensor, an array or "
            "numbers.",
            argument=argument,
        ) from error


def as_integers(argument: str, values: Any) -> Tensor:
    """A tensor of integers, or an error.

    Args:
        argument: Name of the argument.
        values: A tensor, an array, or numbers in lists.

    Returns:
        The integers, int64.

    Raises:
        ShapeError: It cannot be made one, or there are fractions.
    """
    found = as_tensor(argument, values)
    whole = found.to(torch.int64)
    if found.is_floating_point() and not torch.equal(whole.to(found.dtype), found):
        raise ShapeError(f"{argument} holds fractions; give integers.", argument=argument)
    return whole


def check_within(argument: str, values: Tensor, low: int, high: int, what: str) -> None:
    """Refuses integers that are out of range.

    Args:
        argument: Name of the argument.
        values: Integers, at least one.
        low: The least.
        high: The most.
        what: What the most is.

    Raises:
        ShapeError: One is out of range.
    """
    least, most = int(values.min()), int(values.max())
    if least < low or most > high:
        found = least if least < low else most
        raise ShapeError(
            f"{argument} holds {found}; all must be from {low} to {high}, {what}.",
            argument=argument,
            found=found,
        )
