"""Rotary positions of DeepSeek-V4.1: adjacent pairs as complex numbers, two frequency sets.

Layers of ratio 0 rotate with `rope_theta`; layers with a pool rotate everything (queries, window keys, pool
rows, index queries and keys) with `compress_rope_theta` under YaRN. There is no attention temperature.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from deepinfer.models.deepseek_v41.config import DeepseekV41Config

__all__ = ["Rotation", "apply_rope_", "rope_frequencies", "rope_phases"]


def rope_frequencies(
    config: DeepseekV41Config, *, compressed: bool, device: torch.device | str | None = None
) -> Tensor:
    """Angular frequencies of one kind of layer.

    Args:
        config: The model configuration.
        compressed: True for layers with a pool (YaRN), False for layers of ratio 0 and draft stages.
        device: Where to put them.

    Returns:
        Radians per position, shape [rope_dim / 2], fp32.
    """
    dim = config.qk_rope_head_dim
    theta = config.compress_rope_theta if compressed else config.rope_theta
    index = torch.arange(0, dim, 2, dtype=torch.float32, device=device)
    frequencies = 1.0 / (theta ** (index / dim))
    if not compressed:
        return frequencies
    yarn = config.rope_scaling
    span = yarn["original_max_position_embeddings"]

    def pair_of(turns: float) -> float:
        return dim * math.log(span / (turns * 2 * math.pi)) / (2 * math.log(theta))

    low = max(math.floor(pair_of(yarn["beta_fast"])), 0)
    high = min(math.ceil(pair_of(yarn["beta_slow"])), dim - 1)
    ramp = (torch.arange(dim // 2, dtype=torch.float32, device=device) - low) / max(
        high - low, 1e-3
    )
    ramp = ramp.clamp(0, 1)
    return frequencies * (1 - ramp) + frequencies / yarn["factor"] * ramp


def rope_phases(frequencies: Tensor, positions: Tensor) -> Tensor:
    """Rotations of the given positions; the angle is a product in fp32, as in the published reference.

    Args:
        frequencies: Radians per position, shape [rope_dim / 2], fp32.
        positions: Positions, shape [tokens], integer.

    Returns:
        Unit complex numbers, shape [tokens, rope_dim / 2], complex64.
    """
    angles = torch.outer(positions.float(), frequencies)
    return torch.polar(torch.ones_like(angles), angles)


@dataclass(frozen=True, slots=True)
class Rotation:
    """Rotations of the tokens of a pass.

    Attributes:
        per_token: For one row a token, shape [tokens, rope_dim / 2], complex64.
        per_head: For several heads a token, shape [tokens, 1, rope_dim / 2], complex64.
        per_head_inverse: Undoes `per_head`.
    """

    per_token: Tensor
    per_head: Tensor
    per_head_inverse: Tensor

    @classmethod
    def at(cls, frequencies: Tensor, positions: Tensor) -> Rotation:
        """Rotations of positions, shape [tokens], by frequencies, shape [rope_dim / 2]."""
        phases = rope_phases(frequencies, positions)
        return cls(phases, phases.unsqueeze(1), phases.conj().resolve_conj().unsqueeze(1))


def apply_rope_(x: Tensor, phases: Tensor) -> Tensor:
    """Rotates the trailing channels of `x` in place.

    Args:
        x: Values, shape [tokens, ..., channels]; the last `2 * phases.shape[-1]` channels are rotated.
        phases: Rotations that broadcast against the pairs, shape [tokens, ..., rope_dim / 2], complex64;
            their conjugate undoes a rotation.

    Returns:
        `x` itself.
    """
    pairs = phases.shape[-1]
    tail = x.narrow(-1, x.shape[-1] - 2 * pairs, 2 * pairs).view(*x.shape[:-1], pairs, 2)
    if x.dtype == torch.float32:
        torch.view_as_complex(tail).mul_(phases)
    else:
        tail.copy_(torch.view_as_real(torch.view_as_complex(tail.float()) * phases))
    return x
