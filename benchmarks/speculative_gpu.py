"""Speculative decoding on one GPU: recorded blocks, tokens a second by load, and what steps of real widths cost.

blocks: drafts of the embedded `nano` over four kinds of text, as (confidences, margins, accepted), to
`speculative_blocks.npz`; `speculative.py --blocks FILE` calibrates and replays them.

load: `nano` in the engine with recorded steps, at 1 to 256 requests at once: without drafts, with all five verified, and
with as many as pay. The three engines take turns every 64 tokens of the same texts, so that they share what disturbs the
machine, and ratios are those of neighbours. Where a step's time goes comes along.

curve: seconds of recorded steps of the published widths by rows, and of drafting by requests, from packed random weights, see
`speculative_wide.py`; nano-curve: those of `nano`. `speculative.py --curve FILE` replays the recorded blocks over them,
since random weights have no drafts worth verifying.

wide: load, with engines of `nano` whose steps take the time of five layers of the published widths as well.

planner: CPU time of a plan on the machine's host, beside plans written in the shape of others.

Every case is a JSON line in $OUT (or --out); what no longer fits into --seconds is left out and named.
Run: PYTHONPATH=src python benchmarks/speculative_gpu.py [--only blocks load planner nano-curve curve wide] [--seconds 190]
"""

from __future__ import annotations

import argparse
import contextlib
import datetime
import gc
import json
import os
import platform
import statistics
import subprocess
import time
import traceback
import warnings
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import torch
from speculative_wide import WideModel, replay_ms

from deepinfer import Engine, SamplingParams
from deepinfer.core.protocols import DraftBatch, DraftView
from deepinfer.engine import DSparkDrafter, draft_graphs, graphs
from deepinfer.engine.recording import record_call
from deepinfer.engine.stats import StatsRecorder
from deepinfer.models import load_model
from deepinfer.models.deepseek_v41.decode_draft import DraftStep
from deepinfer.models.deepseek_v41.decode_inputs import DecodeInputs
from deepinfer.models.deepseek_v41.decode_step import DecodeStep
from speculative import look_lines, planner_lines, prompts

LOADS = (60, 256, 16, 128, 4, 1)
ROWS = (1, 2, 4, 8, 16, 32, 64, 96, 128, 192, 256, 384, 512, 768, 1024, 1536)
REQUESTS = (1, 4, 16, 60, 128, 256)


class Report:
    """Cases as JSON lines."""

    def __init__(self, path: Path, seconds: float, device: str) -> None:
        self._file = path.open("a", encoding="utf-8")
        self._began = time.perf_counter()
        self._end = self._began + seconds
        git = ["git", "-C", str(Path(__file__).resolve().parent), "rev-parse", "--short", "HEAD"]
        self._machine = {
            "device": torch.cuda.get_device_name() if device == "cuda" else platform.machine(),
            "versions": {"python": platform.python_version(), "torch": torch.__version__},
            "commit": subprocess.run(git, capture_output=True, text=True).stdout.strip(),
            "date": datetime.date.today().isoformat(),
        }

    @property
    def left_s(self) -> float:
        """Seconds that are left."""
        return self._end - time.perf_counter()

    def add(self, case: str, **values: Any) -> None:
        """Writes a case and shows it."""
        found = {k: float(f"{v:.5g}") if isinstance(v, float) else v for k, v in values.items()}
        line = {"part": "speculative_gpu", "case": case, **found, **self._machine}
        self._file.write(json.dumps(line) + "\n")
        self._file.flush()
        shown = " ".join(f"{k}={v}" for k, v in found.items())
        print(f"[{time.perf_counter() - self._began:6.1f}s] {case:34s} {shown}"[:400], flush=True)

    def run(self, case: str, work: Callable[[], object], least_s: float = 5.0) -> None:
        """Runs a part if there is time; a failure is a line, and the next parts still run."""
        if self.left_s < least_s:
            self.add(case, skipped="no time left")
            return
        try:
            work()
        except Exception as error:
            self.add(case, error=f"{type(error).__name__}: {error}"[:400])
            traceback.print_exc()


# ---- blocks ----


