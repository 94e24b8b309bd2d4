"""What every launch asks of the place where it runs."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext

import torch
from torch import Tensor

from deepinfer.kernels.contract import interpreted

__all__ = ["interpreted", "on_device", "warps"]


def warps(wanted: int) -> int:
    """Warps of a program: one under the interpreter, which knows no threads."""
    return 1 if interpreted() else wanted


def on_device(x: Tensor) -> AbstractContextManager[object]:
    """Makes the GPU of a tensor the current one; nothing for a tensor elsewhere."""
    return torch.cuda.device(x.device) if x.is_cuda else nullcontext()
