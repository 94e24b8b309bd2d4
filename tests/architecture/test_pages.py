"""The code of every page runs, in the order in which it is read, and prints what the page says."""

from __future__ import annotations

import contextlib
import io
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
FENCE = re.compile(r"^( *)```python\n(.*?)^ *```", re.MULTILINE | re.DOTALL)
PRINTS = re.compile(r"^(?:print\(.*\)|\))  # (.+)$", re.MULTILINE)
SHOWN = re.compile(r"^```python\n.*?^```\n\n```text\n(.*?)^```", re.MULTILINE | re.DOTALL)

# Pages that tests of the parts they are about run.
ELSEWHERE = {
    "how-to/checkpoints.md",
    "how-to/chat_and_tokenizer.md",
    "explanation/deterministic_sampling.md",
}


def code_of(page: Path) -> str:
    text = page.read_text(encoding="utf-8")
    blocks = [re.sub(f"^{indent}", "", body, flags=re.M) for indent, body in FENCE.findall(text)]
    return "\n".join(blocks)


def pages() -> list[str]:
    found = [*(ROOT / "docs").glob("*.md")]
    for folder in ("tutorials", "how-to", "explanation", "reference"):
        found += (ROOT / "docs" / folder).glob("*.md")
    names = sorted(str(page.relative_to(ROOT / "docs")) for page in found if code_of(page))
    return [name for name in names if name not in ELSEWHERE]


@pytest.mark.parametrize("name", pages())
def test_page_runs(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    code = code_of(ROOT / "docs" / name)
    nano = ROOT / "src" / "deepinfer" / "assets" / "nano" / "config.json"
    if '"nano"' in code and not nano.is_file():
        pytest.skip("the embedded checkpoint is not in this checkout")
    monkeypatch.chdir(tmp_path)
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        exec(compile(code, name, "exec"), {"__name__": "page"})
    lines = printed.getvalue().splitlines()
    shown = SHOWN.findall((ROOT / "docs" / name).read_text(encoding="utf-8"))
    expectations = [*PRINTS.findall(code), *"\n".join(shown).splitlines()]
    for expected in filter(None, expectations):
        assert expected in lines, f"the page says {expected!r}; printed: {lines}"
