"""Checks of arrays that planners and calibrators share."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from deepinfer.core.errors import ShapeError

__all__ = ["matrix", "shape_error"]


def shape_error(argument: str, found: object, expected: str) -> ShapeError:
    """An error that says found and expected shapes.

    Args:
        argument: Name of the argument.
        found: Its shape.
        expected: The shape that it must have, with axis names.

    Returns:
        The error.
    """
    return ShapeError(
        f"{argument} has shape {found}; it must be {expected}.",
        argument=argument,
        found=found,
        expected=expected,
    )


def matrix(argument: str, values: Any, axes: str, dtype: Any = np.float64) -> npt.NDArray[Any]:
    """Two axes, or an error.

    Args:
        argument: Name of the argument.
        values: The values: rows, an array, or a tensor of any dtype on any device.
        axes: Names of the axes.
        dtype: Wanted dtype.

    Returns:
        The array.

    Raises:
        ShapeError: There are not two axes, or no numbers.
    """
    try:
        found = np.asarray(values, dtype)
    except (RuntimeError, TypeError, ValueError) as error:
        if not hasattr(values, "detach"):
            raise ShapeError(
                f"{argument} are no rows of numbers of one length ({error}); they must be {axes}: fill short rows up.",
                argument=argument,
                expected=axes,
            ) from error
        # A tensor whose dtype NumPy does not know, that has gradients, or lies on a device.
        found = np.asarray(values.detach().double().cpu(), dtype)
    if found.ndim != 2:
        raise shape_error(argument, found.shape, axes)
    return found
