"""Loaders of published traces."""

from __future__ import annotations

import csv
import datetime
import json
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import numpy as np

from deepinfer.balancers.traffic.records import TraceRecord
from deepinfer.core import _checks as checks
from deepinfer.core.errors import ConfigError

__all__ = [
    "load_azure_csv",
    "load_bailian_jsonl",
    "load_burstgpt_csv",
    "load_lengths_csv",
    "load_mooncake_jsonl",
]

MOONCAKE_BLOCK = 512
"""Tokens that one hash id of a Mooncake trace stands for."""

BAILIAN_BLOCK = 16
"""Tokens that one hash id of a Qwen-Bailian trace stands for."""


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
        when = datetime.datetime.fromisoformat(row["TIMESTAMP"][:26]).replace(tzinfo=None)
        first = first or when
        return TraceRecord(
            arrival_s=max(0.0, (when - first).total_seconds()),
            input_tokens=max(1, int(row["ContextTokens"])),
            output_tokens=max(1, int(row["GeneratedTokens"])),
        )

    with open(path, encoding="utf-8", newline="") as lines:
        return _load(path, csv.DictReader(lines), record, limit)


def load_bailian_jsonl(path: str | Path, *, limit: int | None = None) -> list[TraceRecord]:
    """Loads a trace as Qwen-Bailian publishes them: a JSON object a line, with hash ids of 16-token blocks.

    Args:
        path: The file.
        limit: Most records, the first ones; None takes all.

    Returns:
        The records in order of arrival. `session` is the id of the conversation's first request, so that all turns
        of one chat carry the same.

    Raises:
        ConfigError: A line is no such object; the message gives its number.
        OSError: The file cannot be read.
    """
    roots: dict[int, int] = {}

    def record(text: str) -> TraceRecord:
        values = json.loads(text)
        chat, parent = values["chat_id"], values.get("parent_chat_id", -1)
        roots[chat] = root = chat if parent == -1 else roots.get(parent, parent)
        length = max(1, values["input_length"])
        ids = tuple(values.get("hash_ids") or ())
        return TraceRecord(
            arrival_s=float(values["timestamp"]),
            input_tokens=length,
            output_tokens=max(1, values["output_length"]),
            block_ids=ids,
            block_tokens=BAILIAN_BLOCK if ids else 0,
            session=root,
            kind=values.get("type", ""),
        )

    with open(path, encoding="utf-8") as lines:
        return _load(path, (line for line in lines if line.strip()), record, limit)


def load_burstgpt_csv(path: str | Path, *, limit: int | None = None) -> list[TraceRecord]:
    """Loads a trace as BurstGPT publishes them: Timestamp, Request tokens, Response tokens, and perhaps Session ID.

    Args:
        path: The file.
        limit: Most records, the first ones; None takes all.

    Returns:
        The records in order of arrival. Rows whose request failed (no response token) are left out, since nobody
        knows what they would have cost.

    Raises:
        ConfigError: A row lacks a column or holds no number; the message gives its number.
        OSError: The file cannot be read.
    """

    def record(row: dict[str, str]) -> TraceRecord | None:
        output = int(row["Response tokens"])
        if output < 1:
            return None
        session = (row.get("Session ID") or "").strip()
        return TraceRecord(
            arrival_s=float(row["Timestamp"]),
            input_tokens=max(1, int(row["Request tokens"])),
            output_tokens=output,
            session=int(float(session)) if session else None,
            kind=row.get("Log Type", ""),
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


def _load(
    path: str | Path,
    rows: Iterable[Any],
    record: Callable[[Any], TraceRecord | None],
    limit: int | None,
) -> list[TraceRecord]:
    if limit is not None:
        checks.check_int("limit", limit, 0, 2**62, ConfigError)
    records: list[TraceRecord] = []
    number = 0
    rows = iter(rows)
    while limit is None or len(records) < limit:
        number += 1
        try:
            row = next(rows)
            made = record(row)
        except StopIteration:
            break
        except (KeyError, TypeError, ValueError, csv.Error, RecursionError) as error:
            why = f"it has no {error}" if isinstance(error, KeyError) else str(error)
            raise ConfigError(
                f"record {number} of {path} cannot be read: {why}. Is it a file of the format that this function "
                "loads, and not compressed?",
                field="path",
                value=str(path),
            ) from error
        if made is not None:
            records.append(made)
    records.sort(key=_arrival)
    return records


def _arrival(record: TraceRecord) -> float:
    return record.arrival_s
