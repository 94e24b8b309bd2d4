"""Randomness with an owner: numbers that depend on a request's seed, a position and a purpose, and on nothing else."""

from __future__ import annotations

import enum
from collections.abc import Sequence
from typing import Protocol

import numpy as np
import numpy.typing as npt

__all__ = ["CounterNoise", "DrawStream", "NoiseSource"]


class DrawStream(enum.IntEnum):
    """Purposes whose numbers must be independent of each other.

    A draft and the test of it that shared numbers would favour what the draft disliked: a fault that two engines
    shipped. `SHARED` is the opposite by design: the coupled rule gives draft and target the same numbers.
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
    """Noise from NumPy's Philox generator, keyed by seed and purpose, with the position as its counter.

    Nothing is remembered: the same arguments give the same numbers, in any order and in any batch.

    Args:
        seeds: Seed of each request, from 0 to 2**64 - 1.
    """

    def __init__(self, seeds: Sequence[int]) -> None:
        self.seeds = tuple(int(seed) for seed in seeds)

    def uniform(
        self, rows: Sequence[int], positions: Sequence[int], stream: DrawStream
    ) -> npt.NDArray[np.float64]:
        """One number a row; see `NoiseSource`."""
        draws = [
            self._generator(row, position, stream).random()
            for row, position in zip(rows, positions, strict=True)
        ]
        numbers: npt.NDArray[np.float64] = np.maximum(np.array(draws, float), 2.0**-54)
        return numbers

    def gumbel(
        self, rows: Sequence[int], positions: Sequence[int], vocab: int, stream: DrawStream
    ) -> npt.NDArray[np.float64]:
        """Gumbel noise of every token; see `NoiseSource`."""
        out = np.empty((len(rows), vocab))
        for at, (row, position) in enumerate(zip(rows, positions, strict=True)):
            out[at] = self._generator(row, position, stream).random(vocab)
        np.maximum(out, 2.0**-54, out=out)
        noise: npt.NDArray[np.float64] = -np.log(-np.log(out))
        return noise

    def _generator(self, row: int, position: int, stream: DrawStream) -> np.random.Generator:
        key = np.array([self.seeds[row] % 2**64, int(stream)], np.uint64)
        counter = np.array([0, 0, int(position), 0], np.uint64)
        return np.random.Generator(np.random.Philox(key=key, counter=counter))
