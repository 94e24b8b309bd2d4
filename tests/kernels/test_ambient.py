"""What lies around a call (default dtype and device, autocast, fake tensors, gradients) does not change what it gives."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from typing import Any

import pytest
import torch
from tests.kernels.right_calls import CALLS
from torch._subclasses.fake_tensor import FakeTensorMode

from deepinfer import kernels
from deepinfer.core.errors import ShapeError

if os.environ.get("TRITON_INTERPRET") == "1":
    pytest.skip("references only", allow_module_level=True)


def _leaves(x: object) -> Iterator[torch.Tensor]:
    if isinstance(x, torch.Tensor):
        yield x
    elif isinstance(x, (tuple, list)):
        for part in x:
            yield from _leaves(part)


def _filled(x: Any) -> Any:
    """Values that products in bf16 would round: thirds of small numbers."""
    if type(x) is tuple:
        return tuple(map(_filled, x))
    if isinstance(x, torch.Tensor) and x.is_floating_point() and x.numel() > 1:
        values = (torch.arange(x.numel()) % 13 / 3 + 1 / 3).view(x.shape)
        return values.to(x.dtype)
    return x


def _call(
    name: str, around: Callable[[], AbstractContextManager[object]] = nullcontext
) -> list[torch.Tensor]:
    """What a kernel gives as bytes, of the places that have a value."""
    given = {argument: _filled(x) for argument, x in CALLS[name]().items()}
    with around():
        found = getattr(kernels, name)(**given)
    if name.startswith("expand_to_fused"):
        places = given["mapping"].token_topk_to_pos.flatten().long()
        found = [x[places] for x in _leaves(found) if x.dim()]
    return [x.flatten().view(torch.uint8) for x in _leaves(found)]


@contextmanager
def _default_dtype(dtype: torch.dtype) -> Iterator[None]:
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


AROUND: dict[str, Callable[[], AbstractContextManager[object]]] = {
    "default bf16": lambda: _default_dtype(torch.bfloat16),
    "default fp64": lambda: _default_dtype(torch.float64),
    "default device": lambda: torch.device("meta"),
    "autocast": lambda: torch.autocast("cpu", dtype=torch.bfloat16),
}


@pytest.mark.parametrize("name", CALLS)
def test_the_same_bytes_whatever_is_around(name: str) -> None:
    wanted = _call(name)
    for what, around in AROUND.items():
        for x, y in zip(_call(name, around), wanted, strict=True):
            assert torch.equal(x, y), what


@pytest.mark.parametrize("name", sorted(set(CALLS) - {"prepare_mxfp4_weights"}))
def test_fake_tensors_have_the_shapes(name: str) -> None:
    """As for torch.compile: the operation is asked, and nothing computes. What weights are prepared to hangs on them."""
    given = CALLS[name]()
    wanted = [(x.shape, x.dtype) for x in _leaves(getattr(kernels, name)(**CALLS[name]()))]
    with FakeTensorMode() as mode:
        fakes = {k: _mapped(x, mode.from_tensor) for k, x in given.items()}
        found = [(x.shape, x.dtype) for x in _leaves(getattr(kernels, name)(**fakes))]
    assert found == wanted


def _mapped(x: Any, change: Callable[[torch.Tensor], torch.Tensor]) -> Any:
    if isinstance(x, torch.Tensor):
        return change(x)
    if isinstance(x, tuple):
        parts = [_mapped(part, change) for part in x]
        return type(x)(*parts) if hasattr(x, "_fields") else tuple(parts)
    return x


@pytest.mark.parametrize("name", CALLS)
def test_gradients_are_refused_where_torch_records_them(name: str) -> None:
    """A GPU has none, and a CPU would give those of its reference."""
    for argument, value in CALLS[name]().items():
        floats = [x for x in _leaves(value) if x.is_floating_point() and x.dtype.itemsize > 1]
        for leaf in floats:
            wanted = _mapped(value, partial(_requiring, leaf))
            given = {**CALLS[name](), argument: wanted}
            with pytest.raises(ShapeError, match="requires a gradient") as caught:
                getattr(kernels, name)(**given)
            assert str(caught.value.argument).startswith(argument)
            with torch.no_grad():
                getattr(kernels, name)(**given)


def test_compiled_code_refuses_gradients() -> None:
    x, gain = torch.ones(2, 32), torch.ones(32).requires_grad_()
    compiled = torch.compile(lambda x, gain: kernels.rms_norm(x, gain), backend="eager")
    assert compiled(x, gain.detach()).shape == (2, 32)
    with pytest.raises(ShapeError, match="requires a gradient, and rms_norm has none"):
        compiled(x, gain)
    with torch.no_grad():
        assert compiled(x, gain).shape == (2, 32)


def _requiring(leaf: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    return x.clone().requires_grad_() if x is leaf else x
