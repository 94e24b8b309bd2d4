"""Times noise, filters, log probabilities and whole sampling steps, and prints one JSON line a case.

The logits are normal with a few high ones, at the vocabulary size of DeepSeek-V4.1 unless told otherwise. The
control is the usual stateful way: softmax, then `torch.multinomial`. Median of the repeats; on a CPU in processor
time of one thread, which other work on the machine disturbs little, on a GPU in wall time.
Run: python benchmarks/sampling.py [--vocab 129280] [--rows 1 16] [--device cpu]
"""

from __future__ import annotations

import argparse
import datetime
import json
import platform
import statistics
import subprocess
import time
from collections.abc import Callable
from pathlib import Path

import torch

from deepinfer.core.params import SamplingParams
from deepinfer.core.protocols import SampleRows
from deepinfer.core.types import Request
from deepinfer.sampling import Sampler, gumbel_noise, log_partition

PARAMS = {
    "greedy": SamplingParams(temperature=0),
    "plain": SamplingParams(),
    "top_k 50": SamplingParams(top_k=50),
    "top_p 0.95": SamplingParams(top_p=0.95),
    "min_p 0.05": SamplingParams(min_p=0.05),
    "top_k 50, top_p 0.95, min_p 0.01": SamplingParams(top_k=50, top_p=0.95, min_p=0.01),
    "greedy, 5 logprobs": SamplingParams(temperature=0, logprobs=5),
    "penalties over 1000 tokens": SamplingParams(
        temperature=0, presence_penalty=0.5, frequency_penalty=0.5, repetition_penalty=1.1
    ),
}


def milliseconds(call: Callable[[], object], device: torch.device, repeats: int) -> float:
    """Median time of one call, the device's work included."""
    clock = time.thread_time if device.type == "cpu" else time.perf_counter
    seconds = []
    for number in range(repeats + 2):
        start = clock()
        call()
        if device.type == "cuda":
            torch.cuda.synchronize()
        if number >= 2:
            seconds.append(clock() - start)
    return statistics.median(seconds) * 1e3


def rows_of(params: SamplingParams, count: int, vocab: int) -> SampleRows:
    """Rows with the same options, each with its own seed and 1000 tokens of output."""
    output = tuple((i * 7919) % vocab for i in range(1000))
    return SampleRows(
        requests=tuple(
            Request(rid=str(i), prompt_token_ids=output[:100], params=params) for i in range(count)
        ),
        positions=tuple(range(count)),
        seeds=tuple(range(count)),
        output_token_ids=(output,) * count,
    )


def cases(logits: torch.Tensor) -> dict[str, Callable[[], object]]:
    """What is measured, by name."""
    count, vocab = logits.shape
    seeds = list(range(count))
    few = torch.arange(64, device=logits.device).repeat(count, 1)
    sampler = Sampler()
    out: dict[str, Callable[[], object]] = {
        "noise, whole vocabulary": lambda: gumbel_noise(
            seeds, seeds, vocab_size=vocab, device=logits.device
        ),
        "noise, 64 candidates": lambda: gumbel_noise(seeds, seeds, token_ids=few),
        "log partition": lambda: log_partition(logits),
        "control: argmax": lambda: logits.argmax(dim=-1),
        "control: softmax and multinomial": lambda: torch.multinomial(logits.softmax(dim=-1), 1),
    }
    for name, params in PARAMS.items():
        rows = rows_of(params, count, vocab)
        out[f"sampler, {name}"] = lambda rows=rows: sampler(logits, rows)  # type: ignore[misc]
    return out


def main() -> None:
    """Measures and prints."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--vocab", type=int, default=129_280)
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 16])
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--repeats", type=int, default=20)
    options = parser.parse_args()
    torch.set_num_threads(1)
    device = torch.device(options.device)
    git = subprocess.run(
        ["git", "rev-parse", "--short", "HEAD"],
        cwd=Path(__file__).parent,
        capture_output=True,
        text=True,
    )
    name = torch.cuda.get_device_name() if device.type == "cuda" else processor()
    machine = {
        "device": name,
        "versions": {"python": platform.python_version(), "torch": torch.__version__},
        "commit": git.stdout.strip(),
        "date": datetime.date.today().isoformat(),
    }
    for count in options.rows:
        generator = torch.Generator().manual_seed(0)
        logits = torch.randn(count, options.vocab, generator=generator) * 2.0
        logits[:, :8] += 12.0
        for case, call in cases(logits.to(device)).items():
            line = {
                "part": "sampling",
                "case": case,
                "rows": count,
                "vocab": options.vocab,
                "value": round(milliseconds(call, device, options.repeats), 4),
                "unit": "ms",
            }
            print(json.dumps({**line, **machine}))


def processor() -> str:
    """Name of the CPU as the system gives it."""
    info = Path("/proc/cpuinfo")
    if info.is_file():
        for line in info.read_text().splitlines():
            if line.startswith("model name"):
                return f"{line.partition(':')[2].strip()}, 1 thread"
    return f"{platform.machine()}, 1 thread"


if __name__ == "__main__":
    main()
