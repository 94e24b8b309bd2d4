"""Rotation of the last channels of heads by the positions of their tokens, in plain torch."""

from __future__ import annotations

import torch
from torch import Tensor

__all__ = ["apply_rope", "turns_at"]


def turns_at(phases: Tensor, places: Tensor) -> Tensor:
    """Rotations at places of a table; at a place that it does not have, the one that turns nothing.

    Args:
        phases: Cosine and sine of each pair, shape [places, rope_dim / 2, 2], fp32.
        places: Any shape, integers.

    Returns:
        Shape [*places.shape, rope_dim / 2, 2].
    """
    known = (places >= 0) & (places < len(phases))
    if not len(phases):
        found = phases.new_zeros((*places.shape, *phases.shape[1:]))
    else:
        found = phases[places.long().clamp(0, len(phases) - 1)]
    still = phases.new_tensor((1.0, 0.0))
    return torch.where(known[..., None, None], found, still)


def apply_rope(
    x: Tensor,
    phases: Tensor,
    positions: Tensor | None = None,
    inverse: bool = False,
    out: Tensor | None = None,
) -> Tensor:
    """Rotates the last `2 * phases.shape[1]` channels, adjacent pairs as complex numbers, in fp32.

    Args:
        x: Shape [tokens, heads, channels] or [tokens, channels], any float dtype.
        phases: Cosine and sine of each pair, shape [places, rope_dim / 2, 2], fp32.
        positions: Place of each token, shape [tokens], integers; its number when None. A token at a place that the table
            does not have is not turned.
        inverse: Rotate back.
        out: Where the result goes, of the shape and dtype of `x`, which it may be; a new tensor when None.

    Returns:
        Same shape and dtype as `x`.
    """
    turns = phases[: len(x)] if positions is None else turns_at(phases, positions)
    cos, sin = turns.unbind(-1)
    if x.dim() == 3:
        cos, sin = cos.unsqueeze(1), sin.unsqueeze(1)
    sin = -sin if inverse else sin
    width = 2 * phases.shape[1]
    even, odd = x[..., x.shape[-1] - width :].float().unflatten(-1, (-1, 2)).unbind(-1)
    turned = torch.stack((even * cos - odd * sin, even * sin + odd * cos), -1).flatten(-2)
    if out is None:
        return torch.cat((x[..., : x.shape[-1] - width], turned.to(x.dtype)), -1)
    if out is not x:
        out.copy_(x)
    out[..., x.shape[-1] - width :] = turned
    return out
