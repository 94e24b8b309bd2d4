"""Measures how evenly decode ranks in lockstep are filled; prints one JSON line a rule, a fleet and a kind of loop.

A step of a rank takes 8 ms, 0.1 ms a request and 6 ns a token held: arithmetic, not hardware. `value` is the mean step of
the ranks over the longest one, from which on they would not wait for each other.

Run: python benchmarks/decode_balancer.py --trace mooncake_conversation_min00_29.jsonl
Without --trace, lengths with its quantiles are drawn.
"""

from __future__ import annotations

import argparse
import datetime
import json
import platform
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from deepinfer.balancers import (
    Decision,
    DecodeBalancer,
    DecodeCost,
    DecodeTrial,
    Fleet,
    Router,
    RouteRequest,
    WorkerSnapshot,
    run_decode_trial,
)
from deepinfer.balancers.prefill import RandomChoice, RoundRobin
from deepinfer.balancers.traffic import load_mooncake_jsonl

COST = DecodeCost(8e-3, 1e-4, 6e-9)


class Least:
    """The rank with the least of one number."""

    def __init__(self, column: str) -> None:
        self.column = column

    def decide(self, request: RouteRequest, fleet: Fleet) -> Decision:
        """Chooses a rank."""
        return Decision(int(getattr(fleet, self.column).argmin()), f"least_{self.column}")


def rules() -> dict[str, Router]:
    """What is compared."""
    return {
        "random": RandomChoice(seed=0),
        "round robin": RoundRobin(),
        "fewest requests": Least("num_requests"),
        "fewest tokens held": Least("kv_tokens"),
        "published two-dimensional": DecodeBalancer("published", cost=COST),
        "shortest step": DecodeBalancer("cost", cost=COST),
        "normalised two-dimensional": DecodeBalancer(cost=COST),
    }


def lengths(trace: Path | None) -> tuple[list[int], list[int]]:
    """Prompts and answers."""
    if trace:
        records = load_mooncake_jsonl(trace)
        return [r.input_tokens for r in records], [max(1, r.output_tokens) for r in records]
    rng = np.random.default_rng(1)
    prompts = np.clip(rng.lognormal(np.log(7_000), 1.1, 4_000), 100, 123_000).astype(int)
    answers = np.clip(rng.lognormal(np.log(290), 0.6, 4_000), 1, 2_000).astype(int)
    return prompts.tolist(), answers.tolist()


def measure(prompts: list[int], answers: list[int], seeds: int) -> Iterator[dict[str, Any]]:
    """Every rule on every fleet."""
    for ranks in (32, 64):
        for is_open in (False, True):
            for name in rules():
                reports = [
                    run_decode_trial(
                        rules()[name],
                        DecodeTrial(
                            ranks=ranks,
                            is_open=is_open,
                            prompt_tokens=prompts,
                            output_tokens=answers,
                            cost=COST,
                            seed=seed,
                        ),
                    )
                    for seed in range(seeds)
                ]
                yield {
                    "case": f"{'open' if is_open else 'closed'} loop, {ranks} ranks, {name}",
                    "value": round(float(np.mean([r.efficiency for r in reports])), 4),
                    "unit": "mean step / longest step",
                    "requests_max_over_mean": round(
                        float(np.mean([r.requests_spread for r in reports])), 4
                    ),
                    "tokens_max_over_mean": round(
                        float(np.mean([r.kv_spread for r in reports])), 4
                    ),
                    "worst_seed": round(min(r.efficiency for r in reports), 4),
                    "requests_per_rank": 60,
                    "seeds": seeds,
                }


def speed() -> dict[str, Any]:
    """Decisions a second."""
    fleet = Fleet(
        WorkerSnapshot(name=str(n), num_running=50 + n % 7, cached_tokens=700_000 + 1_000 * n)
        for n in range(64)
    )
    balancer = DecodeBalancer(cost=COST)
    requests = [RouteRequest(rid=str(n), prompt_tokens=100 + 37 * n) for n in range(5_000)]
    begin = time.process_time()
    for request in requests:
        balancer.decide(request, fleet)
    return {
        "case": "decisions a second, 64 ranks, normalised",
        "value": round(len(requests) / (time.process_time() - begin)),
        "unit": "1/s",
    }


def main() -> None:
    """Measures and prints."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--trace", type=Path, help="a Mooncake trace; default: drawn lengths")
    parser.add_argument("--seeds", type=int, default=3)
    options = parser.parse_args()
    git = subprocess.run(
        ["git", "rev-parse", "--short", "HEAD"],
        cwd=Path(__file__).parent,
        capture_output=True,
        text=True,
    )
    machine = {
        "lengths": options.trace.stem if options.trace else "drawn",
        "device": "virtual ranks; decisions: one CPU core",
        "versions": {"python": platform.python_version(), "numpy": np.__version__},
        "commit": git.stdout.strip(),
        "date": datetime.date.today().isoformat(),
    }
    prompts, answers = lengths(options.trace)
    for line in (*measure(prompts, answers, options.seeds), speed()):
        print(json.dumps({"part": "decode_balancer", **line, **machine}), flush=True)


if __name__ == "__main__":
    main()
