"""Speculative decoding on one GPU: recorded blocks, tokens a second by load, and what steps of real widths cost.

blocks: drafts of the embedded `nano` over four kinds of text, as (confidences, margins, accepted), to
`speculative_blocks.npz`; `speculative.py --blocks FILE` calibrates and replays them.

load: `nano` in the engine with recorded steps, at 1 to 256 requests at once: without drafts, with all five verified, and
with as many as pay. The three engines take turns every 64 tokens of the same texts, so that they share what disturbs the
machine, and ratios are those of neighbours. Where a step's time goes comes along.

curve: seconds of recorded steps of the published widths by rows, and of drafting by requests, from packed random weights, see
`speculative_wide.py`; nano-curve: those of `nano`. `speculative.py --curve FILE` replays the recorded blocks over them,
since random weights have no drafts worth verifying.

wide: load, with engines of `nano` whose steps take the time of five layers of the published widths as well.

planner: CPU time of a plan on the machine's host, beside plans written in the shape of others.

Every case is a JSON line in $OUT (or --out); what no longer fits into --seconds is left out and named.
Run: PYTHONPATH=src python benchmarks/speculative_gpu.py [--only blocks load planner nano-curve curve wide] [--seconds 190]
"""

from __future__ import annotations

import argparse
import gc
import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from speculative_load import throughput
from speculative_record import record_blocks
from speculative_report import Report
from speculative_wide import WideModel, replay_ms

from deepinfer.engine.recording import record_call
from deepinfer.models import load_model
from deepinfer.models.deepseek_v41.decode_draft import DraftStep
from deepinfer.models.deepseek_v41.decode_inputs import DecodeInputs
from deepinfer.models.deepseek_v41.decode_step import DecodeStep
from speculative import look_lines, planner_lines

LOADS = (60, 256, 16, 128, 4, 1)
ROWS = (1, 2, 4, 8, 16, 32, 64, 96, 128, 192, 256, 384, 512, 768, 1024, 1536)
REQUESTS = (1, 4, 16, 60, 128, 256)


def nano_curve(report: Report, context: int = 1024) -> None:
    """Milliseconds of the steps of `nano` by rows and of drafting by requests."""
    model = load_model("nano", device="cuda", dtype=torch.bfloat16)
    slots = max(REQUESTS)
    cache = model.new_cache(slots, context, 64)
    step = DecodeStep(model, cache)

    def measured(call: Callable[[], Any]) -> float:
        graph, _ = record_call(call, torch.device("cuda"))
        return replay_ms(graph.replay)

    for rows in ROWS:
        inputs = DecodeInputs.empty(rows, 1, "cuda")
        at = torch.arange(rows, device="cuda")
        inputs.ids.copy_((7 + at % 500).unsqueeze(1))
        inputs.values[:, 0] = context - 64 + at // slots  # what several rows of a slot look like
        inputs.values[:, 1] = at % slots
        inputs.values[:, 2] = 1
        found = measured(lambda i=inputs: step(i, context))
        report.add(f"curve, nano, {rows} rows", value=found, unit="ms")
    drafter = DraftStep(model, cache)
    width = len(model.config.dspark_target_layer_ids) * model.config.hidden_size
    for requests in REQUESTS:
        at = torch.arange(requests, device="cuda")
        places = torch.full_like(at, context - 64)
        draft = measured(
            lambda a=at, p=places: drafter.draft_greedy(a + 7, p, a, torch.zeros_like(p))
        )
        features = torch.randn(6 * requests, width, device="cuda", dtype=model.embed.weight.dtype)
        counts = torch.full_like(at, 3)
        extend = measured(
            lambda f=features, a=at, p=places, c=counts: drafter.extend_context(f, p, a, c)
        )
        report.add(
            f"curve, nano, drafting for {requests}", draft_ms=draft, context_ms=extend,
            value=draft + extend, unit="ms",
        )  # fmt: skip


def wide_parts(report: Report, options: Any, *, curve: bool, load: bool) -> None:
    """The curve of real widths, and engines that run at its cost."""
    with torch.inference_mode():
        began = time.perf_counter()
        model = WideModel("cuda")
        report.add("real widths, model", seconds=time.perf_counter() - began)
        if curve:
            report.run("curve, real widths", lambda: add_all(report, model.target_lines()))
            report.run("curve, drafting", lambda: add_all(report, model.draft_lines(REQUESTS)))
    if load:
        with model.borrowed_by():
            throughput(report, options, "nano at the cost of five wide layers", options.wide_loads)


def add_all(report: Report, lines: Iterator[tuple[str, dict[str, Any]]]) -> None:
    """Every line."""
    for case, values in lines:
        report.add(case, **values)


def parts(report: Report, options: Any) -> Iterator[tuple[str, Callable[[], object]]]:
    """What can be asked for, in order."""
    yield "blocks", lambda: record_blocks(report, options)
    yield "load", lambda: throughput(report, options, "nano", options.loads)

    def planner() -> None:
        for line in (*planner_lines(), *look_lines()):
            report.add(line.pop("case"), **line)

    yield "planner", planner
    if options.device == "cuda":
        yield "nano-curve", lambda: nano_curve(report)
        both = {name: not options.only or name in options.only for name in ("curve", "wide")}
        if all(both.values()):
            yield "curve", lambda: wide_parts(report, options, curve=True, load=True)
        else:
            yield "curve", lambda: wide_parts(report, options, curve=True, load=False)
            yield "wide", lambda: wide_parts(report, options, curve=False, load=True)


def main() -> None:
    """Runs the parts."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--only", nargs="*", default=[], help="blocks, load, planner, nano-curve, curve, wide"
    )
    parser.add_argument("--seconds", type=float, default=190.0)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--prompts", type=int, default=192, help="recorded prompts of each kind")
    parser.add_argument("--tokens", type=int, default=128, help="tokens of each recorded answer")
    parser.add_argument("--loads", type=int, nargs="+", default=LOADS)
    parser.add_argument("--wide-loads", type=int, nargs="+", default=(60, 128, 256, 16, 4, 1))
    parser.add_argument(
        "--stretch", type=int, default=64, help="tokens a request before the next way's turn"
    )
    parser.add_argument("--tokens-timed", type=int, default=384, help="of a request, in stretches")
    parser.add_argument("--repeats", type=int, default=4)
    parser.add_argument("--out", default=os.environ.get("OUT", "."))
    options = parser.parse_args()
    report = Report(Path(options.out) / "speculative_gpu.jsonl", options.seconds, options.device)
    for name, work in parts(report, options):
        if not options.only or name in options.only:
            report.run(name, work)
            gc.collect()


if __name__ == "__main__":
    main()
