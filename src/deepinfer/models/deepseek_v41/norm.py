"""RMS norm and the plain linear layer of DeepSeek-V4.1."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from deepinfer.kernels import batch_invariant
from deepinfer.models.deepseek_v41 import small_cpu

__all__ = ["Linear", "RMSNorm", "rms_norm"]


def rms_norm(x: Tensor, weight: Tensor, eps: float, *, deterministic: bool = False) -> Tensor:
    """Root-mean-square norm over the last axis, computed in fp32.

    Args:
        x: Values, shape [..., channels], any float dtype.
        weight: Gains, shape [channels], any float dtype.
        eps: Added to the mean square.
        deterministic: Whether a row's bits must be free of the other rows.

    Returns:
        The normed values, same shape and dtype as `x`.
    """
    if deterministic:
        return batch_invariant.rms_norm(x, weight, eps)
    if small_cpu.fits(x):
        return torch.from_numpy(small_cpu.rms_norm(x.numpy(), weight.numpy(), eps))
    wide = x.float()
    scale = torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
    return (wide * scale * weight.float()).to(x.dtype)


class RMSNorm(nn.Module):
    """Root-mean-square norm with a learned gain.

    Attributes:
        weight: Gains, shape [channels].
        eps: Added to the mean square.
        deterministic: Whether a row's bits must be free of the other rows.
    """

    deterministic = False

    def __init__(
        self,
        channels: int,
        eps: float,
        *,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        self.eps = eps
        self.weight = nn.Parameter(torch.ones(channels, device=device, dtype=dtype))

    def forward(self, x: Tensor) -> Tensor:
        """Norms `x`, shape [..., channels], over its last axis."""
        return rms_norm(x, self.weight, self.eps, deterministic=self.deterministic)


class Linear(nn.Module):
    """A matrix without bias; its weight is left empty for a loader to fill.

    Attributes:
        weight: The matrix, shape [out_channels, in_channels].
        deterministic: Whether a row's bits must be free of the other rows.
    """

    deterministic = False

    def __init__(
        self,
        in_channels: int,
        out_channels: int,
        *,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        self.weight = nn.Parameter(
            torch.empty(out_channels, in_channels, device=device, dtype=dtype)
        )

    def forward(self, x: Tensor) -> Tensor:
        """Multiplies `x`, shape [..., in_channels]; the input is promoted to an fp32 weight's dtype."""
        weight = self.weight
        x = x if x.dtype == weight.dtype else x.to(weight.dtype)
        return batch_invariant.linear(x, weight) if self.deterministic else F.linear(x, weight)
