"""Products of FP8 codes with FP8 weights, scaled for 32 channels, in torch."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

__all__ = ["code_linear"]

Pair = tuple[Tensor, Tensor]


def code_linear(x: Pair, weight: Pair, out: Tensor) -> Tensor:
    """Product of codes with the codes of a weight, for a few rows.

    Args:
        x: Codes, shape [tokens, channels], e4m3, and their powers of two, [tokens, channels / 32], e8m0; rows contiguous.
        weight: Codes, shape [out_channels, channels], e4m3 or uint8, contiguous, and powers of 32x32 blocks,
            [ceil(out_channels / 32), channels / 32], e8m0 or uint8. Channels are a multiple of 128.
        out: Shape [tokens, out_channels], bf16 or fp32, contiguous, written and returned.

    Returns:
        `out`. Products are exact and summed in fp32; in a kernel the order hangs on the weight's shape alone.
    """
    values = _values(*weight, rows=32)[: out.shape[1]]
    return out.copy_(F.linear(_values(*x), values))


def _values(codes: Tensor, powers: Tensor, rows: int = 1) -> Tensor:
    if codes.dtype == torch.uint8:
        codes = codes.view(torch.float8_e4m3fn)
    scale = torch.exp2(powers.view(torch.uint8).float() - 127).repeat_interleave(32, 1)
    if rows > 1:
        scale = scale.repeat_interleave(rows, 0)[: len(codes)]
    return codes.float() * scale
