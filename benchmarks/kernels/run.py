"""Checks, then times the kernels on a CUDA GPU: `python benchmarks/kernels/run.py --families attention,moe --out FILE`.

Checks run in parallel processes (a case that hangs is stopped), times in this process. Only what is right is timed.
"""

from __future__ import annotations

import argparse
import datetime
import importlib
import json
import os
import subprocess
import sys
import time
import traceback
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))

import torch
from harness import Case, Limits, checked, commit, dump, measure_limits, timed, versions

FAMILIES = sorted(
    p.stem
    for p in Path(__file__).parent.glob("*.py")
    if p.stem not in ("harness", "run", "warm_peers")
)


def load(families: list[str], only: str) -> list[Case]:
    """The cases of some families; a family that cannot be loaded is told of and left out."""
    found: list[Case] = []
    for family in families:
        try:
            found += importlib.import_module(family).cases()
        except Exception:
            print(f"FAMILY {family} cannot be loaded\n{traceback.format_exc()[-1500:]}", flush=True)
    keys = [c.key for c in found]
    twice = sorted({k for k in keys if keys.count(k) > 1})
    if twice:
        print("TWICE", twice, flush=True)
    return [c for c in found if any(part in c.key for part in only.split(","))]


def chosen(cases: list[Case], prior: str) -> list[Case]:
    """Of each shape what was fastest in the lines of an earlier run, and what that run did not time; all without one."""
    if not prior:
        return cases
    times: dict[tuple[str, str], dict[str, float]] = {}
    for text in Path(prior).read_text().splitlines():
        line = json.loads(text)
        if "variant" in line:
            times.setdefault((line["op"], line["shape"]), {})[line["variant"]] = line["value"]

    def kept(case: Case) -> bool:
        found = times.get((case.op, case.shape), {})
        best = min(found, key=found.__getitem__, default=None)
        return case.check_only or case.variant not in found or case.variant in (best, "table")

    return [case for case in cases if kept(case)]


def first_of_shapes(cases: list[Case]) -> list[Case]:
    """The first timed case of each shape: the one that peers are timed beside."""
    seen: dict[tuple[str, str], Case] = {}
    for case in cases:
        if not case.check_only:
            seen.setdefault((case.op, case.shape), case)
    return list(seen.values())


def warm_peers(cases: list[Case], wanted: str, index: int, count: int) -> None:
    """Runs every count-th shape's peers once, so that what they compile lies on the disk when they are timed."""
    for i, case in enumerate(first_of_shapes(cases)):
        if i % count == index:
            try:
                for name, make in case.build(False).peers.items():
                    if wanted == "*" or name in wanted.split(","):
                        make()()
                torch.cuda.synchronize()
            except Exception as error:
                print("cold", case.key, f"{type(error).__name__}: {str(error)[:120]}", flush=True)
            torch.cuda.empty_cache()


def worker(arguments: argparse.Namespace, families: list[str]) -> None:
    """Checks every count-th case; one JSON line each, and one before each so that a hang has a name."""
    torch.backends.cuda.matmul.allow_tf32 = False
    index, count = arguments.worker, arguments.workers
    cases = chosen(load(families, arguments.only), arguments.prior)
    for i, case in enumerate(cases):
        if i % count == index:
            print(json.dumps({"begin": case.key}), flush=True)
            print(json.dumps(checked(case, 1000 + i + int(time.time()))), flush=True)
            torch.cuda.empty_cache()
    if arguments.peers:
        warm_peers(cases, arguments.peers, index, count)


def check_all(arguments: argparse.Namespace, begin: float) -> dict[str, dict]:
    """Checks in parallel; what has not answered by the limit is a failure."""
    command = [sys.executable, __file__, *sys.argv[1:]]
    files, processes = [], []
    for i in range(arguments.workers):
        path = Path(arguments.out).with_suffix(f".check{i}")
        files.append(path)
        with path.open("w") as file:
            processes.append(
                subprocess.Popen(
                    [*command, "--workers", str(arguments.workers), "--worker", str(i)],
                    stdout=file,
                    stderr=subprocess.STDOUT,
                )
            )
    for p in processes:
        try:
            p.wait(timeout=max(1.0, arguments.check_s - (time.time() - begin)))
        except subprocess.TimeoutExpired:
            p.kill()
    found: dict[str, dict] = {}
    for path in files:
        last = None
        for text in path.read_text(errors="replace").splitlines():
            if text.startswith('{"begin"'):
                last = json.loads(text)["begin"]
            elif text.startswith('{"key"'):
                row = json.loads(text)
                found[row["key"]] = row
                last = None
            else:
                print(path.name, text[:300], flush=True)
        if last:
            found[last] = {"key": last, "ok": False, "error": "it did not end", "s": -1}
        path.unlink()
    return found


