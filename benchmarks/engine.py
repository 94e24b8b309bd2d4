"""Times generation through the engine, the model's share of a step, and its matrix products alone, side by side.

A step is timed whole; inside it the calls of model and draft are timed; and after each step the matrix products of such
a step, recorded with their weights and shapes, are run alone. All three are measured in the same run, alternating: on a
CPU in processor time of one thread, which other work on the machine disturbs little, on a GPU in wall time. Prints two
JSON lines a case.
Run: python benchmarks/engine.py [--model nano] [--batch 1 16] [--context 600] [--device cpu] [--depths] [--prefix]

--model random takes random weights at the full size of nano; drafts are then never right.
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
from types import SimpleNamespace
from typing import Any

import torch
from model_step import ProductRecorder, cpu_name, random_model, small_config

from deepinfer import Engine, SamplingParams

WARM_UP = 5
PARAMS = {
    "greedy": SamplingParams(temperature=0, ignore_eos=True, max_tokens=10_000),
    "sampled": SamplingParams(
        temperature=0.8, top_p=0.95, seed=1, ignore_eos=True, max_tokens=10_000
    ),
    "greedy with drafts": SamplingParams(temperature=0, ignore_eos=True, max_tokens=10_000),
}


class Timed:
    """A model whose calls are timed, those of its draft as well.

    Args:
        model: The model.
    """

    def __init__(self, model: Any) -> None:
        self._model = model
        self.seconds = 0.0
        self.forward = self._timed(model.forward)
        self.compute_logits = self._timed(model.compute_logits)
        self.draft = SimpleNamespace(
            draft_greedy=self._timed(model.draft.draft_greedy),
            extend_context=self._timed(model.draft.extend_context),
        )

    def __getattr__(self, name: str) -> Any:
        return getattr(self._model, name)

    def _timed(self, call: Callable[..., Any]) -> Callable[..., Any]:
        def timed(*args: Any) -> Any:
            start = now(self)
            out = call(*args)
            self.seconds += now(self) - start
            return out

        return timed


def now(model: Any) -> float:
    """The time once the device has done its work."""
    if model.embed.weight.is_cuda:
        torch.cuda.synchronize()
        return time.perf_counter()
    return time.thread_time()


def prompts_of(engine: Engine, batch: int, context: int, text: str) -> list[list[int]]:
    """Different pieces of one text, `context` tokens each; any tokens without a tokenizer."""
    vocab = engine.info.vocab_size
    ids = [(i * i * 31 + i) % (vocab - 16) + 8 for i in range(batch * 40 + context)]
    if engine.tokenizer is not None:
        ids = engine.tokenizer.encode(text * 50)[: batch * 40 + context]
    return [ids[40 * i : 40 * i + context] for i in range(batch)]


def measure(
    engine: Engine, timed: Timed, batch: int, context: int, repeats: int, mode: str
) -> dict[str, float]:
    """Medians of a decode step, of the model in it, and of its products."""
    source = Path(__file__).read_text(encoding="utf-8")
    rids = [engine.add_request(p, PARAMS[mode]) for p in prompts_of(engine, batch, context, source)]
    while len(engine.step()) < batch or any(d.usage.generated < WARM_UP for d in engine.step()):
        pass
    with ProductRecorder(engine.model.config.hc_mult) as recorder:
        engine.step()
    times: dict[str, list[float]] = {"step": [], "model": [], "products": []}
    tokens = 0
    for _ in range(repeats):
        timed.seconds = 0.0
        start = now(timed)
        deltas = engine.step()
        times["step"].append(now(timed) - start)
        times["model"].append(timed.seconds)
        tokens += sum(len(delta.token_ids) for delta in deltas)
        start = now(timed)
        with torch.inference_mode():
            for call in recorder.calls:
                call()
        times["products"].append(now(timed) - start)
    for rid in rids:
        engine.abort(rid)
    engine.step()
    median = {name: statistics.median(values) for name, values in times.items()}
    return {**median, "tokens_per_step": tokens / repeats, "total": sum(times["step"])}


def depth_lines(
    model: Any, tokenizer: Any, batch: int, context: int, tokens: int
) -> list[dict[str, Any]]:
    """Whole batches at both depths, alternating: tokens per second of wall time, best of three."""
    source = Path(__file__).read_text(encoding="utf-8")
    best = {0: 0.0, 1: 0.0}
    params = SamplingParams(temperature=0, ignore_eos=True, max_tokens=tokens)
    for _ in range(3):
        for depth in best:
            config = {
                "max_num_seqs": batch,
                "max_model_len": context + tokens,
                "async_depth": depth,
            }
            with Engine(model=model, tokenizer=tokenizer, config=config) as engine:
                prompts = prompts_of(engine, batch, context, source)
                engine.generate(prompts, params.replace(max_tokens=2))
                start = time.perf_counter()
                engine.generate(prompts, params)
                best[depth] = max(best[depth], batch * tokens / (time.perf_counter() - start))
    return [
        {"case": f"greedy, depth {depth}", "value": round(value, 1), "unit": "tokens/s"}
        for depth, value in best.items()
    ]


def prefix_lines(model: Any, tokenizer: Any, context: int) -> list[dict[str, Any]]:
    """Time to the first token of a prompt that was not seen before, and of one that was, median of five."""
    source = Path(__file__).read_text(encoding="utf-8")
    one = SamplingParams(temperature=0, ignore_eos=True, max_tokens=1)
    lines = []
    for name, options in (
        ("cold", {"prefix_cache": False}),
        ("hit, bounded replay", {"replay": "bounded"}),
        ("hit, exact replay", {"replay": "exact"}),
    ):
        config = {"max_num_seqs": 1, "max_model_len": context + 8, **options}
        with Engine(model=model, tokenizer=tokenizer, config=config) as engine:
            (prompt,) = prompts_of(engine, 1, context, source)
            engine.generate(prompt, one)
            seconds = []
            for _ in range(5):
                start = time.perf_counter()
                output = engine.generate(prompt, one)[0]
                seconds.append(time.perf_counter() - start)
        lines.append(
            {
                "case": f"time to first token, {name}",
                "value": round(1e3 * statistics.median(seconds), 2),
                "unit": "ms",
                "cached": output.usage.cached,
                "replayed": output.usage.replayed,
            }
        )
    return lines


def main() -> None:
    """Measures every case and prints its lines."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="nano")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--batch", type=int, nargs="*", default=[1, 16])
    parser.add_argument("--context", type=int, default=600)
    parser.add_argument("--repeats", type=int, default=100)
    parser.add_argument("--depths", action="store_true", help="steps ahead of their results too")
    parser.add_argument("--prefix", action="store_true", help="prompts that were seen before too")
    parser.add_argument("--modes", nargs="*", default=list(PARAMS), choices=list(PARAMS))
    args = parser.parse_args()
    torch.set_num_threads(1)
    if args.model == "random":
        tokenizer, model = None, random_model(small_config(), "full").to(args.device)
    else:
        with Engine.from_pretrained(args.model, device=args.device) as loaded:
            tokenizer, model = loaded.tokenizer, loaded.model
    root = Path(__file__).resolve().parent
    git = subprocess.run(
        ["git", "rev-parse", "--short", "HEAD"], cwd=root, capture_output=True, text=True
    )
    is_cuda = args.device.startswith("cuda")
    name = torch.cuda.get_device_name() if is_cuda else f"{cpu_name()}, 1 thread"
    about = {
        "part": "engine",
        "device": name,
        "versions": {"python": platform.python_version(), "torch": torch.__version__},
        "commit": git.stdout.strip(),
        "date": datetime.date.today().isoformat(),
    }
    extra = prefix_lines(model, tokenizer, args.context) if args.prefix else []
    for batch in args.batch if args.depths else ():
        lines = depth_lines(model, tokenizer, batch, args.context, args.repeats)
        extra += [line | {"batch": batch} for line in lines]
    for line in extra:
        line["case"] += f", model {args.model}"
        print(json.dumps({**about, **line, "context": args.context}), flush=True)
    for batch in args.batch:
        for mode in args.modes:
            timed = Timed(model)
            config = {"max_num_seqs": batch, "max_model_len": args.context + 12 * args.repeats}
            drafter = "dspark" if mode == "greedy with drafts" else None
            with Engine(model=timed, tokenizer=tokenizer, config=config, drafter=drafter) as engine:
                found = measure(engine, timed, batch, args.context, args.repeats, mode)
            rest = found["step"] - found["model"]
            common = {**about, "batch": batch, "context": args.context}
            line = {
                "case": f"{mode}, model {args.model}",
                "value": round(found["tokens_per_step"] * args.repeats / found["total"], 1),
                "unit": "tokens/s",
                "tokens_per_step_and_request": round(found["tokens_per_step"] / batch, 3),
                "step_ms": round(1e3 * found["step"], 3),
                "model_ms": round(1e3 * found["model"], 3),
                "products_ms": round(1e3 * found["products"], 3),
                "rest_ms": round(1e3 * rest, 3),
                "rest_share": round(rest / found["step"], 3),
            }
            ratio = {
                "case": f"step over its matrix products, {mode}, model {args.model}",
                "value": round(found["step"] / found["products"], 2),
                "unit": "times",
            }
            for one in (line, ratio):
                print(json.dumps(one | common), flush=True)


if __name__ == "__main__":
    main()
