"""Lines of a comparison of grammar engines, from what the harness that drives `grammar_peer:DeepInfer` writes.

The harness runs each engine in a process of its own, one after the other, over the same schemas, regular expressions and
EBNF texts: it compiles each from its text, feeds instances token by token, and times every mask, those of states seen before
included. Processor time of one thread. One JSON line for each engine and kind.
Run: python benchmarks/grammar_beside.py RESULTS.json
"""

from __future__ import annotations

import argparse
import datetime
import json
import platform
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from grammar import processor

KINDS = {"json_schema": "JSON Schemas", "regex": "regular expressions", "gbnf": "EBNF texts"}


def spread(values: list[float], digits: int) -> dict[str, float]:
    """Percentiles."""
    found = np.percentile(values, [50, 90, 99, 100]).round(digits).tolist()
    return dict(zip(("p50", "p90", "p99", "max"), found, strict=True))


def lines(results: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """The lines of all engines."""
    for name, engine in results.items():
        title = name.rpartition(":")[2].lower() + " " + engine["meta"]["version"]
        for kind, what in KINDS.items():
            cases = [case for case in engine["results"] if case["kind"] == kind]
            done = [case for case in cases if case.get("masks_cpu")]
            if not done:
                continue
            masks = [value for case in done for value in case["masks_cpu"]]
            yield {
                "case": f"{title}: masks, {len(done)} of {len(cases)} {what}",
                "unit": "us",
                **spread(masks, 2),
                "mean": round(float(np.mean(masks)), 2),
                "count": len(masks),
            }
            compiled = [case["compile_cpu_ms"] for case in done]
            yield {"case": f"{title}: compile, {what}", "unit": "ms", **spread(compiled, 2)}


def main() -> None:
    """Prints one JSON line a case."""
    parser = argparse.ArgumentParser()
    parser.add_argument("results", type=Path)
    args = parser.parse_args()
    commit = subprocess.run(
        ["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=False
    ).stdout.strip()
    machine = {
        "part": "grammar",
        "device": processor(),
        "versions": {"python": platform.python_version(), "numpy": np.__version__},
        "commit": commit,
        "date": datetime.date.today().isoformat(),
    }
    for line in lines(json.loads(args.results.read_text(encoding="utf-8"))):
        print(json.dumps({**line, **machine}))


if __name__ == "__main__":
    main()
