"""How long answers are, learned from those that ended."""

from __future__ import annotations

import numpy as np

from deepinfer.core import _checks as checks
from deepinfer.core.errors import ConfigError

__all__ = ["OutputLengths"]

_BUCKETS = 64


class OutputLengths:
    """Predicts how many tokens an answer has left, from how many it has and how long others became.

    Lengths are counted in buckets that grow by a quarter each, and old ones fade.

    Args:
        prior_tokens: Mean length to assume before anything is known.
        memory: Answers after which what was seen counts for a third.

    Raises:
        ConfigError: A number is out of range.

    Examples:
        >>> lengths = OutputLengths(prior_tokens=300)
        >>> lengths.remaining(0)
        300.0
        >>> for _ in range(1000):
        ...     lengths.observe(100)
        >>> 90 < lengths.remaining(0) < 115
        True
    """

    def __init__(self, *, prior_tokens: float = 500.0, memory: int = 2_000) -> None:
        self.prior_tokens = checks.check_float(
            "prior_tokens", prior_tokens, 0.0, 1e9, ConfigError, open_low=True
        )
        self._keep = 1.0 - 1.0 / checks.check_int("memory", memory, 2, 2**31 - 1, ConfigError)
        self._weight = np.zeros(_BUCKETS)
        self._tokens = np.zeros(_BUCKETS)

    def observe(self, tokens: int) -> None:
        """Takes the length of an answer that ended by itself.

        Args:
            tokens: Its tokens, from 0.

        Raises:
            ConfigError: The number is negative.
        """
        checks.check_int("tokens", tokens, 0, 2**62, ConfigError)
        self._weight *= self._keep
        self._tokens *= self._keep
        bucket = _bucket(tokens)
        self._weight[bucket] += 1.0
        self._tokens[bucket] += tokens

    def remaining(self, generated: int) -> float:
        """Tokens that an answer is expected to have left.

        Args:
            generated: Tokens that it has.

        Returns:
            The mean over longer answers seen so far, at least 1; the prior where none was.
        """
        first = _bucket(generated) + (generated > 0)
        weight = float(self._weight[first:].sum())
        if weight < 1e-3:
            return max(1.0, self.prior_tokens - generated)
        return max(1.0, float(self._tokens[first:].sum()) / weight - generated)


def _bucket(tokens: int) -> int:
    return min(_BUCKETS - 1, int(np.log(max(tokens, 1)) / np.log(1.25)))
