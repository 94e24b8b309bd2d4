"""Chunks of prompts by time: as long as a step with decoding rows in it may get."""

from __future__ import annotations

from deepinfer.core import _checks as checks
from deepinfer.core.errors import ConfigError
from deepinfer.scheduling.cost_model import PrefillCostModel
from deepinfer.scheduling.step_work import StepWork

__all__ = ["TimedChunks"]

_INT_MAX = 2**31 - 1


class TimedChunks:
    """A `ChunkPolicy` that gives each step's prompts the time which the decoding rows leave of a target.

    The chunk is the largest that the cost model fits into that time. These rules come on top:

    - A step always gets on with one prompt, if only by `min_tokens`, even when decoding alone takes all the time.
      Further prompts get a chunk when at least `min_tokens`, or all that remains of them, fits.
    - What is left of a prompt after a chunk is never less than `min_tokens` or `window`: a tail that short is taken along
      when that exceeds the target by no more than `slack`, and else the rest is split into two equal chunks.
    - Chunks end on multiples of `grain` where that takes no more than an eighth of them.
    - Before a model was fitted, the chunks of a step have `first_tokens` together.

    Args:
        model: What steps cost.
        target_s: Seconds that a step should take at most.
        idle_target_s: The same for steps in which nothing decodes, so that no one waits for their end; None takes
            `target_s`.
        max_tokens: Most tokens of a chunk.
        min_tokens: Fewest tokens worth a row, save for the last of a prompt.
        window: Width of the model's attention window; the chunk that ends a prompt should hold as many tokens.
        grain: Where chunks should end, such as the size of a cache block.
        slack: By what share of the target a step may be longer when that spares a tail.
        first_tokens: Tokens of all chunks of a step before the model is fitted.

    Raises:
        ConfigError: A number is out of range.

    Examples:
        >>> from deepinfer.scheduling import StepCoefficients, StepTimeModel
        >>> model = StepTimeModel(StepCoefficients(token_s=1e-5, decode_row_s=1e-4))
        >>> policy = TimedChunks(model, target_s=0.05)
        >>> policy.chunk(prefix=0, remaining=60_000, cap=32_768, work=StepWork())
        5000
        >>> policy.chunk(prefix=0, remaining=60_000, cap=32_768, work=StepWork(decode_rows=100))
        4000
    """

    reads_work = True

    def __init__(
        self,
        model: PrefillCostModel,
        target_s: float,
        *,
        idle_target_s: float | None = None,
        max_tokens: int = 32_768,
        min_tokens: int = 256,
        window: int = 0,
        grain: int = 1,
        slack: float = 0.05,
        first_tokens: int = 2_048,
    ) -> None:
        self.model = model
        self.target_s = _seconds("target_s", target_s)
        self.idle_target_s = (
            self.target_s if idle_target_s is None else _seconds("idle_target_s", idle_target_s)
        )
        self.max_tokens = checks.check_int("max_tokens", max_tokens, 1, _INT_MAX, ConfigError)
        self.min_tokens = checks.check_int("min_tokens", min_tokens, 1, max_tokens, ConfigError)
        self.window = checks.check_int("window", window, 0, _INT_MAX, ConfigError)
        self.grain = checks.check_int("grain", grain, 1, _INT_MAX, ConfigError)
        self.slack = checks.check_float("slack", slack, 0.0, 1.0, ConfigError)
        self.first_tokens = checks.check_int("first_tokens", first_tokens, 1, _INT_MAX, ConfigError)

    def chunk(self, prefix: int, remaining: int, cap: int, work: StepWork) -> int:
        """Length of the next chunk of one prompt.

        Args:
            prefix: Tokens before it.
            remaining: Tokens of the prompt that were not run yet, at least 1.
            cap: Most tokens that may be given, at least 1.
            work: What the step holds so far.

        Returns:
            Tokens, from 0 to `cap`. It is 0 only when the step holds a chunk already.
        """
        cap = min(cap, self.max_tokens, remaining)
        target_s = self.target_s if work.decode_rows else self.idle_target_s
        is_first = work.max_prefix < 0
        if self.model.is_fitted:
            fits = self.model.largest_beside(work, prefix, target_s, cap)
        else:
            fits = max(0, min(cap, self.first_tokens - work.tokens))
        if fits >= remaining and not self._ends_within(work, prefix, remaining, target_s):
            fits = remaining - 1
        if fits < min(self.min_tokens, remaining):
            if not is_first:
                return 0
            fits = min(self.min_tokens, cap)
        return self._without_tail(work, prefix, remaining, cap, fits, target_s)

    def predict(self, work: StepWork) -> float | None:
        """Seconds that a step takes.

        Args:
            work: The step.

        Returns:
            The prediction, or None before the model was fitted.
        """
        return self.model.seconds(work) if self.model.is_fitted else None

    def observe(self, work: StepWork, seconds: float) -> None:
        """Lets the model learn from a step.

        Args:
            work: The step.
            seconds: How long it took; durations that are not above 0 are ignored.
        """
        if seconds > 0.0:
            self.model.observe_work(work, seconds)

    def _ends_within(self, work: StepWork, prefix: int, tokens: int, seconds: float) -> bool:
        if not self.model.is_fitted:
            return True
        return self.model.seconds(work.plus(prefix, tokens, ends_prompt=True)) <= seconds

    def _without_tail(
        self, work: StepWork, prefix: int, remaining: int, cap: int, chunk: int, target_s: float
    ) -> int:
        shortest = max(self.window, self.min_tokens)
        if chunk < remaining and remaining - chunk < shortest:
            relaxed = target_s * (1.0 + self.slack)
            if cap >= remaining and (
                remaining < 2 * shortest or self._ends_within(work, prefix, remaining, relaxed)
            ):
                return remaining
            if remaining >= 2 * self.window:
                chunk = min(chunk, -(-remaining // 2))
            elif remaining > self.window:
                chunk = min(chunk, remaining - self.window)
        if chunk == remaining:
            return chunk
        aligned = (prefix + chunk) // self.grain * self.grain - prefix
        return aligned if 8 * (chunk - aligned) <= chunk else chunk

    def __repr__(self) -> str:
        return f"TimedChunks({self.target_s * 1e3:g} ms, {self.model!r})"


def _seconds(name: str, value: float) -> float:
    return checks.check_float(name, value, 0.0, 1e6, ConfigError, open_low=True)
