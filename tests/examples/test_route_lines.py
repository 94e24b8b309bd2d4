"""The router as a filter."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

EXAMPLE = Path(__file__).parents[2] / "examples" / "route_lines.py"


def test_lines_in_decisions_out() -> None:
    told = [
        {"rid": "0", "prompt_tokens": 9},
        {"name": "a", "time_s": 1.0, "waiting_s": 0.01},
        {"name": "b", "time_s": 1.0},
        {"rid": "1", "prompt_tokens": 1000, "block_keys": ["k1", "k2"]},
        {"worker": "a", "sequence": 0, "stored": ["k1", "k2"]},
        {"rid": "2", "prompt_tokens": 1100, "block_keys": ["k1", "k2"]},
        {"worker": "a", "sequence": 2, "stored": ["k3"]},
    ]
    run = subprocess.run(
        [sys.executable, str(EXAMPLE)],
        input="\n".join(map(json.dumps, told)),
        capture_output=True,
        text=True,
        check=True,
    )
    said = [json.loads(line) for line in run.stdout.splitlines()]
    assert [line.get("worker", "-") for line in said] == [None, "b", "a", "-"]
    assert said[-1] == {"snapshot_wanted": ["a"]}


def test_it_is_as_short_as_it_says() -> None:
    assert len(EXAMPLE.read_text().splitlines()) <= 42
