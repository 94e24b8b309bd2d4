"""Whether the embedded checkpoint generates the same tokens on a CUDA GPU as on the CPU, in deterministic mode.

    PYTHONPATH=src python benchmarks/nano_devices.py --record FILE     on the CPU: greedy streams with their margins
    PYTHONPATH=src python benchmarks/nano_devices.py --compare FILE    on the GPU: the same, stream by stream

The comparison tells how many streams are equal, and for each other one the margin (log probability of the first over
the second token, on the CPU) where it leaves, beside the largest difference of log probabilities up to there: two
machines that sum in another order can only part where the margin is at most the sum of the differences of the two
tokens. Without rounding (`--rounding none`) the differences are those of the order of fp32 sums; with it, an ulp moves
a value over a rounding edge of FP8 or FP4 now and then, which is a step of 6 or 25 % of one channel.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import platform
from pathlib import Path

import torch

from deepinfer import Engine, SamplingParams
from deepinfer.engine import Tokenizer
from deepinfer.models import load_model, resolve_checkpoint

TEXTS = (
    "def read_lines(path):\n", "class Stack:\n    def __init__(self):\n", "import os\nimport sys\n\ndef main():\n",
    '"""Tools for dates."""\n', "for name in sorted(", "try:\n    import json\nexcept ", "The module provides ",
    "    return self._", "def test_", "raise ValueError(", "if __name__ == ", "with open(", "x = [i for i in ",
    "async def fetch(", "from typing import ", "print('hello", "while True:\n", "lambda a, b: ", "This function returns ",
    "assert isinstance(", "self.assertEqual(", "@property\ndef ", "elif key in ", "logger.", "return {", "del items[",
    "yield from ", "global _cache\n", "# Copyright ", "parser.add_argument(", "struct.unpack(", "sum(x * y for ",
)  # fmt: skip


def streams(device: str, tokens: int, dtype: str, rounding: str) -> list[dict]:
    """Greedy continuations of every text, with log probabilities of the two likeliest tokens."""
    torch.set_num_threads(max(1, (os.cpu_count() or 1) // 2))
    config = {"deterministic": True, "max_num_seqs": 16, "device": device, "dtype": dtype}
    params = SamplingParams(max_tokens=tokens, temperature=0.0, logprobs=2, ignore_eos=True)
    model = load_model("nano", device=device, dtype=getattr(torch, dtype), rounding=rounding)
    tokenizer = Tokenizer(resolve_checkpoint("nano"))
    with Engine(model=model, tokenizer=tokenizer, config=config) as engine:
        outputs = engine.generate(list(TEXTS), params)
    found = []
    for output in outputs:
        entries = output.logprobs or ()
        best = [[lp for _, lp in entry.top] for entry in entries]
        found.append({"tokens": list(output.token_ids), "best": best})
    return found


def compare(ours: list[dict], theirs: list[dict]) -> dict:
    """Streams of the GPU against those of the CPU."""
    equal, parted, largest = 0, [], 0.0
    for a, b in zip(ours, theirs, strict=True):
        at = next(
            (i for i, (x, y) in enumerate(zip(a["tokens"], b["tokens"], strict=True)) if x != y),
            None,
        )
        upto = len(b["tokens"]) if at is None else at + 1
        difference = max(
            abs(x[0] - y[0]) for x, y in zip(a["best"][:upto], b["best"][:upto], strict=True)
        )
        largest = max(largest, difference)
        if at is None:
            equal += 1
        else:
            margin = b["best"][at][0] - b["best"][at][1]
            parted.append({"at": at, "margin": margin, "difference_there": difference})
    return {"equal": equal, "streams": len(ours), "parted": parted, "largest_difference": largest}


def main() -> None:
    """Records or compares."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--record", type=Path)
    parser.add_argument("--compare", type=Path)
    parser.add_argument("--tokens", type=int, default=48)
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--rounding", default="full")
    parser.add_argument(
        "--out", default=str(Path(os.environ.get("OUT", ".")) / "nano_devices.jsonl")
    )
    arguments = parser.parse_args()
    if arguments.record:
        arguments.record.write_text(
            json.dumps(streams("cpu", arguments.tokens, arguments.dtype, arguments.rounding))
        )
        return
    result = compare(
        streams("cuda", arguments.tokens, arguments.dtype, arguments.rounding),
        json.loads(arguments.compare.read_text()),
    )
    line = {
        "part": "nano_devices", "case": "streams equal to those of the CPU, deterministic greedy",
        "value": result.pop("equal"), "unit": "streams", **result, "tokens_each": arguments.tokens, "dtype": arguments.dtype, "rounding": arguments.rounding,
        "device": torch.cuda.get_device_name(), "date": datetime.date.today().isoformat(),
        "versions": {"python": platform.python_version(), "torch": str(torch.__version__)},
    }  # fmt: skip
    with open(arguments.out, "a") as file:
        file.write(json.dumps(line) + "\n")
    print(json.dumps(line)[:3000])


if __name__ == "__main__":
    main()
