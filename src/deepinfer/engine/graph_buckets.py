"""Shapes of recorded steps, and how many steps fitted them."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

__all__ = [
    "GraphBucket",
    "GraphStats",
    "WarmupReport",
    "bucket_for",
    "context_buckets",
    "row_buckets",
]

_LEAST_CONTEXT = 256


@dataclass(frozen=True, slots=True, order=True)
class GraphBucket:
    """Shape of a recorded step.

    Attributes:
        rows: Requests.
        tokens: Tokens of each request: 1 for decode, 1 + drafts for verify.
        context: Tokens that any of them holds at most, the step included.
    """

    rows: int
    tokens: int
    context: int


@dataclass(slots=True)
class GraphStats:
    """How steps fared.

    Attributes:
        hits: Steps that were run from a recording, by bucket.
        misses: Steps that were not, by reason.
        padded_tokens: Tokens that were run for nothing.
        tokens: Tokens that were run and wanted.
    """

    hits: Counter[GraphBucket] = field(default_factory=Counter)
    misses: Counter[str] = field(default_factory=Counter)
    padded_tokens: int = 0
    tokens: int = 0


@dataclass(frozen=True, slots=True)
class WarmupReport:
    """What `warmup` recorded.

    Attributes:
        buckets: The recorded shapes.
        seconds: Seconds it took, compilation of kernels included.
        size_bytes: Device memory that the recordings hold.
        skipped: Why nothing was recorded, or "".
    """

    buckets: tuple[GraphBucket, ...]
    seconds: float
    size_bytes: int
    skipped: str = ""


def row_buckets(max_rows: int) -> tuple[int, ...]:
    """Numbers of rows to record: 1, 2, 4, then steps of 8, of 16 from 64 and of 32 from 256 on.

    Args:
        max_rows: The largest; always among them.
    """
    sizes = [1, 2, 4, *range(8, 64, 8), *range(64, 256, 16), *range(256, max_rows + 32, 32)]
    return (*(size for size in sizes if size < max_rows), max_rows)


def context_buckets(max_tokens: int) -> tuple[int, ...]:
    """Contexts to record: powers of two from 256 on.

    Args:
        max_tokens: The largest; always among them.
    """
    sizes = [_LEAST_CONTEXT << k for k in range(max_tokens.bit_length())]
    return (*(size for size in sizes if size < max_tokens), max_tokens)


def bucket_for(rows: int, tokens: int, context: int, *, most_rows: int, most_context: int) -> GraphBucket:  # fmt: skip
    """The shape to record for a step that fits no recording: few shapes in all, each of some use to others.

    Args:
        rows: Requests of the step.
        tokens: Most tokens that one of them runs.
        context: Most tokens that one of them holds, the step included.
        most_rows: Slots.
        most_context: Tokens of a slot.

    Returns:
        Rows rounded up to a power of two, and to a multiple of 32 above 64; contexts to 1,024 or
        a power of four times as many.
    """
    wide = 1 << (rows - 1).bit_length() if rows <= 64 else -(-rows // 32) * 32
    long = 1024
    while long < context:
        long *= 4
    return GraphBucket(min(wide, most_rows), tokens, min(long, most_context))
