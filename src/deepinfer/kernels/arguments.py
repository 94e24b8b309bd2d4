"""What a public kernel says when its arguments make it fail: a typed error in the place of torch's or Triton's own.

The kernels check shapes, dtypes and strides before they run. What is left, and costs a call too much to look for, is found
here after the failure: tensors of several devices, without data or without strides, what is no tensor. Gradients are looked
for before, where torch would record them: no device has them, and a CPU would make some up.
"""

from __future__ import annotations

import functools
import importlib
import inspect
from collections.abc import Callable, Iterator, Mapping
from typing import Any, ParamSpec, TypeVar

import torch
from torch import Tensor

from deepinfer.core.errors import ConfigError, DeepInferError, ShapeError, UnsupportedHardware

__all__ = ["check_devices", "described", "refuse_gradients", "typed"]

P = ParamSpec("P")
R = TypeVar("R")

_RAW = (RuntimeError, TypeError, ValueError, LookupError, AttributeError, ArithmeticError)
# Failures of the device and not of the arguments; newer versions of torch have the second.
_DEVICE = (torch.OutOfMemoryError, getattr(torch, "AcceleratorError", torch.OutOfMemoryError))


_DETACHED = "be detached. Call .detach() on it, or the kernel under torch.no_grad()"


def typed(function: Callable[P, R]) -> Callable[P, R]:
    """A kernel that fails on its arguments with a `DeepInferError`, whose cause is the first error.

    Args:
        function: A public kernel, annotated.

    Returns:
        The same with the same signature. Traced code sees the kernel itself. Where gradients are recorded, tensors that
        require one are refused. A call that Python would refuse (an argument missing, or of a name that is none) raises
        Python's `TypeError`.
    """

    @functools.wraps(function)
    def call(*args: P.args, **kwargs: P.kwargs) -> R:
        if torch.compiler.is_compiling():
            return function(*args, **kwargs)
        backend = kwargs.get("backend")
        if backend is not None and backend not in ("torch", "triton"):
            # A call without rows would not look for it.
            registry = importlib.import_module("deepinfer.kernels.registry")
            registry.check_backend(backend)
        if torch.is_grad_enabled():
            for x in (*args, *kwargs.values()):
                if isinstance(x, Tensor):
                    if x.requires_grad:
                        raise _of_gradient(function, args, kwargs)
                elif isinstance(x, tuple):
                    for part in x:
                        if isinstance(part, Tensor) and part.requires_grad:
                            raise _of_gradient(function, args, kwargs)
        try:
            return function(*args, **kwargs)
        except Exception as error:
            if type(error).__module__.startswith("triton"):
                raise _of_triton(function.__name__, error) from error
            if isinstance(error, (DeepInferError, *_DEVICE)) or not isinstance(error, _RAW):
                raise
            try:
                given = inspect.signature(function).bind(*args, **kwargs).arguments
            except TypeError:
                raise error from None
            raise _refusal(function, given, error) from error

    return call


def _of_gradient(
    function: Callable[..., Any], args: tuple[object, ...], kwargs: Mapping[str, object]
) -> ShapeError:
    """The error for tensors that require a gradient."""
    given = inspect.signature(function).bind_partial(*args, **kwargs).arguments
    name = next(name for name, x in _leaves(given) if x.requires_grad)
    return _of_tensor(
        name,
        f"requires a gradient, and {function.__name__} has none",
        _DETACHED,
    )


def _of_triton(name: str, error: Exception) -> UnsupportedHardware:
    """The error for a kernel that Triton cannot compile or launch."""
    reason = str(error).strip().split("\n")[0]
    return UnsupportedHardware(
        f"Triton cannot serve this call of {name} on this device ({type(error).__name__}: {reason}). Call it under "
        "use_backend('torch'), and report the shapes.",
        needed=reason, found=type(error).__name__, fallback="use_backend('torch')",
    )  # fmt: skip


def check_devices(name: str, *values: object) -> None:
    """Refuses tensors of several devices.

    Args:
        name: Name of the kernel.
        values: Its arguments, in its order; what is no tensor is skipped.

    Raises:
        ShapeError: Two tensors are on different devices.
    """
    devices = {x.device for x in values if isinstance(x, Tensor)}
    if len(devices) > 1:
        found = " and ".join(sorted(map(str, devices)))
        raise ShapeError(
            f"{name} was given tensors on {found}; all must be on one device. Move them with .to().",
            argument="device", expected="one device", found=found,
        )  # fmt: skip


