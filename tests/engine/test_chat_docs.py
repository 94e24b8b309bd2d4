from __future__ import annotations

import re
from pathlib import Path

import pytest

PAGES = ["docs/how-to/chat_and_tokenizer.md", "docs/explanation/deterministic_sampling.md"]


@pytest.mark.parametrize("page", PAGES)
def test_snippets_run(page: str, repo_root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    text = (repo_root / page).read_text(encoding="utf-8")
    code = "\n".join(re.findall(r"^```python\n(.*?)^```", text, re.MULTILINE | re.DOTALL))
    nano = repo_root / "src" / "deepinfer" / "assets" / "nano" / "tokenizer.json"
    if 'resolve_checkpoint("nano")' in code and not nano.is_file():
        pytest.skip("the embedded checkpoint is not in this checkout")
    exec(compile(code, page, "exec"), {})
    printed = capsys.readouterr().out
    for comment in re.findall(r"^(?:print\(.*\)  )?# (.+)$", code, re.MULTILINE):
        if "seed 42" not in comment:
            assert comment in printed
