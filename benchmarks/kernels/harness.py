"""What every benchmark of a kernel shares: cases, checks in parallel processes, times over graph replays, lines, a table.

A family's module has `cases()`. Correctness first: each case is built small and checked against a reference in another
process; only what is right is timed, beside its peers, in one process and one run. Times are medians of
`triton.testing.do_bench` over replays of a recorded graph, with the L2 cache flushed before each.
"""

from __future__ import annotations

import json
import subprocess
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

Run = Callable[[], Any]
REPEATS = 20


@dataclass
class Built:
    """A case with its data on the GPU.

    Attributes:
        run: One call of the kernel, with all outputs allocated before.
        check: Compares what `run` wrote with a reference and returns the figures; raises AssertionError when wrong.
        flops: Floating-point operations of a call.
        size_bytes: Bytes that a call must read and write.
        peak: Unit that does the operations: "bf16", "fp8" or "none".
        peers: Builders of one call of each peer on data of the same shape.
        graph: False when the call cannot be recorded.
    """

    run: Run
    check: Callable[[], Mapping[str, float]] = dict
    flops: float = 0.0
    size_bytes: float = 0.0
    peak: str = "none"
    peers: Mapping[str, Callable[[], Run]] = field(default_factory=dict)
    graph: bool = True


@dataclass(frozen=True)
class Case:
    """One operation at one shape with one tuning.

    Attributes:
        op: Public name of the operation.
        shape: The shape in words, as "256 rows x 64 heads, 528 B".
        variant: Tuning or form, as "64x64 w8"; peers are timed once a shape.
        build: Takes `small` and returns the case with fresh random data; small data when it is to be checked.
        check_only: True for contract and repetition cases that are never timed.
        peer: Time of the best public kernel on the same card in another run, in ms, when it cannot run here.
    """

    op: str
    shape: str
    variant: str
    build: Callable[[bool], Built]
    check_only: bool = False
    peer: float | None = None

    @property
    def key(self) -> str:
        """Its name in tables and lines."""
        return f"{self.op} {self.shape} [{self.variant}]"


def calc_diff(x: torch.Tensor, y: torch.Tensor) -> float:
    """`1 - 2 <x, y> / (|x|^2 + |y|^2)` in fp64; 0 when both are zero."""
    x, y = x.double(), y.double()
    size = float((x * x + y * y).sum())
    return 0.0 if size == 0 else float(1 - 2 * (x * y).sum() / size)


def assert_repeats(
    run: Run, *outputs: torch.Tensor, poison: float = 777.0, times: int = REPEATS
) -> None:
    """Runs again, each time over poisoned outputs, and asks for the same bits."""
    run()
    first = [o.clone() for o in outputs]
    wrong = 0
    for _ in range(times):
        for o in outputs:
            o.fill_(poison) if o.is_floating_point() else o.fill_(111)
        run()
        wrong += not all(same_bits(o, f) for o, f in zip(outputs, first, strict=True))
    assert not wrong, f"{wrong} of {times} repeats differ"


def same_bits(x: torch.Tensor, y: torch.Tensor) -> bool:
    """Equality of bytes, so that NaN equals itself and zeros keep their sign."""
    return bool(torch.equal(x.contiguous().view(torch.uint8), y.contiguous().view(torch.uint8)))


def measure(run: Run, graph: bool = True, rep_ms: int = 50) -> float:
    """Milliseconds of a call: the median, with the L2 cache flushed before each."""
    import triton

    run()
    torch.cuda.synchronize()
    call = run
    if graph:
        recorded = torch.cuda.CUDAGraph()
        with torch.cuda.graph(recorded):
            run()
        call = recorded.replay
    return float(triton.testing.do_bench(call, warmup=8, rep=rep_ms, return_mode="median"))


@dataclass(frozen=True)
class Limits:
    """What the card reaches in this run.

    Attributes:
        copy_tb_s: Bytes read and written by a large copy, in TB/s.
        bf16_tflop_s: A large bf16 product by torch.
        fp8_tflop_s: A large FP8 product by torch, one scale a tensor.
    """

    copy_tb_s: float
    bf16_tflop_s: float
    fp8_tflop_s: float

    def floor_ms(self, built: Built) -> tuple[float, str]:
        """The least time of a case, and which limit gives it."""
        memory = built.size_bytes / self.copy_tb_s / 1e9
        rate = {"bf16": self.bf16_tflop_s, "fp8": self.fp8_tflop_s}.get(built.peak)
        compute = built.flops / rate / 1e9 if rate else 0.0
        return (memory, "memory") if memory >= compute else (compute, built.peak)


