"""Measures the planning half of speculative decoding and prints one JSON line a measurement.

Planner: CPU time of a whole plan (survival, order, budget, lengths), beside Algorithm 1 in plain Python, and beside
budgets written here in the shape of what two engines do: numpy over dictionaries, and torch.

Blocks: drafts of the embedded `nano` over four kinds of text, recorded as (confidences, accepted) in the engine, then
replayed under each schedule: rows verified, accepted length, and expected tokens a second under a published step cost
(9.9 ms and 12 us a row, 60 requests). Confidences are calibrated on one half of the prompts and judged on the other.

Run: python benchmarks/speculative.py --only planner blocks
"""

from __future__ import annotations

import argparse
import datetime
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
    LaggedConfidence,
    SequentialTemperatureScaling,
    StepCostModel,
    VerificationScheduler,
    calibration_report,
    prefix_survival,
)

GRAPHS = list(range(8, 4097, 8))
PUBLISHED = StepCostModel.additive(9.9e-3, 12e-6)
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


class Recorder:
    """A drafter that writes down what it proposed and how far it was accepted."""

    def __init__(self, model: Any) -> None:
        from deepinfer.engine.drafter import DSparkDrafter

        self.inner = DSparkDrafter(model)
        self.open: dict[str, tuple[int, tuple[float, ...]]] = {}
        self.blocks: dict[str, list[tuple[tuple[float, ...], int]]] = {}

    @property
    def draft_length(self) -> int:
        """Most drafts of a row."""
        return self.inner.draft_length

    def bind(self, cache: Any) -> None:
        """Passes the cache on."""
        self.inner.bind(cache)

    def unbind(self, cache: Any) -> None:
        """Passes the cache on."""
        self.inner.unbind(cache)

    def observe(self, *values: Any) -> None:
        """Passes target features on."""
        self.inner.observe(*values)

    def propose(self, view: Any, max_drafts: int) -> Any:
        """Proposes, and notes how far the block before came."""
        found = self.inner.propose(view, max_drafts)
        for rid, position, confidence in zip(
            view.rids, view.positions, found.confidences, strict=True
        ):
            if rid in self.open:
                before, known = self.open[rid]
                if position - before - 1 <= len(known):
                    self.blocks.setdefault(rid, []).append((known, position - before - 1))
            self.open[rid] = (position, confidence)
        return found


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


def record(count: int, tokens: int) -> dict[str, list[list[tuple[tuple[float, ...], int]]]]:
    """Blocks by kind and request."""
    from deepinfer import Engine, EngineConfig, SamplingParams
    from deepinfer.models import load_model

    model = load_model("nano", rounding="none")
    recorder = Recorder(model)
    params = SamplingParams(max_tokens=tokens, temperature=0.0, ignore_eos=True)
    out: dict[str, list[list[tuple[tuple[float, ...], int]]]] = {}
    config = EngineConfig(rounding="none", max_num_seqs=8)
    with Engine.from_pretrained("nano", config=config, drafter=lambda model: recorder) as engine:
        for kind, texts in prompts(count).items():
            recorder.blocks.clear()
            recorder.open.clear()
            engine.generate(texts, params)
            out[kind] = [blocks for _, blocks in sorted(recorder.blocks.items())]
    return out


Schedule = Callable[[np.ndarray, list[int]], np.ndarray]


def replay(
    requests: list[list[tuple[np.ndarray, int]]], schedule: Schedule
) -> tuple[float, float, float]:
    """Rows and emitted tokens a request and step, and expected tokens a second, 60 requests at a time."""
    rows = emitted = seconds = 0.0
    count = 0
    for first in range(0, len(requests), 60):
        batch = requests[first : first + 60]
        for step in range(min(map(len, batch))):
            confidence = np.stack([blocks[step][0] for blocks in batch])
            accepted = np.array([blocks[step][1] for blocks in batch])
            lengths = schedule(confidence, list(range(first, first + len(batch))))
            scale = 60 / len(batch)  # a smaller last batch is priced as a full one
            rows += float((lengths + 1).sum())
            emitted += float((np.minimum(lengths, accepted) + 1).sum())
            seconds += (9.9e-3 + 12e-6 * scale * float((lengths + 1).sum())) / scale
            count += len(batch)
    return rows / count, emitted / count, emitted / seconds


def schedules() -> Iterator[tuple[str, Callable[[], Schedule]]]:
    """Every schedule, fresh."""
    for length in range(DRAFTS + 1):
        yield (
            f"fixed {length}",
            lambda n=length: lambda c, ids: np.full(len(c), n),
        )
    for threshold in (0.2, 0.4, 0.6):
        static = VerificationScheduler(PUBLISHED, search="static", threshold=threshold)
        yield (
            f"threshold {threshold}",
            lambda s=static: lambda c, ids: s.plan(prefix_survival(c)).lengths,
        )
    early = VerificationScheduler(PUBLISHED, search="early_stop")
    yield "early stop", lambda: lambda c, ids: early.plan(prefix_survival(c)).lengths
    for lag in (0, 1, 2):
        yield f"global, lag {lag}", lambda n=lag: _global(n)


