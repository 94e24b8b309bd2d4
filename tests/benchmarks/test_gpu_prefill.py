"""`benchmarks/gpu_prefill.py` with small sizes on the CPU."""

from __future__ import annotations

import json
from pathlib import Path

import gpu_prefill
import pytest
import torch


def test_every_part(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    torch.set_num_threads(1)
    gpu_prefill.main(["--device", "cpu", "--tiny", "--seconds", "600", "--out", str(tmp_path)])
    lines = [
        json.loads(x) for x in (tmp_path / "gpu_prefill.jsonl").read_text("utf-8").splitlines()
    ]
    found = {line["case"]: line for line in lines}
    assert not [line for line in lines if "error" in line or "skipped" in line]
    checks = [line for line in lines if line["case"].startswith("check")]
    assert [line["good"] for line in checks] == [True, True]
    assert min(line["control_median"] for line in checks) > 0.05
    assert found["prefill 128 tokens"]["removed_flops"] == pytest.approx(0.42, abs=0.01)
    assert found["cost steps"]["steps"] == sum(line["case"] == "cost step" for line in lines) == 40
    assert {"cost fit all", "cost error all", "cost all: prefix 0"} <= found.keys()
    assert {"replay 1 requests", "replay 4 requests"} <= found.keys()
    assert "replay 4 requests" in capsys.readouterr().out.splitlines()[-1]
