"""Counter-based random numbers: every number is a pure function of (seed, position, index, stream).

There is no generator object and no state, so nothing that happens to a request (other rows of its batch,
preemption, speculation, a restart in another process) can move its stream. The bits are those of
Philox4x32-10 (Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", 2011).
"""

from __future__ import annotations

import enum
import secrets
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from deepinfer.core.errors import ConfigError
from deepinfer.core.philox import WORD_MASK, philox4x32

__all__ = [
    "MAX_GUMBEL",
    "MIN_GUMBEL",
    "SeedWords",
    "Stream",
    "child_seed",
    "gumbel_from_bits",
    "gumbel_noise",
    "noise_bits",
    "philox4x32",
    "resolve_seed",
    "uniform_from_bits",
]

_MASK = WORD_MASK
_SEED_MASK = 0xFFFFFFFFFFFFFFFF

MIN_GUMBEL = -3.14
"""No Gumbel noise made here is below this."""
MAX_GUMBEL = 22.88
"""No Gumbel noise made here is above this."""


class Stream(enum.IntEnum):
    """Third counter word: uses of randomness that must be independent of each other."""

    SAMPLE = 0
    """Noise that chooses an output token; a coupled drafter shares it."""
    DRAFT = 1
    """Noise that chooses a draft token under the standard acceptance rule."""
    ACCEPT = 2
    """The acceptance test of a draft token."""
    RESIDUAL = 3
    """The token that replaces a rejected draft."""
    BONUS = 4
    """The token after the last accepted draft."""
    CHILD_SEED = 5
    """Seeds of the further samples of one prompt."""


