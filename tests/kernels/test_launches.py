"""Launches that are remembered reach the kernel that Triton would have found."""

from __future__ import annotations

from typing import Any

import torch

from deepinfer.kernels.batch_invariant.launches import KnownLaunch


class Compiled:
    function = 1

    def __init__(self, calls: list[Any]) -> None:
        self.calls = calls

    def __getitem__(self, grid: tuple[int, int, int]) -> Any:
        return lambda *args: self.calls.append((grid, args))


class Kernel:
    arg_names = ("x", "out", "rows", "width", "BLOCK", "EVEN")

    def __init__(self, gives_back: bool = True) -> None:
        self.found: list[Any] = []
        self.known: list[Any] = []
        self.gives_back = gives_back

    def __getitem__(self, grid: tuple[int, int, int]) -> Any:
        def launch(*args: Any, **kwargs: Any) -> Any:
            self.found.append((args, kwargs))
            return Compiled(self.known) if self.gives_back else None

        return launch


def launch(run: KnownLaunch, x: torch.Tensor, rows: int, width: int = 8, block: int = 4) -> None:
    run((rows, 1, 1), (x, x), (rows,), (width,), (block, True), 4, 2)


def test_the_second_launch_goes_straight() -> None:
    kernel, x = Kernel(), torch.zeros(64)
    run = KnownLaunch(kernel)
    launch(run, x, 3)
    options = {"BLOCK": 4, "EVEN": True, "num_warps": 4, "num_stages": 2}
    assert kernel.found == [((x, x, 3, 8), options)]
    launch(run, x, 5)  # the number of rows chooses no kernel
    assert len(kernel.found) == 1
    assert kernel.known == [((5, 1, 1), (x, x, 5, 8, 4, True))]


def test_other_arguments_are_found_anew() -> None:
    kernel, x = Kernel(), torch.zeros(64)
    run = KnownLaunch(kernel)
    for other in ((x, 3), (x, 3, 16), (x, 3, 8, 8), (x.half(), 3), (x[1:], 3), (x[1:], 3)):
        launch(run, *other)
    assert len(kernel.found) == 6  # one that is not aligned is never remembered
    assert not kernel.known


def test_an_interpreter_gives_nothing_to_remember() -> None:
    kernel, x = Kernel(gives_back=False), torch.zeros(64)
    run = KnownLaunch(kernel)
    launch(run, x, 3)
    launch(run, x, 3)
    assert len(kernel.found) == 2
