"""Decode steps from recorded CUDA graphs against eager ones, on one GPU.

Checks first: every Triton kernel of a step against its reference on the values of a real step, and the tokens of 64
greedy steps against eager ones. Then times generation at several batches and depths, the share of a decode step in
which the GPU idles, prefill, and the gaps between tokens of 64 decoders while long prompts arrive, by time target. Each case is one
JSON line in $OUT (or --out); a table comes last. Cases that no longer fit into --seconds are left out and named.
Run: PYTHONPATH=src python benchmarks/gpu_decode.py [--model nano] [--seconds 140]
"""

from __future__ import annotations

import argparse
import datetime
import itertools
import json
import os
import statistics
import time
import traceback
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from model_step import random_model, small_config

from deepinfer import Engine, SamplingParams
from deepinfer.engine.graphs import DecodeGraphs, GraphBucket, GraphRow
from deepinfer.kernels.fused import fused_kernels
from deepinfer.kernels.reference import fused as reference
from deepinfer.models import load_model
from deepinfer.models.deepseek_v41 import DeepseekV41, ForwardBatch, Segment, SlotCache
from deepinfer.models.deepseek_v41.decode_inputs import DecodeInputs, row_values
from deepinfer.models.deepseek_v41.decode_step import DecodeStep

DEVICE = "cuda"
GREEDY_STEPS = 64


class Report:
    """Collects cases: a JSON line each, and rows of the last table."""

    def __init__(self, path: Path, seconds: float, only: tuple[str, ...] = ("",)) -> None:
        self._only = only
        self._file = path.open("a")
        self._end = time.perf_counter() + seconds
        self._began = time.perf_counter()
        self.lines: list[str] = []

    def add(self, case: str, **values: Any) -> None:
        """Writes a case."""
        found = {k: float(f"{v:.5g}") if isinstance(v, float) else v for k, v in values.items()}
        at = round(time.perf_counter() - self._began, 1)
        machine = {
            "device": torch.cuda.get_device_name(), "torch": torch.__version__,
            "date": datetime.date.today().isoformat(),
        }  # fmt: skip
        line = {"part": "gpu_decode", "case": case, "at_s": at, **found, **machine}
        self._file.write(json.dumps(line) + "\n")
        self._file.flush()
        line = f"{case:34s} " + " ".join(f"{k}={v}" for k, v in found.items())
        self.lines.append(line)
        print(f"[{at:6.1f}s] {line}", flush=True)

    def run(self, case: str, work: Any, least_s: float = 5.0) -> None:
        """Runs a case if it is asked for and the time is there; a failure is a line too."""
        if not case.startswith(self._only):
            return
        if time.perf_counter() + least_s > self._end:
            self.add(case, skipped="no time left")
            return
        try:
            work()
        except Exception as error:
            self.add(case, error=f"{type(error).__name__}: {error}"[:300])
            traceback.print_exc()


class CheckedKernels:
    """The Triton kernels, each compared with its reference on the arguments of every call."""

    def __init__(self) -> None:
        self.worst: dict[str, float] = {}

    def __getattr__(self, name: str) -> Any:
        fast, slow = getattr(fused_kernels(DEVICE), name), getattr(reference, name)

        def run(*args: Any, **kwargs: Any) -> Any:
            copies: dict[int, torch.Tensor] = {}

            def copy(value: Any) -> Any:
                if not torch.is_tensor(value):
                    return value
                if not value.numel():
                    return value
                if value.data_ptr() not in copies:
                    copies[value.data_ptr()] = value.clone()
                return copies[value.data_ptr()]

            twin = [copy(a) for a in args], {k: copy(v) for k, v in kwargs.items()}
            wanted = slow(*twin[0], **twin[1])
            found = fast(*args, **kwargs)
            pairs = [(found, wanted)]
            if isinstance(found, tuple):
                pairs = list(zip(found, wanted, strict=True))
            if name == "scatter_rows":
                pairs = [(args[0], twin[0][0])]
            if name != "expert_order":
                for a, b in pairs:
                    a, b = a.double(), b.double()
                    scale = b.abs().max().clamp_min(1e-9)
                    # Rounded values may land on the neighbouring code: the mean shows real faults.
                    error = float((a - b).abs().mean() / scale)
                    bad = float("inf") if a.isnan().any() else error
                    self.worst[name] = max(self.worst.get(name, 0.0), bad)
            return found

        return run