def earlier_checks(path: Path) -> dict[str, dict]:
    """What an earlier run on the same code and card found right or wrong."""
    rows = [json.loads(text) for text in path.read_text().splitlines()]
    return {row["check"]: row | {"key": row["check"]} for row in rows if "check" in row}


def main() -> int:
    """Checks and times, and prints a table last."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--families", default=",".join(FAMILIES))
    parser.add_argument("--only", default="", help="parts of keys, with commas")
    parser.add_argument("--out", default="kernels.jsonl")
    parser.add_argument("--workers", type=int, default=14)
    parser.add_argument("--check-s", type=float, default=150.0)
    parser.add_argument("--time-s", type=float, default=300.0)
    parser.add_argument("--peers", nargs="?", const="*", default="", help="which, with commas; all")
    parser.add_argument("--prior", default="")
    parser.add_argument("--no-time", action="store_true")
    parser.add_argument("--checked", default="", help="lines of an earlier run whose checks stand")
    parser.add_argument("--worker", type=int, default=None)
    arguments = parser.parse_args()
    families = arguments.families.split(",")
    if arguments.worker is not None:
        worker(arguments, families)
        return 0
    begin = time.time()
    checked_before = arguments.checked and Path(arguments.checked)
    results = earlier_checks(checked_before) if checked_before else check_all(arguments, begin)
    good = sum(r["ok"] for r in results.values())
    print(
        f"checked {good} right, {len(results) - good} wrong in {time.time() - begin:.0f} s",
        flush=True,
    )
    file = Path(arguments.out).open("a")  # noqa: SIM115 - written line by line until the end
    for row in results.values():
        if not row["ok"]:
            print("WRONG", row["key"], row["error"], flush=True)
        dump({"check": row["key"], **{k: v for k, v in row.items() if k != "key"}}, file)
    if arguments.no_time:
        return 0
    limits = measure_limits()
    print(limits, flush=True)
    common = {
        "device": torch.cuda.get_device_name(),
        "versions": versions(),
        "commit": commit(),
        "date": datetime.date.today().isoformat(),
        "limits": limits.__dict__,
    }
    time_all(
        chosen(load(families, arguments.only), arguments.prior),
        results,
        limits,
        common,
        arguments,
        file,
    )
    print(f"total {time.time() - begin:.0f} s")
    return 0


def time_all(
    cases: list[Case],
    results: dict,
    limits: Limits,
    common: dict,
    arguments: argparse.Namespace,
    file,
) -> None:
    """Times what was right until the time is up."""
    begin, seen = time.time(), set()
    for case in cases:
        if case.check_only or not results.get(case.key, {"ok": False})["ok"]:
            continue
        if time.time() - begin > arguments.time_s:
            print("TIME IS UP at", case.key, flush=True)
            break
        first = (case.op, case.shape) not in seen
        seen.add((case.op, case.shape))
        try:
            for line in timed(case, limits, arguments.peers if first else ""):
                line["error_figures"] = results[case.key]["figures"]
                dump(line | common, file)
                ratios = " ".join(
                    f"{k.removeprefix('speed_to_')} {v}"
                    for k, v in line.items()
                    if k.startswith("speed_to")
                )
                print(f"{case.key:74} {line['value']:8.4f} ms {line['TB/s']:6.2f} TB/s {line['TFLOP/s']:7.0f} TF "
                      f"{100 * line['share_of_limit']:4.0f}% of {line['limit']} {ratios}", flush=True)  # fmt: skip
        except Exception as error:
            print("NOT TIMED", case.key, f"{type(error).__name__}: {str(error)[:300]}", flush=True)
        torch.cuda.empty_cache()


if __name__ == "__main__":
    os.environ.setdefault("PYTHONUNBUFFERED", "1")
    sys.exit(main())
