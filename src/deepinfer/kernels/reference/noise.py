"""Counter-based noise of tokens in plain torch: Philox4x32-10, keyed by seed, counted by position, token and purpose."""

from __future__ import annotations

import torch
from torch import Tensor

__all__ = ["noise_words", "token_gumbel", "token_uniform"]

_MASK = 0xFFFFFFFF
_FACTORS = (0xD2511F53, 0xCD9E8D57)
_STEPS = (0x9E3779B9, 0xBB67AE85)


def noise_words(seeds: Tensor, positions: Tensor, token_ids: Tensor, stream: int) -> Tensor:
    """Random words of tokens: key = seed, counter = (position, token id >> 2, stream, 0), word token id & 3.

    Args:
        seeds: 64 bits each, shape [rows], int64.
        positions: Position of the token to be chosen, shape [rows], integers.
        token_ids: Shape [rows, candidates] or [1, candidates], int64, from 0.
        stream: Purpose of the noise.

    Returns:
        Words from 0 to 2**32 - 1, shape [rows, candidates], int64.
    """
    seeds = seeds.to(torch.int64).unsqueeze(-1)
    keys = [seeds & _MASK, (seeds >> 32) & _MASK]
    first = positions.to(torch.int64).unsqueeze(-1) & _MASK
    zero = torch.zeros_like(first)
    words = [first, token_ids >> 2, zero + stream, zero]
    for i in range(10):
        # An int64 product of two words wraps; the mask behind the shift takes the sign away again.
        low = [words[0] * _FACTORS[0], words[2] * _FACTORS[1]]
        high = [(product >> 32) & _MASK for product in low]
        added = [(key + i * step) & _MASK for key, step in zip(keys, _STEPS, strict=True)]
        words = [
            high[1] ^ words[1] ^ added[0],
            low[1] & _MASK,
            high[0] ^ words[3] ^ added[1],
            low[0] & _MASK,
        ]
    shape = torch.broadcast_shapes(seeds.shape, token_ids.shape)
    which = token_ids.expand(shape) & 3
    out = words[0].expand(shape)
    for i in range(1, 4):
        out = torch.where(which == i, words[i].expand(shape), out)
    return out


def token_uniform(seeds: Tensor, positions: Tensor, token_ids: Tensor, stream: int) -> Tensor:
    """Uniform numbers strictly between 0 and 1; arguments as in `noise_words`.

    Returns:
        `(word + 0.5) / 2**32`, shape [rows, candidates], fp64.
    """
    words = noise_words(seeds, positions, token_ids, stream)
    return (words.to(torch.float64) + 0.5) * 2.0**-32


def token_gumbel(seeds: Tensor, positions: Tensor, token_ids: Tensor, stream: int) -> Tensor:
    """Gumbel noise `-log(-log(u))`, always finite; arguments as in `noise_words`.

    Returns:
        From -3.14 to 22.88, shape [rows, candidates], fp64.
    """
    return -(-token_uniform(seeds, positions, token_ids, stream).log()).log()
