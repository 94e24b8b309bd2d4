"""What an Engram adds to the residual streams, in plain torch."""

from __future__ import annotations

import torch
from torch import Tensor

__all__ = ["add_engram", "pair_latents"]


def add_engram(
    streams: Tensor,
    projected: Tensor,
    q_weight: Tensor,
    k_weight: Tensor,
    eps: float,
    is_image: Tensor | None = None,
) -> Tensor:
    """Adds a value to every stream, through a gate that compares the stream with its key.

    Args:
        streams: Residual streams, shape [tokens, n, channels].
        projected: Keys of the streams, then the value, shape [tokens, (n + 1) * channels].
        q_weight: Gains of the streams, shape [n, channels], fp32.
        k_weight: Gains of the keys, shape [n, channels], fp32.
        eps: Added to every mean square.
        is_image: True for image tokens, which get nothing, shape [tokens]; None when there is none.

    Returns:
        The new streams, same shape and dtype. Computed in fp32.
    """
    kv = projected.float().unflatten(-1, (streams.shape[1] + 1, -1))
    key, value, wide = kv[:, :-1], kv[:, -1:], streams.float()
    dot = (wide * (q_weight * k_weight) * key).sum(-1)
    scale = (wide.square().mean(-1) + eps) * (key.square().mean(-1) + eps)
    dot = dot * torch.rsqrt(scale * wide.shape[-1])
    gate = torch.sigmoid(dot.sign() * dot.abs().clamp_min(1e-6).sqrt())
    if is_image is not None:
        gate = gate.masked_fill(is_image.unsqueeze(-1), 0.0)
    return (wide + gate.unsqueeze(-1) * value).to(streams.dtype)


def pair_latents(first: Tensor, second: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Normed latents of pairs of tokens: by channel, a softmax over the two gates weighs the two values.

    Args:
        first: Value and gate of each first token, shape [pairs, 2, channels], fp32.
        second: Those of each second token, same shape.
        weight: Gains of the norm, shape [channels]; the norm sees values rounded to their dtype.
        eps: Added to the mean square.

    Returns:
        Shape [pairs, channels], dtype of `weight`.
    """
    share = torch.sigmoid(first[:, 1] - second[:, 1])
    mixed = (share * first[:, 0] + (1 - share) * second[:, 0]).to(weight.dtype).float()
    normed = mixed * torch.rsqrt(mixed.square().mean(-1, keepdim=True) + eps)
    return (normed * weight.float()).to(weight.dtype)
