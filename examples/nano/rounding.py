"""Straight-through versions of the checkpoint's and the caches' number formats."""

from __future__ import annotations

from torch import Tensor

from deepinfer.kernels.reference.quant import round_fp8, round_mxfp4, round_nvfp4


def straight_through(x: Tensor, rounded: Tensor) -> Tensor:
    """`rounded` in the forward pass, the identity in the backward pass."""
    y = x.float()
    return (y + (rounded.float() - y).detach()).to(x.dtype)


def cache_fp8(x: Tensor) -> Tensor:
    """FP8 per 32 channels: window rows and the inputs of quantised projections."""
    return straight_through(x, round_fp8(x.detach()))


def cache_fp4(x: Tensor) -> Tensor:
    """FP4 per 16 channels: pool rows."""
    return straight_through(x, round_nvfp4(x.detach()))


def cache_mxfp4(x: Tensor) -> Tensor:
    """MXFP4 per 32 channels: index keys and queries."""
    return straight_through(x, round_mxfp4(x.detach()))


def round_fp8_blocks(w: Tensor) -> Tensor:
    """FP8 with one power-of-two scale a 32 x 32 block, and back. Shape [..., rows, columns]."""
    blocks = w.unflatten(-1, (-1, 32)).unflatten(-3, (-1, 32)).transpose(-3, -2)
    return (
        round_fp8(blocks.flatten(-2), 1024)
        .unflatten(-1, (32, 32))
        .transpose(-3, -2)
        .flatten(-2)
        .flatten(-3, -2)
    )


def weight_fp8(w: Tensor, blend: Tensor) -> Tensor:
    """A dense weight on its way to FP8: `blend` 0 keeps it, 1 rounds it."""
    q = w.detach()
    return w + (round_fp8_blocks(q) - q) * blend


def weight_mxfp4(w: Tensor, blend: Tensor) -> Tensor:
    """An expert weight on its way to MXFP4: `blend` 0 keeps it, 1 rounds it."""
    q = w.detach()
    return w + (round_mxfp4(q) - q) * blend
