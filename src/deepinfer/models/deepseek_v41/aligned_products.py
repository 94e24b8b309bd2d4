"""FP8 weights with one power of two for 128 x 128, made from the published form with one for 32 x 32.

Their products take tokens as `per_token_cast_to_fp8_aligned` casts them. Tensor cores of Hopper add up 128 channels before
a scale is applied; with a scale for each 32 they add up 32, which halves their rate. The powers of 128 x 128 codes are
therefore brought to the largest of them, and the codes moved as far down. A code keeps its value but where it falls below
2^-6 of the larger power: it is rounded to steps of 2^-9 then, which is at most 2^-10 of that power, as the casts themselves
round by up to 2^-4 of each value.
"""

from __future__ import annotations

import torch
from torch import Tensor

from deepinfer.models.packed import PackedWeight

__all__ = ["align_weight", "fits"]

_WIDE = 128
_BLOCK = 32


def fits(weight: object) -> bool:
    """Whether a weight has whole blocks of 128 rows and 128 channels of FP8 codes."""
    return (
        isinstance(weight, PackedWeight)
        and weight.kind == "fp8_block"
        and not any(n % _WIDE for n in weight.shape)
    )


def align_weight(weight: PackedWeight) -> tuple[Tensor, Tensor]:
    """Codes of a weight with one power of two for 128 x 128.

    Args:
        weight: A weight that `fits`.

    Returns:
        Codes, shape [out_channels, in_channels], e4m3, and powers, shape [out_channels / 128, in_channels / 128], fp32.
    """
    side = _WIDE // _BLOCK
    rows, columns = (n // _WIDE for n in weight.shape)
    powers = weight.scale.int().view(rows, side, columns, side)
    top = powers.amax((1, 3), keepdim=True)
    down = torch.exp2((powers - top).float())
    codes = torch.empty_like(weight.codes).view(torch.float8_e4m3fn)
    given = weight.codes.view(torch.float8_e4m3fn)
    for row in range(rows):  # one at a time: fp32 takes four times as much memory
        part = slice(row * _WIDE, (row + 1) * _WIDE)
        values = given[part].float().view(side, _BLOCK, columns, side, _BLOCK)
        moved = values * down[row].unsqueeze(1).unsqueeze(-1)
        codes[part] = moved.view(_WIDE, -1).to(torch.float8_e4m3fn)
    return codes, torch.exp2((top.view(rows, columns) - 127).float())
