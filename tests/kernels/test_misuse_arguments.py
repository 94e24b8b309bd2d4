"""Every public kernel against wrong arguments: it works or raises a typed error, and never one of torch or Triton.

Each of its tensors in turn is made another: of another device, dtype, shape or layout, or no tensor at all; numbers leave their
range. Where torch itself fails, the error names the argument.
"""

from __future__ import annotations

import inspect
import os
import pickle
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from tests.kernels.right_calls import CALLS

from deepinfer import kernels
from deepinfer.core.errors import ConfigError, DeepInferError, ShapeError, UnsupportedHardware
from deepinfer.kernels.arguments import typed

NAMES = [
    name
    for name in kernels.__all__
    if inspect.isfunction(getattr(kernels, name)) and name not in ("explain", "use_backend")
]
if os.environ.get("TRITON_INTERPRET") == "1":
    pytest.skip("what is checked comes before any kernel of Triton's", allow_module_level=True)


def _apart(x: torch.Tensor) -> torch.Tensor:
    """The same values with a gap behind each."""
    return torch.stack((x, x), -1)[..., 0] if x.dim() else x


CHANGES: dict[str, Callable[[torch.Tensor], object]] = {
    "on meta": lambda x: x.to("meta"),
    "apart": _apart,
    "transposed": lambda x: x.mT.contiguous().mT if x.dim() > 1 else x,
    "integers": lambda x: torch.zeros(x.shape, dtype=torch.int16),
    "fp64": lambda x: torch.ones(x.shape, dtype=torch.float64),
    "fp16": lambda x: torch.ones(x.shape, dtype=torch.float16),
    "bools": lambda x: torch.ones(x.shape, dtype=torch.bool),
    "complex": lambda x: torch.ones(x.shape, dtype=torch.complex64),
    "a number of torch": lambda x: x.flatten()[0],
    "more axes": lambda x: x[None],
    "one axis": lambda x: x.flatten(),
    "no rows": lambda x: x[:0],
    "no columns": lambda x: x[..., :0],
    "a column less": lambda x: x[..., :-1],
    "twice as long": lambda x: torch.cat((x, x)),
    "sparse": lambda x: x.to_sparse() if x.element_size() > 1 else x,
    "with a gradient": lambda x: x.clone().requires_grad_() if x.is_floating_point() else x,
    "a number": lambda x: 3,
    "nothing": lambda x: None,
}


def _places(given: dict[str, Any]) -> Iterator[tuple[str, int | None]]:
    """Where the tensors of a call are: the argument, and the part of it."""
    for name, value in given.items():
        if isinstance(value, torch.Tensor):
            yield name, None
        elif isinstance(value, tuple):
            yield from ((name, i) for i, x in enumerate(value) if isinstance(x, torch.Tensor))


def _changed(given: dict[str, Any], place: tuple[str, int | None], change: Callable[[Any], object]) -> dict[str, Any]:  # fmt: skip
    name, part = place
    value = given[name]
    if part is None:
        return {**given, name: change(value)}
    parts = [change(x) if i == part else x for i, x in enumerate(value)]
    return {**given, name: type(value)(*parts) if hasattr(value, "_fields") else tuple(parts)}


