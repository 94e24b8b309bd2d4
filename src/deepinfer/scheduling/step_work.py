"""What a step consists of, as far as its duration depends on it."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from deepinfer.core import _checks as checks
from deepinfer.core.errors import ConfigError
from deepinfer.core.plan import ROLES, RowRole, StepPlan

__all__ = ["PREFIX_BUCKETS", "Chunk", "StepSample", "StepWork", "bucket_name"]

PREFIX_BUCKETS = (0, 1, 16_384, 65_536, 262_144)
"""Lowest prefix of each bucket in which errors are reported and samples kept."""

_LAST_PREFILL = ROLES.index(RowRole.LAST_PREFILL)


class Chunk(NamedTuple):
    """Prompt tokens that one request runs in one step; a plain pair (prefix, tokens) is taken for one.

    Attributes:
        prefix: Tokens before the chunk, whose cache entries it reads.
        tokens: Tokens of the chunk.
        ends_prompt: Whether it is the last of its prompt.
    """

    prefix: int
    tokens: int
    ends_prompt: bool = False


class StepWork(NamedTuple):
    """The sums that a step's duration is linear in.

    Attributes:
        prefix_tokens: Prefixes of all chunks, added up: L in the formula.
        tokens: Tokens of all chunks, and drafts: x.
        pairs: Sum of 2 L x + x² over the chunks, about twice the pairs of query and key.
        ended_prompts: Chunks that end their prompt.
        decode_rows: Rows that decode.
        decode_context: Tokens before those rows, added up.
        ended_prefix_tokens: Prefixes of the chunks that end their prompt, added up.
        max_prefix: The longest prefix among the chunks, or -1 without one; sorts the step into a bucket.
    """

    prefix_tokens: int = 0
    tokens: int = 0
    pairs: int = 0
    ended_prompts: int = 0
    decode_rows: int = 0
    decode_context: int = 0
    ended_prefix_tokens: int = 0
    max_prefix: int = -1

    @classmethod
    def of(
        cls,
        chunks: Iterable[Chunk | tuple[int, int]],
        decode: Sequence[int] = (),
        num_drafts: int = 0,
    ) -> StepWork:
        """Adds up a step.

        Args:
            chunks: The chunks; those without tokens count for nothing.
            decode: Tokens before each decoding row, one entry a row.
            num_drafts: Drafts that these rows verify, together.

        Returns:
            The sums.
        """
        prefixes = tokens = pairs = ended = ended_prefixes = 0
        longest = -1
        for chunk in chunks:
            prefix, count, *last = chunk
            if count:
                prefixes += prefix
                tokens += count
                pairs += count * (2 * prefix + count)
                if last and last[0]:
                    ended += 1
                    ended_prefixes += prefix
                longest = max(longest, prefix)
        return cls(
            prefixes, tokens + num_drafts, pairs, ended, len(decode), sum(decode), ended_prefixes, longest
        )  # fmt: skip

    @property
    def is_mixed(self) -> bool:
        """Whether there are both chunks and decoding rows: two launches then, where each alone is one."""
        return self.max_prefix >= 0 and self.decode_rows > 0

    def plus(self, prefix: int, tokens: int, *, ends_prompt: bool = False) -> StepWork:
        """The sums with one chunk more.

        Args:
            prefix: Tokens before the chunk.
            tokens: Tokens of the chunk, at least 1.
            ends_prompt: Whether it is the last of its prompt.

        Returns:
            New sums.
        """
        return StepWork(
            self.prefix_tokens + prefix,
            self.tokens + tokens,
            self.pairs + tokens * (2 * prefix + tokens),
            self.ended_prompts + ends_prompt,
            self.decode_rows,
            self.decode_context,
            self.ended_prefix_tokens + prefix * ends_prompt,
            max(self.max_prefix, prefix),
        )

    @classmethod
    def of_plan(cls, plan: StepPlan) -> StepWork:
        """Adds up a plan; a row that replays counts as a chunk."""
        rows = plan.rows
        prompts = rows.roles <= _LAST_PREFILL
        decodes = ~prompts
        ends = rows.roles == _LAST_PREFILL
        ended_prefixes = int(rows.first_positions[ends].sum())
        first, count = rows.first_positions, rows.num_tokens
        num_decodes = int(decodes.sum())
        drafts = context = 0
        if num_decodes:
            drafts = int(rows.num_drafts.sum())
            context = int(first[decodes].sum())
            first, count = first[prompts], count[prompts]
        return cls(
            int(first.sum()),
            int(count.sum()) + drafts,
            int((count * (2 * first + count)).sum()),
            int(ends.sum()),
            num_decodes,
            context,
            ended_prefixes,
            int(first.max(initial=-1)),
        )


@dataclass(frozen=True, slots=True)
class StepSample:
    """A step that was timed.

    Attributes:
        work: What it ran.
        seconds: How long it took, above 0.

    Raises:
        ConfigError: The duration is no number above 0, or a count is negative.
    """

    work: StepWork
    seconds: float

    def __post_init__(self) -> None:
        """Checks the fields."""
        checks.check_float("seconds", self.seconds, 0.0, 1e9, ConfigError, open_low=True)
        if min(self.work[:-1]) < 0:
            checks.fail("work", self.work, "made of counts from 0", ConfigError)


def bucket_of(work: StepWork) -> int:
    """Index of a step's bucket by its longest prefix; -1 for a step without chunks."""
    return sum(work.max_prefix >= low for low in PREFIX_BUCKETS) - 1


def bucket_name(index: int) -> str:
    """A bucket in words.

    Args:
        index: Its index in `PREFIX_BUCKETS`, or -1 for steps without chunks.

    Returns:
        Such as "no chunks", "0", "1-16383" or "262144 and more".
    """
    if index < 0:
        return "no chunks"
    low = PREFIX_BUCKETS[index]
    if index + 1 == len(PREFIX_BUCKETS):
        return f"{low} and more"
    high = PREFIX_BUCKETS[index + 1] - 1
    return str(low) if low == high else f"{low}-{high}"
