"""Products of many FP8 tokens in turns: `python benchmarks/gemm_rounds.py --out FILE` on a CUDA GPU.

A card at its power limit gives each kernel the clock that its energy leaves, and grows warmer meanwhile. So kernels of one
shape run in turns, each without a pause for some milliseconds, and the clock and the power are read beside the time.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent / "kernels"))

import gemm
import torch

Run = Callable[[], object]
DENSE: list[tuple[int, ...]] = [(2, 256, 4, 16, 1, 0, 2), (2, 256, 4, 16)]
GROUPS: list[tuple[int, ...]] = [(2, 256, 4, 2, 1, 0, 2), (2, 256, 4, 2)]
# The kind of the product, its shape, whose first number is that of groups if there are four, and what is compared
SHAPES: list[tuple[str, tuple[int, ...], list[tuple[int, ...]]]] = [
    ("fp8", (4096, 4096, 7168), DENSE),
    ("fp8", (4096, 5120, 8192), DENSE),
    ("fp8", (8192, 8192, 8192), DENSE),
    ("fp8", (48, 256, 4608, 5120), GROUPS),
    ("fp8", (8, 2048, 4096, 7168), GROUPS),
    ("fp4", (48, 256, 4608, 5120), [(2, 1, 6), (0, 7)]),
    ("fp4", (4096, 4096, 7168), [(2, 1, 6)]),
]


class Meter:
    """Clock and power of the card, read all the time by a process of its own."""

    def __init__(self) -> None:
        self.seen: list[tuple[float, float, float]] = []

    @contextlib.contextmanager
    def running(self) -> Iterator[None]:
        """Reads while the body runs; without the tool, nothing is read."""
        query = "--query-gpu=clocks.sm,power.draw.instant"
        try:
            process = subprocess.Popen(
                ["nvidia-smi", query, "--format=csv,noheader,nounits", "-lms", "10"],
                stdout=subprocess.PIPE,
                text=True,
            )
        except OSError:
            yield
            return
        thread = threading.Thread(target=self._read, args=(process,), daemon=True)
        thread.start()
        try:
            yield
        finally:
            process.terminate()
            thread.join(2)

    def _read(self, process: subprocess.Popen[str]) -> None:
        for text in process.stdout or ():
            with contextlib.suppress(ValueError):
                clock, power = (float(part) for part in text.split(","))
                self.seen.append((time.time(), clock, power))

    def between(self, begin: float, end: float) -> tuple[float, float]:
        """Mean clock in MHz and power in W; NaN where nothing was read."""
        found = [s for s in self.seen if begin <= s[0] <= end]
        if not found:
            return float("nan"), float("nan")
        return sum(s[1] for s in found) / len(found), sum(s[2] for s in found) / len(found)


def contenders(
    kind: str, shape: tuple[int, ...], variants: list[tuple[int, ...]]
) -> tuple[dict[str, Run], float]:
    """Calls by name, and the operations of one; a shape of four begins with the groups."""
    found: dict[str, Run] = {}
    build = gemm.dense if len(shape) == 3 else gemm.contiguous
    for sizes in variants:
        built = build(kind, *shape, sizes, False)
        found["x".join(map(str, sizes))] = built.run
    try:
        peer = built.peers["deepgemm"]()
        peer()
        found["deepgemm"] = peer
    except Exception as error:
        print("no deepgemm:", f"{type(error).__name__}: {str(error)[:200]}", flush=True)
    return found, built.flops


def recorded(run: Run, calls: int) -> Run:
    """Some calls as one graph."""
    run()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(calls):
            run()
    replay: Run = graph.replay
    return replay


def turn(replay: Run, calls: int, seconds: float) -> tuple[float, float, float]:
    """Milliseconds of a call without pauses, and when the second half began and ended."""
    first, last = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    end = time.time() + seconds
    middle = time.time() + seconds / 2
    count = 0
    first.record()
    while time.time() < end:
        replay()
        count += calls
        if count % (4 * calls) == 0:
            torch.cuda.synchronize()
    last.record()
    torch.cuda.synchronize()
    return first.elapsed_time(last) / count, middle, time.time()


def main() -> int:
    """Prints and writes one line for each kernel of each shape."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", default="gemm_rounds.jsonl")
    parser.add_argument("--rounds", type=int, default=6)
    parser.add_argument("--seconds", type=float, default=0.06, help="of a turn")
    arguments = parser.parse_args()
    meter = Meter()
    with Path(arguments.out).open("w") as file, meter.running():
        for kind, shape, variants in SHAPES:
            runs, flops = contenders(kind, shape, variants)
            replays = {name: recorded(run, 4) for name, run in runs.items()}
            seen: dict[str, list[tuple[float, float, float]]] = {name: [] for name in replays}
            for _ in range(arguments.rounds):
                for name, replay in replays.items():
                    ms, begin, end = turn(replay, 4, arguments.seconds)
                    seen[name].append((ms, *meter.between(begin, end)))
            for name, rows in seen.items():
                later = sorted(row[0] for row in rows[1:])  # the card is cool in the first round
                best = later[len(later) // 2]
                clock, power = (sum(r[i] for r in rows) / len(rows) for i in (1, 2))
                line = {"kind": kind, "shape": shape, "kernel": name, "ms": round(best, 5), "TFLOP/s": round(flops / best / 1e9, 1),
                        "all_ms": [round(row[0], 4) for row in rows], "MHz": round(clock, 0), "W": round(power, 0)}  # fmt: skip
                print(json.dumps(line), flush=True)
                file.write(json.dumps(line) + "\n")
            del runs, replays
            torch.cuda.empty_cache()
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
