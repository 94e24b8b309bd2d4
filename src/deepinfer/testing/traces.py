"""Recorded traffic as requests: loaders of published traces, and a generator that needs no file."""

from __future__ import annotations

import csv
import datetime
import json
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

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

MOONCAKE_BLOCK = 512
"""Tokens that one hash id of a Mooncake trace stands for."""


@dataclass(frozen=True, slots=True)
class TraceRecord:
    """One request of a trace.

    Attributes:
        arrival_s: Seconds since the begin of the trace.
        input_tokens: Tokens of the prompt, at least 1.
        output_tokens: Tokens that were generated, at least 1.
        block_ids: One id for each block of `block_tokens` prompt tokens, the last of which may be partial; prompts
            begin alike exactly as far as their ids are equal. Empty when the trace says nothing about prefixes.
        block_tokens: Tokens of a block, or 0 without ids.

    Raises:
        ConfigError: A number is out of range, or the ids do not cover the prompt.
    """

    arrival_s: float
    input_tokens: int
    output_tokens: int
    block_ids: tuple[int, ...] = ()
    block_tokens: int = 0

    def __post_init__(self) -> None:
        """Checks the fields."""
        checks.check_float("arrival_s", self.arrival_s, 0.0, 1e12, ConfigError)
        checks.check_int("input_tokens", self.input_tokens, 1, 2**31 - 1, ConfigError)
        checks.check_int("output_tokens", self.output_tokens, 1, 2**31 - 1, ConfigError)
        if self.block_ids:
            checks.check_int("block_tokens", self.block_tokens, 1, 2**31 - 1, ConfigError)
            wanted = -(-self.input_tokens // self.block_tokens)
            if len(self.block_ids) != wanted:
                checks.fail(
                    "block_ids",
                    self.block_ids,
                    f"{wanted} ids for {self.input_tokens} tokens",
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


def load_mooncake_jsonl(path: str | Path, *, limit: int | None = None) -> list[TraceRecord]:
    """Loads a trace as Mooncake publishes them: a JSON object a line, with hash ids of 512-token blocks.

    Args:
        path: The file.
        limit: Most records, the first ones; None takes all.

    Returns:
        The records in order of arrival.

    Raises:
        ConfigError: A line is no such object; the message gives its number.
        OSError: The file cannot be read.
    """

    def record(text: str) -> TraceRecord:
        values = json.loads(text)
        return TraceRecord(
            arrival_s=values["timestamp"] / 1e3,
            input_tokens=values["input_length"],
            output_tokens=max(1, values["output_length"]),
            block_ids=tuple(values["hash_ids"]),
            block_tokens=MOONCAKE_BLOCK,
        )

    with open(path, encoding="utf-8") as lines:
        return _load(path, (line for line in lines if line.strip()), record, limit)


def load_azure_csv(path: str | Path, *, limit: int | None = None) -> list[TraceRecord]:
    """Loads a trace as the Azure data sets publish them: TIMESTAMP, ContextTokens, GeneratedTokens.

    Args:
        path: The file.
        limit: Most records, the first ones; None takes all.

    Returns:
        The records in order of arrival; the first one arrives at 0. Requests without a token in or out count as
        having one.

    Raises:
        ConfigError: A row lacks a column or holds no number; the message gives its number.
        OSError: The file cannot be read.
    """
    first: datetime.datetime | None = None

    def record(row: dict[str, str]) -> TraceRecord:
        nonlocal first
        # Seven digits after the point, and datetime takes six.
        when = datetime.datetime.fromisoformat(row["TIMESTAMP"][:26])
        first = first or when
        return TraceRecord(
            arrival_s=max(0.0, (when - first).total_seconds()),
            input_tokens=max(1, int(row["ContextTokens"])),
            output_tokens=max(1, int(row["GeneratedTokens"])),
        )

    with open(path, encoding="utf-8", newline="") as lines:
        return _load(path, csv.DictReader(lines), record, limit)


def load_lengths_csv(
    path: str | Path, *, rate_per_s: float, seed: int = 0, limit: int | None = None
) -> list[TraceRecord]:
    """Loads lengths only, with the columns num_prefill_tokens and num_decode_tokens; arrivals are drawn.

    Args:
        path: The file.
        rate_per_s: Mean arrivals a second; the gaps between them are exponential.
        seed: Seed of the arrivals.
        limit: Most records, the first ones; None takes all.

    Returns:
        The records in order of arrival.

    Raises:
        ConfigError: A row lacks a column or holds no number, or the rate is not above 0.
        OSError: The file cannot be read.
    """
    checks.check_float("rate_per_s", rate_per_s, 0.0, 1e9, ConfigError, open_low=True)
    generator = np.random.default_rng(seed)
    now = 0.0

    def record(row: dict[str, str]) -> TraceRecord:
        nonlocal now
        now += float(generator.exponential(1.0 / rate_per_s))
        return TraceRecord(
            arrival_s=now,
            input_tokens=max(1, int(row["num_prefill_tokens"])),
            output_tokens=max(1, int(row["num_decode_tokens"])),
        )

    with open(path, encoding="utf-8", newline="") as lines:
        return _load(path, csv.DictReader(lines), record, limit)


def generate_chat_trace(
    num_requests: int,
    *,
    rate_per_s: float = 2.0,
    seed: int = 0,
    mean_input_tokens: int = 4_000,
    max_input_tokens: int = 65_536,
    mean_output_tokens: int = 200,
    follow_up: float = 0.4,
    system_tokens: int = 512,
) -> list[TraceRecord]:
    """Draws a trace that looks like chat: long-tailed lengths, one system prompt, conversations that grow.

    Args:
        num_requests: How many requests.
        rate_per_s: Mean arrivals a second; the gaps between them are exponential.
        seed: Seed; equal arguments give equal traces.
        mean_input_tokens: Mean of the new tokens of a prompt, drawn from a log-normal distribution.
        max_input_tokens: Longest prompt.
        mean_output_tokens: Mean of the outputs, drawn alike.
        follow_up: Probability that a request continues an earlier one, whose prompt its own begins with.
        system_tokens: Tokens with which every prompt begins.

    Returns:
        The records in order of arrival, with ids of 512-token blocks.

    Raises:
        ConfigError: A number is out of range.
    """
    checks.check_int("num_requests", num_requests, 1, 10_000_000, ConfigError)
    checks.check_float("rate_per_s", rate_per_s, 0.0, 1e9, ConfigError, open_low=True)
    checks.check_float("follow_up", follow_up, 0.0, 1.0, ConfigError)
    checks.check_int(
        "max_input_tokens", max_input_tokens, system_tokens + 1, 2**31 - 1, ConfigError
    )
    generator = np.random.default_rng(seed)
    shared = tuple(range(system_tokens // MOONCAKE_BLOCK))
    next_id = len(shared)
    open_prompts: list[tuple[int, ...]] = []  # whole blocks of prompts that may be continued
    records = []
    now = 0.0
    for _ in range(num_requests):
        now += float(generator.exponential(1.0 / rate_per_s))
        begin = shared
        if open_prompts and generator.random() < follow_up:
            begin = open_prompts.pop(int(generator.integers(len(open_prompts))))
        new = _log_normal(generator, mean_input_tokens, 1.2)
        length = min(len(begin) * MOONCAKE_BLOCK + new, max_input_tokens)
        count = -(-length // MOONCAKE_BLOCK)
        ids = begin[:count] + tuple(range(next_id, next_id + max(0, count - len(begin))))
        next_id += max(0, count - len(begin))
        output = min(_log_normal(generator, mean_output_tokens, 1.0), 16 * mean_output_tokens)
        records.append(TraceRecord(now, length, output, ids, MOONCAKE_BLOCK))
        if length < max_input_tokens:
            open_prompts.append(ids[: length // MOONCAKE_BLOCK])
    return records


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


def _log_normal(generator: np.random.Generator, mean: int, sigma: float) -> int:
    return max(1, round(float(generator.lognormal(np.log(mean) - sigma**2 / 2, sigma))))


def _load(
    path: str | Path, rows: Iterable[Any], record: Callable[[Any], TraceRecord], limit: int | None
) -> list[TraceRecord]:
    records: list[TraceRecord] = []
    for number, row in enumerate(rows, start=1):
        if limit is not None and len(records) >= limit:
            break
        try:
            records.append(record(row))
        except (KeyError, TypeError, ValueError) as error:
            raise ConfigError(
                f"record {number} of {path} cannot be read ({type(error).__name__}: {error}).",
                field="path",
                value=str(path),
            ) from error
    records.sort(key=_arrival)
    return records


def _arrival(record: TraceRecord) -> float:
    return record.arrival_s
