"""Shapes of recorded steps, and how many steps fitted them."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from deepinfer.core.errors import ConfigError

if TYPE_CHECKING:
    from deepinfer.models.deepseek_v41.cache import SlotCache

__all__ = [
    "GraphBucket",
    "GraphStats",
    "WarmupReport",
    "bucket_for",
    "check_bucket",
    "context_buckets",
    "recorded_rows",
    "row_buckets",
]

_LEAST_CONTEXT = 256


@dataclass(frozen=True, slots=True, order=True)
class GraphBucket:
    """Shape of a recorded step.

    With one token a row it serves verify steps too: each token of a request is a row of its own, so requests of
    different lengths leave no gaps.

    Attributes:
        rows: Requests, or tokens when `tokens` is 1.
        tokens: Tokens of each request: 1, or 1 + drafts for verify steps in which all have as many.
        context: Tokens that any of them holds at most, the step included.
        features: Whether the step makes what the model's draft learns of its tokens; a step that needs none takes less
            time.
    """

    rows: int
    tokens: int
    context: int
    features: bool = True


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


def recorded_rows(rows: int) -> int:
    """Rows that a step is rounded up to when it is recorded.

    Args:
        rows: Rows of the step, at least 1.

    Returns:
        A power of two up to 8, then also those halfway between, and from 64 on in quarters.
    """
    high = 1 << (rows - 1).bit_length()
    step = max(1, high // 8) if high > 64 else max(1, high // 4) if high > 8 else high
    return -(-rows // step) * step


def bucket_for(
    rows: int, context: int, *, most_rows: int, most_context: int, features: bool = True
) -> GraphBucket:
    """The shape to record for a step that fits no recording: few shapes in all, each of some use to others.

    Args:
        rows: Tokens of the step.
        context: Most tokens that one of its requests holds, the step included.
        most_rows: Most tokens of any step.
        most_context: Tokens of a slot.
        features: As in `GraphBucket`.

    Returns:
        Rows rounded as `recorded_rows` does, of one token each; contexts to 1,024 or a power of four times as many.
    """
    long = 1024
    while long < context:
        long *= 4
    return GraphBucket(min(recorded_rows(rows), most_rows), 1, min(long, most_context), features)


def check_bucket(bucket: GraphBucket, cache: SlotCache) -> None:
    """Refuses a shape that no step over a cache can have.

    Args:
        bucket: The shape.
        cache: The cache.

    Raises:
        ConfigError: It has no rows or tokens, or more than fit.
    """
    most = cache.max_rollback + 1
    limits = {
        "rows": (bucket.rows, cache.num_slots * (most if bucket.tokens == 1 else 1)),
        "tokens": (bucket.tokens, most),
        "context": (bucket.context, cache.max_tokens),
    }
    for name, (value, high) in limits.items():
        if not 1 <= value <= high:
            raise ConfigError(
                f"{bucket} has {name} {value}; it must be from 1 to {high} for this cache.",
                field=name, value=value, limit=f"1 to {high}",
            )  # fmt: skip