def prefill(model: DeepseekV41, cache: SlotCache, prompts: list[list[int]]) -> list[int]:
    """Runs prompts, and returns the greedy next tokens."""
    batch = ForwardBatch.from_segments([(i, 0, p) for i, p in enumerate(prompts)])
    out = model(batch, cache)
    return model.compute_logits(out.hidden[batch.last_rows]).argmax(-1).tolist()


def make_prompts(count: int, length: int, vocab: int) -> list[list[int]]:
    """Random prompts, the same for each length."""
    generator = torch.Generator().manual_seed(length)
    return torch.randint(5, vocab, (count, length), generator=generator).tolist()


def make_model(args: argparse.Namespace, dtype: torch.dtype, rounding: str) -> DeepseekV41:
    """The model that is asked for, on the GPU."""
    if args.model == "random":
        model = random_model(small_config(), rounding).to(DEVICE)
        model.set_engram_token_map(range(model.config.vocab_size))
        return model
    return load_model(args.model, device=DEVICE, dtype=dtype, rounding=rounding)


def check_kernels(report: Report, model: DeepseekV41, name: str) -> None:
    """Runs a verify step in which every kernel is compared with its reference."""
    cache = model.new_cache(4, 512, 256)
    last = prefill(model, cache, make_prompts(3, 150, 500))
    inputs = DecodeInputs.empty(4, 2)
    segments = [Segment(i, 150, 2) for i in range(3)]
    inputs.fill([[t, 7] for t in last], [row_values(s, 0) for s in segments])
    inputs = DecodeInputs(inputs.ids.to(DEVICE), inputs.values.to(DEVICE))
    checked = CheckedKernels()
    DecodeStep(model, cache, checked)(inputs, 512)
    for kernel, error in sorted(checked.worst.items()):
        report.add(f"kernel {kernel} {name}", error=float(f"{error:.2e}"), good=error < 1e-2)


def check_tokens(report: Report, model: DeepseekV41, name: str) -> None:
    """Compares the greedy choices of recorded and eager steps."""
    prompts = make_prompts(8, 40, 500)
    other, cache = model.new_cache(8, 512, 64), model.new_cache(8, 512, 64)
    last = prefill(model, other, prompts)
    prefill(model, cache, prompts)
    future = torch.tensor(last, device=DEVICE)
    graphs = DecodeGraphs(model, cache, future=future)
    warm = graphs.warmup([GraphBucket(8, 1, 512)])
    eager_tokens, graph_tokens, worst = [], [], 0.0
    for step in range(GREEDY_STEPS):
        at = 40 + step
        ids = torch.tensor(last, device=DEVICE)
        out = model(ForwardBatch(ids, tuple(Segment(i, at, 1) for i in range(8))), other)
        wanted = model.compute_logits(out.hidden)
        run = graphs.try_run([GraphRow(Segment(i, at, 1), [0], True) for i in range(8)])
        # Both go on with the eager tokens, so that one flip does not hide what follows.
        worst = max(worst, float((run.logits - wanted).abs().max()))
        graph_tokens.append(run.logits.argmax(-1).tolist())
        last = wanted.argmax(-1).tolist()
        eager_tokens.append(last)
        future.copy_(torch.tensor(last))
    flat = [a == b for x, y in zip(eager_tokens, graph_tokens, strict=True) for a, b in zip(x, y, strict=True)]  # fmt: skip
    report.add(
        f"greedy tokens {name}", steps=GREEDY_STEPS, equal=sum(flat), of=len(flat),
        max_logit_difference=worst, warmup_s=warm.seconds, graph_MiB=warm.size_bytes / 2**20,
    )  # fmt: skip