def refuse_gradients(name: str, *values: object) -> None:
    """Refuses tensors that require a gradient.

    Args:
        name: Name of the kernel.
        values: Its arguments; what is no tensor is skipped.

    Raises:
        ShapeError: A tensor requires a gradient.
    """
    for x in values:
        if isinstance(x, Tensor) and x.requires_grad:
            raise _of_tensor("a tensor", f"requires a gradient, and {name} has none", _DETACHED)


def described(x: object) -> str:
    """A value in few words: dtype, shape and device of a tensor."""
    if isinstance(x, Tensor):
        return f"{str(x.dtype).removeprefix('torch.')} {list(x.shape)} on {x.device}"
    if isinstance(x, (tuple, list)):
        return f"({', '.join(map(described, x))})"
    text = repr(x)
    return text if len(text) <= 60 else f"{text[:57]}..."


def _leaves(given: Mapping[str, object]) -> Iterator[tuple[str, Tensor]]:
    """The tensors among arguments, those of tuples by their numbers or names."""
    for name, value in given.items():
        if isinstance(value, Tensor):
            yield name, value
        elif isinstance(value, (tuple, list)):
            names = getattr(value, "_fields", range(len(value)))
            for part, x in zip(names, value, strict=True):
                if isinstance(x, Tensor):
                    yield f"{name}[{part}]" if isinstance(part, int) else f"{name}.{part}", x


def _refusal(
    function: Callable[..., Any], given: Mapping[str, object], error: Exception
) -> DeepInferError:
    """The error that says what is wrong with arguments on which a kernel failed."""
    for name, value in given.items():
        wanted = str(function.__annotations__.get(name, ""))
        found = _wrong_kind(name, value, wanted)
        if found is not None:
            return found
    tensors = dict(_leaves(given))
    for name, x in tensors.items():
        if x.layout != torch.strided:
            return _of_tensor(
                name, f"has the layout {x.layout}", "be dense. Call .to_dense() on it"
            )
    try:
        check_devices(function.__name__, *tensors.values())
    except ShapeError:
        first = next(iter(tensors.values())).device
        name, x = next((n, t) for n, t in tensors.items() if t.device != first)
        return _of_tensor(name, f"is on {x.device}, and other tensors on {first}", f"be there, too. Call .to({str(first)!r}) on it")  # fmt: skip
    for name, x in tensors.items():
        if x.is_meta:
            return _of_tensor(name, "is on meta, where tensors have no data", "have some; for shapes alone, trace the call with torch.compile")  # fmt: skip
    listed = "; ".join(f"{name} {described(value)}" for name, value in given.items())
    reason = str(error).strip().split("\n")[0]
    return ShapeError(
        f"{function.__name__} failed on its arguments ({type(error).__name__}: {reason}). They were: {listed}. Compare "
        "them with its docstring.",
        argument=None, expected=None, found=listed,
    )  # fmt: skip


def _of_tensor(name: str, found: str, needed: str) -> ShapeError:
    return ShapeError(
        f"{name} {found}; it must {needed}.", argument=name, expected=needed, found=found
    )


_KINDS: dict[str, tuple[type, ...]] = {"int": (int,), "float": (int, float), "str": (str,)}
_PAIRS = ("Pair", "tuple[Tensor, Tensor]")
_SEVERAL = (*_PAIRS, "Weights")


def _wrong_kind(name: str, value: object, wanted: str) -> DeepInferError | None:
    """An error for a value that is not of the kind that its annotation says."""
    if isinstance(value, Tensor) and wanted in _PAIRS:
        return _of_tensor(
            name,
            f"is one tensor, {described(value)}",
            "be a pair of tensors, as its docstring says",
        )
    if isinstance(value, Tensor) or (value is None and "None" in wanted):
        return None
    kind = type(value).__name__
    if wanted in ("Tensor", "Tensor | None"):
        return _of_tensor(name, f"is {described(value)}, of type {kind}", "be a tensor")
    if wanted in _SEVERAL:
        parts = value if isinstance(value, (tuple, list)) else (value,)
        for part, x in enumerate(parts):
            if not isinstance(x, Tensor):
                own = f"{name}[{part}]" if parts is value else name
                return _of_tensor(own, f"is {described(x)}, of type {type(x).__name__}", "be a tensor")  # fmt: skip
    first = wanted.split(" |")[0]
    fits = isinstance(value, _KINDS.get(first, object))
    if first == "KVCacheFormat":
        fits = kind == first
    too_large = isinstance(value, int) and not -(2**63) <= value < 2**63
    if not fits or (first in _KINDS and too_large):
        limit = "of 64 bits" if fits else wanted
        return ConfigError(
            f"{name} is {described(value)}, of type {kind}; it must be {limit}.",
            field=name, value=value, limit=limit,
        )  # fmt: skip
    return None
