"""Times the host's work in a decode step: plan, launch, batch, sampling call, collect, apply, outputs, counts.

A whole engine runs with the real scheduler, cache manager, runner, books of the model's cache, recordings and sampler;
only the arithmetic is missing: the model and its recordings give logits that were made before. The vocabulary is tiny,
so that what the sampler computes counts for little and what it costs to ask for it is what is seen. Times are
processor times of one thread on a CPU. Prints one JSON line a case;
--results appends them to a file.
Run: python benchmarks/host_path.py [--rows 1 16 64 256 1024] [--depth 0 1] [--modes greedy sampled] [--profile 40]
"""

from __future__ import annotations

import argparse
import cProfile
import datetime
import itertools
import json
import platform
import pstats
import statistics
import subprocess
import time
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from model_step import cpu_name, small_config

from deepinfer import Engine, SamplingParams
from deepinfer.engine import graphs as graphs_module
from deepinfer.engine.batching import Batch
from deepinfer.engine.graphs import DecodeGraphs, GraphBucket
from deepinfer.engine.tokenizer import Tokenizer
from deepinfer.models.deepseek_v41.batch import ForwardBatch, ForwardOutput
from deepinfer.models.deepseek_v41.cache import SlotCache
from deepinfer.models.deepseek_v41.decode_step import DecodeOutput

ASSETS = Path(__file__).resolve().parent.parent / "src" / "deepinfer" / "assets" / "nano"
VOCAB = 16
PROMPT = 16
WARM_UP = 24
PARAMS = {
    "greedy": SamplingParams(temperature=0, ignore_eos=True, max_tokens=100_000),
    "sampled": SamplingParams(
        temperature=0.8, top_p=0.95, seed=1, ignore_eos=True, max_tokens=100_000
    ),
    "penalties": SamplingParams(
        temperature=0, presence_penalty=0.5, ignore_eos=True, max_tokens=100_000
    ),
}


class PreparedModel:
    """A model without arithmetic: it keeps the books of its cache and gives logits made before.

    Args:
        most_rows: Most rows of logits of a step.
    """

    def __init__(self, most_rows: int) -> None:
        self.config = small_config()
        object.__setattr__(self.config, "vocab_size", VOCAB)
        self.rounding = "none"
        self.deterministic = False
        self.draft = None
        self.device = torch.device("cpu")
        made = torch.randn(most_rows, VOCAB, generator=torch.Generator().manual_seed(1))
        made[:, :5] = -20.0
        self._made = made
        self._hidden = torch.zeros(1 << 16, 1)

    def new_cache(
        self, num_slots: int, max_tokens: int, step: int = 512, **sizes: Any
    ) -> SlotCache:
        """A cache with the books of a real one."""
        return SlotCache(self.config, num_slots, max_tokens, step, dtype=torch.bfloat16, **sizes)

    def forward(self, batch: ForwardBatch, cache: SlotCache) -> ForwardOutput:
        """Keeps the books."""
        cache.begin(batch.segments)
        cache.commit(batch.segments)
        return ForwardOutput(self._hidden[: batch.num_tokens], None)

    def compute_logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """Logits that were there before."""
        return self._made[: len(hidden)].clone()

    def replay(self, *_: Any) -> DecodeOutput:
        """What a recording gives."""
        return DecodeOutput(self._hidden[: len(self._made)], None, self._made)


def make_engine(rows: int, depth: int, tokenizer: Any, *, is_eager: bool, length: int) -> Engine:
    """An engine whose steps cost the host's work only."""
    model = PreparedModel(rows)
    options = {
        "max_num_seqs": rows, "max_model_len": length, "async_depth": depth,
        "prefill_chunk_tokens": PROMPT,
    }  # fmt: skip
    engine = Engine(model=model, tokenizer=tokenizer, config=options)
    runner = engine._parts.runner
    runner._check_ids = runner._future._check = False  # as on a GPU
    if not is_eager:
        with (
            mock.patch.object(graphs_module, "why_no_fixed_shape", return_value=""),
            mock.patch.object(graphs_module, "DecodeStep", return_value=model.replay),
        ):
            graphs: DecodeGraphs = runner.make_graphs()
            graphs.warmup([GraphBucket(rows, 1, length)])
    return engine


