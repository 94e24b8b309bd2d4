"""Plays images through vision encoders and prints one JSON line a rule and a kind of traffic.

Eight encoders, 50 microseconds a patch and 2 ms a batch: arithmetic, not hardware. Images arrive at random, at 70 % of what
the encoders could do if none came twice. `value` is the time until the embedding is there, 99th percentile.

Run: python benchmarks/encoder_balancer.py
"""

from __future__ import annotations

import argparse
import datetime
import heapq
import json
import platform
import subprocess
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

from deepinfer.balancers import EncoderBalancer, EncoderCost, EncoderFleet, ImageTask

COST = EncoderCost(patch_s=5e-5, batch_s=2e-3)
WORKERS = 8
Choose = Callable[[ImageTask, EncoderFleet, float, int], int | None]


def patches_of(rng: np.random.Generator, number: int) -> np.ndarray:
    """Photos of about a thousand patches, and one screen in ten with eight times as many."""
    sizes = rng.lognormal(np.log(900), 0.5, number)
    return np.clip(np.where(rng.random(number) < 0.1, 8 * sizes, sizes), 64, 16_384).astype(int)


def traffic(kind: str, number: int, seed: int) -> list[tuple[float, ImageTask]]:
    """Arrivals: every image once, images that come again, or one image for a fifth of the requests."""
    rng = np.random.default_rng(seed)
    names = np.arange(number)
    if kind == "images come again":
        for index in range(1, number):
            if rng.random() < 0.5:  # the next turn of a recent conversation
                names[index] = names[rng.integers(max(0, index - 200), index)]
    elif kind == "one popular image":
        names[rng.random(number) < 0.2] = 0
    sizes = patches_of(rng, number)[names]
    gap_s = sizes.mean() * COST.patch_s / WORKERS / 0.7
    times = np.cumsum(rng.exponential(gap_s, number))
    return [
        (float(t), ImageTask(f"r{i}", f"image{n}", int(p), max(1, int(p) // 4)))
        for i, (t, n, p) in enumerate(zip(times, names, sizes, strict=True))
    ]


def rules() -> dict[str, Choose]:
    """What is compared."""
    balancer = EncoderBalancer(COST)

    def fewest(image: ImageTask, fleet: EncoderFleet, now_s: float, number: int) -> int:
        # A running batch counts as one more image, so that an idle encoder comes first.
        return min(range(WORKERS), key=lambda w: fleet.waiting(w)[0] + (fleet.busy_s(w, now_s) > 0))

    def owner(image: ImageTask, fleet: EncoderFleet, now_s: float, number: int) -> int:
        return zlib.crc32(str(image.media_hash).encode()) % WORKERS

    return {
        "round robin": lambda image, fleet, now_s, number: number % WORKERS,
        "fewest images": fewest,
        "by hash": owner,
        "earliest embedding": lambda image, fleet, now_s, number: (
            balancer.decide(image, fleet, now_s).target
        ),
    }


def play(choose: Choose, arrivals: list[tuple[float, ImageTask]]) -> dict[str, float]:
    """Waits of all requests, and how many patches were encoded."""
    fleet = EncoderFleet([str(n) for n in range(WORKERS)], capacity_tokens=1 << 18, lease_s=1e6)
    came = {image.rid: at for at, image in arrivals}
    waits: list[float] = []
    ends: list[tuple[float, int]] = []
    work = np.zeros(WORKERS)

    def begin(worker: int, now_s: float) -> None:
        if fleet.begin_batch(worker, now_s, COST):
            seconds = fleet.busy_s(worker, now_s)
            work[worker] += seconds
            heapq.heappush(ends, (now_s + seconds, worker))

    def finish(until_s: float) -> None:
        while ends and ends[0][0] <= until_s:
            now_s, worker = heapq.heappop(ends)
            for rid, media in fleet.end_batch(worker):
                if fleet.consume(worker, rid, media):
                    waits.append(now_s - came[rid])
            begin(worker, now_s)

    for number, (now_s, image) in enumerate(arrivals):
        finish(now_s)
        worker = choose(image, fleet, now_s, number)
        assert worker is not None
        fleet.send(worker, image, now_s)
        if fleet.find(worker, image.media_hash) == "ready":
            fleet.consume(worker, image.rid, image.media_hash)
            waits.append(0.0)
        begin(worker, now_s)
    finish(float("inf"))
    assert len(waits) == len(arrivals)
    return {
        "p99_ms": 1e3 * float(np.percentile(waits, 99)),
        "mean_ms": 1e3 * float(np.mean(waits)),
        "encoder_s": float(work.sum()),
        "busy_max_over_mean": float(work.max() / work.mean()),
    }


def measure(number: int, seeds: int) -> Iterator[dict[str, Any]]:
    """Every rule on every kind of traffic."""
    for kind in ("every image once", "images come again", "one popular image"):
        for name, choose in rules().items():
            found = [play(choose, traffic(kind, number, seed)) for seed in range(seeds)]
            mean = {key: float(np.mean([run[key] for run in found])) for key in found[0]}
            yield {
                "case": f"{kind}, {name}",
                "value": round(mean["p99_ms"], 1),
                "unit": "ms to the embedding, p99",
                "mean_ms": round(mean["mean_ms"], 1),
                "encoder_s": round(mean["encoder_s"], 1),
                "busy_max_over_mean": round(mean["busy_max_over_mean"], 3),
                "images": number,
                "seeds": seeds,
            }


def main() -> None:
    """Measures and prints."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--images", type=int, default=4_000)
    parser.add_argument("--seeds", type=int, default=3)
    options = parser.parse_args()
    git = subprocess.run(
        ["git", "rev-parse", "--short", "HEAD"],
        cwd=Path(__file__).parent,
        capture_output=True,
        text=True,
    )
    machine = {
        "device": "virtual encoders",
        "versions": {"python": platform.python_version(), "numpy": np.__version__},
        "commit": git.stdout.strip(),
        "date": datetime.date.today().isoformat(),
    }
    for line in measure(options.images, options.seeds):
        print(json.dumps({"part": "encoder_balancer", **line, **machine}), flush=True)


if __name__ == "__main__":
    main()
