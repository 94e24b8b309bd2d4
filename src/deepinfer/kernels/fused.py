"""Which form of the row-wise steps a device runs."""

from __future__ import annotations

import importlib
import importlib.util
from types import ModuleType

import torch

__all__ = ["fused_kernels"]


def fused_kernels(device: torch.device | str) -> ModuleType:
    """The row-wise steps of a device: Triton on a CUDA GPU where Triton is installed, plain torch elsewhere.

    Args:
        device: The device.

    Returns:
        A module with the names of `deepinfer.kernels.reference.fused`.
    """
    kind = "reference"
    if torch.device(device).type == "cuda" and importlib.util.find_spec("triton") is not None:
        kind = "triton"
    return importlib.import_module(f"deepinfer.kernels.{kind}.fused")
