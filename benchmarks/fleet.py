"""Plays traffic through simulated fleets and prints one JSON line a measurement.

Routers of prompts beside rules of others, with and without a shared store; how evenly ranks in lockstep fill their
steps; a herd on one hot prefix; contexts in tiers; and how many decisions a second one core makes. Engines are
arithmetic, not hardware: 20,000 prompt tokens a second, attention as dear as all the rest at 65,536 tokens, 10 ms a
step. Routers, indices and caches are the real code.

Run: python benchmarks/fleet.py --trace mooncake_conversation_min00_29.jsonl
Without --trace, a generated trace of the same kind is played.
"""

from __future__ import annotations

import argparse
import dataclasses
import datetime
import json
import platform
import subprocess
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from deepinfer.balancers import Fleet, Router, RouteRequest, WorkerSnapshot
from deepinfer.balancers.prefill import (
    CacheUpdate,
    DynamoCost,
    EarliestCompletion,
    LeastRequests,
    LeastWork,
    LoadAware,
    LongestPrefix,
    PowerOfTwo,
    PrefillCost,
    PrefixIndex,
    RoundRobin,
    SglangCacheAware,
    TierRouter,
)
from deepinfer.balancers.simulator import (
    CacheKind,
    FleetReport,
    FleetSimulator,
    PrefillConfig,
    RankChoice,
)
from deepinfer.balancers.traffic import (
    TraceRecord,
    TrafficClass,
    generate_chat_trace,
    generate_herd,
    generate_traffic,
    load_mooncake_jsonl,
)

COST = PrefillCost.of_rate(20_000, crossover_tokens=65_536, step_s=0.01)
ENGINES = PrefillConfig(num_engines=8, cost=COST, cache_blocks=2_000)
Maker = Callable[[PrefixIndex], Router]

ROUTERS: dict[str, Maker] = {
    "round robin": lambda index: RoundRobin(),
    "least requests": lambda index: LeastRequests(),
    "least work": lambda index: LeastWork(),
    "two choices by work": lambda index: PowerOfTwo(),
    "SGLang's rule": SglangCacheAware,
    "Dynamo's cost": DynamoCost,
    "production stack, load aware": LoadAware,
    "earliest completion, selfish": lambda index: EarliestCompletion(COST, index, own_weight=1.0),
    "earliest completion": lambda index: EarliestCompletion(COST, index),
}


def play(
    records: Sequence[TraceRecord], make: Maker, config: PrefillConfig = ENGINES, **options: Any
) -> FleetReport:
    """One run with a fresh index."""
    index = PrefixIndex()
    return FleetSimulator(config, make(index), index=index, **options).run(records)


def faster(records: Sequence[TraceRecord], speed: float) -> list[TraceRecord]:
    """The same requests in less time."""
    return [dataclasses.replace(record, arrival_s=record.arrival_s / speed) for record in records]


def figures(report: FleetReport) -> dict[str, Any]:
    """What a line says beside its value."""
    return {
        "ttft_mean_s": round(float(np.nanmean(report.ttft_s)), 3),
        "ttft_p50_s": round(report.ttft_percentile(50), 3),
        "ttft_p99_s": round(report.ttft_percentile(99), 2),
        "busy_max_over_mean": round(report.busy_max_over_mean, 3),
        "busy_share": round(report.busy_share, 3),
        "unserved": report.num_unserved,
    }


