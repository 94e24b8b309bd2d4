"""Loaders of traces beside those that `testing` had first, and generators."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from deepinfer.balancers.traffic import (
    TraceRecord,
    TrafficClass,
    generate_herd,
    generate_traffic,
    load_azure_csv,
    load_bailian_jsonl,
    load_burstgpt_csv,
    load_mooncake_jsonl,
    summarize_trace,
)
from deepinfer.core.errors import ConfigError


def write(path: Path, *lines: str) -> Path:
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return path


def chat(number: int, parent: int, time_s: float, tokens: int, blocks: int) -> str:
    return json.dumps(
        {
            "chat_id": number,
            "parent_chat_id": parent,
            "timestamp": time_s,
            "input_length": tokens,
            "output_length": 9,
            "type": "text",
            "turn": 1,
            "hash_ids": list(range(blocks)),
        }
    )


def test_bailian_sessions_and_blocks(tmp_path: Path) -> None:
    path = write(
        tmp_path / "t.jsonl",
        chat(159, -1, 0.5, 40, 3),
        chat(160, 159, 1.5, 40, 2),  # whole blocks only
        chat(161, 160, 2.0, 10, 0),
        chat(162, 7, 3.0, 10, 0),  # its parent is not in the file
    )
    records = load_bailian_jsonl(path)
    assert [record.session for record in records] == [159, 159, 159, 7]
    assert [len(record.block_ids) for record in records] == [3, 2, 0, 0]
    assert [record.block_tokens for record in records] == [16, 16, 0, 0]
    assert (records[0].arrival_s, records[0].kind) == (0.5, "text")
    with pytest.raises(ConfigError, match="record 1"):
        load_bailian_jsonl(write(tmp_path / "bad.jsonl", chat(1, -1, 0.0, 40, 5)))


@pytest.mark.parametrize("has_session", [False, True])
def test_burstgpt_leaves_failures_out(tmp_path: Path, has_session: bool) -> None:
    head = "Timestamp,Session ID,Elapsed time,Model,Request tokens,Response tokens,Total tokens,Log Type"
    rows = ["5,12,1.5,ChatGPT,472,18,490,Conversation log", "9,,1.5,GPT-4,3,0,3,API log"]
    if not has_session:
        head = head.replace("Session ID,Elapsed time,", "")
        rows = [",".join([*row.split(",")[:1], *row.split(",")[3:]]) for row in rows]
    records = load_burstgpt_csv(write(tmp_path / "t.csv", head, *rows))
    session = 12 if has_session else None
    assert records == [TraceRecord(5.0, 472, 18, session=session, kind="Conversation log")]
    with pytest.raises(ConfigError, match=r"record 1 .* it has no "):
        load_burstgpt_csv(write(tmp_path / "bad.csv", "Timestamp", "1"))


def test_generated_traffic_repeats_and_grows() -> None:
    records = generate_traffic(3000, seed=5)
    assert records == generate_traffic(3000, seed=5)
    assert records != generate_traffic(3000, seed=6)
    times = [record.arrival_s for record in records]
    assert times == sorted(times)
    assert max(record.input_tokens for record in records) > 262_144, "no public trace has these"
    assert {record.kind for record in records} == {"chat", "agent", "long"}
    last: dict[int, TraceRecord] = {}
    grown = 0
    for record in records:
        assert record.session is not None
        before = last.get(record.session)
        if before is not None:
            whole = before.input_tokens // 512
            assert record.block_ids[:whole] == before.block_ids[:whole]
            assert record.input_tokens > before.input_tokens
            grown += 1
        last[record.session] = record
    assert grown > 500
    assert summarize_trace(records).reusable_share > 0.3


def test_classes_are_checked() -> None:
    with pytest.raises(ConfigError, match="share"):
        TrafficClass(name="x", share=0.0)
    with pytest.raises(ConfigError, match="max_input_tokens"):
        TrafficClass(name="x", system_tokens=512, max_input_tokens=512)
    with pytest.raises(ConfigError, match="classes"):
        generate_traffic(3, [])


def test_a_herd_shares_its_prefix() -> None:
    records = generate_herd(1000, prefix_tokens=4096, hot_share=0.75, seed=1)
    hot = [record for record in records if record.kind == "hot"]
    assert 650 < len(hot) < 850
    assert {record.block_ids[:8] for record in hot} == {tuple(range(8))}
    cold = [block for record in records if record.kind == "cold" for block in record.block_ids]
    assert len(set(cold)) == len(cold)
    assert min(cold) >= 8


def test_the_recorded_chat_trace(shared_data: Path) -> None:
    records = load_mooncake_jsonl(shared_data / "traces" / "mooncake_conversation_min00_29.jsonl")
    assert len(records) == 5719
    shared = [record.block_ids[0] for record in records]
    assert set(shared) == {0}, "everyone shares the first block"
    assert np.percentile([record.input_tokens for record in records], 50) == 7640


def test_files_of_another_kind_are_named(tmp_path: Path) -> None:
    packed = tmp_path / "trace.jsonl.gz"
    packed.write_bytes(b"\x1f\x8b\x08\x00\xf0\xff")
    for load in (load_mooncake_jsonl, load_bailian_jsonl, load_azure_csv, load_burstgpt_csv):
        with pytest.raises(ConfigError, match=r"trace\.jsonl\.gz .*compressed"):
            load(packed)
    wrong = write(tmp_path / "a.csv", "TIME,ContextTokens", "1,2")
    with pytest.raises(ConfigError, match=r"record 1 .* it has no 'TIMESTAMP'"):
        load_azure_csv(wrong)
    deep = write(tmp_path / "deep.jsonl", "[" * 200_000)
    with pytest.raises(ConfigError, match="record 1"):
        load_mooncake_jsonl(deep)
    assert load_azure_csv(wrong, limit=0) == []
    with pytest.raises(ConfigError, match="limit"):
        load_azure_csv(wrong, limit=-1)


def test_azure_times_with_and_without_a_fraction(tmp_path: Path) -> None:
    path = write(
        tmp_path / "azure.csv",
        "TIMESTAMP,ContextTokens,GeneratedTokens",
        "2024-05-10 00:00:00.5000000+00:00,1,2",
        "2024-05-10 00:00:02+00:00,3,4",
        "2024-05-10 00:00:03.2500000,5,6",
    )
    assert [record.arrival_s for record in load_azure_csv(path)] == [0.0, 1.5, 2.75]


def test_ids_are_in_a_tuple() -> None:
    with pytest.raises(ConfigError, match="tuple"):
        TraceRecord(0.0, 1024, 1, [1, 2], 512)  # type: ignore[arg-type]
