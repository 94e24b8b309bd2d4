"""Writes every generated table of the repository's Markdown from benchmarks/results, or checks that it is current.

Run: python benchmarks/tables.py [--check]

A table stands between `<!-- table: NAME -->` and `<!-- end of table -->` in README.md, docs/ or the model card; names
are those of `nano_tables()`, and "results FILE" for the newest lines of benchmarks/results/FILE.jsonl.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent))

from quality import card
from quality.results import RESULTS, ROOT

NANO = ROOT / "src" / "deepinfer" / "assets" / "nano"
_NO_CASE = {"part", "case", "value", "unit", "device", "versions", "commit", "date"}


def nano_tables() -> dict[str, str]:
    """Tables about the embedded checkpoint; none when it is not in this checkout."""
    return card.tables(NANO, RESULTS) if (NANO / "config.json").is_file() else {}


def result_tables(folder: Path = RESULTS.parent) -> dict[str, str]:
    """One table a results file, with the newest line of every case."""
    return {
        f"results {path.stem}": result_table(path.read_text(encoding="utf-8"))
        for path in sorted(folder.glob("*.jsonl"))
    }


def result_table(text: str) -> str:
    """The newest line of every case of a results file, in the order in which cases first appeared."""
    newest: dict[str, dict[str, Any]] = {}
    for line in map(json.loads, text.splitlines()):
        case = {k: v for k, v in line.items() if k not in _NO_CASE}
        newest[json.dumps([line["part"], line["case"], case], sort_keys=True)] = line
    rows = [
        [str(line["part"]), _words(line["case"]), _words(line["value"]), line["unit"], line["device"], line["date"]]
        for line in newest.values()
    ]  # fmt: skip
    return card.table(["part", "case", "value", "unit", "device", "date"], rows)


def _words(value: Any) -> str:
    if isinstance(value, dict):
        return ", ".join(f"{name} {_words(item)}" for name, item in value.items())
    return " ".join(map(_words, value)) if isinstance(value, list) else str(value)


def documents() -> list[Path]:
    """Files that may hold generated tables."""
    found = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md")), NANO / "README.md"]
    return [path for path in found if path.is_file()]


def stale(paths: list[Path]) -> dict[Path, str]:
    """Files whose tables differ from the results, with the text that they should have."""
    tables = {**nano_tables(), **result_tables()}
    out = {}
    for path in paths:
        text = path.read_text(encoding="utf-8")
        if card.BLOCK.search(text) and (filled := card.fill(text, tables)) != text:
            out[path] = filled
    return out


def main() -> int:
    """Writes, or checks."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--check", action="store_true", help="write nothing; fail if a table is stale"
    )
    options = parser.parse_args()
    found = stale(documents())
    for path, text in found.items():
        print(path.relative_to(ROOT))
        if not options.check:
            path.write_text(text, encoding="utf-8")
    return int(bool(found) and options.check)


if __name__ == "__main__":
    sys.exit(main())
