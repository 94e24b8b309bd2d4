"""Tokens a second of engines without drafts, with all of them verified, and with as many as pay, at the same loads in turns."""

from __future__ import annotations

import contextlib
import gc
import statistics
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from typing import Any
from unittest import mock

import numpy as np
import torch
from speculative_report import Report

from deepinfer import Engine, SamplingParams
from deepinfer.engine import draft_graphs, graphs
from deepinfer.engine.recording import record_call
from deepinfer.engine.stats import StatsRecorder
from speculative import prompts

__all__ = ["throughput"]


class Spans(StatsRecorder):
    """Where the time of steps goes."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[dict[str, float]] = []

    def step(self, flight: Any, progress: Any, load: Any, *, now: float) -> None:
        """Notes a step."""
        spans = {name: end - begin for name, (begin, end) in flight.spans.items()}
        drafts = 0 if flight.result is None else int(flight.result.rows.num_drafts.sum())
        self.seen.append({
            **spans, "drafts": drafts, "device": flight.result.duration_s if flight.result else 0.0,
            "drafting": float(getattr(flight.handle, "draft_s", 0.0)),
        })  # fmt: skip
        super().step(flight, progress, load, now=now)


WAYS: dict[str, dict[str, Any]] = {
    "none": {},
    "fixed 5": {"drafter": "dspark"},
    "scheduled": {"drafter": "dspark", "verify": "scheduled"},
}


def texts_of(count: int) -> list[str]:
    """Prompts of the four kinds in turns."""
    kinds = list(prompts(-(-count // 4)).values())
    return [text for row in zip(*kinds, strict=True) for text in row][:count]


class Running:
    """Requests that run in one engine, some tokens at a time.

    Args:
        engine: The engine; every request is brought 48 tokens behind its prompt.
        texts: Prompts.
        tokens: Tokens that each request makes at least.
    """

    def __init__(self, engine: Engine, texts: list[str], tokens: int) -> None:
        self._engine, self._count, self._made = engine, len(texts), 0
        self.spans, self.seconds, self.steps, self.tokens = Spans(), 0.0, 0, 0
        self._aim = 0
        # Some requests are far ahead of the others: more of their drafts are accepted.
        params = SamplingParams(max_tokens=2 * tokens, temperature=0, ignore_eos=True)
        self._rids = [engine.add_request(text, params) for text in texts]
        seen: set[str] = set()
        while len(seen) < len(texts):
            seen.update(delta.rid for delta in self._step() if delta.token_ids)
        while self._made < 48 * self._count:
            self._step()
        self._aim = self._made
        self._before, engine._loop.recorder = engine._loop.recorder, self.spans

    def _step(self) -> list[Any]:
        deltas = self._engine.step()
        errors = [delta.error for delta in deltas if delta.error is not None]
        if errors or not self._engine.has_unfinished:
            raise RuntimeError(f"requests came to their end: {errors[:1]}")
        self._made += sum(len(delta.token_ids) for delta in deltas)
        return deltas

    def stretch(self, tokens: int) -> float:
        """Goes on for so many tokens a request; tells the tokens a second."""
        self._aim += tokens * self._count
        wait()
        began, before, steps = time.perf_counter(), self._made, 0
        while self._made < self._aim:
            self._step()
            steps += 1
        wait()
        seconds = time.perf_counter() - began
        self.seconds += seconds
        self.steps += steps
        self.tokens += self._made - before
        return (self._made - before) / seconds

    def end(self) -> dict[str, float]:
        """Ends the requests; what was seen of all stretches."""
        engine, seen = self._engine, self.spans.seen
        engine._loop.recorder = self._before
        for rid in self._rids:
            engine.abort(rid)
        while engine.has_unfinished:
            engine.step()
        found = {
            "tokens_per_s": self.tokens / self.seconds, "step_ms": 1e3 * self.seconds / self.steps,
            "tokens_a_step": self.tokens / self.steps / self._count,
            "verified": statistics.fmean(s["drafts"] for s in seen) / self._count,
            "steps_with_drafts": statistics.fmean(s["drafts"] > 0 for s in seen),
        }  # fmt: skip
        for name in ("plan", "forward", "sample", "collect", "apply", "device", "drafting"):
            values = [s[name] for s in seen if name in s]
            found[f"{name}_ms"] = 1e3 * statistics.median(values) if values else 0.0
        return found


class Recordings:
    """Notes how long each recording takes: the calls before it, the recorded call, and all of it with the graph made.

    Attributes:
        seconds: Of each recording: the first call, the recorded one, and the whole.
    """

    def __init__(self) -> None:
        self.seconds: list[tuple[float, float, float]] = []

    def __call__(self, call: Callable[[], Any], device: Any, pool: Any = None) -> tuple[Any, Any]:
        """As `record_call`."""
        calls: list[float] = []

        def timed() -> Any:
            began = time.perf_counter()
            found = call()
            calls.append(time.perf_counter() - began)
            return found

        began = time.perf_counter()
        found = record_call(timed, device, pool)
        self.seconds.append((calls[0], calls[-1], time.perf_counter() - began))
        return found

    @contextlib.contextmanager
    def noting(self) -> Iterator[None]:
        """Notes what engines record meanwhile."""
        with mock.patch.object(graphs, "record_call", self), mock.patch.object(draft_graphs, "record_call", self):  # fmt: skip
            yield

    def line(self) -> dict[str, Any]:
        """Sums, and the longest of each."""
        parts = ("first_call", "recorded_call", "whole")
        columns = list(zip(*self.seconds, strict=True)) if self.seconds else [(0.0,)] * 3
        found: dict[str, Any] = {"recordings": len(self.seconds)}
        for name, values in zip(parts, columns, strict=True):
            found |= {f"{name}_s": sum(values), f"{name}_most_s": max(values)}
        return found


def wait() -> None:
    """Until the device has nothing to do."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def against(rates: dict[str, list[float]]) -> dict[str, Any]:
    """What the schedule gives over the better of none and all five, in percent.

    The ways run each stretch of text one right after the other, so what disturbs the machine for longer than that disturbs
    all; `value` is the median of the stretches' ratios, `quartiles` their spread, `error` the standard error of the median.
    """
    others = [way for way in rates if way != "scheduled"]
    better = max(others, key=lambda way: statistics.median(rates[way]))
    found: dict[str, Any] = {"better": better, "stretches": len(rates[better]), "unit": "%"}
    for way in others:
        ratios = np.array(rates["scheduled"]) / np.array(rates[way])
        percents = 100.0 * (ratios - 1.0)
        draws = np.random.default_rng(0).choice(percents, (2000, len(percents)))
        values = {
            "value": float(np.median(percents)),
            "quartiles": [round(float(v), 2) for v in np.percentile(percents, (25, 75))],
            "error": float(np.median(draws, 1).std()),
        }
        name = way.replace(" ", "_")
        found |= {f"over_{name}": values["value"]} if way != better else values
    return found


