"""Times the host's work in a decode step: plan, launch, batch, sampling call, collect, apply, outputs, counts.

A whole engine runs with the real scheduler, cache manager, runner, books of the model's cache, recordings and sampler;
only the arithmetic is missing: the model and its recordings give logits that were made before. The vocabulary is tiny,
so that what the sampler computes counts for little and what it costs to ask for it is what is seen. Times are
processor times of one thread on a CPU. Prints one JSON line a case;
--results appends them to a file.

--drafts: "fixed" verifies blocks of five prepared drafts, of which half are accepted; "scheduled" has lengths planned in
every step; "whole" has a schedule for which trimming never pays; "off" one for which drafting does not, so that it decodes
as without a drafter.
--against FOLDER: measures a second copy of the sources beside this one, in turns, and gives the ratio as well.
Run: python benchmarks/host_path.py [--rows 1 16 64 256 1024] [--depth 0 1] [--modes greedy sampled] [--profile 40]
"""

from __future__ import annotations

import argparse
import contextlib
import cProfile
import datetime
import itertools
import json
import os
import platform
import pstats
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from model_step import cpu_name, small_config
from torch.utils._python_dispatch import TorchDispatchMode

from deepinfer import Engine, SamplingParams
from deepinfer.engine import draft_graphs as drafts_module
from deepinfer.engine import graphs as graphs_module
from deepinfer.engine.batching import Batch
from deepinfer.engine.graphs import DecodeGraphs, GraphBucket
from deepinfer.engine.tokenizer import Tokenizer
from deepinfer.models.deepseek_v41.batch import ForwardBatch, ForwardOutput
from deepinfer.models.deepseek_v41.cache import SlotCache
from deepinfer.models.deepseek_v41.decode_step import DecodeOutput
from deepinfer.speculative import StepCostModel

ASSETS = Path(__file__).resolve().parent.parent / "src" / "deepinfer" / "assets" / "nano"
VOCAB = 16
PROMPT = 16
WARM_UP = 24
TURNS = 5
BLOCK = 5
VERIFY = {
    "none": None,
    "fixed": None,
    "scheduled": StepCostModel.additive(1e-4, 2e-4),
    "whole": StepCostModel.additive(2e-3, 1e-9),
    "off": StepCostModel.additive(1e-4, 1e-1, request_s=1e-2),
}
PARAMS = {
    "greedy": SamplingParams(temperature=0, ignore_eos=True, max_tokens=100_000),
    "sampled": SamplingParams(
        temperature=0.8, top_p=0.95, seed=1, ignore_eos=True, max_tokens=100_000
    ),
    "penalties": SamplingParams(
        temperature=0, presence_penalty=0.5, ignore_eos=True, max_tokens=100_000
    ),
}


class PreparedDraft:
    """A draft without arithmetic: blocks that were made before, and the books of its context.

    Args:
        chosen: Tokens that the prepared logits choose, shape [rows * (BLOCK + 1)].
    """

    def __init__(self, chosen: torch.Tensor) -> None:
        blocks = chosen.view(-1, BLOCK + 1)[:, :BLOCK].clone()
        right = torch.arange(len(blocks)) % (BLOCK + 1)  # drafts accepted of each block
        wrong = torch.arange(BLOCK) >= right.unsqueeze(1)
        self._tokens = torch.where(wrong, 5 + (blocks - 4) % (VOCAB - 5), blocks)
        self._confidences = torch.where(wrong, 0.3, 0.9)
        self._margins = torch.where(wrong, 0.5, 4.0)

    def extend_context(self, features: Any, positions: Any, slots: Any, cache: SlotCache) -> None:
        """Notes what the draft has seen."""
        for at, slot in zip(positions, slots, strict=True):
            first, end = cache.draft_spans[slot]
            cache.draft_spans[slot] = (first if first < end == at else at, at + 1)

    def draft_greedy(self, anchors: torch.Tensor, *_: Any) -> tuple[torch.Tensor, ...]:
        """What a recording gives."""
        count = len(anchors)
        return self._tokens[:count], self._confidences[:count], self._margins[:count]

    def write_context(self, *_: Any) -> None:
        """Nothing to write."""


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
        self.prepared = PreparedDraft(made.argmax(-1))
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
        hidden = self._hidden[: batch.num_tokens]
        return ForwardOutput(hidden, None if self.draft is None else hidden)

    def compute_logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """Logits that were there before."""
        return self._made[: len(hidden)].clone()

    def replay(self, *_: Any, **__: Any) -> DecodeOutput:
        """What a recording gives."""
        return DecodeOutput(self._hidden[: len(self._made)], None, self._made)


def make_engine(
    rows: int, depth: int, tokenizer: Any, *, is_eager: bool, length: int, drafts: str = "none"
) -> Engine:
    """An engine whose steps cost the host's work only."""
    model = PreparedModel(rows * (BLOCK + 1))
    parts: dict[str, Any] = {}
    if drafts != "none":
        model.draft = model.prepared  # type: ignore[assignment]
        parts = {"drafter": "dspark", "verify": VERIFY[drafts]}
    options = {
        "max_num_seqs": rows, "max_model_len": length, "async_depth": depth,
        "prefill_chunk_tokens": PROMPT,
    }  # fmt: skip
    engine = Engine(model=model, tokenizer=tokenizer, config=options, **parts)
    runner = engine._parts.runner
    runner._check_ids = runner._future._check = False  # as on a GPU
    if not is_eager:
        with (
            mock.patch.object(graphs_module, "why_no_fixed_shape", return_value=""),
            mock.patch.object(graphs_module, "DecodeStep", return_value=model.replay),
            mock.patch.object(drafts_module, "DraftStep", return_value=model.prepared),
        ):
            if parts:
                runner._drafter.record()
            graphs: DecodeGraphs = runner.make_graphs(on_demand=bool(parts))
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