def routing_lines(records: Sequence[TraceRecord], name: str) -> Iterator[dict[str, Any]]:
    """Eight engines with caches of their own, then with one store."""
    for speed in (1.5, 2.2, 2.6):
        for rule, make in ROUTERS.items():
            report = play(faster(records, speed), make)
            yield {
                "case": f"routing, {name} x{speed:g}, {rule}",
                "value": round(report.block_hit_rate, 3),
                "unit": "blocks found, share",
                **figures(report),
            }
    store = dataclasses.replace(ENGINES, cache=CacheKind.STORE, cache_blocks=10**9)
    for rule in ("round robin", "least work"):
        report = play(faster(records, 2.2), ROUTERS[rule], store)
        yield {
            "case": f"routing, {name} x2.2, shared store, {rule}",
            "value": round(report.block_hit_rate, 3),
            "unit": "blocks found, share",
            **figures(report),
        }
    head = faster(records, 2.2)[: len(records) // 4]
    report = play(head, LongestPrefix)
    yield {
        "case": f"routing, first quarter of {name} x2.2, longest prefix",
        "value": round(report.block_hit_rate, 3),
        "unit": "blocks found, share",
        **figures(report),
    }


def herd_lines() -> Iterator[dict[str, Any]]:
    """Nearly everyone begins with the same 16K tokens."""
    records = generate_herd(4_000, rate_per_s=75.0, hot_share=0.95, seed=6)
    for rule in ("SGLang's rule", "Dynamo's cost", "earliest completion"):
        report = play(records, ROUTERS[rule])
        yield {
            "case": f"herd on one prefix, {rule}",
            "value": round(report.busy_max_over_mean, 3),
            "unit": "busiest engine over the mean",
            "block_hit_rate": round(report.block_hit_rate, 3),
            "ttft_p99_s": round(report.ttft_percentile(99), 2),
        }


def lockstep_lines(records: Sequence[TraceRecord], name: str) -> Iterator[dict[str, Any]]:
    """One engine of some ranks with all prompts waiting: how full the mean rank is beside the fullest."""
    waiting = [dataclasses.replace(record, arrival_s=0.0) for record in records[:3000]]
    policies: list[tuple[str, dict[str, Any]]] = [
        ("8192 tokens a step", {"chunk_tokens": 8_192}),
        ("32768 tokens a step", {"chunk_tokens": 32_768}),
        ("8192 tokens a step, ranks in turn", {"chunk_tokens": 8_192, "ranks": RankChoice.IN_TURN}),
        *((f"{1e3 * t:g} ms a step", {"chunk_s": t}) for t in (0.1, 0.2, 0.4, 0.8)),
        (
            "400 ms a step, least remaining rank on arrival",
            {"chunk_s": 0.4, "ranks": RankChoice.LEAST_SECONDS},
        ),
        ("400 ms a step, ranks in turn", {"chunk_s": 0.4, "ranks": RankChoice.IN_TURN}),
    ]
    for ranks in (2, 4, 8):
        for policy, options in policies:
            config = PrefillConfig(
                num_engines=1, num_ranks=ranks, cost=COST, cache=CacheKind.NONE, **options
            )
            report = play(waiting, ROUTERS["round robin"], config)
            work = float(COST.seconds(0.0 * report.prompt_tokens, 1.0 * report.prompt_tokens).sum())
            yield {
                "case": f"lockstep, {name}, {ranks} ranks, {policy}",
                "value": round(report.prefill_efficiency, 3),
                "unit": "mean rank over the slowest",
                "of_perfect": round(work / ranks / report.end_s, 3),
            }


def tier_lines() -> Iterator[dict[str, Any]]:
    """A mix with contexts beyond 256K on sixteen engines, with tiers and without."""
    classes = (
        TrafficClass(name="chat", share=0.9, new_tokens=1_500, follow_up=0.5),
        TrafficClass(
            name="long", share=0.01, new_tokens=300_000, new_sigma=0.3, max_input_tokens=1_048_576
        ),
    )
    records = generate_traffic(6_000, classes, rate_per_s=12.0, seed=11)
    config = dataclasses.replace(ENGINES, num_engines=16, num_ranks=4, chunk_s=0.4)
    makers: dict[str, Maker] = {
        "without tiers": ROUTERS["earliest completion"],
        "tiers": lambda index: TierRouter(EarliestCompletion(COST, index), 16),
    }
    for name, make in makers.items():
        report = play(records, make, config)
        yield {
            "case": f"chat beside contexts beyond 256K, {name}",
            "value": round(report.ttft_percentile(99, tier=0), 2),
            "unit": "s to the first token below 16K, p99",
            "ttft_p99_of_tiers_s": [round(report.ttft_percentile(99, t), 1) for t in range(4)],
            "busy_share": round(report.busy_share, 3),
            "unserved": report.num_unserved,
        }


def decision_lines(records: Sequence[TraceRecord]) -> Iterator[dict[str, Any]]:
    """Decisions a second of processor time, the index full of the trace."""
    for workers in (8, 64):
        index = PrefixIndex()
        fleet = Fleet(WorkerSnapshot(name=f"w{i}") for i in range(workers))
        router = EarliestCompletion(COST, index)
        requests = [
            RouteRequest(rid=str(i), prompt_tokens=r.input_tokens, block_keys=r.block_ids)
            for i, r in enumerate(records)
        ]
        for number, request in enumerate(requests):
            target = router.decide(request, fleet).target or 0
            fleet.sent(target, now_s=0.0, waiting_s=0.1)
            update = CacheUpdate(
                worker=fleet.names[target],
                epoch=number,
                sequence=0,
                stored=request.block_keys,
            )
            index.apply(
                dataclasses.replace(update, epoch=0, sequence=int(fleet.num_requests[target]) - 1)
            )
        best = 0.0
        for _ in range(7):
            begin = time.process_time()
            for request in requests:
                router.decide(request, fleet)
            best = max(best, len(requests) / (time.process_time() - begin))
        yield {
            "case": f"decisions of earliest completion, {workers} workers",
            "value": round(best),
            "unit": "decisions/s of one core",
            "keys": len(index),
        }


def main() -> None:
    """Prints every line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--trace", type=Path, help="a Mooncake trace")
    parser.add_argument("--out", type=Path, help="append the lines to this file")
    parser.add_argument(
        "--only", nargs="*", default=[], help="routing, herd, lockstep, tiers, decisions"
    )
    options = parser.parse_args()
    if options.trace:
        records, name = load_mooncake_jsonl(options.trace), "chat trace"
    else:
        records, name = generate_chat_trace(5_000, rate_per_s=3.2, seed=3), "generated chat"
    held_out = generate_chat_trace(6_000, rate_per_s=4.0, seed=3)
    parts: dict[str, Callable[[], Iterator[dict[str, Any]]]] = {
        "routing": lambda: routing_lines(records, name),
        "held-out": lambda: routing_lines(held_out, "held-out generated chat"),
        "herd": herd_lines,
        "lockstep": lambda: lockstep_lines(records, name),
        "tiers": tier_lines,
        "decisions": lambda: decision_lines(records),
    }
    commit = subprocess.run(
        ["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=False
    )
    common = {
        "device": "virtual fleet; decisions: one CPU core",
        "versions": {"python": platform.python_version(), "numpy": np.__version__},
        "commit": commit.stdout.strip(),
        "date": datetime.date.today().isoformat(),
    }
    for part, lines in parts.items():
        if options.only and part not in options.only:
            continue
        for line in lines():
            text = json.dumps({"part": "fleet", **line, **common})
            print(text, flush=True)
            if options.out:
                with options.out.open("a", encoding="utf-8") as file:
                    file.write(text + "\n")


if __name__ == "__main__":
    main()
