"""Plays a real chat trace through scheduler and cache on a virtual clock, and prints one JSON line a chunk policy.

Chunks by time, whose cost model starts empty and learns from noisy steps, against fixed budgets of tokens a step, on
the same predicted hardware. What a step costs is an estimate, NOT a measurement: see `HARDWARE`. What scheduler and
cache do with it is the real code. Further lines: how far the learned model is off by length of prefix, how well a fit
recovers known coefficients, and what very long prompts do to requests that decode.

Run: python benchmarks/simulate.py --trace mooncake_conversation_min00_29.jsonl
Without --trace, a generated trace of the same kind is played.
"""

from __future__ import annotations

import argparse
import dataclasses
import datetime
import json
import platform
import random
import statistics
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from deepinfer.cache import BlockCacheManager, ReplayPolicy
from deepinfer.scheduling import (
    ChunkPolicy,
    FixedChunks,
    Scheduler,
    SchedulerLimits,
    Simulation,
    Simulator,
    StepCoefficients,
    StepSample,
    StepTimeModel,
    StepWork,
    TimedChunks,
)
from deepinfer.testing import (
    TraceRecord,
    generate_chat_trace,
    load_mooncake_jsonl,
    to_requests,
)

# An estimate of one H200-class engine with DeepSeek-V4.1-Flash, from the published sizes: 8 B parameters a prompt
# token and 16 B a generated one at 500 TFLOP/s in use, index keys of four layers scored at the same rate, 890 bytes a
# cached token read at a tenth of 4.4 TB/s, the last 128 tokens of a prompt through the upper layers, 10 ms a step.
HARDWARE = StepCoefficients(
    step_s=10e-3,
    prefix_token_s=2e-9,
    token_s=32e-6,
    pair_s=2e-11,
    ended_prompt_s=4e-3,
    decode_row_s=64e-6,
    decode_context_token_s=0.5e-9,
)
# The synthetic case of the explanation page, where reading long prefixes weighs more.
SYNTHETIC = StepCoefficients(step_s=3e-3, prefix_token_s=2e-8, token_s=1.2e-6, pair_s=1.5e-12)
WINDOW, BLOCK = 128, 128


def play(
    records: list[TraceRecord],
    chunks: ChunkPolicy,
    budget: int,
    options: argparse.Namespace,
    until_s: float | None = None,
) -> tuple[Simulation, float]:
    """One run, and the processor time that it took."""
    limits = SchedulerLimits(
        max_model_len=1_048_576,
        max_num_seqs=options.seqs,
        max_num_batched_tokens=budget,
        prefill_chunk_tokens=budget,
        window=WINDOW,
        narrows=True,
        chunk_grain=BLOCK,
        async_depth=1,
    )
    cache = BlockCacheManager(
        num_slots=options.seqs,
        num_blocks=options.blocks,
        block_size=BLOCK,
        replay=ReplayPolicy(mode="bounded", window=WINDOW, layers=20),
    )
    scheduler = Scheduler(limits, cache, chunks=chunks)
    simulator = Simulator(
        scheduler, StepTimeModel(HARDWARE), async_depth=1, noise=0.02, keep_steps=False
    )
    begin = time.process_time()
    scale = options.time_scale if until_s is None else 1.0
    run = simulator.run(to_requests(records, time_scale=scale), max_time_s=until_s)
    return run, time.process_time() - begin


def policies(targets_ms: list[float]) -> Iterator[tuple[str, ChunkPolicy, int]]:
    """Name, policy and budget of tokens a step."""
    for tokens in (2_048, 4_096, 8_192, 32_768):
        yield f"{tokens} tokens a step", FixedChunks(tokens), tokens
    for target in targets_ms:
        model = StepTimeModel(StepCoefficients())
        yield (
            f"chunks by time, {target:g} ms",
            TimedChunks(model, target / 1e3, window=WINDOW, grain=BLOCK),
            32_768,
        )


def trace_lines(
    records: list[TraceRecord], options: argparse.Namespace
) -> Iterator[dict[str, Any]]:
    """One line a policy, and lines about the models that learned."""
    shown = f"{options.targets[len(options.targets) // 2]:g} ms" if options.targets else None
    for name, policy, budget in policies(options.targets):
        run, seconds = play(records, policy, budget, options)
        yield {
            **figures(name, run),
            "requests": len(records),
            "time_scale": options.time_scale,
            "trace": options.trace.name if options.trace else "generated",
            "simulated_in_s": round(seconds, 1),
        }
        if isinstance(policy, TimedChunks) and name.endswith(f" {shown}"):
            report = policy.model.report  # type: ignore[attr-defined]
            for bucket in report.buckets:
                yield {
                    "case": f"error of the learned model, prefix {bucket.bucket}",
                    "value": round(100 * bucket.mean_error, 2),
                    "unit": "%",
                    "samples": bucket.num_samples,
                    "bias_percent": round(100 * bucket.mean_bias, 2),
                    "noise_percent": 2,
                }


