"""Recorded traffic as requests for an engine; records and loaders are those of `deepinfer.balancers.traffic`."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from deepinfer.balancers.traffic.generators import generate_chat_trace
from deepinfer.balancers.traffic.loaders import (
    load_azure_csv,
    load_lengths_csv,
    load_mooncake_jsonl,
)
from deepinfer.balancers.traffic.records import TraceRecord, TraceSummary, summarize_trace
from deepinfer.core import _checks as checks
from deepinfer.core.errors import ConfigError
from deepinfer.core.params import SamplingParams
from deepinfer.core.types import Request

__all__ = [
    "TraceRecord",
    "TraceSummary",
    "generate_chat_trace",
    "load_azure_csv",
    "load_lengths_csv",
    "load_mooncake_jsonl",
    "prompt_tokens",
    "summarize_trace",
    "to_requests",
]


def prompt_tokens(
    record: TraceRecord, *, vocab_size: int = 129_280, unique: int = 0
) -> tuple[int, ...]:
    """Token ids for a record, the same each time: prompts share a beginning as far as their block ids are equal.

    A block begins with its id, written in two digits of base `vocab_size`, and goes on with tokens that all blocks
    share, so that a long trace makes few new integers.

    Args:
        record: The record.
        vocab_size: Ids stay below it.
        unique: What stands for the block ids of a record without them; give each record its own.

    Returns:
        `record.input_tokens` ids.

    Raises:
        ConfigError: A block id does not fit two digits, or blocks are shorter than two tokens.
    """
    checks.check_int("vocab_size", vocab_size, 2, 2**31 - 1, ConfigError)
    size = record.block_tokens or record.input_tokens
    ids = record.block_ids or (unique,)
    if record.block_ids and size < 2:
        checks.fail("block_tokens", size, "at least 2", ConfigError)
    if max(ids) >= vocab_size**2 or min(ids) < 0:
        checks.fail("block_ids", ids, f"made of ids from 0 to {vocab_size**2 - 1}", ConfigError)
    filler = tuple(i % vocab_size for i in range(size - 2))
    tokens: list[int] = []
    for block in ids:
        tokens.append(block % vocab_size)
        tokens.append(block // vocab_size)
        tokens += filler
    rest = record.input_tokens - len(tokens)
    if rest > 0:  # the trace has no id for a partial last block
        tokens += (unique % vocab_size, unique // vocab_size, *filler)[:rest]
    return tuple(tokens[: record.input_tokens])


def to_requests(
    records: Iterable[TraceRecord],
    *,
    time_scale: float = 1.0,
    max_input_tokens: int | None = None,
    max_output_tokens: int | None = None,
    vocab_size: int = 129_280,
) -> Iterator[Request]:
    """Makes engine requests of records, one at a time, so that a long trace needs little memory.

    Args:
        records: The records.
        time_scale: What arrival times are multiplied by; below 1 the traffic is denser.
        max_input_tokens: Records with longer prompts are left out; None keeps all.
        max_output_tokens: Outputs are cut to it; None keeps them.
        vocab_size: Ids stay below it.

    Yields:
        Requests named "r0", "r1", ... by their place in the trace. They ignore the end-of-sequence token and end
        after as many tokens as the trace says.

    Raises:
        ConfigError: The scale is not above 0.
    """
    checks.check_float("time_scale", time_scale, 0.0, 1e9, ConfigError, open_low=True)
    for index, record in enumerate(records):
        if max_input_tokens is not None and record.input_tokens > max_input_tokens:
            continue
        count = record.output_tokens
        yield Request(
            rid=f"r{index}",
            prompt_token_ids=prompt_tokens(record, vocab_size=vocab_size, unique=index),
            params=SamplingParams(
                max_tokens=count if max_output_tokens is None else min(count, max_output_tokens),
                temperature=0.0,
                ignore_eos=True,
            ),
            arrival_s=record.arrival_s * time_scale,
        )
