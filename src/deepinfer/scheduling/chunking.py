"""How many tokens of a prompt one step runs."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

from deepinfer.core import _checks as checks
from deepinfer.core.errors import ConfigError

if TYPE_CHECKING:
    from deepinfer.scheduling.step_work import StepWork

__all__ = ["ChunkPolicy", "FixedChunks", "shape_chunk"]

_INT_MAX = 2**31 - 1


class ChunkPolicy(Protocol):
    """Decides how long the next chunk of a prompt is.

    The scheduler asks once for each prompt of a step, in the order in which they are served, after all decoding rows
    were counted. It then shapes the answer (`shape_chunk`) and adds what it took to `work`. All methods but `observe`
    depend on their arguments and on what was observed only.

    Attributes:
        reads_work: Whether it looks at `work`; when False, the scheduler saves the sums and passes an empty one, and
            neither `predict` nor `observe` is called.
    """

    reads_work: bool

    def chunk(self, prefix: int, remaining: int, cap: int, work: StepWork) -> int:
        """Length of the next chunk of one prompt.

        Args:
            prefix: Tokens before it, whose cache entries it reads.
            remaining: Tokens of the prompt that were not run yet, at least 1; a replay after a prefix hit counts.
            cap: Most tokens that may be given, at least 1: what is left of the step's tokens and of the request's.
            work: What the step holds so far.

        Returns:
            Tokens, from 0 to `cap`. 0 leaves the prompt out of this step; that is granted only while the step runs
            something else, so that a prompt always gets on.
        """
        ...

    def predict(self, work: StepWork) -> float | None:
        """Seconds that a step takes, or None when unknown."""
        ...

    def observe(self, work: StepWork, seconds: float) -> None:
        """Learns from a step that was timed."""
        ...


class FixedChunks:
    """Chunks of up to a fixed number of tokens.

    Args:
        max_tokens: Most tokens of a chunk.

    Raises:
        ConfigError: `max_tokens` is out of range.

    Examples:
        >>> FixedChunks(512).chunk(prefix=0, remaining=700, cap=32_768, work=None)
        512
    """

    reads_work = False

    def __init__(self, max_tokens: int = _INT_MAX) -> None:
        self.max_tokens = checks.check_int("max_tokens", max_tokens, 1, _INT_MAX, ConfigError)

    def chunk(self, prefix: int, remaining: int, cap: int, work: StepWork | None) -> int:
        """Length of the next chunk; `prefix` and `work` do not matter."""
        return min(remaining, cap, self.max_tokens)

    def predict(self, work: StepWork) -> float | None:
        """Predicts nothing."""
        return None

    def observe(self, work: StepWork, seconds: float) -> None:
        """Learns nothing."""

    def __repr__(self) -> str:
        return f"FixedChunks({self.max_tokens})"


def shape_chunk(
    chunk: int, position: int, remaining: int, cap: int, *, window: int = 0, grain: int = 1
) -> int:
    """Turns a wished length into one that leaves no tiny tail.

    The chunk that ends a prompt runs its last `window` tokens through every layer and costs as much as a step whatever
    its length, so a tail shorter than that is merged into this chunk where `cap` allows it, and else evened out with
    it. Other chunks end on multiples of `grain` where that leaves them a token at all.

    Args:
        chunk: Wished length, from 1 to `cap`.
        position: Position of the chunk's first token.
        remaining: Tokens not run yet, this chunk included.
        cap: Most tokens that may be taken.
        window: Shortest last chunk that is welcome.
        grain: Where chunks should end, from 1.

    Returns:
        The length, from 1 to `cap`; 0 only for a `chunk` of 0.

    Examples:
        >>> shape_chunk(512, 0, 600, 512, window=128)
        300
        >>> shape_chunk(512, 0, 600, 1024, window=128)
        600
        >>> shape_chunk(30, 2, 1000, 30, grain=8)
        30
        >>> shape_chunk(31, 2, 1000, 31, grain=8)
        30
    """
    if chunk >= remaining or chunk == 0:
        return min(chunk, remaining)
    if remaining - chunk < window:
        if remaining <= cap:
            return remaining
        half = -(-remaining // 2)
        if half >= window:
            chunk = min(chunk, half)
        elif remaining > window:
            chunk = remaining - window
        if remaining - chunk < window:
            return chunk  # too short a tail cannot be helped
    aligned = (position + chunk) // grain * grain - position
    return aligned if aligned > 0 else chunk
