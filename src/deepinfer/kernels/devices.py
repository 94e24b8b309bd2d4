"""The GPU on which a kernel is launched."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from functools import lru_cache

import torch
from torch import Tensor

__all__ = ["has_one_device", "on_device"]

_HERE: AbstractContextManager[object] = nullcontext()


def on_device(x: Tensor) -> AbstractContextManager[object]:
    """Makes the GPU of a tensor the current one; nothing where it is so, and for a tensor elsewhere.

    Args:
        x: The tensor, of any shape.

    Returns:
        What the launch is made inside of.
    """
    if has_one_device() or not x.is_cuda or x.get_device() == torch.cuda.current_device():
        return _HERE
    return torch.cuda.device(x.device)


@lru_cache(maxsize=1)
def has_one_device() -> bool:
    """Whether there are no GPUs to choose from, asked for once: every launch wants it."""
    return torch.cuda.device_count() <= 1
