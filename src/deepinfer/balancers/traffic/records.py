"""One request of recorded traffic, and the sizes of a trace."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from deepinfer.core import _checks as checks
from deepinfer.core.errors import ConfigError

__all__ = ["TraceRecord", "TraceSummary", "summarize_trace"]


@dataclass(frozen=True, slots=True)
class TraceRecord:
    """One request of a trace.

    Attributes:
        arrival_s: Seconds since the begin of the trace.
        input_tokens: Tokens of the prompt, at least 1.
        output_tokens: Tokens that were generated, at least 1.
        block_ids: One id for each block of `block_tokens` prompt tokens; a partial last block may have one too.
            Prompts begin alike exactly as far as their ids are equal. Empty when the trace says nothing about them.
        block_tokens: Tokens of a block, or 0 without ids.
        session: Which conversation it belongs to, or None when the trace does not say.
        kind: The trace's own name for the class of traffic, or "".

    Raises:
        ConfigError: A number is out of range, or the ids are in no tuple or do not cover the prompt.
    """

    arrival_s: float
    input_tokens: int
    output_tokens: int
    block_ids: tuple[int, ...] = ()
    block_tokens: int = 0
    session: int | None = None
    kind: str = ""

    def __post_init__(self) -> None:
        """Checks the fields."""
        checks.check_float("arrival_s", self.arrival_s, 0.0, 1e12, ConfigError)
        checks.check_int("input_tokens", self.input_tokens, 1, 2**31 - 1, ConfigError)
        checks.check_int("output_tokens", self.output_tokens, 1, 2**31 - 1, ConfigError)
        if not isinstance(self.block_ids, tuple):
            checks.fail("block_ids", self.block_ids, "a tuple of ids", ConfigError)
        if self.block_ids:
            checks.check_int("block_tokens", self.block_tokens, 1, 2**31 - 1, ConfigError)
            whole, rest = divmod(self.input_tokens, self.block_tokens)
            if len(self.block_ids) not in (whole, whole + (rest > 0)):
                checks.fail(
                    "block_ids",
                    self.block_ids,
                    f"{whole} whole blocks for {self.input_tokens} tokens, or one more for the rest",
                    ConfigError,
                )


@dataclass(frozen=True, slots=True, kw_only=True)
class TraceSummary:
    """Sizes of a trace.

    Attributes:
        num_requests: Records.
        span_s: Seconds from the first arrival to the last.
        mean_input_tokens: Mean length of a prompt.
        max_input_tokens: Longest prompt.
        mean_output_tokens: Mean length of an output.
        reusable_share: Share of the prompts' tokens that a cache which forgets nothing would have.
    """

    num_requests: int
    span_s: float
    mean_input_tokens: float
    max_input_tokens: int
    mean_output_tokens: float
    reusable_share: float


def summarize_trace(records: Sequence[TraceRecord]) -> TraceSummary:
    """Sizes of a trace.

    Args:
        records: The records, in order of arrival.

    Returns:
        The summary.

    Raises:
        ConfigError: There is no record.
    """
    if not records:
        checks.fail("records", records, "at least one record", ConfigError)
    hits = 0
    seen: set[int] = set()
    for record in records:
        shared = 0
        for block in record.block_ids:
            if block not in seen:
                break
            shared += record.block_tokens
        hits += min(shared, record.input_tokens)
        seen.update(record.block_ids)
    total = sum(record.input_tokens for record in records)
    return TraceSummary(
        num_requests=len(records),
        span_s=records[-1].arrival_s - records[0].arrival_s,
        mean_input_tokens=total / len(records),
        max_input_tokens=max(r.input_tokens for r in records),
        mean_output_tokens=sum(r.output_tokens for r in records) / len(records),
        reusable_share=hits / total,
    )
