"""Launches that are remembered reach the kernel that Triton would have found."""

from __future__ import annotations

import contextlib
import inspect
import math
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from deepinfer.kernels.triton import launches


class Compiled:
    function = 1

    def __init__(self, calls: list[Any]) -> None:
        self.calls = calls

    def __getitem__(self, grid: tuple[int, int, int]) -> Any:
        return lambda *args: self.calls.append((grid, args))


def parameters(x: Any, out: Any, rows: Any, BLOCK: Any, EVEN: Any = False) -> None:
    """What a kernel takes."""


class Jitted:
    arg_names = ("x", "out", "rows", "BLOCK", "EVEN")
    signature = inspect.signature(parameters)

    def __init__(self, gives_back: bool = True) -> None:
        self.found: list[Any] = []
        self.known: list[Any] = []
        self.gives_back = gives_back

    def __getitem__(self, grid: Any) -> Any:
        def launch(*args: Any, **kwargs: Any) -> Any:
            self.found.append((args, kwargs))
            return Compiled(self.known) if self.gives_back else None

        return launch


class Described:
    """A descriptor of bulk copies, as far as launches look at it."""

    def __init__(self, base: torch.Tensor, box: list[int], layout: str) -> None:
        self.base, self.block_shape, self.layout = base, box, layout


def test_what_was_compiled_is_launched_with_the_values_of_all_parameters() -> None:
    kernel, x = Jitted(), torch.zeros(64)
    for _ in range(2):
        launches.launch(kernel, 3, x, x, 5, BLOCK=8, num_warps=4)
    launches.launch(kernel, (3, 2, 1), x, x, 5, BLOCK=8, num_warps=4)
    assert kernel.found == [((x, x, 5), {"BLOCK": 8, "num_warps": 4})]
    assert kernel.known == [((3, 1, 1), (x, x, 5, 8, False)), ((3, 2, 1), (x, x, 5, 8, False))]


def test_all_that_chooses_a_kernel_is_looked_at() -> None:
    kernel, x = Jitted(), torch.zeros(64)
    box = Described(x, [8, 8], "layout")
    others: list[tuple[Any, ...]] = [
        (x, x, 5), (x, x, 6), (x.half(), x, 5), (x, x[1:], 5), (x[1:], x, 5), (box, x, 5),
        (Described(x.half(), [8, 8], "layout"), x, 5), (Described(x, [8, 4], "layout"), x, 5),
        (Described(x, [8, 8], "other"), x, 5),
    ]  # fmt: skip
    for other in others:
        for _ in range(2):
            launches.launch(kernel, 3, *other, BLOCK=8)
    launches.launch(kernel, 3, x, x, 5, BLOCK=16)
    launches.launch(kernel, 3, x, x, 5, BLOCK=8, maxnreg=64)
    assert len(kernel.found) == len(others) + 2
    assert len(kernel.known) == len(others)


def test_values_that_choose_no_kernel_are_not_looked_at() -> None:
    class Free(Jitted):
        params = tuple(
            SimpleNamespace(do_not_specialize=name == "rows") for name in Jitted.arg_names
        )

    kernel, x = Free(), torch.zeros(64)
    for rows in (5, 6, 1, 2**31 - 1, 2**31, 2**40):
        launches.launch(kernel, 3, x, x, rows, BLOCK=8)
    assert [args[2] for args, _ in kernel.found] == [5, 2**31]  # one of 32 bits, one of 64
    assert [args[2] for _, args in kernel.known] == [6, 1, 2**31 - 1, 2**40]
    kernel = Free()
    for out in (0.5, 0.25):
        launches.launch(kernel, 3, x, out, 5, BLOCK=8)
    assert len(kernel.found) == 1  # floats choose none


def test_nothing_is_kept_where_nothing_is_compiled_or_too_much(monkeypatch: Any) -> None:
    kernel, x = Jitted(gives_back=False), torch.zeros(64)
    for _ in range(2):
        launches.launch(kernel, 3, x, x, 5, BLOCK=8)
    assert len(kernel.found) == 2
    kernel = Jitted()
    monkeypatch.setattr(launches, "_MOST", 2)
    for rows in (1, 2, 3, 1):
        launches.launch(kernel, 3, x, x, rows, BLOCK=8)
    assert len(kernel.found) == 4  # the third found two, which were let go


@pytest.mark.parametrize("n", [*range(70), 1023, 1024, 1025, 2**31])
def test_sizes_of_grids(n: int) -> None:
    above = launches.next_power_of_2(n)
    assert above == 0 if n == 0 else above // 2 < n <= above
    assert above & (above - 1) == 0
    assert launches.cdiv(n, 7) == math.ceil(n / 7)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float8_e4m3fn, torch.int32])
def test_a_descriptor_is_the_one_that_triton_makes(dtype: torch.dtype) -> None:
    gluon = pytest.importorskip("triton.experimental.gluon.nvidia.hopper")
    language = pytest.importorskip("triton.experimental.gluon.language")
    from triton._C.libtriton import native_specialize_impl
    from triton.backends.compiler import BaseBackend

    from deepinfer.kernels.triton import descriptors

    x = torch.zeros(64, 256).to(dtype)
    bits = 8 * x.itemsize
    tile = language.NVMMASharedLayout(
        swizzle_byte_width=min(64 * x.itemsize, 128), element_bitwidth=bits
    )
    flat = language.NVMMASharedLayout(swizzle_byte_width=0, element_bitwidth=32, rank=1)
    pairs = [(descriptors.matrix(x, 32, 64), gluon.TensorDescriptor(x, [64, 256], [256, 1], [32, 64], tile))]  # fmt: skip
    if bits == 32:
        listed = gluon.TensorDescriptor(x.view(-1), [x.numel()], [1], [64], flat)
        pairs.append((descriptors.listed(x, 64), listed))
    for found, wanted in pairs:
        names = [native_specialize_impl(BaseBackend, d, False, True, True) for d in (found, wanted)]
        assert names[0] == names[1]
        for part in ("shape", "strides", "block_shape", "padding"):
            assert getattr(found, part) == getattr(wanted, part)
        assert found.base.data_ptr() == x.data_ptr()
        assert repr(found.layout) == repr(wanted.layout)


def test_the_gpu_of_the_first_tensor_is_the_current_one(monkeypatch: Any) -> None:
    current = [0]

    @contextlib.contextmanager
    def device(index: int) -> Iterator[None]:
        before, current[0] = current[0], index
        yield
        current[0] = before

    class There(Jitted):
        def __getitem__(self, grid: Any) -> Any:
            places.append(current[0])
            return super().__getitem__(grid)

    places: list[int] = []
    described = Described(torch.zeros(64), [8], "layout")
    assert launches._device_of((5, described, torch.zeros(1, device="meta"))) == -1
    kernel, x = There(), torch.zeros(64)
    monkeypatch.setattr(launches, "has_one_device", lambda: False)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: current[0])
    monkeypatch.setattr(torch.cuda, "device", device)
    for index in (1, 0, 1, -1):
        monkeypatch.setattr(launches, "_device_of", lambda args, index=index: index)
        launches.launch(kernel, 3, x, x, 5, BLOCK=8)
    assert places == [1, 0]  # each GPU has a kernel of its own, and no GPU is the current one
    assert len(kernel.known) == 2
    assert current == [0]
