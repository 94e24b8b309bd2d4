"""Randomness with an owner: numbers that depend on a request's seed, a position and a purpose, and on nothing else."""

from __future__ import annotations

import enum
from collections.abc import Iterable, Sequence
from typing import Protocol

import numpy as np
import numpy.typing as npt

from deepinfer.core import _checks as checks
from deepinfer.core.errors import ConfigError
from deepinfer.core.philox import WORD_MASK, philox4x32

__all__ = ["CounterNoise", "DrawStream", "NoiseSource"]


class DrawStream(enum.IntEnum):
    """Purposes whose numbers must be independent of each other.

    A draft and the test of it that shared numbers would favour what the draft disliked: a fault that two engines
    shipped. `SHARED` is the opposite by design: the coupled rule gives draft and target the same numbers.

    A position may be drafted again in the next step. `DRAFT` numbers of its position alone are then the same ones, which is
    right as long as nothing that has happened since depends on that draft: so under the rule "standard" with lengths that
    live confidences or nothing decides. Where lengths follow *lagged* confidences, and under the rule "block", it does
    depend on it: draw drafts with numbers of the step there, such as a seed for each step.
    """

    SHARED = 0
    DRAFT = 1
    ACCEPT = 2
    RESIDUAL = 3
    BONUS = 4


class NoiseSource(Protocol):
    """Where drafters and verifiers take their numbers from."""

    def uniform(
        self, rows: Sequence[int], positions: Sequence[int], stream: DrawStream
    ) -> npt.NDArray[np.float64]:
        """One number a row, strictly between 0 and 1, shape [rows].

        Args:
            rows: Requests, as indices into the source's seeds.
            positions: Position of the token that is decided about, in the whole sequence.
            stream: The purpose.
        """
        ...

    def gumbel(
        self, rows: Sequence[int], positions: Sequence[int], vocab: int, stream: DrawStream
    ) -> npt.NDArray[np.float64]:
        """Gumbel noise of every token, shape [rows, vocab].

        Args:
            rows: Requests, as indices into the source's seeds.
            positions: Position of the token that is drawn.
            vocab: Tokens.
            stream: The purpose.
        """
        ...


class CounterNoise:
    """The noise of the sampler (`deepinfer.sampling.gumbel_noise`) in NumPy: Philox4x32-10 of seed, position and purpose.

    So a draft that is drawn with it agrees with what an engine draws from the same law with the same seed. Nothing is
    remembered: the same arguments give the same numbers, in any order and in any batch. Positions count modulo 2**32.

    Args:
        seeds: Seed of each request, from 0 to 2**64 - 1.

    Raises:
        ConfigError: A seed is out of range.
    """

    def __init__(self, seeds: Sequence[int]) -> None:
        if not isinstance(seeds, Iterable):
            checks.fail("seeds", seeds, "a sequence, one a request", ConfigError)
        self.seeds = tuple(
            [checks.check_int("seeds", seed, 0, 2**64 - 1, ConfigError) for seed in seeds]
        )

    def uniform(
        self, rows: Sequence[int], positions: Sequence[int], stream: DrawStream
    ) -> npt.NDArray[np.float64]:
        """One number a row; see `NoiseSource`."""
        return self._numbers(rows, positions, 1, stream)[:, 0]

    def gumbel(
        self, rows: Sequence[int], positions: Sequence[int], vocab: int, stream: DrawStream
    ) -> npt.NDArray[np.float64]:
        """Gumbel noise of every token; see `NoiseSource`."""
        noise: npt.NDArray[np.float64] = -np.log(
            -np.log(self._numbers(rows, positions, vocab, stream))
        )
        return noise

    def _numbers(
        self, rows: Sequence[int], positions: Sequence[int], count: int, stream: DrawStream
    ) -> npt.NDArray[np.float64]:
        """Numbers of tokens, strictly between 0 and 1, shape [rows, count]: four from each counter."""
        if len(rows) and not 0 <= min(rows) <= max(rows) < len(self.seeds):
            limit = f"rows of the {len(self.seeds)} seeds, one of which belongs to each request"
            checks.fail("rows", [min(rows), max(rows)], limit, ConfigError)
        low = np.array([[self.seeds[row] & WORD_MASK] for row in rows], np.int64).reshape(-1, 1)
        high = np.array([[self.seeds[row] >> 32 & WORD_MASK] for row in rows], np.int64)
        place = np.array([int(at) & WORD_MASK for at in positions], np.int64).reshape(-1, 1)
        quarter = np.arange(-(-count // 4))
        words = philox4x32((place, quarter, int(stream), 0), (low, high.reshape(-1, 1)))
        bits = np.stack(np.broadcast_arrays(*words), -1).reshape(len(rows), 4 * len(quarter))[
            :, :count
        ]
        numbers: npt.NDArray[np.float64] = (bits + 0.5) * 2.0**-32
        return numbers
