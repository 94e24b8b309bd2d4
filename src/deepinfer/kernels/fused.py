"""Which form of the row-wise steps a device runs."""

from __future__ import annotations

import functools
import importlib
import importlib.util
from types import ModuleType

import torch

__all__ = ["fused_kernels", "has_triton"]


@functools.cache
def has_triton() -> bool:
    """Whether Triton is installed."""
    return importlib.util.find_spec("triton") is not None


def fused_kernels(device: torch.device | str) -> ModuleType:
    """The row-wise steps of a device: Triton on a CUDA GPU where Triton is installed, plain torch elsewhere.

    Args:
        device: The device.

    Returns:
        A module with the names of `deepinfer.kernels.reference.fused`.
    """
    kind = torch.device(device).type
    return _module("triton" if kind == "cuda" and has_triton() else "reference")


@functools.cache
def _module(kind: str) -> ModuleType:
    return importlib.import_module(f"deepinfer.kernels.{kind}.fused")