def replay_times(report: Report, model: DeepseekV41, name: str, rows: list[int]) -> None:
    """Device time of a recorded step by batch and context, and its number of kernels."""
    cache = model.new_cache(max(rows), 1024, 64)
    graphs = DecodeGraphs(model, cache, future=torch.zeros(max(rows), dtype=torch.int64, device=DEVICE))  # fmt: skip
    buckets = [GraphBucket(r, t, c) for r in rows for t, c in ((1, 256), (1, 1024))]
    warm = graphs.warmup([*buckets, GraphBucket(min(16, max(rows)), 6, 1024)])
    report.add(
        f"warm-up {name}", graphs=len(warm.buckets), seconds=warm.seconds, MiB=warm.size_bytes / 2**20
    )  # fmt: skip
    for bucket, recording in sorted(graphs._recordings.items()):
        times = []
        for _ in range(30):
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            start.record()
            recording.graph.replay()
            end.record()
            times.append((start, end))
        torch.cuda.synchronize()
        step_ms = statistics.median(s.elapsed_time(e) for s, e in times)
        report.add(
            f"replay {name} b{bucket.rows} t{bucket.tokens} c{bucket.context}", step_ms=step_ms,
            tokens_per_s=bucket.rows * bucket.tokens / step_ms * 1e3,
        )  # fmt: skip
    recording = graphs._recordings[GraphBucket(max(rows), 1, 256)]
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as trace:
        recording.graph.replay()
        torch.cuda.synchronize()
    kernels: dict[str, list[float]] = {}
    for event in gpu_events(trace):
        kernels.setdefault(event.name[:60], []).append(event.device_time)
    total = sum(map(len, kernels.values()))
    report.add(
        f"kernels {name} b{max(rows)}", count=total, a_layer=total / model.config.num_hidden_layers,
        sum_us=sum(map(sum, kernels.values())),
    )  # fmt: skip
    for kernel, times in sorted(kernels.items(), key=lambda kv: -sum(kv[1]))[:14]:
        print(f"    {sum(times):9.1f} us {len(times):5d} x  {kernel}")


def engine_for(model: DeepseekV41, batch: int, depth: int, recorded: bool, length: int = 512, **options: Any) -> Engine:  # fmt: skip
    """An engine, with recordings of its decode steps if asked for."""
    options = {
        "max_num_seqs": batch, "max_model_len": length, "async_depth": depth, "cuda_graphs": recorded, **options
    }  # fmt: skip
    engine = Engine(model=model, config=options)
    if recorded:
        graphs = engine._parts.runner.make_graphs()
        warm = graphs.warmup([GraphBucket(batch, 1, length)])
        if warm.skipped:
            raise RuntimeError(f"nothing was recorded: {warm.skipped}")
    return engine


def decode_speed(report: Report, model: DeepseekV41, name: str, batch: int, depth: int, recorded: bool) -> None:  # fmt: skip
    """Greedy tokens a second through the engine, and idle shares of recorded steps."""
    tokens = 400 if recorded else 24
    with engine_for(model, batch, depth, recorded) as engine:
        params = SamplingParams(temperature=0, max_tokens=tokens, ignore_eos=True)
        for i, prompt in enumerate(make_prompts(batch, 32, 500)):
            engine.add_request(prompt, params, rid=str(i))
        while not engine.step():  # prompts first
            pass
        for _ in range(4):
            engine.step()
        torch.cuda.synchronize()
        gone, steps, began = 0, 0, time.perf_counter()
        ends = [began]
        while engine.has_unfinished and steps < tokens - 12:
            gone += sum(len(delta.token_ids) for delta in engine.step())
            steps += 1
            ends.append(time.perf_counter())
        torch.cuda.synchronize()
        middle = statistics.median(b - a for a, b in itertools.pairwise(ends))
        seconds = time.perf_counter() - began
        idle: dict[str, Any] = {}
        if recorded and engine.has_unfinished:
            try:
                idle = idle_share(engine, seconds / max(steps, 1), middle)
            except Exception as error:  # the speed stands without it
                idle = {"idle_error": str(error)[:80]}
    report.add(
        f"decode {name} b{batch} depth{depth} {'graph' if recorded else 'eager'}",
        tokens_per_s=gone / seconds, step_ms=seconds / max(steps, 1) * 1e3, **idle,
    )  # fmt: skip


