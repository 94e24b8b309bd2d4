"""Rotary positions as cosine and sine tables."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from deepinfer.models.deepseek_v41.config import DeepseekV41Config
from deepinfer.models.deepseek_v41.rope import rope_frequencies, rope_phases


class Rope(NamedTuple):
    """Rotations of positions.

    Attributes:
        cos: Shape [..., T, rope_dim / 2], fp32.
        sin: Same shape.
    """

    cos: Tensor
    sin: Tensor

    def at(self, index: Tensor | slice) -> Rope:
        """The rotations of some positions."""
        return Rope(self.cos[index], self.sin[index])


def rope_table(c: DeepseekV41Config, num_positions: int, *, compressed: bool) -> Rope:
    """Rotations of positions 0 .. num_positions - 1, the numbers that inference uses."""
    frequencies = rope_frequencies(c, compressed=compressed)
    phases = rope_phases(frequencies, torch.arange(num_positions))
    return Rope(phases.real.contiguous(), phases.imag.contiguous())


def rotate(x: Tensor, rope: Rope, *, inverse: bool = False) -> Tensor:
    """Rotates adjacent pairs of the trailing channels.

    Args:
        x: Shape [..., T, channels], or [..., T, H, channels] with one axis more than the tables.
        rope: Rotations, shape [..., T, rope_dim / 2].
        inverse: Turn back instead.
    """
    cos, sin = rope
    r = 2 * cos.shape[-1]
    sin = -sin if inverse else sin
    a, b = x[..., -r:].float().unflatten(-1, (r // 2, 2)).unbind(-1)
    turned = torch.stack([a * cos - b * sin, a * sin + b * cos], -1).flatten(-2)
    return torch.cat([x[..., :-r], turned.to(x.dtype)], -1)


def per_head(rope: Rope) -> Rope:
    """The same rotations for several heads a token: an axis for the heads is put in."""
    return Rope(rope.cos[..., None, :], rope.sin[..., None, :])