class Recorder(DSparkDrafter):
    """Proposes the likeliest tokens, and writes down confidences, margins, and how far each block was accepted."""

    def __init__(self, model: Any) -> None:
        super().__init__(model)
        self.open: dict[str, tuple[int, np.ndarray, np.ndarray]] = {}
        self.blocks: list[tuple[str, int, np.ndarray, np.ndarray, int]] = []

    def propose(self, view: DraftView, max_drafts: int) -> DraftBatch:
        """Proposes, and notes how far the blocks before came."""
        draft = self._draft
        out = draft.propose(view.anchor_ids, view.positions, view.slots, self._cache)
        before = torch.tensor(view.anchor_ids, device=out.hidden.device)
        tokens, margins, inputs = [], [], []
        for logits in out.base_logits.unbind(1):
            inputs.append(before)
            best = (logits + draft.markov_bias(before)).topk(2, -1)
            before = best.indices[:, 0]
            tokens.append(before)
            margins.append(best.values[:, 0] - best.values[:, 1])
        confidence = draft.confidence(out.hidden, torch.stack(inputs, 1)).double()
        logit = torch.logit(confidence, eps=1e-9).float().cpu().numpy()
        gaps = torch.stack(margins, 1).float().cpu().numpy()
        for at, (rid, position) in enumerate(zip(view.rids, view.positions, strict=True)):
            known = self.open.get(rid)
            if known is not None and position - known[0] <= max_drafts + 1:
                self.blocks.append((rid, known[0], known[1], known[2], position - known[0] - 1))
            self.open[rid] = (position, logit[at], gaps[at])
        proposed = torch.stack(tokens, 1)[:, :max_drafts].tolist()
        return DraftBatch(
            token_ids=tuple(map(tuple, proposed)),
            confidences=tuple(map(tuple, confidence[:, :max_drafts].tolist())),
        )


def record_blocks(report: Report, options: Any) -> None:
    """Blocks of every kind of text; those that the end of an answer may have cut are left out."""
    made: list[Recorder] = []

    def make(model: Any) -> Recorder:
        made.append(Recorder(model))
        return made[0]

    config = {"max_num_seqs": 256, "max_model_len": 1024, "device": options.device}
    columns: dict[str, list[Any]] = {
        name: [] for name in ("kind", "request", "position", "logits", "margins", "accepted")
    }
    params = SamplingParams(max_tokens=options.tokens, temperature=0, ignore_eos=True)
    texts = prompts(options.prompts)
    with Engine.from_pretrained("nano", config=config, drafter=make) as engine:
        recorder, request = made[0], 0
        for number, (kind, given) in enumerate(texts.items()):
            recorder.open.clear()
            recorder.blocks.clear()
            began = time.perf_counter()
            outputs = engine.generate(given, params)
            seconds = time.perf_counter() - began
            ends = {}
            for rid, position, *_ in recorder.blocks:
                ends[rid] = max(ends.get(rid, 0), position)
            names = {rid: request + at for at, rid in enumerate(sorted(ends))}
            request += len(names)
            kept = [b for b in recorder.blocks if b[1] < ends[b[0]] - 6]
            for rid, position, logits, gaps, accepted in kept:
                columns["kind"].append(number)
                columns["request"].append(names[rid])
                columns["position"].append(position)
                columns["logits"].append(logits)
                columns["margins"].append(gaps)
                columns["accepted"].append(accepted)
            report.add(
                f"recorded, {kind}", blocks=len(kept), requests=len(given), seconds=seconds,
                accepted_length=1 + statistics.mean(b[-1] for b in kept),
                generated=sum(o.usage.generated for o in outputs),
            )  # fmt: skip
    np.savez_compressed(
        Path(options.out) / "speculative_blocks.npz",
        kinds=np.array(list(texts)),
        kind=np.array(columns["kind"], np.uint8),
        request=np.array(columns["request"], np.uint16),
        position=np.array(columns["position"], np.uint16),
        logits=np.array(columns["logits"], np.float16),
        margins=np.array(columns["margins"], np.float16),
        accepted=np.array(columns["accepted"], np.uint8),
    )


# ---- load ----


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


# ---- curves ----


