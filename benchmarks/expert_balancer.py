"""Measures how evenly experts are placed, how fast, and with how many moves; prints one JSON line a measurement.

Loads are Zipf laws in random order with 14 % noise; loads that drift (`DriftingLoad`); and counts recorded from the
router of nano (`--recorded tests/data/expert_loads/nano.npz`). Imbalance is the slowest GPU over the mean. Times are of
one core, and ratios of times are taken side by side in one process: `plain` is the published algorithm in plain Python,
written here.

Run: OMP_NUM_THREADS=1 python benchmarks/expert_balancer.py
"""

from __future__ import annotations

import argparse
import datetime
import json
import platform
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

from deepinfer.balancers.expert_parallel import (
    DriftingLoad,
    ExpertPlanner,
    Placement,
    TokenSplitter,
    count_moves,
    place_experts,
    planned_imbalance,
    realised_imbalance,
    rebalance_experts,
    relabel,
    slot_imbalance,
    stage_moves,
)

EXPERTS = 384
# GPUs and further slots a GPU, as published: 4 for prefill, 1 for decode.
DEPLOYMENTS = ((2, 4), (4, 4), (8, 4), (32, 1), (64, 1), (128, 1))
RECORDED = Path(__file__).resolve().parent.parent / "tests" / "data" / "expert_loads" / "nano.npz"


def zipf(exponent: float, layers: int, seed: int) -> np.ndarray:
    """Loads of experts in random order, shape [layers, experts]."""
    rng = np.random.default_rng(seed)
    ranked = np.arange(1, EXPERTS + 1) ** -exponent
    return rng.permuted(ranked * rng.gamma(50.0, 1 / 50.0, (layers, EXPERTS)), axis=1)


def plain_greedy(weight: list[list[float]], slots: int, gpus: int) -> list[list[int]]:
    """The published greedy algorithm for one group, in plain Python."""
    result = []
    for loads in weight:
        counts = [1] * len(loads)
        copies = list(range(len(loads)))
        for _ in range(slots - len(loads)):
            best = max(range(len(loads)), key=lambda expert: loads[expert] / counts[expert])
            counts[best] += 1
            copies.append(best)
        copies.sort(key=lambda expert: -loads[expert] / counts[expert])
        room = slots // gpus
        packs: list[list[int]] = [[] for _ in range(gpus)]
        total = [0.0] * gpus
        for expert in copies:
            free = [gpu for gpu in range(gpus) if len(packs[gpu]) < room]
            gpu = min(free, key=total.__getitem__)
            packs[gpu].append(expert)
            total[gpu] += loads[expert] / counts[expert]
        result.append([expert for pack in packs for expert in pack])
    return result


def seconds_of(run: Callable[[], object], repeats: int) -> float:
    """Processor time, the least of several."""
    taken = []
    for _ in range(repeats):
        begin = time.process_time()
        run()
        taken.append(time.process_time() - begin)
    return min(taken)


def speed() -> Iterator[dict[str, Any]]:
    """Planning 40 layers for 64 GPUs."""
    for exponent in (0.8, 1.2, 1.6):
        weight = zipf(exponent, 40, 1)
        plain = seconds_of(lambda weight=weight: plain_greedy(weight.tolist(), 448, 64), 1)
        compatible = seconds_of(
            lambda weight=weight: rebalance_experts(weight, 448, 1, 1, 64, mode="compatible"), 9
        )
        best = seconds_of(lambda weight=weight: rebalance_experts(weight, 448, 1, 1, 64), 9)
        yield {
            "case": f"plan of 40 layers, 384 experts, 64 GPUs, Zipf {exponent}",
            "value": round(1e3 * best, 1),
            "unit": "ms",
            "compatible_ms": round(1e3 * compatible, 1),
            "plain_ms": round(1e3 * plain, 1),
            "plain_over_best": round(plain / best, 1),
        }


def quality() -> Iterator[dict[str, Any]]:
    """Planned imbalance of both modes."""
    for exponent in (0.0, 0.4, 0.8, 1.0, 1.2, 1.4, 1.6):
        for gpus, further in DEPLOYMENTS:
            weight = zipf(exponent, 12, 2)
            slots = EXPERTS + gpus * further
            best = rebalance_experts(weight, slots, 1, 1, gpus)[0]
            published = rebalance_experts(weight, slots, 1, 1, gpus, mode="compatible")[0]
            found = planned_imbalance(weight, best, gpus)
            yield {
                "case": f"planned imbalance, EP{gpus} with {further} further slots a GPU, Zipf {exponent}",
                "value": round(float(found.mean()), 5),
                "unit": "slowest / mean",
                "worst_layer": round(float(found.max()), 5),
                "compatible": round(float(planned_imbalance(weight, published, gpus).mean()), 5),
                "in_order": round(
                    float(Placement.in_order(12, EXPERTS, gpus, further).imbalance(weight).mean()),
                    3,
                ),
            }


