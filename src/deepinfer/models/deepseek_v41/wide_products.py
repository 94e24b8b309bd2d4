"""Products with fp32 weights on tensor cores: a coefficient as the sum of three bf16 numbers, which is all of fp32.

Router and compressor keep fp32 weights. For bf16 inputs the three products are exact and summed in fp32, so the result is
that of an fp32 product with its sums in another order, at a third of the bf16 rate instead of the rate of the fp32 units.
For many tokens the parts lie in memory; for few, where reading the weights takes longest, they are made from the fp32 weight
in registers.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from deepinfer.kernels import bf16_gemm_nt
from deepinfer.kernels.fused import fused_kernels

__all__ = ["split_weight", "wide_linear"]

# Sums from which on three products from memory take less time than weights that are split by every program.
_MANY_SUMS = 3 << 17


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
        owner: Holds `wide_parts`, the `split_weight` of all weights one above the other, or None, and `wide_whole`, the
            memory in which several weights lie one above the other, or None.
        weights: fp32, each of shape [out_channels, in_channels].
        y: Shape [tokens, in_channels].

    Returns:
        One a weight, shape [tokens, out_channels], fp32; not contiguous where there are several.
    """
    parts: Tensor | None = getattr(owner, "wide_parts", None)
    if parts is None or y.dtype != torch.bfloat16 or parts.device != y.device:
        wide = y.float()
        return [F.linear(wide, weight) for weight in weights]
    if len(y) * len(parts) < 3 * _MANY_SUMS:
        whole: Tensor | None = getattr(owner, "wide_whole", None)
        joined = [whole] if whole is not None and whole.device == y.device else weights
        found = [fused_kernels(y.device).wide_linear(y, weight) for weight in joined]
        total = found[0] if len(found) == 1 else torch.cat(found, 1)
    else:
        products = bf16_gemm_nt(y, parts, y.new_empty(len(y), len(parts), dtype=torch.float32))
        total = products.view(len(y), 3, -1).sum(1)
    return [total] if len(weights) == 1 else list(total.split([len(w) for w in weights], 1))
