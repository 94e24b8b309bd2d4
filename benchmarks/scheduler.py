"""Times the scheduler alone: plan, launch and apply of steps on a CPU, without a model, and prints one JSON line a case.

"decode" is a step in which every running request decodes one token; "drafts" is one in which each verifies three drafts
of which one is accepted; in "mixed" one request in 128 ends every step, and one with a prompt of 2,000 tokens, which is
run in chunks of 512, takes its place. Results are made from columns, as a runner makes them, outside of the time.
"progress" adds what it costs to look at every entry that `apply` returns. Median over the steps, in processor time of one
thread, which other work on the machine disturbs little.
Run: python benchmarks/scheduler.py [--running 64 256 512 1024] [--block 16 64 128 256] [--depth 0 1]
"""

from __future__ import annotations

import argparse
import datetime
import json
import platform
import statistics
import subprocess
import time
from collections import deque
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from deepinfer.cache import BlockCacheManager
from deepinfer.core import Request, RowResults, SamplingParams, StepPlan, StepResult
from deepinfer.scheduling import Scheduler, SchedulerLimits

PROMPT = 100
WARM_UP = 40


def request(number: int, length: int, max_tokens: int) -> Request:
    """A prompt that shares nothing with others."""
    ids = ((np.arange(length) * 7 + number * 104_729) % 100_000).tolist()
    params = SamplingParams(temperature=0, max_tokens=max_tokens)
    return Request(rid=f"r{number}", prompt_token_ids=tuple(ids), params=params)


def result_of(plan: StepPlan, accepted: int) -> StepResult:
    """What a runner returns: some token for each row that samples, one accepted draft where there are drafts."""
    rows = plan.rows
    taken = np.minimum(rows.num_drafts, accepted)
    counts = np.where(rows.num_logits > 0, taken + 1, 0)
    tokens = (np.arange(int(counts.sum())) * 31 + plan.step) % 100_000 + 10
    if not rows.num_drafts.any():
        return StepResult(step=plan.step, rows=RowResults(rows, tokens))
    results = RowResults(rows, tokens, num_token_ids=counts, num_accepted=taken)
    return StepResult(step=plan.step, rows=results)


def numbers() -> Iterator[int]:
    """Request numbers."""
    number = 0
    while True:
        yield number
        number += 1


def run(kind: str, running: int, block: int, depth: int, steps: int) -> dict[str, object]:
    """Times one case."""
    longest = 4096
    limits = SchedulerLimits(
        max_model_len=longest,
        max_num_seqs=running,
        max_num_batched_tokens=32_768,
        prefill_chunk_tokens=512,
        eos_token_ids=(1,),
        draft_length=3 if kind == "drafts" else 0,
        async_depth=depth,
        window=128,
    )
    blocks = running * (-(-longest // block))
    cache = BlockCacheManager(
        num_slots=running, num_blocks=blocks, block_size=block, max_tokens=longest
    )
    scheduler = Scheduler(limits, cache)
    names = numbers()
    for index in range(running):
        number = next(names)
        # Lengths differ, so that borders of blocks do not fall into one step.
        scheduler.add(request(number, PROMPT + index % 256, 3000))
    flying: deque[StepPlan] = deque()
    times: dict[str, list[float]] = {"plan": [], "launch": [], "apply": [], "progress": []}
    clock = time.thread_time
    timed = step = 0
    leaving = 0.0
    while timed < steps:
        if kind == "mixed":
            leaving += running / 128
            for rid in list(scheduler._books.running)[: int(leaving)]:
                scheduler.abort(rid)
                scheduler.add(request(next(names), 2000, 2000))
            leaving -= int(leaving)
        begin = clock()
        plan = scheduler.plan(0.0)
        planned = clock()
        if plan is not None:
            plan = scheduler.launch(plan)
            flying.append(plan)
        launched = clock()
        if len(flying) <= depth and plan is not None:
            continue
        result = result_of(flying.popleft(), accepted=1)
        started = clock()
        progress = scheduler.apply(result)
        applied = clock()
        for _ in progress:
            pass
        looked = clock()
        step += 1
        full = plan is not None and (kind == "mixed" or len(plan.rows) == running)
        if step > WARM_UP and full:
            timed += 1
            for name, value in (
                ("plan", planned - begin),
                ("launch", launched - planned),
                ("apply", applied - started),
                ("progress", looked - applied),
            ):
                times[name].append(value)
        if step > 40 * steps:
            raise SystemExit(f"{kind} with {running} running never gets to full steps")
    scheduler.check()
    micro = {name: statistics.median(values) * 1e6 for name, values in times.items()}
    sums = [
        sum(parts) for parts in zip(times["plan"], times["launch"], times["apply"], strict=True)
    ]
    total = statistics.median(sums) * 1e6
    return {
        "case": kind,
        "running": running,
        "block_size": block,
        "async_depth": depth,
        "us_per_step": round(total, 1),
        "us_per_request": round(total / running, 3),
        "mean_us_per_request": round(statistics.mean(sums) * 1e6 / running, 3),
        **{f"{name}_us": round(value, 1) for name, value in micro.items()},
    }


def main() -> None:
    """Runs every case."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--running", type=int, nargs="*", default=[64, 256, 512, 1024])
    parser.add_argument("--block", type=int, nargs="*", default=[16, 64, 128, 256])
    parser.add_argument("--depth", type=int, nargs="*", default=[0, 1])
    parser.add_argument("--case", nargs="*", default=["decode", "drafts", "mixed"])
    parser.add_argument("--steps", type=int, default=400)
    args = parser.parse_args()
    root = Path(__file__).parents[1]
    commit = subprocess.run(
        ["git", "rev-parse", "--short", "HEAD"],
        cwd=root,
        capture_output=True,
        text=True,
        check=False,
    ).stdout.strip()
    for kind in args.case:
        for depth in args.depth:
            for running in args.running:
                for block in args.block:
                    line = run(kind, running, block, depth, args.steps)
                    line |= {
                        "benchmark": "scheduler",
                        "machine": f"{platform.machine()}, Python {platform.python_version()}",
                        "date": datetime.date.today().isoformat(),
                        "commit": commit,
                    }
                    print(json.dumps(line), flush=True)


if __name__ == "__main__":
    main()
