"""Traces: what the loaders read, and tokens that share beginnings exactly as the trace says."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from deepinfer.core.errors import ConfigError
from deepinfer.testing import (
    TraceRecord,
    generate_chat_trace,
    load_azure_csv,
    load_lengths_csv,
    load_mooncake_jsonl,
    prompt_tokens,
    summarize_trace,
    to_requests,
)


def write(path: Path, *lines: str) -> Path:
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return path


def mooncake(timestamp: int, length: int, output: int, ids: list[int]) -> str:
    names = ("timestamp", "input_length", "output_length", "hash_ids")
    return json.dumps(dict(zip(names, (timestamp, length, output, ids), strict=True)))


def test_mooncake_lines(tmp_path: Path) -> None:
    path = write(tmp_path / "t.jsonl", mooncake(1500, 600, 7, [0, 3]), "", mooncake(0, 512, 0, [0]))
    records = load_mooncake_jsonl(path)
    assert records == [TraceRecord(0.0, 512, 1, (0,), 512), TraceRecord(1.5, 600, 7, (0, 3), 512)]
    assert load_mooncake_jsonl(path, limit=1) == records[1:]


def test_azure_rows_start_at_zero(tmp_path: Path) -> None:
    path = write(
        tmp_path / "t.csv",
        "TIMESTAMP,ContextTokens,GeneratedTokens",
        "2023-11-16 18:17:03.9799600,4808,10",
        "2023-11-16 18:17:04.4799600,0,27",
    )
    assert load_azure_csv(path) == [TraceRecord(0.0, 4808, 10), TraceRecord(0.5, 1, 27)]


def test_lengths_get_arrivals_of_the_wanted_rate(tmp_path: Path) -> None:
    rows = ["30,4,34,7.5"] * 2000
    path = write(
        tmp_path / "t.csv", "num_prefill_tokens,num_decode_tokens,num_total_tokens,pd_ratio", *rows
    )
    records = load_lengths_csv(path, rate_per_s=5.0, seed=1)
    assert records == load_lengths_csv(path, rate_per_s=5.0, seed=1)
    assert records != load_lengths_csv(path, rate_per_s=5.0, seed=2)
    assert records[-1].arrival_s == pytest.approx(400, rel=0.1)
    assert (records[0].input_tokens, records[0].output_tokens) == (30, 4)


@pytest.mark.parametrize(
    "line",
    [
        "no json",
        '{"timestamp": 0}',
        mooncake(0, 600, 1, [0, 1, 2]),
        mooncake(0, 0, 1, [0]),
        mooncake(-5, 600, 1, [0, 1]),
    ],
)
def test_bad_lines_are_named(tmp_path: Path, line: str) -> None:
    path = write(tmp_path / "t.jsonl", mooncake(0, 512, 1, [0]), line)
    with pytest.raises(ConfigError, match=r"record 2 of .*t\.jsonl"):
        load_mooncake_jsonl(path)


def test_prompts_are_equal_exactly_as_far_as_their_ids() -> None:
    one = TraceRecord(0.0, 9, 1, (0, 1, 2), 4)
    two = TraceRecord(0.0, 12, 1, (0, 1, 300), 4)
    first, second = prompt_tokens(one, vocab_size=256), prompt_tokens(two, vocab_size=256)
    assert (len(first), len(second)) == (9, 12)
    assert first[:8] == second[:8]
    assert first[8] != second[8]
    assert max(second) < 256
    assert prompt_tokens(one, vocab_size=256) == first
    # Two blocks that differ by a multiple of the vocabulary are told apart by the second token.
    a, b = (prompt_tokens(TraceRecord(0.0, 4, 1, (i,), 4), vocab_size=256) for i in (5, 261))
    assert a[0] == b[0]
    assert a != b


def test_records_without_ids_share_nothing() -> None:
    requests = list(to_requests([TraceRecord(0.0, 8, 2), TraceRecord(1.0, 8, 2)]))
    assert requests[0].prompt_token_ids[0] != requests[1].prompt_token_ids[0]


def test_ids_that_cannot_be_told_apart_are_refused() -> None:
    with pytest.raises(ConfigError, match="block_ids"):
        prompt_tokens(TraceRecord(0.0, 4, 1, (16,), 4), vocab_size=4)
    with pytest.raises(ConfigError, match="block_tokens"):
        prompt_tokens(TraceRecord(0.0, 1, 1, (1,), 1))


def test_requests_keep_their_place_and_end_where_the_trace_says() -> None:
    records = [TraceRecord(2.0, 8, 5), TraceRecord(4.0, 99, 5), TraceRecord(6.0, 8, 50)]
    requests = list(to_requests(records, time_scale=0.5, max_input_tokens=50, max_output_tokens=9))
    assert [r.rid for r in requests] == ["r0", "r2"]
    assert [r.arrival_s for r in requests] == [1.0, 3.0]
    assert [r.params.max_tokens for r in requests] == [5, 9]
    assert requests[0].params.ignore_eos
    with pytest.raises(ConfigError):
        next(to_requests(records, time_scale=0.0))


def test_generated_traffic_is_reproducible_and_reuses_prefixes() -> None:
    records = generate_chat_trace(300, seed=3)
    assert records == generate_chat_trace(300, seed=3)
    assert records != generate_chat_trace(300, seed=4)
    summary = summarize_trace(records)
    assert summary.num_requests == 300
    assert summary.span_s == pytest.approx(150, rel=0.25)
    assert 0.2 < summary.reusable_share < 0.7
    assert summary.max_input_tokens <= 65_536
    assert summarize_trace(generate_chat_trace(300, follow_up=0.0)).reusable_share < 0.2
    with pytest.raises(ConfigError, match="follow_up"):
        generate_chat_trace(3, follow_up=2.0)
    with pytest.raises(ConfigError, match="records"):
        summarize_trace([])


def test_the_published_conversation_trace(shared_data: Path) -> None:
    path = shared_data / "traces" / "mooncake_conversation_min00_29.jsonl"
    if not path.is_file():
        pytest.skip("the trace is not among the test data")
    summary = summarize_trace(load_mooncake_jsonl(path))
    assert summary.num_requests == 5719
    assert summary.span_s == 1797.0
    assert summary.max_input_tokens < 128 * 1024
    assert 0.33 < summary.reusable_share < 0.36
