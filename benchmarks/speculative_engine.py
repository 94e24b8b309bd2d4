"""Measures speculative decoding inside the engine with the embedded `nano` and prints one JSON line a measurement.

Acceptance: share of verified drafts that become output, and tokens a step, by temperature; drafts that are the draft's
likeliest tokens beside drafts that it draws with the sampler's noise. The tokens are the same both ways.

Invariance: requests decoded alone without drafts, and in batches of 64 with drafts under a schedule that rolls dice, in
deterministic mode, half of them greedy and half drawn: how many outputs are the same token for token.

Run: python benchmarks/speculative_engine.py --only acceptance --count 6
     python benchmarks/speculative_engine.py --only invariance --runs 1000
"""

from __future__ import annotations

import argparse
import datetime
import json
import platform
import random
import subprocess
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch

from deepinfer import Engine, EngineConfig, SamplingParams
from deepinfer.core.protocols import DraftBatch, DraftView
from deepinfer.engine import DSparkDrafter
from deepinfer.models import load_model
from deepinfer.scheduling import Scheduler
from speculative import prompts

CASES: dict[str, dict[str, float]] = {
    "temperature 0": {"temperature": 0.0},
    "temperature 0.7": {"temperature": 0.7},
    "temperature 1.0": {"temperature": 1.0},
    "temperature 1.0, top-p 0.9": {"temperature": 1.0, "top_p": 0.9},
}


class Likeliest(DSparkDrafter):
    """Proposes the draft's likeliest tokens whatever the temperature."""

    def propose(self, view: DraftView, max_drafts: int) -> DraftBatch:
        """Proposes without the noise."""
        plain = DraftView(
            rids=view.rids, slots=view.slots, anchor_ids=view.anchor_ids, positions=view.positions
        )
        return super().propose(plain, max_drafts)


class Dice:
    """Verifies a random number of drafts of each row."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)

    def choose(self, confidences: Sequence[Sequence[float]], num_running: int) -> list[int]:
        """Rolls once a row."""
        return [self.random.randint(0, len(row)) for row in confidences]


def acceptance(options: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """One line a case and way of drafting."""
    texts = [text for kind in prompts(options.count).values() for text in kind]
    config = EngineConfig(
        max_num_seqs=32, max_model_len=1024, rounding="none", device=options.device
    )
    for case, values in CASES.items():
        params = [
            SamplingParams(max_tokens=64, ignore_eos=True, seed=i, **values)  # type: ignore[arg-type]
            for i in range(len(texts))
        ]
        first: list[tuple[int, ...]] = []
        for way, kind in (("likeliest", Likeliest), ("drawn", DSparkDrafter)):
            if way == "drawn" and not values["temperature"]:
                continue
            with Engine.from_pretrained(
                "nano", config=config, drafter=lambda model, kind=kind: kind(model)
            ) as engine:
                outputs = engine.generate(texts, params)
            verified = sum(output.usage.verified for output in outputs)
            accepted = sum(output.usage.accepted for output in outputs)
            generated = sum(output.usage.generated for output in outputs)
            tokens = [output.token_ids for output in outputs]
            first = first or tokens
            yield {
                "case": f"accepted drafts, {case}, {way}",
                "value": round(100 * accepted / verified, 2),
                "unit": "% of verified",
                "tokens_a_step": round(generated / (generated - accepted), 3),
                "requests": len(texts),
                "same_tokens": sum(a == b for a, b in zip(first, tokens, strict=True)),
            }


def invariance(options: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """One line: how many outputs do not depend on drafts, schedule and company."""
    model = load_model("nano", device=options.device)
    generator = random.Random(0)
    vocab = model.config.vocab_size
    asked = [
        (
            [0, *(generator.randrange(300, vocab) for _ in range(generator.randint(3, 40)))],
            SamplingParams(
                max_tokens=16,
                ignore_eos=True,
                seed=number,
                temperature=0.0 if number % 2 else 0.5 + 0.25 * (number % 3),
                top_p=0.9 if number % 5 == 0 else 1.0,
            ),
        )
        for number in range(options.first + options.runs)
    ]
    asked = asked[options.first :]
    config = {"deterministic": True, "max_model_len": 128, "max_num_seqs": 64}
    alone: list[tuple[int, ...]] = []
    with Engine(model=model, config={**config, "max_num_seqs": 1}) as engine:
        for prompt, params in asked:
            alone.append(engine.generate([prompt], params)[0].token_ids)
    same, verified, accepted = [0, 0], 0, 0
    for start in range(0, len(asked), 64):
        part = asked[start : start + 64]
        dice = Dice(options.first + start)
        with Engine(
            model=model,
            drafter="dspark",
            config={**config, "async_depth": (options.first + start) // 64 % 2},
            scheduler=lambda limits, cache, dice=dice: Scheduler(
                limits, cache, verify_lengths=dice
            ),
        ) as engine:
            outputs = engine.generate([p for p, _ in part], [s for _, s in part])
        for number, output in enumerate(outputs, start):
            same[asked[number][1].is_greedy] += output.token_ids == alone[number]
            verified += output.usage.verified
            accepted += output.usage.accepted
    yield {
        "case": "same tokens alone without drafts and in 64 with drafts, any schedule",
        "value": round(100 * sum(same) / len(asked), 3),
        "unit": "% of runs",
        "runs": len(asked),
        "same_drawn": same[0],
        "same_greedy": same[1],
        "verified": verified,
        "accepted": accepted,
    }


def main() -> None:
    """Prints every line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", nargs="*", default=[], help="acceptance, invariance")
    parser.add_argument("--count", type=int, default=6, help="prompts of each kind")
    parser.add_argument("--runs", type=int, default=1000, help="requests of the invariance")
    parser.add_argument("--first", type=int, default=0, help="number of the first of them")
    parser.add_argument("--device", default="cpu", help="where the model runs")
    parser.add_argument("--out", type=Path, help="append the lines to this file")
    options = parser.parse_args()
    commit = subprocess.run(
        ["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=False
    )
    is_gpu = options.device.startswith("cuda")
    name = torch.cuda.get_device_name() if is_gpu else platform.processor() or platform.machine()
    common = {
        "device": name,
        "versions": {"python": platform.python_version(), "torch": torch.__version__},
        "commit": commit.stdout.strip(),
        "date": datetime.date.today().isoformat(),
    }
    for part in (acceptance, invariance):
        if options.only and part.__name__ not in options.only:
            continue
        for line in part(options):
            text = json.dumps({"part": "speculative", **line, **common})
            print(text, flush=True)
            if options.out:
                with options.out.open("a", encoding="utf-8") as file:
                    file.write(text + "\n")


if __name__ == "__main__":
    main()
