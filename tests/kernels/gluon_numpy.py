"""Gluon functions on the CPU: their source runs over a stand-in for the language that computes with numpy.

One program at a time, without threads: it shows the arithmetic, the places that are read and written (a place outside a
buffer, or written twice by one store, fails), not races.
"""

from __future__ import annotations

import importlib
import operator
import sys
import types
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from types import MappingProxyType
from typing import Any

import numpy as np

PROGRAM = {"id": 0, "warps": 4}


def _raw(x: Any) -> Any:
    return x.data if isinstance(x, Tensor) else x


def _pair(x: Any, y: Any) -> tuple[Any, Any]:
    """Python's numbers take the type of the other side; bits of logic become integers beside integers."""
    x, y = _raw(x), _raw(y)
    if isinstance(x, int | float) and isinstance(y, int | float):
        x = np.int32(x)
    if isinstance(x, int | float):
        x = np.asarray(y).dtype.type(x)
    if isinstance(y, int | float):
        y = np.asarray(x).dtype.type(y)
    return x, y


class Tensor:
    """Values of all threads of a program."""

    def __init__(self, data: Any) -> None:
        self.data = np.asarray(data)

    @property
    def type(self) -> Any:
        return types.SimpleNamespace(layout=None)

    @property
    def shape(self) -> tuple[int, ...]:
        return self.data.shape

    @property
    def dtype(self) -> Any:
        return self.data.dtype.type

    def to(self, dtype: Any, bitcast: bool = False) -> Tensor:
        if not bitcast:
            return Tensor(self.data.astype(dtype))
        return Tensor(np.atleast_1d(self.data).view(dtype).reshape(self.data.shape))

    def reshape(self, shape: list[int]) -> Tensor:
        return Tensor(self.data.reshape(shape))

    def __getitem__(self, at: Any) -> Tensor:
        return Tensor(self.data[at])

    def __bool__(self) -> bool:
        return bool(self.data)

    def __index__(self) -> int:
        return int(self.data)

    __hash__ = None  # type: ignore[assignment]


def _binary(function: Callable, swapped: bool = False) -> Callable:
    def apply(self: Tensor, other: Any) -> Any:
        if isinstance(other, Pointer):
            return NotImplemented
        x, y = _pair(self, other)
        logical = x.dtype == np.bool_ and np.asarray(y).dtype == np.bool_
        if not (logical and function in (operator.and_, operator.or_)):
            x = x.astype(np.int32) if x.dtype == np.bool_ else x
            y = y.astype(np.int32) if np.asarray(y).dtype == np.bool_ else y
        return Tensor(function(y, x) if swapped else function(x, y))

    return apply


for _name in [
    "add",
    "sub",
    "mul",
    "floordiv",
    "mod",
    "and_",
    "or_",
    "xor",
    "lshift",
    "rshift",
    "lt",
    "le",
    "gt",
    "ge",
    "eq",
    "ne",
]:
    _function, _short = getattr(operator, _name), _name.strip("_")
    setattr(Tensor, f"__{_short}__", _binary(_function))
    if _name not in ("lt", "le", "gt", "ge", "eq", "ne"):
        setattr(Tensor, f"__r{_short}__", _binary(_function, True))


class Pointer:
    """Places of a buffer."""

    def __init__(self, buffer: np.ndarray, at: Any = 0) -> None:
        self.buffer, self.at = buffer, at

    def __add__(self, offset: Any) -> Pointer:
        return Pointer(self.buffer, self.at + np.asarray(_raw(offset)).astype(np.int64))

    __radd__ = __add__


def _load(pointer: Pointer, mask: Any = True, other: Any = 0) -> Tensor:
    at, used = np.broadcast_arrays(pointer.at, _raw(mask))
    assert ((at >= 0) & (at < len(pointer.buffer)))[used].all(), "a read outside the buffer"
    found = pointer.buffer[np.where(used, at, 0)]
    other = other.data if isinstance(other, Tensor) else pointer.buffer.dtype.type(other)
    return Tensor(np.where(used, found, other))


def _store(pointer: Pointer, value: Any, mask: Any = True) -> None:
    at, value, used = np.broadcast_arrays(pointer.at, _raw(value), _raw(mask))
    at, value = at[used], value[used]
    assert ((at >= 0) & (at < len(pointer.buffer))).all(), "a write outside the buffer"
    assert len(np.unique(at)) == len(at), "a place is written twice"
    pointer.buffer[at] = value