def throughput(report: Report, options: Any, name: str, loads: Sequence[int]) -> None:
    """Every way at every load, in turns."""
    engines: dict[str, Engine] = {}
    for way, parts in WAYS.items():
        began = time.perf_counter()
        config = {
            "max_num_seqs": max(loads), "max_model_len": 1400, "async_depth": 1, "prefix_cache": False,
            "device": options.device,
        }  # fmt: skip
        recordings = Recordings()
        with warnings.catch_warnings(), recordings.noting():
            warnings.filterwarnings("ignore", "the step cost model is flat")
            engines[way] = Engine.from_pretrained("nano", config=config, **parts)
        report.add(
            f"{name}, engine, {way}", seconds=time.perf_counter() - began, **recordings.line()
        )
        policy = getattr(engines[way]._parts.scheduler, "verify_lengths", None)
        if policy is not None and hasattr(policy, "scheduler"):
            report.add(f"{name}, cost model, {way}", model=policy.scheduler.cost.to_dict())
    for load in loads:
        report.run(
            f"{name}, load {load}",
            lambda load=load: one_load(report, options, engines, name, load),
            3.0,
        )
    for way, engine in engines.items():
        policy = getattr(engine._parts.scheduler, "verify_lengths", None)
        if policy is not None and hasattr(policy, "to_dict"):
            report.add(f"{name}, policy, {way}", state=policy.to_dict())
        made = getattr(engine._parts.runner, "_graphs", None)
        if made is not None:
            hits = sorted(((b.rows, b.tokens, b.context), n) for b, n in made.stats.hits.items())
            report.add(
                f"{name}, recordings, {way}", hits=hits, misses=dict(made.stats.misses),
                padded=made.stats.padded_tokens, used=made.stats.tokens,
                unsupported=made.unsupported,
            )  # fmt: skip
        engine.close()


def one_load(
    report: Report, options: Any, engines: dict[str, Engine], name: str, load: int
) -> None:
    """Stretches of the same texts, each by every way before the next."""
    texts = texts_of(load)
    stretches = max(1, options.tokens_timed // options.stretch)
    rates: dict[str, list[float]] = {way: [] for way in engines}
    last: dict[str, dict[str, float]] = {}
    ways, took = list(engines), 0.0
    for repeat in range(options.repeats + 1):
        began = time.perf_counter()
        if report.left_s < 1.2 * took:
            break
        runs = {}
        for way in ways:  # what is recorded and compiled is so by the end of the first repeat
            runs[way] = Running(engines[way], texts, options.stretch * (stretches + 1))
        if not repeat:  # what is there by now is not collected again and again
            gc.collect()
            gc.freeze()
        for stretch in range(stretches if repeat else 1):
            first = (stretch + repeat) % len(ways)
            for way in ways[first:] + ways[:first]:
                rate = runs[way].stretch(options.stretch if repeat else 12)
                if repeat:
                    rates[way].append(rate)
        last = {way: run.end() for way, run in runs.items()}
        took = time.perf_counter() - began
    if not all(rates.values()):
        report.add(f"{name}, load {load}", skipped="no time left")
        return
    for way, values in rates.items():
        policy = getattr(engines[way]._parts.scheduler, "verify_lengths", None)
        switch = policy.switch.state() if policy is not None else {}
        report.add(
            f"{name}, {load} requests, {way}", **last[way], median_tokens_per_s=statistics.median(values),
            best_tokens_per_s=max(values), stretches=[round(r) for r in values], **switch,
        )  # fmt: skip
    report.add(f"{name}, {load} requests, scheduled against the others", **against(rates))
