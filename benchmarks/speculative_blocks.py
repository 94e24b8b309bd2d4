"""Recorded drafts replayed: calibration, schedules, and tokens a second by load over measured step costs.

Blocks are (confidence logits, margins, accepted) of drafts that were all verified, as `speculative_gpu.py` records them.
Half of the requests fit what has to be fitted, the others are judged.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from deepinfer.speculative import (
    AcceptanceEstimator,
    LaggedConfidence,
    LiveLengths,
    MarginEstimator,
    OnlineTemperatureScaling,
    SequentialIsotonicScaling,
    SequentialTemperatureScaling,
    StepCostModel,
    VerificationScheduler,
    calibration_report,
    prefix_survival,
)
from deepinfer.speculative.calibration.report import auroc
from deepinfer.speculative.calibration.sequential import sigmoid
from deepinfer.speculative.calibration.trials import verified_trials
from deepinfer.speculative.survival import best_lengths

PUBLISHED = StepCostModel.additive(9.9e-3, 12e-6)
LOADS = (1, 4, 16, 60, 128, 256)

Schedule = Callable[[np.ndarray, list[int]], np.ndarray]
"""Confidences of a step's blocks and who they are for; drafts of each to verify."""


@dataclass(frozen=True)
class Blocks:
    """Drafted blocks in the order in which they were made.

    Attributes:
        kinds: Names of the kinds of text.
        kind: Kind of each block, shape [blocks].
        request: Request of each, shape [blocks].
        logits: Confidence logits, shape [blocks, drafts].
        margins: Gaps between the two likeliest tokens, shape [blocks, drafts].
        accepted: Drafts that were accepted, shape [blocks].
    """

    kinds: list[str]
    kind: np.ndarray
    request: np.ndarray
    logits: np.ndarray
    margins: np.ndarray
    accepted: np.ndarray

    @classmethod
    def load(cls, path: Path) -> Blocks:
        """Reads a recording."""
        with np.load(path) as file:
            return cls(
                kinds=file["kinds"].tolist(),
                kind=file["kind"].astype(int),
                request=file["request"].astype(int),
                logits=file["logits"].astype(float),
                margins=file["margins"].astype(float),
                accepted=file["accepted"].astype(int),
            )

    def part(self, chosen: np.ndarray) -> Blocks:
        """Some of the blocks."""
        columns = (self.kind, self.request, self.logits, self.margins, self.accepted)
        return Blocks(self.kinds, *(column[chosen] for column in columns))

    def halves(self) -> tuple[Blocks, Blocks]:
        """Even requests and odd ones."""
        even = self.request % 2 == 0
        return self.part(even), self.part(~even)

    def requests(self, confidence: np.ndarray) -> list[list[tuple[np.ndarray, int]]]:
        """(confidences, accepted) of each request's blocks, requests in a random order that is always the same."""
        found: dict[int, list[tuple[np.ndarray, int]]] = {}
        for request, row, count in zip(self.request, confidence, self.accepted, strict=True):
            found.setdefault(int(request), []).append((row, int(count)))
        order = np.random.default_rng(0).permutation(len(found))
        lists = list(found.values())
        return [lists[at] for at in order]


# ---- calibration, and schedules at the published cost ----


