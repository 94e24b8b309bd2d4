"""Kernels in Triton for CUDA GPUs; each has a twin of the same name in `deepinfer.kernels.reference`."""

from __future__ import annotations

__all__: list[str] = []
