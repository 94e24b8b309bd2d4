"""Which implementation of the batch-invariant kernels serves a call."""

from __future__ import annotations

import os
from typing import Literal

from torch import Tensor

from deepinfer.core.errors import ConfigError, UnsupportedHardware

__all__ = ["Backend", "uses_triton"]

Backend = Literal["torch", "triton"]


def uses_triton(x: Tensor, backend: Backend | None) -> bool:
    """Whether a call on `x` goes to Triton; by default a CUDA tensor does and a CPU tensor does not.

    Raises:
        ConfigError: There is no such backend.
        UnsupportedHardware: The backend cannot serve this device.
    """
    if backend is None:
        if x.is_cpu or x.is_cuda:
            return x.is_cuda
        raise UnsupportedHardware(
            f"There are batch-invariant kernels for cpu and cuda tensors, not for {x.device}; "
            "move the tensors, or leave deterministic arithmetic off.",
            needed="cpu or cuda", found=str(x.device),
        )  # fmt: skip
    if backend not in ("torch", "triton"):
        raise ConfigError(
            f"backend is {backend!r}; it must be 'torch', 'triton' or None.",
            field="backend", value=backend, limit="'torch', 'triton' or None",
        )  # fmt: skip
    if backend == "torch" and not x.is_cpu:
        raise UnsupportedHardware(
            f"The torch backend of the batch-invariant kernels needs cpu tensors, not {x.device}: torch "
            "chooses other kernels there for other numbers of rows. Use backend='triton'.",
            needed="cpu", found=str(x.device), fallback="backend='triton'",
        )  # fmt: skip
    if backend == "triton" and not x.is_cuda and os.environ.get("TRITON_INTERPRET") != "1":
        raise UnsupportedHardware(
            f"The triton backend needs cuda tensors, not {x.device}; only its interpreter (TRITON_INTERPRET=1, "
            "set before the first use) takes others. Use backend='torch' or None.",
            needed="cuda", found=str(x.device), fallback="backend='torch'",
        )  # fmt: skip
    return backend == "triton"