def calibration_lines(blocks: Blocks) -> Iterator[dict[str, Any]]:
    """Errors before and after scaling, and what head and margin tell apart."""
    fit, test = blocks.halves()
    scaling = SequentialTemperatureScaling().fit(fit.logits, fit.accepted)
    online = OnlineTemperatureScaling(fit.logits.shape[1])
    for at in range(0, len(fit.accepted), 64):
        part = slice(at, at + 64)
        online.update(
            fit.logits[part],
            fit.accepted[part],
            np.full(len(fit.accepted[part]), fit.logits.shape[1]),
        )
    yield {
        "case": "temperatures", "value": round(float(scaling.temperatures.mean()), 3), "unit": "mean",
        "by_position": [round(t, 3) for t in scaling.temperatures.tolist()],
        "online": [round(t, 3) for t in online.temperatures.tolist()],
    }  # fmt: skip
    isotonic = SequentialIsotonicScaling().fit(fit.logits, fit.accepted)
    estimator = AcceptanceEstimator(5).fit(fit.logits, fit.margins, fit.accepted)
    both = estimator.predict(test.logits, test.margins)
    ways = (
        ("raw", sigmoid(test.logits)),
        ("calibrated", scaling.transform(test.logits)),
        ("calibrated online", online.transform(test.logits)),
        ("isotonic behind temperatures", isotonic.transform(test.logits)),
        ("with margins", both),
    )
    for name, values in ways:
        for report in calibration_report(np.cumprod(values, 1), test.accepted):
            yield {
                "case": f"calibration error, {name}, position {report.position + 1}",
                "value": round(100 * report.ece, 2), "unit": "%", "auroc": round(report.auroc, 4),
                "brier": round(report.brier, 4), "blocks": report.count,
            }  # fmt: skip
    yield from split_lines(blocks)
    margin = MarginEstimator(fit.logits.shape[1], decay=1.0)
    everything = np.full(len(fit.accepted), fit.logits.shape[1])
    margin.update(fit.margins, fit.accepted, everything)
    scores = {
        "head": scaling.transform(test.logits), "margin": margin.predict(test.margins), "head and margin": both,
    }  # fmt: skip
    everything = np.full(len(test.accepted), test.logits.shape[1])
    _, columns, hits = verified_trials(test.logits, test.accepted, everything)
    for name, values in scores.items():
        rows, _, _ = verified_trials(values, test.accepted, everything)
        trials = values[rows, columns]
        reports = calibration_report(np.cumprod(values, 1), test.accepted)
        yield {
            "case": f"AUROC, {name}", "value": round(auroc(trials, hits), 4),
            "unit": "of a draft behind an accepted prefix", "trials": len(hits),
            "by_position": [
                round(auroc(trials[columns == k], hits[columns == k]), 4) for k in range(values.shape[1])
            ],
            "survival": [round(r.auroc, 4) for r in reports],
            "survival_ece_percent": [round(100 * r.ece, 2) for r in reports],
        }  # fmt: skip


