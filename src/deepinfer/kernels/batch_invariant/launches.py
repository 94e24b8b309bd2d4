"""Launches of kernels that were compiled before, without finding out again which one it is."""

from __future__ import annotations

from typing import Any

from torch import Tensor

__all__ = ["KnownLaunch"]


class KnownLaunch:
    """Launches a Triton kernel whose parameters are tensors, then integers, then constants.

    Triton finds the compiled kernel from all arguments at each launch, which takes the host longer than the launch.
    What it looks at is remembered here: dtypes and alignment of tensors, and the values of all other arguments but
    those that it is told not to look at.

    Args:
        kernel: The kernel, from `triton.jit`.
    """

    def __init__(self, kernel: Any) -> None:
        self._kernel = kernel
        self._names = kernel.arg_names
        self._known: dict[tuple[Any, ...], Any] = {}

    def __call__(
        self,
        grid: tuple[int, int, int],
        tensors: tuple[Tensor, ...],
        free: tuple[int, ...],
        integers: tuple[int, ...],
        constants: tuple[Any, ...],
        num_warps: int,
        num_stages: int,
    ) -> None:
        """Launches the kernel on the current device and stream.

        Args:
            grid: Programs along three axes.
            tensors: The first arguments.
            free: Integers below 2^31 that choose no kernel: the parameters of `do_not_specialize`.
            integers: Integers behind them.
            constants: The rest.
            num_warps: Warps of a program.
            num_stages: Depth of software pipelines.
        """
        bits = 0
        for tensor in tensors:
            bits |= tensor.data_ptr()
        key = (
            tensors[0].get_device(), *[t.dtype for t in tensors], bits & 15, integers, constants, num_warps
        )  # fmt: skip
        known = self._known.get(key)
        if known is not None:
            known[grid](*tensors, *free, *integers, *constants)
            return
        named = zip(self._names[-len(constants) :], constants, strict=True)
        found = self._kernel[grid](
            *tensors, *free, *integers, **dict(named), num_warps=num_warps, num_stages=num_stages
        )
        # Only where every pointer is aligned does one bit say all; an interpreter gives nothing back.
        if not bits & 15 and hasattr(found, "function"):
            self._known[key] = found