def gpu_events(trace: Any) -> list[Any]:
    """What ran on the GPU."""
    return [e for e in trace.events() if e.device_type == torch.autograd.DeviceType.CUDA]


def idle_share(engine: Engine, step_s: float, middle_s: float, repeats: int = 40) -> dict[str, float]:  # fmt: skip
    """Share of a step's time in which the GPU had nothing to do.

    Events time the step's own work, recording and sampler, launched again and again so that the queue never runs
    empty; what an engine's step takes beyond that, the GPU waits for the host.
    """
    runner, seen = engine._parts.runner, {}
    sampler = runner._sampler

    def keep(logits: torch.Tensor, *rest: Any) -> Any:
        seen["call"] = logits, *rest
        return sampler(logits, *rest)

    runner._sampler = keep
    engine.step()
    runner._sampler = sampler
    torch.cuda.synchronize()
    hits = runner._graphs.stats.hits
    graph = runner._graphs._recordings[max(hits, key=hits.get)].graph
    events = [torch.cuda.Event(enable_timing=True) for _ in range(2)]
    for turn in range(-5, repeats):
        if not turn:
            events[0].record()
        graph.replay()
        sampler(*seen["call"])
    events[1].record()
    torch.cuda.synchronize()
    device_s = events[0].elapsed_time(events[1]) / repeats / 1e3
    return {
        "median_step_ms": middle_s * 1e3, "device_ms": device_s * 1e3,
        "idle_share": max(0.0, 1 - device_s / step_s), "median_idle_share": max(0.0, 1 - device_s / middle_s),
    }  # fmt: skip


def prefill_speed(report: Report, model: DeepseekV41, name: str) -> None:
    """Tokens of prompts a second."""
    length = min(2048, model.config.max_position_embeddings - 8)
    for chunk in (512, 2048):
        options = {"prefill_chunk_tokens": chunk, "max_num_batched_tokens": 8192}
        with engine_for(model, 16, 0, False, length + 8, **options) as engine:
            params = SamplingParams(temperature=0, max_tokens=1, ignore_eos=True)
            engine.generate(make_prompts(2, 600, 500), params)
            torch.cuda.synchronize()
            began = time.perf_counter()
            engine.generate(make_prompts(16, length, 500), params)
            torch.cuda.synchronize()
            seconds = time.perf_counter() - began
        report.add(f"prefill {name} chunk{chunk}", tokens_per_s=16 * length / seconds)