def split_lines(blocks: Blocks, splits: int = 8) -> Iterator[dict[str, Any]]:
    """The same errors over random halves of the requests, and how much of an error is chance."""

    def errors(confidence: np.ndarray, accepted: np.ndarray) -> list[float]:
        return [100 * r.ece for r in calibration_report(np.cumprod(confidence, 1), accepted)]

    rng = np.random.default_rng(5)
    requests = np.unique(blocks.request)
    found: dict[str, list[list[float]]] = {"calibrated": [], "isotonic": [], "with margins": [], "chance alone": []}  # fmt: skip
    for _ in range(splits):
        chosen = np.isin(blocks.request, rng.permutation(requests)[: len(requests) // 2])
        fit, test = blocks.part(chosen), blocks.part(~chosen)
        scaling = SequentialTemperatureScaling().fit(fit.logits, fit.accepted)
        found["calibrated"].append(errors(scaling.transform(test.logits), test.accepted))
        isotonic = SequentialIsotonicScaling().fit(fit.logits, fit.accepted)
        values = isotonic.transform(test.logits)
        found["isotonic"].append(errors(values, test.accepted))
        estimator = AcceptanceEstimator(5).fit(fit.logits, fit.margins, fit.accepted)
        both = estimator.predict(test.logits, test.margins)
        found["with margins"].append(errors(both, test.accepted))
        kept = (rng.random(values.shape) < values).cumprod(1).sum(1)  # as if all were true
        found["chance alone"].append(errors(values, kept))
    for name, rows in found.items():
        table = np.array(rows)
        yield {
            "case": f"calibration error over {splits} random halves, {name}",
            "value": round(float(table.mean(0).max()), 2), "unit": "% at the worst position, mean of the halves",
            "by_position": table.mean(0).round(2).tolist(), "most": table.max(0).round(2).tolist(),
        }  # fmt: skip


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
            total = float((lengths + 1).sum())
            rows += total
            emitted += float((np.minimum(lengths, accepted) + 1).sum())
            seconds += (9.9e-3 + 12e-6 * scale * total) / scale
            count += len(batch)
    return rows / count, emitted / count, emitted / seconds


def fixed(length: int) -> Schedule:
    """The same for all."""
    return lambda confidence, ids: np.full(len(confidence), length)


def planned(scheduler: VerificationScheduler) -> Schedule:
    """By the confidences at hand."""
    return lambda confidence, ids: scheduler.plan(prefix_survival(confidence)).lengths


def lagged(lag: int) -> Schedule:
    """Budget by confidences some steps old."""
    scheduler = VerificationScheduler(PUBLISHED)
    memory = LaggedConfidence(5, lag=max(lag, 1))

    def choose(confidence: np.ndarray, ids: list[int]) -> np.ndarray:
        live = prefix_survival(confidence)
        if lag == 0:
            return scheduler.plan(live, invariant=True).lengths
        known = memory.get(ids)
        memory.push(ids, confidence)
        return scheduler.plan(live, lagged=known).lengths

    return choose


def block_before() -> Schedule:
    """Lengths by the confidences of each request's block before, as a planner that runs before the drafts would."""
    scheduler = VerificationScheduler(PUBLISHED)
    before: dict[int, np.ndarray] = {}

    def choose(confidence: np.ndarray, ids: list[int]) -> np.ndarray:
        known = np.stack([before.get(i, np.ones(5)) for i in ids])
        before.update(zip(ids, confidence, strict=True))
        return scheduler.plan(prefix_survival(known), invariant=np.ones(len(ids), bool)).lengths

    return choose


def block_lines(blocks: Blocks) -> Iterator[dict[str, Any]]:
    """Calibration, and every schedule."""
    for number, kind in enumerate(blocks.kinds):
        accepted = blocks.accepted[blocks.kind == number]
        yield {
            "case": f"accepted length, {kind}", "value": round(1 + float(accepted.mean()), 3),
            "unit": "tokens a step", "blocks": len(accepted),
            "survival": [round(float((accepted >= k).mean()), 4) for k in range(1, 6)],
        }  # fmt: skip
    yield from calibration_lines(blocks)
    fit, test = blocks.halves()
    scaling = SequentialTemperatureScaling().fit(fit.logits, fit.accepted)
    estimator = AcceptanceEstimator(5).fit(fit.logits, fit.margins, fit.accepted)
    for source, confidence in (
        ("", estimator.predict(test.logits, test.margins)),
        (", head alone", scaling.transform(test.logits)),
    ):
        yield from schedule_lines(source, test.requests(confidence))


def at_length(lost: float) -> Callable[[list[list[tuple[np.ndarray, int]]]], tuple[float, float]]:
    """Fewest rows whose accepted length is at most so much below that of verifying all; and that length."""

    def search(requests: list[list[tuple[np.ndarray, int]]]) -> tuple[float, float]:
        whole = replay(requests, fixed(5))
        best = (0.0, 0.0)
        for share in np.arange(0.5, 1.0, 0.01):
            rows, length, _ = replay(requests, best_share(share))
            found = (rows / whole[0] - 1, length / whole[1] - 1)
            if found[1] >= -lost and found[0] < best[0]:
                best = found
        return best

    return search


def best_share(share: float) -> Schedule:
    """The same share of all drafts in every step, those that survive best."""
    return lambda confidence, ids: best_lengths(
        prefix_survival(confidence), round(5 * share * len(ids))
    )


def schedule_lines(
    source: str, requests: list[list[tuple[np.ndarray, int]]]
) -> Iterator[dict[str, Any]]:
    """Every schedule over the same blocks."""
    schedules: dict[str, Schedule] = {f"fixed {n}": fixed(n) for n in range(6)}
    for threshold in (0.2, 0.4, 0.6):
        static = VerificationScheduler(PUBLISHED, search="static", threshold=threshold)
        schedules[f"threshold {threshold}"] = planned(static)
    schedules["early stop"] = planned(VerificationScheduler(PUBLISHED, search="early_stop"))
    schedules |= {f"global, lag {lag}": lagged(lag) for lag in (0, 1, 2)}
    schedules["global, lengths by the block before"] = block_before()
    results = {name: replay(requests, schedule) for name, schedule in schedules.items()}
    outcomes = [[(np.where(np.arange(5) < n, 1.0, 0.0), n) for _, n in one] for one in requests]
    results["oracle"] = replay(outcomes, lambda c, ids: c.sum(1).astype(int))
    whole_rows, whole_length, whole_rate = results["fixed 5"]
    for name, (rows, length, rate) in results.items():
        yield {
            "case": f"schedule{source}, {name}",
            "value": round(100 * (rows / whole_rows - 1), 1),
            "unit": "% rows against verifying all",
            "accepted_length": round(length, 3),
            "accepted_length_percent": round(100 * (length / whole_length - 1), 2),
            "tokens_per_s_percent": round(100 * (rate / whole_rate - 1), 2),
            "rows": round(rows, 3),
        }
    rows, length = at_length(0.027)(requests)
    yield {
        "case": f"rows saved{source} at 2.7 % less accepted length", "value": round(100 * rows, 1),
        "unit": "% rows against verifying all", "accepted_length_percent": round(100 * length, 2),
    }  # fmt: skip


# ---- loads, over a measured curve ----


def curve_lines(blocks: Blocks, path: Path, engine: Path) -> Iterator[dict[str, Any]]:
    """Tokens a second by load, over each curve of a file, and over the step costs of a whole engine."""
    found: dict[str, dict[str, dict[int, float]]] = {}
    for text in path.read_text("utf-8").splitlines():
        line = json.loads(text)
        words = line["case"].split(", ")
        if words[0] != "curve" or "value" not in line:
            continue
        kind = "draft" if words[2].startswith("drafting") else "rows"
        count = int(words[2].split()[-1] if kind == "draft" else words[2].split()[0])
        found.setdefault(words[1], {}).setdefault(kind, {})[count] = line["value"] / 1e3
    costs: list[tuple[str, StepCostModel]] = [("published", PUBLISHED)]
    costs.append(("nano in the engine", StepCostModel.load(engine)))
    for name, parts in found.items():
        rows = sorted(parts["rows"])
        cost = StepCostModel(
            rows, [parts["rows"][n] for n in rows], graph_sizes=rows, draft=parts.get("draft")
        )
        costs.append((name, cost))
    _, test = blocks.halves()
    requests = test.requests(np.concatenate([sigmoid(test.logits), test.margins], 1))
    for name, cost in costs:
        for load in LOADS:
            yield load_line(name, cost, load, requests)


def load_line(
    name: str, cost: StepCostModel, load: int, requests: list[list[tuple[np.ndarray, int]]]
) -> dict[str, Any]:
    """Every way of drafting, each through the same text."""
    warm, steps = (200, 2000) if load < 16 else (100, 1000)
    draft = cost.draft_seconds(load)
    none = load / cost.plain_seconds(load)
    rates: dict[str, float] = {"none": none}
    rows: dict[str, float] = {}
    for way in ("fixed 5", "scheduled"):
        policy = LiveLengths(VerificationScheduler(cost), calibration=AcceptanceEstimator(5))
        places = [(at % len(requests), 0) for at in range(load)]
        following = load
        seconds = emitted = verified = 0.0
        drafted = 0
        for turn in range(warm + steps):
            if turn == warm:
                seconds = emitted = verified = 0.0
                drafted = 0
            if way == "scheduled" and not policy.drafts(load):
                seconds += cost.plain_seconds(load)
                emitted += load
                continue
            blocks = []
            for at, (request, step) in enumerate(places):
                if step >= len(requests[request]):
                    request, step, following = following % len(requests), 0, following + 1
                blocks.append(requests[request][step])
                places[at] = (request, step + 1)
            confidence = [row[:5].tolist() for row, _ in blocks]
            margins = [row[5:].tolist() for row, _ in blocks]
            accepted = np.array([n for _, n in blocks])
            lengths = np.full(load, 5)
            if way == "scheduled":
                lengths = np.array(policy.trim(confidence, [5] * load, margins=margins))
                if policy.wants_outcomes:
                    kept = np.minimum(accepted, lengths).tolist()
                    policy.learn(confidence, lengths.tolist(), kept, margins=margins)
            total = int(lengths.sum()) + load
            seconds += float(cost.table(total + 1)[total]) + draft
            emitted += float(np.minimum(accepted, lengths).sum()) + load
            verified += float(lengths.sum())
            drafted += 1
        rates[way] = emitted / seconds
        rows[way] = verified / max(1, drafted) / load
    best = max(rates["none"], rates["fixed 5"])
    return {
        "case": f"load over a curve, {name}, {load} requests",
        "value": round(100 * (rates["scheduled"] / best - 1), 2),
        "unit": "% tokens a second over the better of none and fixed",
        "over_fixed_percent": round(100 * (rates["scheduled"] / rates["fixed 5"] - 1), 2),
        **{f"{way}_tokens_per_s": round(rate, 1) for way, rate in rates.items()},
        "drafts_verified": round(rows["scheduled"], 3),
        "is_on": policy.is_on,
    }
