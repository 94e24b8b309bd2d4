"""NumPy arrays from what callers have, and back; torch is used when the caller's array is its tensor, never imported."""

from __future__ import annotations

import sys
from typing import Any

import numpy as np
import numpy.typing as npt

from deepinfer.core import _checks as checks
from deepinfer.core.errors import ShapeError

# Sums of loads stay finite in single precision, which the published algorithm computes in.
_MOST = 1e30

FloatArray = npt.NDArray[np.float64]
IntArray = npt.NDArray[np.int64]


def is_tensor(value: object) -> bool:
    """Whether a value is a torch tensor."""
    torch = sys.modules.get("torch")
    return torch is not None and isinstance(value, torch.Tensor)


def to_numpy(name: str, value: Any) -> npt.NDArray[Any]:
    """A NumPy array with the values of an array, a tensor on any device, or nested lists."""
    if is_tensor(value):
        value = value.detach().cpu()
        return np.asarray(value.float() if value.is_floating_point() else value)
    try:
        return np.asarray(value)
    except ValueError as error:  # nested lists of unequal lengths
        raise ShapeError(
            f"{name} has rows of unequal lengths; give each layer as many numbers."
        ) from error


def loads(name: str, value: Any, num_dims: int = 2) -> FloatArray:
    """Checks an array of loads: from 0 to 1e30, and the given number of dimensions.

    Returns:
        float64.
    """
    array = to_numpy(name, value)
    if array.ndim != num_dims or not array.size or array.dtype.kind not in "iufb":
        raise ShapeError(
            f"{name} has shape {array.shape} and dtype {array.dtype}; it must be numbers of "
            f"{num_dims} dimensions, none of them empty.",
        )
    array = array.astype(np.float64)
    fits = (array >= 0) & (array <= _MOST)  # NaN is neither
    if not fits.all():
        worst = float(array[~fits].flat[0])
        raise ShapeError(
            f"{name} holds {checks.show(worst)}; loads must be finite and from 0 to {_MOST:g}."
        )
    return array


def indices(name: str, value: Any, shape: tuple[int, ...], high: int) -> IntArray:
    """Checks an array of indices below `high`, of a shape in which -1 stands for any length.

    Returns:
        int64.
    """
    array = to_numpy(name, value)
    fits = array.ndim == len(shape) and all(
        wanted in (-1, found) for wanted, found in zip(shape, array.shape, strict=True)
    )
    if not fits or not array.size or array.dtype.kind not in "iu":
        wanted_shape = ", ".join("any" if size < 0 else str(size) for size in shape)
        raise ShapeError(
            f"{name} has shape {array.shape} and dtype {array.dtype}; it must be integers of shape "
            f"[{wanted_shape}]."
        )
    if array.min() < 0 or array.max() >= high:
        raise ShapeError(
            f"{name} holds {array.min()} to {array.max()}; indices must be from 0 to {high - 1}."
        )
    return array.astype(np.int64)


def like(value: object, array: npt.NDArray[Any]) -> Any:
    """A result in the kind of the caller's array: a tensor on the CPU for a tensor, else the NumPy array."""
    return sys.modules["torch"].from_numpy(array) if is_tensor(value) else array