def token_gaps(report: Report, model: DeepseekV41, name: str, target_ms: float) -> None:
    """Gaps between tokens of 64 decoders while long prompts arrive, against the time that a step may take.

    Prompts arrive for a while before gaps count: kernels are compiled and the cost of steps is learned by then.
    """
    long = min(3000, model.config.max_position_embeddings - 16)
    options = {
        "max_num_batched_tokens": 4096, "target_step_s": target_ms / 1e3, "prefix_cache": False,
        "max_num_seqs": 72, "max_model_len": long + 16, "async_depth": 1,
    }  # fmt: skip
    warm_s, timed_s, every_s = 4.0, 5.0, 0.12
    seen: dict[str, float] = {}
    gaps: list[float] = []
    steps: list[float] = []
    with Engine(model=model, config=options) as engine:
        short = SamplingParams(temperature=0, max_tokens=long // 2, ignore_eos=True)
        one = SamplingParams(temperature=0, max_tokens=1, ignore_eos=True)
        prompts, decoders = make_prompts(16, long, 500), make_prompts(64, 32, 500)
        for i, prompt in enumerate(decoders):
            engine.add_request(prompt, short, rid=f"d{i}")
        began, arrived, timed, done = time.perf_counter(), 0, 0, 0
        last = began
        while time.perf_counter() - began < warm_s + timed_s:
            now = time.perf_counter() - began
            if now > every_s * arrived and arrived - done < 3:
                engine.add_request(prompts[arrived % 16], one, rid=f"p{arrived}")
                arrived += 1
                timed += now > warm_s
            deltas = engine.step()
            now = time.perf_counter()
            if now - began > warm_s:
                steps.append(now - last)
            last = now
            for delta in deltas:
                if not delta.rid.startswith("d"):
                    done += delta.finished
                    continue
                if delta.rid in seen and now - began > warm_s:
                    gaps.append(now - seen[delta.rid])
                seen[delta.rid] = now
                if delta.finished:
                    i = int(delta.rid[1:]) % 64
                    engine.add_request(decoders[i], short, rid=f"d{int(delta.rid[1:]) + 64}")
        engine.check()
    gaps.sort()
    steps.sort()
    p99 = gaps[int(len(gaps) * 0.99)] * 1e3
    report.add(
        f"token gaps {name} target {target_ms:g} ms", p50_ms=gaps[len(gaps) // 2] * 1e3, p90_ms=gaps[int(len(gaps) * 0.9)] * 1e3,
        p99_ms=p99, most_ms=gaps[-1] * 1e3, over_target=p99 / target_ms - 1, prompts=timed,
        prompt_tokens_per_s=timed * long / timed_s, tokens_per_s=len(gaps) / timed_s, step_p99_ms=steps[int(len(steps) * 0.99)] * 1e3,
    )  # fmt: skip


def full_size(report: Report, model: DeepseekV41) -> None:
    """The same at the full size of nano with random weights in fp32."""
    name = "12 layers fp32"
    check_tokens(report, model, name)
    replay_times(report, model, name, [1, 64])
    decode_speed(report, model, name, 64, 1, True)
    decode_speed(report, model, name, 64, 1, False)


def main() -> None:
    """Runs the cases."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="nano")
    parser.add_argument("--seconds", type=float, default=140.0)
    parser.add_argument("--batch", type=int, nargs="+", default=[1, 16, 64, 256])
    parser.add_argument("--only", nargs="+", default=[""], help="beginnings of the names of cases")
    parser.add_argument("--out", default=os.environ.get("OUT", "."))
    args = parser.parse_args()
    torch.backends.cuda.matmul.allow_tf32 = False
    report = Report(Path(args.out) / "gpu_decode.jsonl", args.seconds, tuple(args.only))
    report.add(
        "machine", gpu=torch.cuda.get_device_name(), torch=torch.__version__, model=args.model
    )
    held = SimpleNamespace(model=None)

    def load(dtype: torch.dtype, rounding: str) -> DeepseekV41:
        held.model = None
        held.model = make_model(args, dtype, rounding)
        return held.model

    checked = ((torch.float32, "none"), (torch.float32, "full"), (torch.bfloat16, "full"))
    for dtype, rounding in checked if {"", "kernels", "greedy"} & {*args.only} else checked[-1:]:
        name = f"{str(dtype).removeprefix('torch.')} {rounding}"
        model = load(dtype, rounding)
        report.run(f"kernels {name}", lambda m=model, n=name: check_kernels(report, m, n))
        report.run(f"greedy tokens {name}", lambda m=model, n=name: check_tokens(report, m, n))
    name = "bf16"  # the model that is held by now
    report.run("replays", lambda: replay_times(report, model, name, args.batch))
    for batch in args.batch:
        for depth, recorded in ((1, True), (0, True), (1, False), (0, False)):
            report.run(
                f"decode {name} b{batch} depth{depth} {'graph' if recorded else 'eager'}",
                lambda b=batch, d=depth, r=recorded: decode_speed(report, model, name, b, d, r),
            )
    report.run("prefill", lambda: prefill_speed(report, model, name))
    for target_ms in (20.0, 30.0, 40.0):
        report.run("token gaps", lambda t=target_ms: token_gaps(report, model, name, t), 12)
    if args.model == "nano":
        args.model = "random"
        report.run("full size", lambda: full_size(report, load(torch.float32, "full")), 15)
    print("\n" + "\n".join(report.lines))


if __name__ == "__main__":
    main()
