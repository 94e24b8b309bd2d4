"""The example of structured output, with the embedded checkpoint."""

from __future__ import annotations

import re
import runpy
import sys
from pathlib import Path

import pytest


def test_it_runs(
    repo_root: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    if not (repo_root / "src" / "deepinfer" / "assets" / "nano" / "config.json").is_file():
        pytest.skip("the embedded checkpoint is not in this checkout")
    monkeypatch.setattr(sys, "argv", ["structured_output.py", "--model", "nano"])
    runpy.run_path(str(repo_root / "examples" / "structured_output.py"), run_name="__main__")
    out = capsys.readouterr().out
    assert re.search(r"regex +stop +(yes|no), because [a-z ]{3,20}\.$", out, re.MULTILINE)
    assert re.search(r"json_schema +stop +\{", out)
    assert re.search(r"ebnf +stop +\d+ \+ \d+", out)
    assert "1 tokens, forced" in out
