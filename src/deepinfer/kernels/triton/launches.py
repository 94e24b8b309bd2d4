"""What every launch asks of the place where it runs, sizes of its grid, and launches that go straight to what was compiled."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter

from deepinfer.kernels.contract import interpreted
from deepinfer.kernels.devices import has_one_device, on_device

__all__ = ["cdiv", "interpreted", "launch", "next_power_of_2", "on_device", "warps"]

_MOST = 512
_WIDE = 1 << 31


def warps(wanted: int) -> int:
    """Warps of a program: one under the interpreter, which knows no threads."""
    return 1 if interpreted() else wanted


def cdiv(a: int, b: int) -> int:
    """The quotient of two numbers, rounded up."""
    return -(-a // b)


def next_power_of_2(n: int) -> int:
    """The smallest power of two that is not below a number; 0 for 0, as Triton's."""
    return 1 << (n - 1).bit_length() if n else 0


def launch(kernel: Any, grid: int | tuple[int, int, int], /, *args: Any, **constants: Any) -> None:
    """Launches a kernel on the device of its first tensor and its stream, as `kernel[grid](*args, **constants)`.

    Triton finds the compiled kernel anew at each launch, which takes the host longer than the launch. What it looks at is
    remembered here beside what it found: dtypes of tensors and what their addresses leave of 16 bytes, boxes and layouts of
    descriptors, and all other values but floats and those that `do_not_specialize` names.

    Args:
        kernel: The kernel, from `triton.jit` or `gluon.jit`.
        grid: Programs along one axis, or along three.
        args: The first parameters: tensors, descriptors, numbers.
        constants: The other ones, and options of the launch.
    """
    known = getattr(kernel, "_known", None)
    if known is None:
        kernel._known = known = _Known(kernel)
    facts: list[Any] = []
    if not has_one_device():
        device, here = _device_of(args), torch.cuda.current_device()
        if device not in (-1, here):
            with torch.cuda.device(device):
                launch(kernel, grid, *args, **constants)
            return
        facts.append(here)
    addresses = 0
    for x, is_free in zip(args, known.is_free, strict=False):
        kind = type(x)
        if kind is int:
            facts.append(-_WIDE <= x < _WIDE if is_free else x)
        elif kind is Tensor or kind is Parameter:
            facts.append(x.dtype)
            addresses |= x.data_ptr()
        else:
            facts.append(_fact(x))
    if addresses & 15:  # seldom: which of them is not aligned
        facts.append(tuple([x.data_ptr() & 15 for x in args if isinstance(x, Tensor)]))
    key = (*facts, *constants, *constants.values())
    found = known.compiled.get(key)
    if found is not None:
        compiled, rest = found
        compiled[grid if type(grid) is tuple else (grid, 1, 1)](*args, *rest)
        return
    compiled = kernel[grid if type(grid) is tuple else (grid,)](*args, **constants)
    if hasattr(compiled, "function"):  # an interpreter gives nothing back
        if len(known.compiled) >= _MOST:
            known.compiled.clear()
        known.compiled[key] = compiled, _rest(kernel, len(args), constants)


class _Known:
    """What was compiled of a kernel.

    Attributes:
        is_free: Whether the value of an integer chooses no kernel, unless it takes 64 bits, for each parameter.
        compiled: Kernels and the values behind the first arguments, by what chooses them.
    """

    def __init__(self, kernel: Any) -> None:
        given = getattr(kernel, "params", None)
        names = getattr(kernel, "arg_names", ())
        self.is_free = (
            [False] * len(names) if given is None else [p.do_not_specialize for p in given]
        )
        self.compiled: dict[tuple[Any, ...], tuple[Any, tuple[Any, ...]]] = {}


def _device_of(args: tuple[Any, ...]) -> int:
    """Number of the GPU of the first tensor, -1 for none."""
    first = next(x for x in args if isinstance(x, Tensor) or hasattr(x, "base"))
    return (first if isinstance(first, Tensor) else first.base).get_device()


def _fact(x: Any) -> Any:
    """What chooses a kernel in an argument that is neither a number nor a plain tensor."""
    if isinstance(x, Tensor):
        return x.dtype, x.data_ptr() & 15
    if isinstance(x, float):
        return float
    base = getattr(x, "base", None)
    return x if base is None else (base.dtype, *x.block_shape, repr(x.layout))


def _rest(kernel: Any, given: int, constants: dict[str, Any]) -> tuple[Any, ...]:
    """Values of the parameters behind the first ones, in their order."""
    known = kernel.signature.parameters
    return tuple(
        constants[name] if name in constants else known[name].default
        for name in kernel.arg_names[given:]
    )
