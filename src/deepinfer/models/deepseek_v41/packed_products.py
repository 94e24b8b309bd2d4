"""Products with weights that stay as their published bytes: codes and scales go to the kernels as they are.

The input of such a product was rounded to FP8 per 32 channels by the step before it, so casting it to codes loses
nothing: the product is that of the dequantised weight, up to the order of its sums.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from deepinfer.kernels import fp8_gemm_nt, per_token_cast_to_fp8
from deepinfer.models.packed import PackedWeight

__all__ = ["linear", "takes_codes"]


def takes_codes(weight: Tensor, kind: str = "fp8_block") -> bool:
    """Whether a weight is held as codes of a kind, "fp8_block" or "mxfp4"."""
    return isinstance(weight, PackedWeight) and weight.kind == kind


def linear(module: nn.Module, x: Tensor, *, rounded: bool) -> Tensor:
    """A linear layer without bias, from codes where its weight is held as such.

    Args:
        module: Has `weight`, shape [out_channels, in_channels].
        x: Shape [tokens, in_channels].
        rounded: Whether `x` was rounded to FP8 per 32 channels.

    Returns:
        Shape [tokens, out_channels], in the dtype of `x`.
    """
    weight = module.weight
    if (
        not rounded
        or module.deterministic
        or not isinstance(weight, PackedWeight)
        or weight.kind != "fp8_block"
    ):
        out: Tensor = module(x)
        return out
    codes, scale = per_token_cast_to_fp8(x)
    out = x.new_empty(len(x), weight.shape[0])
    direct = out.dtype in (torch.bfloat16, torch.float32)
    product = fp8_gemm_nt(
        (codes, scale),
        (weight.codes.view(torch.float8_e4m3fn), weight.scale),
        out if direct else None,
    )
    return product if direct else product.to(x.dtype)
