"""What the kernels ask of their arguments, and the messages when they get something else."""

from __future__ import annotations

import importlib.util
import os
from functools import lru_cache

import torch
from torch import Tensor

from deepinfer.core.errors import ShapeError

__all__ = [
    "capability",
    "check_dtype",
    "check_float_dtype",
    "check_floats",
    "check_last_stride",
    "check_limit",
    "check_shape",
    "check_sizes",
    "gluon_refusal",
    "has_gluon",
    "has_triton",
    "interpreted",
    "triton_refusal",
]


def check_shape(name: str, x: Tensor, expected: tuple[int | None, ...], axes: str) -> None:
    """Refuses another shape.

    Args:
        name: Name of the argument.
        x: The argument, any shape.
        expected: Sizes, None for any.
        axes: Names of the axes, for the message.

    Raises:
        ShapeError: The shape differs.
    """
    shape = x.shape
    if shape == expected:  # most calls: compared without a loop
        return
    good = len(shape) == len(expected)
    if good:
        for size, found in zip(expected, shape, strict=True):
            if size is not None and size != found:
                good = False
    if not good:
        wanted = ", ".join("any" if e is None else str(e) for e in expected)
        raise ShapeError(
            f"{name} has shape {tuple(x.shape)}; it must be [{axes}] = [{wanted}].",
            argument=name, expected=expected, found=tuple(x.shape),
        )  # fmt: skip


def check_dtype(name: str, x: Tensor, *dtypes: torch.dtype) -> None:
    """Refuses other dtypes.

    Raises:
        ShapeError: The dtype is none of these.
    """
    if x.dtype not in dtypes:
        wanted = " or ".join(str(d).removeprefix("torch.") for d in dtypes)
        bytes_ = next((d for d in dtypes if x.itemsize == d.itemsize == 1), None)
        advice = "Cast it first."
        if bytes_ is not None and x.dtype != torch.bool:
            advice = f"If it holds such bytes already, look at them as .view({bytes_}): a cast would change them."
        raise ShapeError(
            f"{name} has dtype {str(x.dtype).removeprefix('torch.')}; it must be {wanted}. {advice}",
            argument=name, expected=dtypes, found=x.dtype,
        )  # fmt: skip


def check_float_dtype(name: str, dtype: torch.dtype) -> None:
    """Refuses a dtype of a result that would cut values to integers.

    Raises:
        ShapeError: The dtype is no float.
    """
    if not dtype.is_floating_point:
        raise ShapeError(
            f"{name} is {str(dtype).removeprefix('torch.')}; it must be a float dtype, as values are not whole numbers.",
            argument=name, expected="a float dtype", found=dtype,
        )  # fmt: skip


def check_floats(name: str, x: Tensor) -> None:
    """Refuses integers, and a number without axes.

    Raises:
        ShapeError: The dtype is no float, or there is no axis.
    """
    if not x.is_floating_point() or x.dim() == 0:
        raise ShapeError(
            f"{name} is {str(x.dtype).removeprefix('torch.')} of shape {tuple(x.shape)}; it must be floats with at least "
            "one axis. Cast or reshape it first.",
            argument=name, expected="floats, [..., channels]", found=(x.dtype, tuple(x.shape)),
        )  # fmt: skip


def check_last_stride(name: str, x: Tensor) -> None:
    """Refuses rows whose elements do not lie side by side; rows may lie apart.

    Raises:
        ShapeError: The last axis has another stride than 1.
    """
    if x.numel() > 0 and x.shape[-1] > 1 and x.stride(-1) != 1:
        raise ShapeError(
            f"{name} has stride {x.stride(-1)} along its last axis; it must be 1. Call .contiguous() on it.",
            argument=name, expected=1, found=x.stride(-1),
        )  # fmt: skip


def check_sizes(name: str, *sizes: int) -> None:
    """Refuses groups or blocks without a value.

    Raises:
        ShapeError: A size is below 1.
    """
    if min(sizes) < 1:
        raise ShapeError(
            f"{name} is {', '.join(map(str, sizes))}; scales stand for at least one value.",
            argument=name, expected="at least 1", found=sizes,
        )  # fmt: skip


def check_limit(limit: float | None) -> None:
    """Refuses a clamp whose lower end lies above the upper one.

    Raises:
        ShapeError: The limit is negative or NaN.
    """
    if limit is not None and not limit >= 0:
        raise ShapeError(
            f"limit is {limit}; it must be at least 0, or None for no clamp.",
            argument="limit", expected="at least 0", found=limit,
        )  # fmt: skip


def triton_refusal(*tensors: Tensor) -> str | None:
    """Why Triton kernels cannot serve these tensors, or None."""
    if not has_triton():
        return "triton is not installed"
    if interpreted():
        return None
    first = tensors[0]
    if not first.is_cuda:
        return f"the tensors are on {first.device}, and Triton's need cuda"
    index = first.get_device()
    for x in tensors:
        if x.get_device() != index:
            return f"the tensors are on {first.device} and {x.device}"
    return None


def gluon_refusal(*tensors: Tensor) -> str | None:
    """Why the kernels for Hopper cannot serve these tensors, or None."""
    if interpreted():
        return "Triton's interpreter has no bulk copies and warpgroup products"
    reason = triton_refusal(*tensors)
    if reason is not None:
        return reason
    major, minor = capability(tensors[0].device)
    if major != 9:
        return f"it is for compute capability 9.0, and this device has {major}.{minor}"
    return None if has_gluon() else "it needs Triton 3.6 or newer"


@lru_cache(maxsize=1)
def interpreted() -> bool:
    """Whether kernels run under Triton's interpreter, which Triton asks once too, when it is imported."""
    return os.environ.get("TRITON_INTERPRET") == "1"


@lru_cache(maxsize=64)
def capability(device: torch.device) -> tuple[int, int]:
    """Compute capability of a CUDA device, asked for once: each call of a kernel wants it."""
    return torch.cuda.get_device_capability(device)


@lru_cache(maxsize=1)
def has_triton() -> bool:
    """Whether Triton is installed."""
    return importlib.util.find_spec("triton") is not None


@lru_cache(maxsize=1)
def has_gluon() -> bool:
    """Whether the installed Triton has Gluon, the language of the kernels for Hopper."""
    from importlib.metadata import version

    major, minor = (int(part) for part in version("triton").split(".")[:2])
    return (major, minor) >= (3, 6)
