"""Products with fp32 weights on tensor cores: a coefficient as the sum of three bf16 numbers, which is all of fp32.

Router and compressor keep fp32 weights. For bf16 inputs the three products are exact and summed in fp32, so the result is
that of an fp32 product with its sums in another order, at a third of the bf16 rate instead of the rate of the fp32 units.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from deepinfer.kernels import bf16_gemm_nt

__all__ = ["split_weight", "wide_linear"]

_MANY_TOKENS = 512


def split_weight(weight: Tensor) -> Tensor:
    """Three bf16 parts of an fp32 matrix, largest first, shape [3 * out_channels, in_channels], from [out, in]."""
    parts, rest = [], weight.float()
    for _ in range(3):
        part = rest.to(torch.bfloat16)
        parts.append(part)
        rest = rest - part.float()
    return torch.cat(parts)


def wide_linear(owner: nn.Module, weights: Sequence[Tensor], y: Tensor) -> list[Tensor]:
    """fp32 products of one input.

    Args:
        owner: Holds `wide_parts`, the `split_weight` of all weights one above the other, or None.
        weights: fp32, each of shape [out_channels, in_channels].
        y: Shape [tokens, in_channels].

    Returns:
        One a weight, shape [tokens, out_channels], fp32.
    """
    parts = getattr(owner, "wide_parts", None)
    few = y.dtype != torch.bfloat16 or len(y) < _MANY_TOKENS
    if parts is None or few or parts.device != y.device:
        wide = y.float()
        return [F.linear(wide, weight) for weight in weights]
    products = bf16_gemm_nt(y, parts, y.new_empty(len(y), len(parts), dtype=torch.float32))
    total = products.view(len(y), 3, -1).sum(1)
    return list(total.split([len(w) for w in weights], 1))