def _attempt(name: str, given: dict[str, Any], what: str) -> DeepInferError | None:
    """The typed error of a call, or None; any other error fails the test."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            getattr(kernels, name)(**given)
    except DeepInferError as error:
        return error
    except Exception as error:
        pytest.fail(f"{name}, {what}: {type(error).__name__}: {error}")
    return None


def test_every_kernel_has_a_call_that_is_right() -> None:
    assert set(NAMES) == set(CALLS)


@pytest.mark.parametrize("name", NAMES)
def test_wrong_tensors(name: str) -> None:
    assert _attempt(name, CALLS[name](), "as it is right") is None
    for place in _places(CALLS[name]()):
        for what, change in CHANGES.items():
            error = _attempt(name, _changed(CALLS[name](), place, change), f"{place} {what}")
            if what in ("on meta", "sparse") and isinstance(error, ShapeError) and error.argument:
                assert error.argument in str(error)
    every = CALLS[name]()
    for place in _places(every):
        every = _changed(every, place, CHANGES["on meta"])
    _attempt(name, every, "everything on meta")


@pytest.mark.parametrize("name", NAMES)
def test_wrong_numbers_and_backends(name: str) -> None:
    for argument, value in CALLS[name]().items():
        if type(value) is int:
            for wrong in (-1, 0, -(2**31), 2**40, 2**63, 2.5, "x", None):
                _attempt(name, {**CALLS[name](), argument: wrong}, f"{argument} = {wrong!r}")
    if "backend" not in inspect.signature(getattr(kernels, name)).parameters:
        return
    assert isinstance(_attempt(name, {**CALLS[name](), "backend": "none"}, "no backend"), ConfigError)  # fmt: skip
    error = _attempt(name, {**CALLS[name](), "backend": 3}, "a number as the backend")
    assert isinstance(error, ConfigError)
    error = _attempt(name, {**CALLS[name](), "backend": "triton"}, "Triton on a CPU")
    assert isinstance(error, (UnsupportedHardware, ConfigError))
    assert "triton" in str(error)


def test_the_error_names_the_argument_and_what_to_do() -> None:
    x = torch.ones(2, 32)
    for weight, said in (
        (
            torch.ones(32, device="meta"),
            r"weight is on meta, and other tensors on cpu.*\.to\('cpu'\)",
        ),
        (3, "weight is 3, of type int; it must be a tensor"),
    ):
        with pytest.raises(ShapeError, match=said) as caught:
            kernels.rms_norm(x, weight)  # type: ignore[arg-type]
        assert caught.value.argument == "weight"
        assert caught.value.__cause__ is not None
    with pytest.raises(ShapeError, match=r"a\[1\] is 3, of type int"):
        kernels.fp8_gemm_nt(**_changed(CALLS["fp8_gemm_nt"](), ("a", 1), lambda x: 3))  # type: ignore[arg-type]
    leaf = torch.ones(2, 32).requires_grad_()
    with pytest.raises(ShapeError, match=r"out requires a gradient.*\.detach\(\)"):
        kernels.rms_norm(x, torch.ones(32), out=leaf)
    with pytest.raises(ConfigError, match="page_size is 'x', of type str; it must be int"):
        kernels.quantize_and_insert_k_cache(**{**CALLS["quantize_and_insert_k_cache"](), "page_size": "x"})  # fmt: skip


def test_devices_are_not_mixed_through_a_backend() -> None:
    """The reference would take an index from another device, and wait for it."""
    with pytest.raises(ShapeError, match=r"apply_rope was given tensors on cpu and meta"):
        kernels.apply_rope(
            torch.ones(2, 8), torch.ones(2, 4, 2), torch.zeros(2, device="meta").long(), backend="torch"
        )  # fmt: skip


def test_what_is_not_of_the_arguments_passes() -> None:
    """Python's own refusal, typed errors and lack of memory stay as they are."""
    with pytest.raises(TypeError, match="missing 1 required positional argument"):
        kernels.rms_norm(torch.ones(2, 32))  # type: ignore[call-arg]
    with pytest.raises(TypeError, match="unexpected keyword"):
        kernels.rms_norm(torch.ones(2, 32), torch.ones(32), epsilon=1.0)  # type: ignore[call-arg]
    for error in (torch.OutOfMemoryError("full"), UnsupportedHardware("none"), KeyboardInterrupt()):

        def fail(x: int, error: BaseException = error) -> None:
            raise error

        with pytest.raises(type(error)) as caught:
            typed(fail)(1)
        assert caught.value is error


def test_kernels_are_functions_like_others() -> None:
    assert pickle.loads(pickle.dumps(kernels.rms_norm)) is kernels.rms_norm
    assert "eps" in inspect.signature(kernels.rms_norm).parameters
    assert "Returns:" in (kernels.rms_norm.__doc__ or "")


def test_traced_code_sees_the_kernel_itself() -> None:
    x, weight = torch.randn(2, 32), torch.ones(32)
    traced = torch.compile(lambda x: kernels.rms_norm(x, weight) * 2, backend="aot_eager", fullgraph=True)  # fmt: skip
    assert torch.equal(traced(x), kernels.rms_norm(x, weight) * 2)


def test_triton_that_cannot_launch_names_the_fallback() -> None:
    out_of_resources = type("OutOfResources", (Exception,), {"__module__": "triton.runtime.errors"})

    def fail() -> None:
        raise out_of_resources("out of resource: shared memory, Required: 300000\nmore")

    with pytest.raises(
        UnsupportedHardware, match=r"of fail .*Required: 300000\).*use_backend"
    ) as caught:
        typed(fail)()
    assert isinstance(caught.value.__cause__, out_of_resources)