def measure_limits() -> Limits:
    """Copy bandwidth and matrix rates on random data, now."""
    x = torch.empty(1 << 30, device="cuda", dtype=torch.float32).normal_()
    y = torch.empty_like(x)
    copy = measure(lambda: y.copy_(x), graph=False)  # recorded, it is a copy node, which is slower
    x = y = torch.empty(0, device="cuda")
    n = 8192
    a = torch.randn(n, n, device="cuda", dtype=torch.bfloat16)
    b = torch.randn(n, n, device="cuda", dtype=torch.bfloat16)
    c = torch.empty(n, n, device="cuda", dtype=torch.bfloat16)
    bf16 = measure(lambda: torch.mm(a, b.T, out=c), rep_ms=100)
    one = torch.ones((), device="cuda")
    qa, qb = a.to(torch.float8_e4m3fn), b.to(torch.float8_e4m3fn)
    fp8 = measure(
        lambda: torch._scaled_mm(qa, qb.T, scale_a=one, scale_b=one, out_dtype=torch.bfloat16),
        rep_ms=100,
    )
    return Limits(
        round(2 * 4 * (1 << 30) / copy / 1e9, 3),
        round(2 * n**3 / bf16 / 1e9, 1),
        round(2 * n**3 / fp8 / 1e9, 1),
    )


def versions() -> dict[str, str]:
    """Versions of what is measured, and of the peers that are here."""
    import importlib.metadata as metadata
    import platform

    found = {"python": platform.python_version(), "torch": str(torch.__version__)}
    for name in ("triton", "sgl-deep-gemm", "flashinfer-python"):
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return found


def commit() -> str:
    """Short name of the commit, or "unknown"."""
    try:
        out = subprocess.run(
            ["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=True
        )
    except (OSError, subprocess.CalledProcessError):
        return "unknown"
    return out.stdout.strip()


def checked(case: Case, seed: int) -> dict[str, Any]:
    """Builds a case small and checks it; never raises."""
    torch.manual_seed(seed)
    begin = time.time()
    try:
        built = case.build(True)
        built.run()
        torch.cuda.synchronize()
        figures = dict(built.check())
        torch.cuda.synchronize()
        return {"key": case.key, "ok": True, "figures": figures, "s": round(time.time() - begin, 1)}
    except Exception as error:
        return {
            "key": case.key,
            "ok": False,
            "error": f"{type(error).__name__}: {str(error)[:600]}",
            "s": round(time.time() - begin, 1),
        }


def timed(case: Case, limits: Limits, wanted: str) -> list[dict[str, Any]]:
    """Times a case and its wanted peers (names with commas; `*` for all); one line each."""
    built = case.build(False)
    ms = measure(built.run, built.graph)
    floor, limit = limits.floor_ms(built)
    line: dict[str, Any] = {
        "part": "kernels",
        "case": f"{case.op} {case.shape}",
        "op": case.op,
        "shape": case.shape,
        "variant": case.variant,
        "value": round(ms, 5),
        "unit": "ms",
        "TB/s": round(built.size_bytes / ms / 1e9, 3),
        "TFLOP/s": round(built.flops / ms / 1e9, 1),
        "limit": limit,
        "share_of_limit": round(floor / ms, 3),
    }
    if case.peer:
        line["speed_to_peer_of_another_run"] = round(case.peer / ms, 3)
    for name, make in built.peers.items():
        if wanted == "*" or name in wanted.split(","):
            try:
                peer_ms = measure(make(), built.graph)
                line[f"{name}_ms"] = round(peer_ms, 5)
                line[f"speed_to_{name}"] = round(peer_ms / ms, 3)
            except Exception as error:
                line[f"{name}_error"] = f"{type(error).__name__}: {str(error)[:160]}"
            torch.cuda.empty_cache()
    return [line]


def dump(line: Mapping[str, Any], file: Any) -> None:
    """Writes a line at once."""
    file.write(json.dumps(line) + "\n")
    file.flush()
