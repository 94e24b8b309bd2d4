"""Calls on the CPU that go straight to the reference, without the registry in between."""

from __future__ import annotations

import torch
from torch import Tensor

from deepinfer.kernels import registry

__all__ = ["is_plain", "is_readable"]


def is_plain(x: Tensor, backend: str | None) -> bool:
    """Whether nobody asked for a backend and the tensor is on the CPU, outside of a traced graph and of autocast."""
    return (
        backend is None
        and x.device.type == "cpu"
        and not torch.compiler.is_compiling()
        and registry._wish.get() is None
        and registry._choices.get() is None
        and not torch._C._len_torch_dispatch_stack()
        and not torch._C._is_any_autocast_enabled()
    )


def is_readable(x: Tensor) -> bool:
    """Whether values can be looked at without a wait: on the CPU, outside of a traced graph."""
    return (
        x.device.type == "cpu"
        and not torch.compiler.is_compiling()
        and not torch._C._len_torch_dispatch_stack()
    )
