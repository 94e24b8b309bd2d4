"""Measures the planning half of speculative decoding and prints one JSON line a measurement.

Planner: CPU time of a whole plan (survival, order, budget, lengths), beside Algorithm 1 in plain Python, and beside
budgets written here in the shape of what two engines do: numpy over dictionaries, and torch. Then that of an engine's
whole look at a step's drafts, with a calibration that learns.

Blocks and curve: drafts of the embedded `nano` over four kinds of text, recorded by `speculative_gpu.py`, replayed under
each schedule; see `speculative_blocks.py`.

Run: python benchmarks/speculative.py --only planner
     python benchmarks/speculative.py --only blocks --blocks speculative_blocks.npz
     python benchmarks/speculative.py --only curve --blocks speculative_blocks.npz --curve speculative_gpu.jsonl
"""

from __future__ import annotations

import argparse
import datetime
import itertools
import json
import platform
import statistics
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

from deepinfer.speculative import (
    AcceptanceEstimator,
    LiveLengths,
    StepCostModel,
    VerificationScheduler,
    prefix_survival,
)

GRAPHS = list(range(8, 4097, 8))
DRAFTS = 5


def algorithm_1(survival: np.ndarray, cost: StepCostModel) -> list[int]:
    """The published search, slot by slot."""
    requests = survival.shape[0]
    slots = sorted((-float(a), j, r) for r, row in enumerate(survival) for j, a in enumerate(row))
    lengths = [0] * requests
    rows, tokens = requests, float(requests)
    table = cost.table(requests * (survival.shape[1] + 1) + 1)
    best = tokens / table[rows]
    for negated, _, request in slots:
        rows += 1
        tokens -= negated
        theta = tokens / table[rows]
        if theta <= best:
            break
        best = theta
        lengths[request] += 1
    return lengths


def over_dictionaries(confidence: dict[str, list[float]], cost: StepCostModel) -> int:
    """A budget in the shape of an engine that keeps confidences by request id: numpy over dictionaries."""
    rows = np.array([confidence[rid] for rid in confidence])
    survival = np.cumprod(rows, axis=1)
    flat = np.sort(survival.reshape(-1))[::-1]
    expected = len(rows) + np.concatenate([[0.0], np.cumsum(flat)])
    counts = len(rows) + np.arange(len(flat) + 1)
    seconds = np.array([cost.seconds(len(rows), counts)])[0]
    return int(np.argmax(expected / seconds))