class Calls(TorchDispatchMode):
    """Counts calls of torch."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Counts one."""
        self.count += 1
        return func(*args, **(kwargs or {}))


def torch_calls(step: Any) -> int:
    """Calls of torch in a step, those of the prepared model among them; the middle one of five steps."""
    counts = []
    for _ in range(5):
        with Calls() as calls:
            step()
        counts.append(calls.count)
    return sorted(counts)[2]


def measure(step: Any, repeats: int) -> float:
    """Median processor time of a step in microseconds."""
    times = []
    for _ in range(repeats):
        began = time.thread_time()
        step()
        times.append(time.thread_time() - began)
    return 1e6 * statistics.median(times)


@contextlib.contextmanager
def running(case: tuple[Any, ...], args: argparse.Namespace) -> Iterator[Any]:
    """Runs a step of a case, warmed up."""
    mode, drafts, text, sink, depth, rows = case
    steps = 64 + WARM_UP + args.repeats * (2 if args.profile else 1)
    length = PROMPT + steps * (1 if drafts in ("none", "off") else BLOCK + 1)
    length += 0 if drafts == "none" else 64 * (BLOCK + 1)  # until it is off
    maker = Tokenizer(ASSETS) if text == "text" else None
    how = {"is_eager": args.eager, "length": length}
    with make_engine(rows, depth, maker, drafts=drafts, **how) as engine:
        step = start(engine, rows, PARAMS[mode], wants_deltas=sink == "deltas")
        for _ in range(WARM_UP + (40 if drafts == "off" else 0)):
            step()
        yield step
        if not engine.has_unfinished:
            raise RuntimeError("the requests came to an end before the steps did")


class Twin:
    """The same case in a process of its own, with other sources.

    Args:
        folder: Holds them, in `src`.
        case: The case.
        args: Options of this process.
    """

    def __init__(self, folder: Path, case: tuple[Any, ...], args: argparse.Namespace) -> None:
        names = ("modes", "drafts", "text", "sinks", "depth", "rows")
        given = [
            part
            for name, value in zip(names, case, strict=True)
            for part in (f"--{name}", f"{value}")
        ]
        self._process = subprocess.Popen(
            [sys.executable, __file__, "--serve", "--repeats", str(args.repeats), *given,
             *(["--eager"] if args.eager else [])],
            env={**os.environ, "PYTHONPATH": str(folder / "src")},
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
        )  # fmt: skip

    def measure(self) -> float:
        """As `measure`, of the other process."""
        pipes = self._process.stdin, self._process.stdout
        if pipes[0] is None or pipes[1] is None:
            raise RuntimeError("the other process has no pipes")
        pipes[0].write("go\n")
        pipes[0].flush()
        return float(pipes[1].readline())

    def close(self) -> None:
        """Ends the process."""
        self._process.communicate(timeout=60)


def main() -> None:
    """Measures every case and prints its line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rows", type=int, nargs="*", default=[1, 16, 64, 256, 1024])
    parser.add_argument("--depth", type=int, nargs="*", default=[0, 1])
    parser.add_argument("--modes", nargs="*", default=["greedy", "sampled"], choices=list(PARAMS))
    parser.add_argument("--text", nargs="*", default=["ids", "text"], choices=["ids", "text"])
    parser.add_argument("--sinks", nargs="*", default=["deltas"], choices=["deltas", "ends"])
    parser.add_argument("--drafts", nargs="*", default=["none"], choices=list(VERIFY))
    parser.add_argument("--eager", action="store_true", help="no recordings")
    parser.add_argument("--against", type=Path, help="folder of other sources, which holds src")
    parser.add_argument("--serve", action="store_true", help=argparse.SUPPRESS)
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
    names = (args.modes, args.drafts, args.text, args.sinks, args.depth, args.rows)
    for case in itertools.product(*names):
        mode, drafts, text, sink, depth, rows = case
        other = Twin(args.against, case, args) if args.against is not None else None
        with running(case, args) as step:
            if args.serve:
                for _ in sys.stdin:
                    print(measure(step, args.repeats // TURNS), flush=True)
                return
            here, there = [], []
            for _ in range(TURNS):
                here.append(measure(step, args.repeats // TURNS))
                if other is not None:
                    there.append(other.measure())
            calls = torch_calls(step)
            if args.profile:
                with cProfile.Profile() as profile:
                    for _ in range(args.repeats):
                        step()
                pstats.Stats(profile).sort_stats("tottime").print_stats(args.profile)
        found = statistics.median(here)
        how = "eager" if args.eager else "recorded"
        drafting = "" if drafts == "none" else f", drafts {drafts}"
        line: dict[str, Any] = {
            "case": f"{mode}, {text}, {sink}, depth {depth}, {how}{drafting}",
            "rows": rows,
            "value": round(found, 1),
            "unit": "us of the host a step",
            "a_row_us": round(found / rows, 3),
            "torch_calls": calls,
        }
        if other is not None:
            other.close()
            line["other_us"] = round(statistics.median(there), 1)
            line["other_over_this"] = round(
                statistics.median([b / a for a, b in zip(here, there, strict=True)]), 2
            )
        record = json.dumps(line | about)
        print(record, flush=True)
        if args.results is not None:
            with args.results.open("a", encoding="utf-8") as file:
                file.write(record + "\n")


if __name__ == "__main__":
    main()
