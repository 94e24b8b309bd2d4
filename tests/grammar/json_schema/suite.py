"""Runs the JSON-Schema-Test-Suite; `python -m tests.grammar.json_schema.suite FOLDER` rewrites the ratchet."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from deepinfer.core.errors import EmptyLanguage, GrammarTooLarge, UnsupportedKeyword
from deepinfer.grammar.json_schema import compile_json_schema

RATCHET = Path(__file__).with_name("ratchet.json")
DRAFTS = {"draft2020-12": "2020-12", "draft7": "7"}
# Keywords that the standard leaves to the implementation, and that the report lists as ignored.
ANNOTATIONS = frozenset(("contentEncoding", "contentMediaType"))


def documents(suite: Path) -> dict[str, Any]:
    """The suite's remote documents by URI."""
    remotes = suite / "remotes"
    return {
        f"http://localhost:1234/{path.relative_to(remotes).as_posix()}": json.loads(
            path.read_text("utf-8")
        )
        for path in sorted(remotes.rglob("*.json"))
    }


def run_file(
    path: Path, name: str, draft: str, resources: dict[str, Any]
) -> tuple[dict[str, int], list[str]]:
    """Counts of one file, and its wrong verdicts.

    "passed": the verdict is right. "refused": the schema is refused by name. "noted": the verdict differs because
    of a keyword whose approximation, or nature as an annotation, the report states.
    """
    counts = {"passed": 0, "refused": 0, "noted": 0}
    wrong = []
    formats = "assert" if name.startswith("optional/format/") else "annotate"
    for group in json.loads(path.read_text("utf-8")):
        grammar = None
        try:
            grammar = compile_json_schema(
                group["schema"], draft=draft, formats=formats, resources=resources
            )
        except EmptyLanguage:
            pass
        except (UnsupportedKeyword, GrammarTooLarge):
            counts["refused"] += len(group["tests"])
            continue
        for test in group["tests"]:
            got = grammar is not None and grammar.matches(json.dumps(test["data"]))
            if got == test["valid"]:
                counts["passed"] += 1
                continue
            report = grammar.report if grammar is not None else ()
            narrower = any(e.status == "approximated" for e in report) and not got
            annotated = (
                any(e.keyword in ANNOTATIONS and e.status == "ignored" for e in report) and got
            )
            if narrower or annotated:
                counts["noted"] += 1
            else:
                wrong.append(f"{name}: {group['description']}: {test['description']}")
    return {key: count for key, count in counts.items() if count}, wrong


def run(suite: Path, folder: str) -> tuple[dict[str, dict[str, int]], list[str]]:
    """Counts of all files of one draft, and all wrong verdicts."""
    resources = documents(suite)
    counts, wrong = {}, []
    base = suite / "tests" / folder
    for path in sorted(base.rglob("*.json")):
        name = path.relative_to(base).as_posix()
        counts[name], mistakes = run_file(path, name, DRAFTS[folder], resources)
        wrong += mistakes
    return counts, wrong


if __name__ == "__main__":
    ratchet = {}
    for folder in DRAFTS:
        ratchet[folder], mistakes = run(Path(sys.argv[1]), folder)
        if mistakes:
            raise SystemExit("\n".join(mistakes))
    RATCHET.write_text(json.dumps(ratchet, indent=1) + "\n", "utf-8")