def in_torch(confidence: Any, seconds: Any) -> Any:
    """A budget and its lengths in the shape of an engine that plans with torch on the CPU."""
    import torch

    survival = torch.cumprod(confidence, 1)
    values, order = torch.sort(survival.reshape(-1), descending=True, stable=True)
    requests, drafts = survival.shape
    expected = requests + torch.cat([torch.zeros(1), torch.cumsum(values, 0)])
    best = int(torch.argmax(expected / seconds[requests : requests + values.numel() + 1]))
    return torch.bincount(order[:best] // drafts, minlength=requests)


def planner_lines() -> Iterator[dict[str, Any]]:
    """CPU time of one plan; the peers interleaved with ours."""
    import torch

    generator = np.random.default_rng(0)
    cost = StepCostModel.additive(9.9e-3, 12e-6, graph_sizes=GRAPHS)
    scheduler = VerificationScheduler(cost)
    for requests in (64, 256, 1024):
        confidence = generator.uniform(0.3, 1.0, (requests, DRAFTS)).astype(np.float32)
        lagged = prefix_survival(generator.uniform(0.3, 1.0, (requests, DRAFTS)))
        by_id = {f"request-{i}": row.tolist() for i, row in enumerate(confidence)}
        tensor = torch.from_numpy(confidence)
        table = torch.from_numpy(cost.table(requests * 6 + 1).copy())
        runs: dict[str, Callable[[], Any]] = {
            "plan": lambda c=confidence, g=lagged: scheduler.plan(prefix_survival(c), lagged=g),
            "Algorithm 1 in plain Python": lambda c=confidence: algorithm_1(
                prefix_survival(c), cost
            ),
            "budget, numpy over dictionaries": lambda d=by_id: over_dictionaries(d, cost),
            "budget and lengths, torch": lambda t=tensor, s=table: in_torch(t, s),
        }
        seconds: dict[str, list[float]] = {name: [] for name in runs}
        for _ in range(
            9
        ):  # in turns, so that all see the same machine; several each, as in a running engine
            for name, run in runs.items():
                for _ in range(15):
                    begin = time.perf_counter()
                    run()
                    seconds[name].append(time.perf_counter() - begin)
        for name, values in seconds.items():
            yield {
                "case": f"{name}, {requests} requests",
                "value": round(1e6 * statistics.median(values), 1),
                "unit": "us",
                "lowest_us": round(1e6 * min(values), 1),
                "of_ours": round(statistics.median(values) / statistics.median(seconds["plan"]), 2),
            }


def look_lines() -> Iterator[dict[str, Any]]:
    """CPU time of a look at a step's drafts: calibrate them, plan, decide whether the plan pays."""
    generator = np.random.default_rng(0)
    cost = StepCostModel.additive(1e-3, 1e-3)  # rows so dear that every plan pays
    logits, margins = (
        generator.normal(0.5, 1.5, (2048, DRAFTS)),
        generator.exponential(2, (2048, DRAFTS)),
    )
    kept = generator.random(logits.shape) < 1 / (1 + np.exp(-logits))
    estimator = AcceptanceEstimator(DRAFTS).fit(logits, margins, kept.cumprod(1).sum(1))
    for requests in (1, 64, 256):
        policy = LiveLengths(VerificationScheduler(cost), calibration=estimator)
        confidence = generator.uniform(0.3, 1.0, (requests, DRAFTS)).astype(np.float32)
        confidence[:, 2:] *= 0.1
        gaps = generator.exponential(2, (requests, DRAFTS)).astype(np.float32)
        counts, seconds = np.full(requests, DRAFTS), []
        for _ in range(400):
            begin = time.perf_counter()
            policy.trim(confidence, counts, margins=gaps)
            seconds.append(time.perf_counter() - begin)
        yield {
            "case": f"look at the drafts of a step, {requests} requests",
            "value": round(1e6 * statistics.median(seconds), 1),
            "unit": "us",
            "lowest_us": round(1e6 * min(seconds), 1),
        }


def prompts(count: int) -> dict[str, list[str]]:
    """Text of four kinds, the same on every machine with this repository."""
    root = Path(__file__).resolve().parents[1]
    code = sorted((root / "src").rglob("*.py"))
    pages = sorted((root / "docs").rglob("*.md"))
    generator = np.random.default_rng(0)
    found: dict[str, list[str]] = {"code": [], "docs": [], "json": [], "functions": []}
    for number in range(count):
        text = code[int(generator.integers(len(code)))].read_text("utf-8")
        at = int(generator.integers(0, max(1, len(text) - 900)))
        found["code"].append(text[at : at + 600])
        text = pages[int(generator.integers(len(pages)))].read_text("utf-8")
        at = int(generator.integers(0, max(1, len(text) - 900)))
        found["docs"].append(text[at : at + 600])
        rows = [{"id": i, "name": f"item {i}", "price": 3 * i + number} for i in range(6)]
        found["json"].append(json.dumps(rows, indent=1)[: 200 + 10 * (number % 8)])
        names = ("width", "height", "total", "count", "value", "index", "start", "end")
        one, two = names[number % 8], names[(number // 8 + 3) % 8]
        verb = ("scale", "merge", "clip", "find")[number // 64 % 4]
        found["functions"].append(f"def {verb}_{one}({one}, {two}):\n    ")
    return found


def main() -> None:
    """Prints every line."""
    from speculative_blocks import Blocks, block_lines, curve_lines

    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", nargs="*", default=["planner"], help="planner, blocks, curve")
    parser.add_argument("--blocks", type=Path, help="speculative_blocks.npz of speculative_gpu.py")
    parser.add_argument(
        "--cost",
        type=Path,
        default=Path(__file__).parent / "results/raw/nano_step_cost.json",
        help="step costs of the engine with nano on an H200, as profile_steps gave them",
    )
    parser.add_argument("--curve", type=Path, help="speculative_gpu.jsonl of speculative_gpu.py")
    parser.add_argument("--out", type=Path, help="append the lines to this file")
    options = parser.parse_args()
    parts: dict[str, Callable[[], Iterator[dict[str, Any]]]] = {
        "planner": lambda: itertools.chain(planner_lines(), look_lines()),
        "blocks": lambda: block_lines(Blocks.load(options.blocks)),
        "curve": lambda: curve_lines(Blocks.load(options.blocks), options.curve, options.cost),
    }
    commit = subprocess.run(
        ["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=False
    )
    common = {
        "device": f"{platform.processor() or platform.machine()}, one thread",
        "versions": {"python": platform.python_version(), "numpy": np.__version__},
        "commit": commit.stdout.strip(),
        "date": datetime.date.today().isoformat(),
    }
    for part, lines in parts.items():
        if part not in options.only:
            continue
        for line in lines():
            text = json.dumps({"part": "speculative", **line, **common})
            print(text, flush=True)
            if options.out:
                with options.out.open("a", encoding="utf-8") as file:
                    file.write(text + "\n")


if __name__ == "__main__":
    main()
