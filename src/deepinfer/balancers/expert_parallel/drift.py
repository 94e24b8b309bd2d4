"""Loads that drift: what a router might choose over many steps, made up, for tests and comparisons."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from deepinfer.balancers.expert_parallel._arrays import FloatArray, IntArray
from deepinfer.core import _checks as checks
from deepinfer.core.errors import ConfigError

__all__ = ["DriftingLoad"]


class DriftingLoad:
    """Counts of experts step by step: a slow random walk, bursts, and the noise of counting.

    The popularity of experts starts as a Zipf law in random order. Its logarithm walks at random from step to step. In a
    step the popularity is drawn from a Dirichlet distribution around it (texts of a batch resemble each other), and the
    counts from a multinomial distribution.

    Args:
        layers: Layers.
        experts: Experts of a layer.
        assignments: Tokens times chosen experts a step, over all ranks.
        exponent: Exponent of the Zipf law.
        walk: Standard deviation of the walk of a logarithm in one step.
        burst: Concentration of the Dirichlet distribution; higher is calmer.
        seed: Seed; equal arguments give equal counts.

    Raises:
        ConfigError: A number is out of range.
    """

    def __init__(
        self,
        layers: int,
        experts: int,
        assignments: int,
        *,
        exponent: float = 0.8,
        walk: float = 0.002,
        burst: float = 10_000.0,
        seed: int = 0,
    ) -> None:
        for name, value in (("layers", layers), ("experts", experts), ("assignments", assignments)):
            checks.check_int(name, value, 1, 2**31 - 1, ConfigError)
        checks.check_float("exponent", exponent, 0.0, 10.0, ConfigError)
        checks.check_float("walk", walk, 0.0, 10.0, ConfigError)
        checks.check_float("burst", burst, 0.0, 1e15, ConfigError, open_low=True)
        self.assignments, self.walk, self.burst = assignments, walk, burst
        self._rng = np.random.default_rng(seed)
        ranked = -exponent * np.log(np.arange(1, experts + 1))
        self._log = self._rng.permuted(np.tile(ranked, (layers, 1)), axis=1)

    @property
    def popularity(self) -> FloatArray:
        """What the loads are on average at this step, shape [layers, experts], each layer with sum 1."""
        weight = np.exp(self._log - self._log.max(1, keepdims=True))
        popularity: FloatArray = weight / weight.sum(1, keepdims=True)
        return popularity

    def step(self) -> IntArray:
        """Goes one step on.

        Returns:
            Counts of the step, shape [layers, experts], int64; each layer has the sum `assignments`.
        """
        self._log += self._rng.normal(0.0, self.walk, self._log.shape)
        drawn = self._rng.gamma(self.burst * self.popularity) + 1e-300
        drawn /= drawn.sum(1, keepdims=True)
        return self._rng.multinomial(self.assignments, drawn)

    def steps(self, number: int) -> Iterator[IntArray]:
        """Goes several steps on.

        Args:
            number: How many.

        Yields:
            The counts of each.
        """
        for _ in range(number):
            yield self.step()