def _reduce(values: Any, axis: int, combine: Callable) -> Any:
    parts = [v.data for v in values]
    found = [Tensor(p.take(0, axis)) for p in parts]
    for i in range(1, parts[0].shape[axis]):
        found = combine(*found, *(Tensor(p.take(i, axis)) for p in parts))
    return tuple(found)


def _largest(x: Any, y: Any) -> Tensor:
    x, y = _pair(x, y)
    return Tensor(np.fmax(x, y))


def _language() -> types.ModuleType:
    gl = types.ModuleType("triton.experimental.gluon.language")
    for name, value in {
        "constexpr": int, "int32": np.int32, "int64": np.int64, "uint64": np.uint64, "float32": np.float32,
        "load": _load, "store": _store, "reduce": _reduce, "maximum": _largest,
        "minimum": lambda x, y: Tensor(np.fmin(*_pair(x, y))),
        "where": lambda c, x, y: Tensor(np.where(_raw(c), *_pair(x, y))),
        "num_warps": lambda: PROGRAM["warps"], "program_id": lambda axis: Tensor(np.int32(PROGRAM["id"])),
        "to_tensor": lambda x: x if isinstance(x, Tensor) else Tensor(np.int32(x)),
        "arange": lambda a, b, layout=None: Tensor(np.arange(a, b, dtype=np.int32)),
        "full": lambda shape, value, dtype, layout=None: Tensor(np.full(shape, value, dtype)),
        "zeros": lambda shape, dtype, layout=None: Tensor(np.zeros(shape, dtype)),
        "BlockedLayout": lambda *a: None, "SliceLayout": lambda *a: None, "convert_layout": lambda x, layout: x,
        "associative_scan": lambda x, axis, add: Tensor(np.cumsum(x.data, axis, dtype=x.data.dtype)),
        "sum": lambda x, axis: Tensor(x.data.sum(axis, dtype=x.data.dtype)),
        "max": lambda x, axis: Tensor(np.fmax.reduce(x.data, axis)),
        "min": lambda x, axis: Tensor(np.fmin.reduce(x.data, axis)),
        "static_range": range,
    }.items():  # fmt: skip
        setattr(gl, name, value)
    return gl


@contextmanager
def gluon_on_numpy(
    *names: str,
    language: Mapping[str, Any] = MappingProxyType({}),
    also: Mapping[str, types.ModuleType] = MappingProxyType({}),
    names_of: Mapping[str, Any] = MappingProxyType({}),
) -> Iterator[list[types.ModuleType]]:
    """Modules of `deepinfer.kernels.triton`, imported over the stand-in; what was imported before comes back after it.

    `language` has more of the language, `also` more modules, and `names_of` more of `gluon_names`.
    """
    gluon = types.ModuleType("triton.experimental.gluon")
    gluon.language, gluon.jit = _language(), lambda f=None, **k: f or (lambda g: g)  # type: ignore[attr-defined]
    gluon.constexpr_function = lambda f: f  # type: ignore[attr-defined]
    experimental = types.ModuleType("triton.experimental")
    experimental.gluon = gluon  # type: ignore[attr-defined]
    triton = types.ModuleType("triton")
    triton.experimental = experimental  # type: ignore[attr-defined]
    folder = "deepinfer.kernels.triton"
    barrier = types.ModuleType(f"{folder}.gluon_names")
    barrier.block_barrier = lambda: None  # type: ignore[attr-defined]
    for name, value in language.items():
        setattr(gluon.language, name, value)
    for name, value in names_of.items():
        setattr(barrier, name, value)
    fakes = {
        "triton": triton, "triton.experimental": experimental, "triton.experimental.gluon": gluon,
        "triton.experimental.gluon.language": gluon.language, f"{folder}.gluon_names": barrier, **also,
    }  # fmt: skip
    kept = {
        n: m for n, m in sys.modules.items() if n.split(".")[0] == "triton" or n.startswith(folder)
    }
    for name in kept:
        del sys.modules[name]
    sys.modules.update(fakes)
    try:
        yield [importlib.import_module(f"{folder}.{name}") for name in names]
    finally:
        for name in [n for n in sys.modules if n.split(".")[0] == "triton" or n.startswith(folder)]:
            del sys.modules[name]
        sys.modules.update(kept)
