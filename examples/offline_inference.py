"""Generates text with a checkpoint, end to end: code, a chat answer, JSON, and free samples.

Run: python examples/offline_inference.py [--model nano] [--device auto] [--max-tokens 64] [--drafter dspark]

The checkpoint is the one inside the package unless --model or the environment variable DEEPINFER_HF_MODEL_DIR names
a folder (or, --model, a hub repository).
"""

from __future__ import annotations

import argparse
import os
import time
from typing import Any

from deepinfer import Engine, Output, SamplingParams

# Text ends where a token ends: behind a space or a line break a byte-level tokenizer would have gone on.
CODE = [
    "class Stack:\n    def __init__(self):\n        self.items = []\n\n    def push(self, item):",
    'def read_lines(path):\n    """Read a file and return its lines."""\n    with open(path) as f:',
    "import os\nimport sys\n\ndef main():\n    for path in",
]
JSON = ['{"name": "Ada", "age": 36, "city":', '[{"id": 1, "color": "red"}, {"id": 2, "color":']
CHAT = [
    [{"role": "user", "content": "Give me a JSON object with the keys name and age."}],
    [
        {"role": "system", "content": "You are a Python programmer. Answer briefly."},
        {"role": "user", "content": "What is Python?"},
    ],
]


def show(title: str, prompts: list[Any], outputs: list[Output]) -> None:
    """Prints prompts with their continuations."""
    print(f"\n=== {title} ===")
    for prompt, output in zip(prompts, outputs, strict=True):
        start = prompt if isinstance(prompt, str) else f"[{prompt[-1]['content']}]\n"
        usage = output.usage
        drafts = f", {usage.accepted} of {usage.verified} drafts accepted" if usage.verified else ""
        print(f"--- {usage.generated} tokens, ended by {output.finish_reason}{drafts}")
        print(f"{start}\033[1m{output.text}\033[0m" if os.isatty(1) else f"{start}{output.text}")


def main() -> None:
    """Loads, generates, prints."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    default = os.environ.get("DEEPINFER_HF_MODEL_DIR") or "nano"
    parser.add_argument("--model", default=default, help="folder, hub repository, or nano")
    parser.add_argument("--device", default="auto", help="auto, cpu, cuda, cuda:1, ...")
    parser.add_argument("--max-tokens", type=int, default=64)
    parser.add_argument("--drafter", choices=["dspark"], help="decode with the model's own draft")
    args = parser.parse_args()

    begin = time.perf_counter()
    with Engine.from_pretrained(args.model, device=args.device, drafter=args.drafter) as engine:
        device = engine.fingerprint()["device"]
        print(f"{args.model} on {device}, loaded in {time.perf_counter() - begin:.1f} s")
        greedy = SamplingParams(temperature=0, max_tokens=args.max_tokens)
        begin, generated = time.perf_counter(), 0
        for title, prompts, params in (
            ("code, greedy", CODE, greedy),
            ("chat, greedy", CHAT, greedy),
            ("JSON, greedy, up to the end of the line", JSON, greedy.replace(stop=("\n",))),
            (
                "code, sampled with a seed",
                CODE[:1],
                greedy.replace(temperature=0.8, top_p=0.95, seed=7),
            ),
        ):
            outputs = engine.generate(prompts, params)
            generated += sum(output.usage.generated for output in outputs)
            show(title, prompts, outputs)
        seconds = time.perf_counter() - begin
        stats = engine.stats()
        print(
            f"\n{generated} tokens in {seconds:.2f} s: {generated / seconds:.0f} tokens/s over "
            f"{stats.steps} steps; {1e3 * stats.overhead_seconds / stats.steps:.2f} ms of a step are not the model"
        )


if __name__ == "__main__":
    main()
