"""Does random actions to engines on a toy model, checks every invariant after each, and prints one JSON line.

Submit, step, abort, preempt, reset, pause, failing and interrupted calls, failing copies, raising sinks, jumping clocks,
at depth 0 and 1, with drafts, grammars, stop strings, priorities, several samples and small pools; outputs are compared
with what each request gives alone. Violations are printed with the fewest actions that show them.
--results appends the line to a file.
Run: python benchmarks/campaign.py [--steps 100000] [--seed 0] [--no-shrink]
"""

from __future__ import annotations

import argparse
import datetime
import json
import logging
import platform
import subprocess
import sys
import time
from pathlib import Path

from deepinfer.testing import CampaignReport, run_campaign, shrink


def main() -> int:
    """Runs the campaign; the exit status is the number of violations, 100 at most."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=100_000, help="actions in all")
    parser.add_argument("--seed", type=int, default=0, help="seed of the first machine")
    parser.add_argument("--no-shrink", action="store_true", help="print violations as found")
    parser.add_argument("--results", type=Path, help="file that the line is appended to")
    options = parser.parse_args()
    logging.getLogger("deepinfer.engine").setLevel(logging.CRITICAL)  # planted failures are logged
    shown = time.monotonic()

    def progress(report: CampaignReport) -> None:
        nonlocal shown
        if time.monotonic() - shown > 10:
            shown = time.monotonic()
            found = len(report.violations)
            print(f"{report.num_actions} actions, {found} violations", file=sys.stderr)

    report = run_campaign(options.steps, options.seed, progress=progress)
    for violation in report.violations:
        small = violation if options.no_shrink else shrink(violation)
        print(small, small.config, *small.actions, sep="\n  ", file=sys.stderr)
    command = ["git", "rev-parse", "--short", "HEAD"]
    commit = subprocess.run(command, capture_output=True, text=True, check=False).stdout.strip()
    found = report.to_dict()
    line = {
        "part": "campaign",
        "case": f"random actions from seed {options.seed}",
        "value": len(found.pop("violations")),
        "unit": "violations",
        **found,
        "device": f"{platform.machine()}, CPU",
        "versions": {"python": platform.python_version()},
        "commit": commit,
        "date": datetime.date.today().isoformat(),
    }
    text = json.dumps(line)
    print(text)
    if options.results is not None:
        with options.results.open("a", encoding="utf-8") as file:
            file.write(text + "\n")
    return min(len(report.violations), 100)


if __name__ == "__main__":
    raise SystemExit(main())