def _philox(
    counter: tuple[Tensor | int, ...], key: tuple[Tensor, ...]
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """`philox4x32` of tensors; on the CPU by NumPy, whose integer operations cost less there."""
    if key[0].device.type != "cpu":
        return philox4x32(counter, key)
    arrays = [word.numpy() if isinstance(word, Tensor) else word for word in (*counter, *key)]
    first, second, third, fourth = map(torch.from_numpy, philox4x32(arrays[:4], arrays[4:]))
    return first, second, third, fourth


class SeedWords(NamedTuple):
    """Seeds as words of keys, ready on a device.

    Attributes:
        low: Low words, shape [rows, 1], int64.
        high: High words, shape [rows, 1], int64.
    """

    low: Tensor
    high: Tensor

    @classmethod
    def of(cls, seeds: Sequence[int] | Tensor | SeedWords, device: torch.device) -> SeedWords:
        """Takes seeds apart.

        Args:
            seeds: One a row, as in `noise_bits`.
            device: Where the words are to be.

        Returns:
            The words.
        """
        if isinstance(seeds, SeedWords):
            return seeds
        if not isinstance(seeds, Tensor):
            low = [int(seed) & _MASK for seed in seeds]
            high = [(int(seed) >> 32) & _MASK for seed in seeds]
            words = torch.tensor([low, high], dtype=torch.int64).to(device, non_blocking=True)
            return cls(words[0].unsqueeze(-1), words[1].unsqueeze(-1))
        seeds = seeds.to(device=device, dtype=torch.int64).unsqueeze(-1)
        return cls(seeds & _MASK, (seeds >> 32) & _MASK)


def _position_column(positions: Sequence[int] | Tensor, device: torch.device) -> Tensor:
    """Positions as counter words, shape [rows, 1]."""
    column = torch.as_tensor(positions, dtype=torch.int64).to(device, non_blocking=True)
    return column.unsqueeze(-1) & _MASK


def noise_bits(
    seeds: Sequence[int] | Tensor | SeedWords,
    positions: Sequence[int] | Tensor,
    *,
    vocab_size: int | None = None,
    token_ids: Tensor | None = None,
    stream: Stream = Stream.SAMPLE,
    device: torch.device | str | None = None,
) -> Tensor:
    """Random 32-bit words of tokens: key = seed, counter = (position, token id >> 2, stream, 0), word id & 3.

    The word of a token is the same whether the whole vocabulary is asked for or that token alone.

    Args:
        seeds: One a row, from 0 to 2**64 - 1 (a tensor holds the same 64 bits as int64), shape [rows]; or their words.
        positions: Position of the token to be chosen, one a row, shape [rows], taken modulo 2**32.
        vocab_size: Ask for tokens 0 to vocab_size - 1; give this or `token_ids`.
        token_ids: Ask for these tokens, shape [rows, candidates], int64.
        stream: Which use of randomness.
        device: Where to make them; that of `token_ids` or the CPU unless given.

    Returns:
        Words from 0 to 2**32 - 1, shape [rows, vocab_size] or that of `token_ids`, int64.

    Raises:
        ConfigError: Neither or both of `vocab_size` and `token_ids` are given.
    """
    if (vocab_size is None) == (token_ids is None):
        raise ConfigError(
            "noise_bits got "
            + ("neither" if vocab_size is None else "both")
            + " of vocab_size and token_ids; give exactly one of them.",
            field="vocab_size",
            value=vocab_size,
        )
    if device is None:
        device = token_ids.device if token_ids is not None else "cpu"
    device = torch.device(device)
    key = SeedWords.of(seeds, device)
    position = _position_column(positions, device)
    if token_ids is not None:
        words = _philox((position, token_ids >> 2, int(stream), 0), key)
        choice = (token_ids & 3).unsqueeze(-1)
        return (
            torch.stack([word.expand_as(token_ids) for word in words], dim=-1)
            .gather(-1, choice)
            .squeeze(-1)
        )
    size = int(vocab_size or 0)
    blocks = torch.arange((size + 3) // 4, dtype=torch.int64, device=device).unsqueeze(0)
    words = _philox((position, blocks, int(stream), 0), key)
    return torch.stack(words, dim=-1).flatten(1)[:, :size]


def uniform_from_bits(bits: Tensor) -> Tensor:
    """Uniform numbers strictly between 0 and 1: (word + 0.5) / 2**32.

    Args:
        bits: Words from 0 to 2**32 - 1, any shape, int64.

    Returns:
        The same shape, float64: the half step keeps both ends out, which float32 could not.
    """
    return bits.to(torch.float64).add_(0.5).mul_(2.0**-32)


def gumbel_from_bits(bits: Tensor) -> Tensor:
    """Standard Gumbel noise, -log(-log(u)): always finite, between `MIN_GUMBEL` and `MAX_GUMBEL`.

    Args:
        bits: Words from 0 to 2**32 - 1, any shape, int64.

    Returns:
        The same shape, float64, rising with the word.
    """
    return uniform_from_bits(bits).log_().neg_().log_().neg_()


def gumbel_noise(
    seeds: Sequence[int] | Tensor | SeedWords,
    positions: Sequence[int] | Tensor,
    *,
    vocab_size: int | None = None,
    token_ids: Tensor | None = None,
    stream: Stream = Stream.SAMPLE,
    device: torch.device | str | None = None,
) -> Tensor:
    """Gumbel noise of tokens; arguments as in `noise_bits`.

    Adding it to log probabilities and taking the highest draws one token from the law. Noise is tied to the
    token id and never to its rank, so a rounding error that swaps two ranks does not change the choice.

    Args:
        seeds: One a row, shape [rows].
        positions: One a row, shape [rows].
        vocab_size: Ask for tokens 0 to vocab_size - 1.
        token_ids: Ask for these tokens, shape [rows, candidates], int64.
        stream: Which use of randomness.
        device: Where to make it.

    Returns:
        Shape [rows, vocab_size] or that of `token_ids`, float64.

    Raises:
        ConfigError: Neither or both of `vocab_size` and `token_ids` are given.
    """
    return gumbel_from_bits(
        noise_bits(
            seeds,
            positions,
            vocab_size=vocab_size,
            token_ids=token_ids,
            stream=stream,
            device=device,
        )
    )


def child_seed(seed: int, index: int) -> int:
    """Seed of sample `index` of a prompt.

    Sample 0 keeps the request's seed, so asking for more samples leaves the first one as it was.

    Args:
        seed: The request's seed, from 0 to 2**64 - 1.
        index: Which sample, from 0.

    Returns:
        From 0 to 2**64 - 1.

    Examples:
        >>> child_seed(7, 0), child_seed(7, 1) != child_seed(7, 2)
        (7, True)
    """
    seed = int(seed) & _SEED_MASK
    if index == 0:
        return seed
    key = (seed & _MASK, seed >> 32)
    low, high, _, _ = philox4x32((index & _MASK, 0, int(Stream.CHILD_SEED), 0), key)
    return int(low) | (int(high) << 32)


def resolve_seed(seed: int | None, index: int = 0) -> int:
    """Seed of one sample of a request: drawn from the operating system when the request has none.

    Args:
        seed: `SamplingParams.seed`.
        index: Which sample, from 0.

    Returns:
        From 0 to 2**64 - 1. Draw it once when the request arrives and keep it with the request.
    """
    return secrets.randbits(64) if seed is None else child_seed(seed, index)
