"""Times of calls: on the device, until the host has launched them, and where either goes."""

from __future__ import annotations

import time
from typing import Any

import torch

__all__ = ["AHEAD_CYCLES", "Clock", "host_functions", "longest_kernels"]

# Cycles of the device in which the host launches a whole step: 40 ms.
AHEAD_CYCLES = 70_000_000


class Clock:
    """Takes times of calls on a device."""

    def __init__(self, device: str) -> None:
        self.device = device

    def time(self, call: Any, record: bool, repeats: int = 10) -> float:
        """Median milliseconds of a call, recorded as a graph if asked for."""
        call()
        if self.device != "cuda":
            began = time.perf_counter()
            call()
            return 1e3 * (time.perf_counter() - began)
        run = self.recorded(call) if record else call
        return self.median(run, repeats)

    def recorded(self, call: Any) -> Any:
        """A call that replays another one."""
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            call()
        return graph.replay

    def median(self, run: Any, repeats: int, ahead: bool = False) -> float:
        """Median milliseconds between two events; `ahead` lets the host launch everything before the first of them."""
        torch.cuda.synchronize()
        found = []
        for _ in range(repeats):
            if ahead:
                torch.cuda._sleep(AHEAD_CYCLES)
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            begin.record()
            run()
            end.record()
            torch.cuda.synchronize()
            found.append(begin.elapsed_time(end))
        return sorted(found)[len(found) // 2]

    def host(self, run: Any, repeats: int) -> tuple[float, float]:
        """Milliseconds until a call has launched everything: median and least, for hosts that others use too."""
        found = []
        for _ in range(repeats):
            torch.cuda.synchronize()
            began = time.perf_counter()
            run()
            found.append(1e3 * (time.perf_counter() - began))
        torch.cuda.synchronize()
        return sorted(found)[len(found) // 2], min(found)


def host_functions(case: str, run: Any) -> str:
    """Where the host spends its time."""
    import cProfile
    import io
    import pstats

    watch = cProfile.Profile()
    for _ in range(5):
        torch.cuda.synchronize()
        watch.enable()
        run()
        watch.disable()
    text = io.StringIO()
    found = pstats.Stats(watch, stream=text)
    found.sort_stats("tottime").print_stats(25)
    found.sort_stats("cumtime").print_stats(30)
    rows = [line for line in text.getvalue().splitlines() if line.strip()]
    return "\n".join([f"-- {case}: the host, five steps", *rows])


def longest_kernels(case: str, call: Any) -> str:
    """The kernels of a call that take longest."""
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CUDA]) as found:
        call()
        torch.cuda.synchronize()
    times: dict[str, list[float]] = {}
    for event in found.events():
        if event.device_time:
            times.setdefault(event.name[:70], []).append(event.device_time)
    each = sorted(times.items(), key=lambda kv: -sum(kv[1]))
    rows = [
        f"-- {case}: {sum(map(sum, times.values())) / 1e3:.3f} ms in {sum(map(len, times.values()))} kernels"
    ]
    rows += [f"   {sum(t):9.1f} us {len(t):4d} x {name}" for name, t in each[:24]]
    return "\n".join(rows)