def nano_curve(report: Report, context: int = 1024) -> None:
    """Milliseconds of the steps of `nano` by rows and of drafting by requests."""
    model = load_model("nano", device="cuda", dtype=torch.bfloat16)
    slots = max(REQUESTS)
    cache = model.new_cache(slots, context, 64)
    step = DecodeStep(model, cache)

    def measured(call: Callable[[], Any]) -> float:
        graph, _ = record_call(call, torch.device("cuda"))
        return replay_ms(graph.replay)

    for rows in ROWS:
        inputs = DecodeInputs.empty(rows, 1, "cuda")
        at = torch.arange(rows, device="cuda")
        inputs.ids.copy_((7 + at % 500).unsqueeze(1))
        inputs.values[:, 0] = context - 64 + at // slots  # what several rows of a slot look like
        inputs.values[:, 1] = at % slots
        inputs.values[:, 2] = 1
        found = measured(lambda i=inputs: step(i, context))
        report.add(f"curve, nano, {rows} rows", value=found, unit="ms")
    drafter = DraftStep(model, cache)
    width = len(model.config.dspark_target_layer_ids) * model.config.hidden_size
    for requests in REQUESTS:
        at = torch.arange(requests, device="cuda")
        places = torch.full_like(at, context - 64)
        draft = measured(
            lambda a=at, p=places: drafter.draft_greedy(a + 7, p, a, torch.zeros_like(p))
        )
        features = torch.randn(6 * requests, width, device="cuda", dtype=model.embed.weight.dtype)
        counts = torch.full_like(at, 3)
        extend = measured(
            lambda f=features, a=at, p=places, c=counts: drafter.extend_context(f, p, a, c)
        )
        report.add(
            f"curve, nano, drafting for {requests}", draft_ms=draft, context_ms=extend,
            value=draft + extend, unit="ms",
        )  # fmt: skip


def wide_parts(report: Report, options: Any, *, curve: bool, load: bool) -> None:
    """The curve of real widths, and engines that run at its cost."""
    with torch.inference_mode():
        began = time.perf_counter()
        model = WideModel("cuda")
        report.add("real widths, model", seconds=time.perf_counter() - began)
        if curve:
            report.run("curve, real widths", lambda: add_all(report, model.target_lines()))
            report.run("curve, drafting", lambda: add_all(report, model.draft_lines(REQUESTS)))
    if load:
        with model.borrowed_by():
            throughput(report, options, "nano at the cost of five wide layers", options.wide_loads)


def add_all(report: Report, lines: Iterator[tuple[str, dict[str, Any]]]) -> None:
    """Every line."""
    for case, values in lines:
        report.add(case, **values)


def parts(report: Report, options: Any) -> Iterator[tuple[str, Callable[[], object]]]:
    """What can be asked for, in order."""
    yield "blocks", lambda: record_blocks(report, options)
    yield "load", lambda: throughput(report, options, "nano", options.loads)

    def planner() -> None:
        for line in (*planner_lines(), *look_lines()):
            report.add(line.pop("case"), **line)

    yield "planner", planner
    if options.device == "cuda":
        yield "nano-curve", lambda: nano_curve(report)
        both = {name: not options.only or name in options.only for name in ("curve", "wide")}
        if all(both.values()):
            yield "curve", lambda: wide_parts(report, options, curve=True, load=True)
        else:
            yield "curve", lambda: wide_parts(report, options, curve=True, load=False)
            yield "wide", lambda: wide_parts(report, options, curve=False, load=True)


def main() -> None:
    """Runs the parts."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--only", nargs="*", default=[], help="blocks, load, planner, nano-curve, curve, wide"
    )
    parser.add_argument("--seconds", type=float, default=190.0)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--prompts", type=int, default=192, help="recorded prompts of each kind")
    parser.add_argument("--tokens", type=int, default=128, help="tokens of each recorded answer")
    parser.add_argument("--loads", type=int, nargs="+", default=LOADS)
    parser.add_argument("--wide-loads", type=int, nargs="+", default=(60, 128, 256, 16, 4, 1))
    parser.add_argument(
        "--stretch", type=int, default=64, help="tokens a request before the next way's turn"
    )
    parser.add_argument("--tokens-timed", type=int, default=384, help="of a request, in stretches")
    parser.add_argument("--repeats", type=int, default=4)
    parser.add_argument("--out", default=os.environ.get("OUT", "."))
    options = parser.parse_args()
    report = Report(Path(options.out) / "speculative_gpu.jsonl", options.seconds, options.device)
    for name, work in parts(report, options):
        if not options.only or name in options.only:
            report.run(name, work)
            gc.collect()


if __name__ == "__main__":
    main()