def drift() -> Iterator[dict[str, Any]]:
    """A plan from 100 steps, and the 60 steps after it."""
    for gpus, further, assignments in (
        (2, 4, 2 * 8_192 * 6),
        (4, 4, 4 * 8_192 * 6),
        (64, 1, 64 * 1_440),
        (128, 1, 128 * 1_440),
    ):
        load = DriftingLoad(6, EXPERTS, assignments, walk=0.005, burst=6_000, seed=3)
        window = np.sum(list(load.steps(100)), axis=0)
        after = np.stack(list(load.steps(60)))
        slots = EXPERTS + gpus * further
        plain = Placement(place_experts(window, slots, gpus), EXPERTS, gpus)
        spread = Placement(place_experts(window, slots, gpus, for_splitter=True), EXPERTS, gpus)
        split = {}
        for name, placement in (("plain", plain), ("spread", spread)):
            splitter = TokenSplitter(placement)
            split[name] = np.mean(
                [slot_imbalance(splitter.split(counts), gpus) for counts in after]
            )
        splitter = TokenSplitter(spread)
        yield {
            "case": f"realised imbalance under drift, EP{gpus}, split by step",
            "value": round(float(split["spread"]), 4),
            "unit": "slowest / mean",
            "planned": round(float(spread.imbalance(window).mean()), 4),
            "equal_shares": round(float(realised_imbalance(after, plain.phy2log, gpus).mean()), 4),
            "split_over_other_plan": round(float(split["plain"]), 4),
            "split_us_per_layer": round(
                1e6 * seconds_of(lambda s=splitter, c=after[0]: s.split(c), 5) / 6
            ),
        }


def moves() -> Iterator[dict[str, Any]]:
    """Plans one after the other while the load drifts."""
    for gpus, further, assignments in (
        (4, 4, 4 * 8_192 * 6),
        (64, 1, 64 * 1_440),
        (128, 1, 128 * 1_440),
    ):
        load = DriftingLoad(6, EXPERTS, assignments, walk=0.01, burst=6_000, seed=4)
        planner = ExpertPlanner(gpus, further, window=100, interval=100)
        placement, found = None, []
        for _ in range(6):
            for counts in load.steps(100):
                planner.observe(counts)
            plan = planner.plan(placement)
            if placement is not None:
                fresh = Placement(
                    place_experts(planner.weight(), placement.num_slots, gpus), EXPERTS, gpus
                )
                stages = stage_moves(placement, plan.placement, moves_per_stage=8)
                found.append(
                    (
                        plan.num_moves,
                        count_moves(placement, fresh).sum(),
                        count_moves(placement, relabel(placement, fresh)).sum(),
                        plan.before.mean(),
                        plan.after.mean(),
                        fresh.imbalance(planner.weight()).mean(),
                        len(stages),
                    )
                )
            placement = plan.placement
        mean = np.mean(found, axis=0)
        yield {
            "case": f"moves of a plan on drifting load, EP{gpus}",
            "value": round(float(mean[0] / mean[1]), 3),
            "unit": "of a plan from scratch",
            "of_a_renumbered_plan": round(float(mean[0] / mean[2]), 3),
            "moves_per_layer": round(float(mean[0] / 6), 1),
            "before": round(float(mean[3]), 4),
            "after": round(float(mean[4]), 4),
            "from_scratch": round(float(mean[5]), 4),
            "stages_of_8": round(float(mean[6]), 1),
        }


def prefill_steps(chunks: np.ndarray, ranks: int) -> np.ndarray:
    """Steps in which each rank runs 512 tokens of a sequence of its own, shape [steps, layers, experts]."""
    return chunks.reshape(-1, ranks, *chunks.shape[1:]).sum(1).reshape(-1, *chunks.shape[2:])


def recorded(path: Path) -> Iterator[dict[str, Any]]:
    """Counts of nano's router: plans from the first half of the steps, the second half after them."""
    counts = np.load(path)
    chunks = counts["prefill"].astype(np.int64)  # [sequences, chunks, layers, experts]
    cases = [
        ("prefill, EP4/DP4", prefill_steps(chunks, 4), 4, 1.074),
        ("prefill, EP2/DP2", prefill_steps(chunks, 2), 2, 1.045),
        ("decode, EP8", counts["decode"].astype(np.int64), 8, 1.090),
    ]
    for name, steps, gpus, published in cases:
        half = len(steps) // 2
        window, after = steps[:half].sum(0), steps[half:]
        experts = window.shape[1]
        line: dict[str, Any] = {}
        for further in (0, 1, 2):
            slots = (-(-experts // gpus) + further) * gpus
            phy2log = place_experts(window, slots, gpus, for_splitter=True)
            placement = Placement(phy2log, experts, gpus)
            splitter = TokenSplitter(placement)
            line[f"split_{further}"] = round(
                float(np.mean([slot_imbalance(splitter.split(c), gpus) for c in after])), 4
            )
            line[f"equal_{further}"] = round(
                float(realised_imbalance(after, phy2log, gpus).mean()), 4
            )
        in_order = Placement.in_order(len(window), experts, gpus).phy2log
        yield {
            "case": f"realised imbalance, recorded from nano, {name}",
            "value": line["split_1"],
            "unit": "slowest / mean",
            "without_balancing": round(float(realised_imbalance(after, in_order, gpus).mean()), 4),
            **line,
            "published_for_the_large_model": published,
            "steps": len(after),
            "assignments_per_gpu": round(float(after.sum((1, 2)).mean() / len(window) / gpus)),
        }


def main() -> None:
    """Measures and prints."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--recorded", type=Path, default=RECORDED)
    options = parser.parse_args()
    git = subprocess.run(
        ["git", "rev-parse", "--short", "HEAD"],
        cwd=Path(__file__).parent,
        capture_output=True,
        text=True,
    )
    machine = {
        "device": "one CPU core",
        "versions": {"python": platform.python_version(), "numpy": np.__version__},
        "commit": git.stdout.strip(),
        "date": datetime.date.today().isoformat(),
    }
    parts = [speed(), quality(), drift(), moves()]
    if options.recorded.is_file():
        parts.append(recorded(options.recorded))
    for lines in parts:
        for line in lines:
            print(json.dumps({"part": "expert_balancer", **line, **machine}), flush=True)


if __name__ == "__main__":
    main()
