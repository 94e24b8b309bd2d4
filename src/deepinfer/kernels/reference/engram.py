"""What an Engram adds to the residual streams, and the rows of its table that it reads, in plain torch."""

from __future__ import annotations

import torch
from torch import Tensor

from deepinfer.kernels.reference.cast import cast_back

__all__ = ["add_engram", "engram_hash", "engram_lookup", "pair_latents"]


def engram_hash(
    history: Tensor,
    token_map: Tensor,
    multipliers: Tensor,
    primes: Tensor,
    offsets: Tensor,
    pad_id: int,
) -> Tensor:
    """Table rows of n-grams; see `deepinfer.kernels.engram.engram_hash`."""
    sizes = history.shape[-1] - 1
    heads = len(primes) // sizes
    broken = ((history < 0) | (history >= len(token_map))).cummax(-1).values
    ids = token_map[history.masked_fill(broken, 0)].masked_fill(broken, pad_id)
    mixed = ids * multipliers
    running, hashes = mixed[..., 0], []
    for n in range(1, sizes + 1):
        running = running ^ mixed[..., n]
        hashes.append(running)
    hashed = torch.stack(hashes, -1).repeat_interleave(heads, -1)
    return hashed % primes + offsets


def engram_lookup(
    rows: Tensor, table: Tensor, scale: Tensor, dtype: torch.dtype = torch.bfloat16
) -> Tensor:
    """Dequantised rows of a table; see `deepinfer.kernels.engram.engram_lookup`."""
    found = (rows >= 0) & (rows < len(table))
    safe = rows.masked_fill(~found, 0)
    channels, groups = table.shape[1], scale.shape[1]
    codes = table.view(torch.uint8)[safe].view(torch.float8_e4m3fn)
    factors = scale.view(torch.uint8)[safe]
    values = cast_back(codes, factors, block=(1, channels // groups), dtype=dtype)
    return values.masked_fill_(~found.unsqueeze(-1), 0.0).flatten(-2)


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
