"""The GPU on which a kernel is launched."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from functools import lru_cache

import torch
from torch import Tensor

__all__ = ["current_device", "on_device"]

_HERE: AbstractContextManager[object] = nullcontext()


def on_device(x: Tensor) -> AbstractContextManager[object]:
    """Makes the GPU of a tensor the current one; nothing where it is so, and for a tensor elsewhere.

    Args:
        x: The tensor, of any shape.

    Returns:
        What the launch is made inside of.
    """
    if _is_only() or not x.is_cuda or x.get_device() == torch.cuda.current_device():
        return _HERE
    return torch.cuda.device(x.device)


def current_device() -> int:
    """Number of the GPU on which this thread launches."""
    return 0 if _is_only() else torch.cuda.current_device()


@lru_cache(maxsize=1)
def _is_only() -> bool:
    """Whether there are no GPUs to choose from, asked for once: every launch wants it."""
    return torch.cuda.device_count() <= 1
