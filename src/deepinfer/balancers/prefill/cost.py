"""What a prompt costs an engine, in seconds."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Protocol, TypeVar

import numpy as np
import numpy.typing as npt

from deepinfer.core import _checks as checks
from deepinfer.core.errors import ConfigError

__all__ = ["PrefillCost"]

Number = TypeVar("Number", float, npt.NDArray[np.float64])


class _Coefficients(Protocol):
    step_s: float
    token_s: float
    prefix_token_s: float
    pair_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class PrefillCost:
    """Seconds of x prompt tokens that stand behind a prefix of L tokens.

    ```text
    t(L, x) = g L + b x + a (2 L x + x²)          and `step_s` for each step that runs some of them
    ```

    The same formula as `deepinfer.scheduling.StepTimeModel`, without the fitting, so that a router process carries four
    numbers and nothing more.

    Args:
        token_s: b, seconds a token.
        pair_s: a, seconds a pair of tokens that see each other, both orders counted.
        prefix_token_s: g, seconds a token of prefix that is read.
        step_s: Seconds of a step that runs nothing.

    Raises:
        ConfigError: A coefficient is no number from 0.

    Examples:
        >>> cost = PrefillCost(token_s=5e-5)
        >>> cost.seconds(prefix=0, tokens=1000)
        0.05
        >>> cost.largest(prefix=0, seconds=0.05, cap=32_768)
        1000
    """

    token_s: float
    pair_s: float = 0.0
    prefix_token_s: float = 0.0
    step_s: float = 0.0

    def __post_init__(self) -> None:
        """Checks the coefficients."""
        for name in ("token_s", "pair_s", "prefix_token_s", "step_s"):
            checks.check_float(name, getattr(self, name), 0.0, 1e9, ConfigError)

    @classmethod
    def of(cls, coefficients: _Coefficients) -> PrefillCost:
        """Takes the coefficients of a fitted model.

        Args:
            coefficients: `StepTimeModel.coefficients`, or anything with fields of the same names.

        Returns:
            The cost.
        """
        return cls(
            token_s=coefficients.token_s,
            pair_s=coefficients.pair_s,
            prefix_token_s=coefficients.prefix_token_s,
            step_s=coefficients.step_s,
        )

    @classmethod
    def of_rate(
        cls, tokens_per_s: float, *, crossover_tokens: float = math.inf, step_s: float = 0.0
    ) -> PrefillCost:
        """A cost from two figures that people know of their engine.

        Args:
            tokens_per_s: Prefill rate of short prompts.
            crossover_tokens: Prompt length at which attention costs as much as all the rest.
            step_s: Seconds of a step that runs nothing.

        Returns:
            The cost.

        Raises:
            ConfigError: A figure is not above 0.
        """
        checks.check_float("tokens_per_s", tokens_per_s, 0.0, 1e15, ConfigError, open_low=True)
        if crossover_tokens != float("inf"):
            checks.check_float(
                "crossover_tokens", crossover_tokens, 0.0, 1e15, ConfigError, open_low=True
            )
        token_s = 1.0 / tokens_per_s
        return cls(token_s=token_s, pair_s=token_s / crossover_tokens, step_s=step_s)

    def seconds(self, prefix: Number, tokens: Number) -> Number:
        """Seconds of a chunk, without those of its step.

        Args:
            prefix: Tokens before it, a number or an array.
            tokens: Its tokens, a number or an array of the same shape.

        Returns:
            The seconds, shaped alike.
        """
        seconds = (self.pair_s * (2.0 * prefix + tokens) + self.token_s) * tokens
        return seconds + self.prefix_token_s * prefix if self.prefix_token_s else seconds

    def largest(self, prefix: float, seconds: float, cap: int) -> int:
        """The largest chunk that stays within a time.

        Args:
            prefix: Tokens before it.
            seconds: Time left for it.
            cap: Most tokens.

        Returns:
            Tokens from 0 to `cap`; 0 when not even one fits.
        """
        left = seconds - self.prefix_token_s * prefix
        linear = self.token_s + 2.0 * self.pair_s * prefix
        if left < 0 or cap < 1:
            return 0
        slope = linear + math.sqrt(linear * linear + 4.0 * self.pair_s * left)
        if slope <= 0 or 2.0 * left >= slope * cap:
            return cap
        tokens = int(2.0 * left / slope)
        if self.seconds(float(prefix), float(tokens + 1)) <= seconds:  # rounding fell short by one
            tokens += 1
        return min(tokens, cap)