def start(engine: Engine, rows: int, params: SamplingParams, *, wants_deltas: bool) -> Any:
    """Adds the requests, and returns what runs a step."""
    batch = Batch()
    for row in range(rows):
        prompt = [5 + (row * 7 + i * i) % (VOCAB - 5) for i in range(PROMPT)]
        one = params if params.seed is None else params.replace(seed=row)
        if wants_deltas:
            engine.add_request(prompt, one)
        else:
            sink: Any = batch if callable(batch) else batch.push  # type: ignore[attr-defined]
            engine._submit(prompt, one, sink, engine._new_rid())
    return engine.step if wants_deltas else engine._advance


def measure(step: Any, repeats: int) -> float:
    """Median processor time of a step in microseconds."""
    times = []
    for _ in range(repeats):
        began = time.thread_time()
        step()
        times.append(time.thread_time() - began)
    return 1e6 * statistics.median(times)


def main() -> None:
    """Measures every case and prints its line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rows", type=int, nargs="*", default=[1, 16, 64, 256, 1024])
    parser.add_argument("--depth", type=int, nargs="*", default=[0, 1])
    parser.add_argument("--modes", nargs="*", default=["greedy", "sampled"], choices=list(PARAMS))
    parser.add_argument("--text", nargs="*", default=["ids", "text"], choices=["ids", "text"])
    parser.add_argument("--sinks", nargs="*", default=["deltas"], choices=["deltas", "ends"])
    parser.add_argument("--eager", action="store_true", help="no recordings")
    parser.add_argument("--repeats", type=int, default=150)
    parser.add_argument("--profile", type=int, default=0, help="lines of a profile after each case")
    parser.add_argument("--results", type=Path, help="file that lines are appended to")
    args = parser.parse_args()
    torch.set_num_threads(1)
    root = Path(__file__).resolve().parent
    git = subprocess.run(
        ["git", "rev-parse", "--short", "HEAD"], cwd=root, capture_output=True, text=True
    )
    about = {
        "part": "host_path",
        "device": f"{cpu_name()}, 1 thread",
        "versions": {"python": platform.python_version(), "torch": torch.__version__},
        "commit": git.stdout.strip(),
        "date": datetime.date.today().isoformat(),
    }
    tokenizer = Tokenizer(ASSETS)
    cases = itertools.product(args.modes, args.text, args.sinks, args.depth, args.rows)
    for mode, text, sink, depth, rows in cases:
        length = PROMPT + 64 + WARM_UP + args.repeats * (2 if args.profile else 1)
        maker = tokenizer if text == "text" else None
        with make_engine(rows, depth, maker, is_eager=args.eager, length=length) as engine:
            step = start(engine, rows, PARAMS[mode], wants_deltas=sink == "deltas")
            for _ in range(WARM_UP):
                step()
            found = measure(step, args.repeats)
            if args.profile:
                with cProfile.Profile() as profile:
                    for _ in range(args.repeats):
                        step()
                pstats.Stats(profile).sort_stats("tottime").print_stats(args.profile)
        how = "eager" if args.eager else "recorded"
        line = {
            "case": f"{mode}, {text}, {sink}, depth {depth}, {how}",
            "rows": rows,
            "value": round(found, 1),
            "unit": "us of the host a step",
            "a_row_us": round(found / rows, 3),
        }
        record = json.dumps(line | about)
        print(record, flush=True)
        if args.results is not None:
            with args.results.open("a", encoding="utf-8") as file:
                file.write(record + "\n")


if __name__ == "__main__":
    main()