def long_lines(options: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """64 requests decode while four prompts of 512 Ki tokens arrive."""
    decoders = [TraceRecord(0.0, 512, 20_000) for _ in range(64)]
    prompts = [TraceRecord(30.0, 524_288, 1) for _ in range(4)]
    for name, policy, budget in policies(options.targets):
        run, _ = play([*decoders, *prompts], policy, budget, options, until_s=900.0)
        waits = [r.time_to_first_token_s for r in run.requests if r.prompt_tokens > 512]
        line = figures(f"64 decoders and four prompts of 524288 tokens, {name}", run)
        in_prompts = [gap for gap in run.inter_token_s.tolist() if gap > 0.03]
        yield {
            "case": line["case"],
            "value": round(1e3 * float(np.percentile(in_prompts, 99)), 1),
            "unit": "ms between tokens while prompts run, p99",
            "longest_step_ms": line["longest_step_ms"],
            "last_prompt_done_s": round(max(w for w in waits if w is not None), 1),
            "done": sum(w is not None for w in waits),
        }


def figures(name: str, run: Simulation) -> dict[str, Any]:
    """The figures of a run."""
    found = run.summary()
    return {
        "case": name,
        "value": round(1e3 * found["itl_p99_s"], 1),
        "unit": "ms between tokens, p99",
        "itl_p50_ms": round(1e3 * found["itl_p50_s"], 1),
        "longest_step_ms": round(1e3 * found["longest_step_s"], 1),
        "ttft_p50_s": round(found["ttft_p50_s"], 3),
        "ttft_p99_s": round(found["ttft_p99_s"], 2),
        "prompt_tokens_per_s": round(found["prompt_tokens_per_s"]),
        "output_tokens_per_s": round(found["output_tokens_per_s"]),
        "busy_share": round(found["busy_share"], 3),
        "hit_rate": round(found["hit_rate"], 3),
        "preemptions": found["preemptions"],
        "finished": found["finished"],
        "steps": found["steps"],
    }


def fit_lines() -> Iterator[dict[str, Any]]:
    """How well a fit recovers known coefficients, and what ignoring prefixes does to chunks."""
    truth = StepTimeModel(SYNTHETIC)
    names = ("step_s", "prefix_token_s", "token_s", "pair_s")
    worst, seconds = [], []
    for seed in range(20):
        draw = random.Random(seed)
        samples = []
        for _ in range(400):
            prefix = draw.choice((0, round(2 ** draw.uniform(10, 20)), draw.randrange(2**20)))
            tokens = draw.choice((round(2 ** draw.uniform(6, 15)), draw.randrange(1, 2**15)))
            work = StepWork.of([(prefix, tokens)])
            samples.append(StepSample(work, truth.seconds(work) * draw.gauss(1.0, 0.02)))
        samples[0] = dataclasses.replace(samples[0], seconds=7.234)  # a step without warm-up
        begin = time.process_time()
        found = StepTimeModel.fit(samples).coefficients
        seconds.append(time.process_time() - begin)
        worst.append(max(abs(getattr(found, n) / getattr(SYNTHETIC, n) - 1) for n in names))
    yield {
        "case": "worst error of four fitted coefficients, 400 samples, 2 % noise, one wild sample",
        "value": round(100 * statistics.median(worst), 2),
        "unit": "%",
        "seeds": 20,
        "largest_percent": round(100 * max(worst), 2),
        "fit_ms": round(1e3 * statistics.median(seconds), 1),
    }
    target = truth.predict([(0, 32_768)])
    blind = StepTimeModel(dataclasses.replace(SYNTHETIC, prefix_token_s=0.0))
    for prefix in (0, 65_536, 262_144, 1_048_576):
        chunk = truth.largest(prefix, target, 32_768)
        wrong = blind.largest(prefix, target, 32_768)
        yield {
            "case": f"chunk behind {prefix} tokens in the time of a cold one of 32768",
            "value": chunk,
            "unit": "tokens",
            "without_prefix_term": wrong,
            "takes_ms": round(1e3 * truth.predict([(prefix, wrong)]), 1),
            "target_ms": round(1e3 * target, 1),
        }
    model = StepTimeModel(HARDWARE)
    work = StepWork(decode_rows=60, decode_context=600_000)
    repeats = 20_000
    begin = time.process_time()
    for prefix in range(repeats):
        model.largest_beside(work, prefix, 0.2, 32_768)
    yield {
        "case": "largest chunk in a time",
        "value": round(1e6 * (time.process_time() - begin) / repeats, 2),
        "unit": "us",
    }


def main() -> None:
    """Simulates and prints."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--trace", type=Path, help="a Mooncake trace; default: a generated one")
    parser.add_argument("--limit", type=int, help="most requests")
    parser.add_argument("--time-scale", type=float, default=1.5, help="above 1 thins the traffic")
    parser.add_argument("--targets", type=float, nargs="*", default=[50, 100, 200, 400])
    parser.add_argument("--seqs", type=int, default=256)
    parser.add_argument("--blocks", type=int, default=350_000, help="40 GB of 890 bytes a token")
    options = parser.parse_args()
    if options.trace:
        records = load_mooncake_jsonl(options.trace, limit=options.limit)
    else:
        records = generate_chat_trace(options.limit or 2_000, mean_input_tokens=8_000)
    git = subprocess.run(
        ["git", "rev-parse", "--short", "HEAD"],
        cwd=Path(__file__).parent,
        capture_output=True,
        text=True,
    )
    machine = {
        "device": "virtual: an estimate of one H200-class engine, not a measurement",
        "versions": {"python": platform.python_version(), "numpy": np.__version__},
        "commit": git.stdout.strip(),
        "date": datetime.date.today().isoformat(),
    }
    given = {name: value for name, value in dataclasses.asdict(HARDWARE).items() if value}
    head = {"case": "predicted hardware", "value": HARDWARE.token_s * 1e6, "unit": "us/token"}
    for line in ({**head, "coefficients": given}, *fit_lines()):
        print(json.dumps({"part": "simulate", **line, **machine}), flush=True)
    for line in long_lines(options):
        print(json.dumps({"part": "simulate", **line, **machine}), flush=True)
    for line in trace_lines(records, options):
        print(json.dumps({"part": "simulate", **line, **machine}), flush=True)


if __name__ == "__main__":
    main()