def _global(lag: int) -> Schedule:
    scheduler = VerificationScheduler(PUBLISHED)
    memory = LaggedConfidence(DRAFTS, lag=max(lag, 1))

    def choose(confidence: np.ndarray, ids: list[int]) -> np.ndarray:
        live = prefix_survival(confidence)
        known = live if lag == 0 else memory.get(ids)
        memory.push(ids, confidence)
        return scheduler.plan(live, lagged=known).lengths

    return choose


def block_lines(count: int, tokens: int) -> Iterator[dict[str, Any]]:
    """Schedules over recorded blocks, and calibration."""
    recorded = record(count, tokens)
    fit: list[tuple[tuple[float, ...], int]] = []
    test: list[list[tuple[tuple[float, ...], int]]] = []
    for kind, requests in recorded.items():
        blocks = [block for blocks in requests for block in blocks]
        yield {
            "case": f"accepted length, {kind}",
            "value": round(1 + statistics.mean(n for _, n in blocks), 3),
            "unit": "tokens a step",
            "blocks": len(blocks),
        }
        fit += [block for blocks in requests[::2] for block in blocks]
        test += requests[1::2]

    def logits(blocks: list[tuple[tuple[float, ...], int]]) -> np.ndarray:
        p = np.clip(np.array([c for c, _ in blocks]), 1e-7, 1 - 1e-7)
        return np.log(p / (1 - p))

    scaling = SequentialTemperatureScaling().fit(logits(fit), [n for _, n in fit])
    flat = [block for blocks in test for block in blocks]
    accepted = [n for _, n in flat]
    raw = np.array([c for c, _ in flat])
    calibrated = scaling.transform(logits(flat))
    for name, values in (("raw", raw), ("calibrated", calibrated)):
        for report in calibration_report(np.cumprod(values, 1), accepted):
            yield {
                "case": f"calibration error, {name}, position {report.position + 1}",
                "value": round(100 * report.ece, 2),
                "unit": "%",
                "auroc": round(report.auroc, 4),
                "brier": round(report.brier, 4),
                "blocks": report.count,
            }
    requests = [
        [(row, n) for row, (_, n) in zip(scaling.transform(logits(blocks)), blocks, strict=True)]
        for blocks in test
    ]
    generator = np.random.default_rng(0)
    order = generator.permutation(len(requests))
    requests = [requests[at] for at in order]
    whole_rows, whole_length, whole_rate = replay(requests, lambda c, ids: np.full(len(c), DRAFTS))
    results = [(name, replay(requests, make())) for name, make in schedules()]
    results.append(("oracle", _oracle(requests)))
    for name, (rows, length, rate) in results:
        yield {
            "case": f"schedule, {name}",
            "value": round(100 * (rows / whole_rows - 1), 1),
            "unit": "% rows against verifying all",
            "accepted_length": round(length, 3),
            "accepted_length_percent": round(100 * (length / whole_length - 1), 2),
            "tokens_per_s_percent": round(100 * (rate / whole_rate - 1), 2),
            "rows": round(rows, 3),
        }


def _oracle(requests: list[list[tuple[np.ndarray, int]]]) -> tuple[float, float, float]:
    """Verifies exactly what will be accepted."""
    rows = emitted = seconds = 0.0
    count = 0
    for first in range(0, len(requests), 60):
        batch = requests[first : first + 60]
        for step in range(min(map(len, batch))):
            accepted = np.array([blocks[step][1] for blocks in batch])
            scale = 60 / len(batch)
            rows += float((accepted + 1).sum())
            emitted += float((accepted + 1).sum())
            seconds += (9.9e-3 + 12e-6 * scale * float((accepted + 1).sum())) / scale
            count += len(batch)
    return rows / count, emitted / count, emitted / seconds


def main() -> None:
    """Prints every line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", nargs="*", default=[], help="planner, blocks")
    parser.add_argument("--prompts", type=int, default=32, help="prompts of each kind")
    parser.add_argument("--tokens", type=int, default=96, help="tokens of each answer")
    parser.add_argument("--out", type=Path, help="append the lines to this file")
    options = parser.parse_args()
    parts: dict[str, Callable[[], Iterator[dict[str, Any]]]] = {
        "planner": planner_lines,
        "blocks": lambda: block_lines(options.prompts, options.tokens),
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
        if options.only and part not in options.only:
            continue
        for line in lines():
            text = json.dumps({"part": "speculative", **line, **common})
            print(text, flush=True)
            if options.out:
                with options.out.open("a", encoding="utf-8") as file:
                    file.write(text + "\n")


if __name__ == "__main__":
    main()
