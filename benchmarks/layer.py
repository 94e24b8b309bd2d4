"""One layer of DeepSeek-V4.1-Flash at its real widths, from packed weights and packed caches, through the kernels.

Hidden 5120, 64 heads of 512, 384 experts in MXFP4 of which 6 serve a token, dense weights in FP8 with 32x32 blocks,
528-byte window rows, 288-byte pool rows, 68-byte index keys; random values. Decode steps of 64 and 256 requests are
recorded; prompts of 8,192 and 2,048 tokens are run in one step each. Three models share their weights: one layer that owns a pool and
selects rows (S), that and one that reuses the selection (SR), and two of the first kind (SS); differences give each kind
of layer alone, and the rest of a step (index arithmetic, embedding, head). Beside each time stands the sum of the least times
of its parts, from bytes and operations at the limits that this card reaches. `--profile` tells the parts of a step apart,
by events around the functions of a layer, and the kernels that take longest; `--torch` adds the same decode step through the
references in torch, `--check` compares results with those. JSON lines go to $OUT; tables come last.
Run: PYTHONPATH=src python benchmarks/layer.py [--profile] [--only prefill] [--small] [--seconds 60]
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import platform
import time
import traceback
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from layer_check import check_layers
from layer_choices import choices
from layer_least import least_ms
from layer_models import KINDS, filled_cache, layer_config, random_model, sharing
from layer_parts import Parts
from layer_times import AHEAD_CYCLES, Clock, host_functions, longest_kernels

from deepinfer.kernels import use_backend
from deepinfer.kernels.fused import fused_kernels
from deepinfer.kernels.reference import fused as reference
from deepinfer.models.deepseek_v41 import (
    DeepseekV41,
    DeepseekV41Config,
    ForwardBatch,
    Segment,
    packed_stack,
)
from deepinfer.models.deepseek_v41.decode_inputs import DecodeInputs, row_values
from deepinfer.models.deepseek_v41.decode_step import DecodeStep
from deepinfer.models.deepseek_v41.packed_products import prepare_products


@dataclass
class Found:
    """Milliseconds of a job by model: whole, on the device, and until the host had launched everything."""

    whole: dict[str, float] = field(default_factory=dict)
    on_device: dict[str, float] = field(default_factory=dict)
    on_host: dict[str, float] = field(default_factory=dict)


class Bench:
    """Times cases and writes them."""

    def __init__(self, path: Path, device: str, small: bool, seconds: float) -> None:
        self.file, self.device, self.small = path.open("a"), device, small
        self.clock = Clock(device)
        self.began = time.perf_counter()
        self.end = self.began + seconds
        self.tables: list[str] = []

    def say(self, *what: object) -> None:
        """Shows something with the seconds since the start."""
        print(f"{time.perf_counter() - self.began:6.1f} s", *what, flush=True)

    def write(self, case: str, ms: float, **more: Any) -> None:
        """Writes a line and shows it."""
        line = {
            "part": "layer", "case": case, "value": round(ms, 4), "unit": "ms", **more,
            "device": torch.cuda.get_device_name() if self.device == "cuda" else platform.machine(),
            "versions": {"python": platform.python_version(), "torch": str(torch.__version__)},
            "date": datetime.date.today().isoformat(),
        }  # fmt: skip
        self.file.write(json.dumps(line) + "\n")
        self.file.flush()
        self.say(case, round(ms, 4), {k: v for k, v in more.items() if "parts" not in k})

    def parts(self, case: str, model: DeepseekV41, call: Any, record: bool, total: float, least: dict[str, float]) -> None:  # fmt: skip
        """Tells the parts of a step apart, and the kernels that take longest."""
        watch = Parts(model.config, self.device, fused_kernels(self.device))
        with watch.watch():
            if self.device != "cuda":
                call()
            elif record:
                replay = self.clock.recorded(call)
                for _ in range(3):
                    replay()
            else:
                torch.cuda._sleep(AHEAD_CYCLES)
                call()
        if self.device == "cuda":
            torch.cuda.synchronize()
        times = watch.milliseconds()
        tops: dict[str, float] = {}
        for path, ms in times.items():
            inner = " > ".join(path.split(" > ")[:-1])
            if inner not in times:  # not inside of another function
                top = path.split(" > ")[0]
                tops[top] = tops.get(top, 0.0) + ms
        self.write(
            f"{case}: parts", sum(tops.values()), whole_ms=round(total, 4),
            parts={k: round(v, 4) for k, v in times.items()}, least_parts={k: round(v, 4) for k, v in least.items()},
        )  # fmt: skip
        rows = [
            f"-- {case}: whole {total:.3f} ms, parts {sum(tops.values()):.3f} ms (measured, least)"
        ]
        for top, ms in sorted(tops.items(), key=lambda kv: -kv[1]):
            rows.append(f"   {ms:9.4f} {least.get(top, 0.0):9.4f}  {top}")
            inner = [(k, v) for k, v in times.items() if k.startswith(f"{top} > ")]
            rows += [f"   {v:9.4f}            {k}" for k, v in sorted(inner, key=lambda kv: -kv[1])]
        self.tables.append("\n".join(rows))
        if self.device == "cuda":
            self.tables.append(longest_kernels(case, call))

    def decode(
        self, kind: str, model: DeepseekV41, rows: int, context: int, options: Any, found: Found
    ) -> None:
        """A recorded step of one token a request."""
        cache = filled_cache(model, rows, context, 16)
        inputs = DecodeInputs.empty(rows, 1, self.device)
        segments = [Segment(s, context, 1) for s in range(rows)]
        inputs.fill([[5 + s] for s in range(rows)], [row_values(s, 0) for s in segments])
        step = DecodeStep(model, cache)

        def call() -> None:
            step(inputs, context + 16)

        ms = self.clock.time(call, record=True, repeats=30)
        more: dict[str, Any] = {"context": context}
        if options.torch and kind == "S":
            plain = DecodeStep(model, cache, reference)  # type: ignore[arg-type]
            with use_backend("torch"):
                more["torch_ms"] = round(
                    self.clock.time(lambda: plain(inputs, context + 16), False, 3), 2
                )
        if self.device == "cuda" and kind != "SR":
            packed_stack._ALIGNED = False
            more["scales_of_32_ms"] = round(self.clock.time(call, record=True, repeats=20), 4)
            packed_stack._ALIGNED = True
        found.whole[kind] = found.on_device[kind] = ms
        self.write(f"decode, {rows} requests, layers {kind}", ms, **more)
        if options.profile and kind == "S":
            least = least_ms(model.config, rows, context, True)
            self.parts(f"decode {rows}, layers {kind}", model, call, True, ms, least)

    def prefill(
        self, kind: str, model: DeepseekV41, tokens: int, _: int, options: Any, found: Found
    ) -> None:
        """A prompt in one step, launched kernel by kernel."""
        cache = model.new_cache(1, tokens + 16, tokens, storage="packed")
        ids = torch.randint(3, 1000, (tokens,), device=self.device)

        def call() -> None:
            cache.reset(0)
            model(ForwardBatch(ids, (Segment(0, 0, tokens),)), cache)

        ms = self.clock.time(call, record=False, repeats=5)
        more: dict[str, float] = {}
        if self.device == "cuda":
            more["device_ms"] = round(self.clock.median(call, 5, ahead=True), 4)
            usual, least_host = self.clock.host(call, 15)
            more |= {"host_ms": round(usual, 4), "host_least_ms": round(least_host, 4)}
            found.on_host[kind] = least_host
            if kind != "SR":
                packed_stack._ALIGNED = False
                more["scales_of_32_ms"] = round(self.clock.median(call, 5, ahead=True), 4)
                packed_stack._ALIGNED = True
        found.whole[kind], found.on_device[kind] = ms, more.get("device_ms", ms)
        self.write(f"prefill, {tokens} tokens, layers {kind}", ms, **more)
        if options.profile and kind == "S":
            least = least_ms(model.config, tokens, tokens, True, prompt=True)
            self.parts(f"prefill {tokens}, layers {kind}", model, call, False, ms, least)
        if options.profile and self.device == "cuda" and tokens < 4096 and kind == "S":
            self.tables.append(host_functions(f"prefill {tokens}, layers {kind}", call))

    def run(self, options: Any) -> None:
        """All cases; a failure is told of and the next one run."""
        context = 256 if self.small else 8192
        jobs = [("prefill", 512 if self.small else 8192)]
        jobs += [("decode", b) for b in ((4,) if self.small else (64, 256))]
        jobs += [("prefill", 128 if self.small else 2048)]
        times: dict[tuple[str, int], Found] = {}
        full = random_model(layer_config("SS", self.small), self.device)
        prepare_products(full)
        models = {kind: sharing(full, kind, self.small) for kind in KINDS}
        if self.device != "cuda":  # the same calls, through the references
            for model in models.values():
                vars(model)["row_kernels"] = lambda: fused_kernels("cpu")
        self.say("models are made")
        if options.check:
            self.check(models["SR"])
        for job, size in jobs:
            for kind in ("SS", "SR", "S"):
                model = models[kind]
                if options.only and options.only != job:
                    continue
                if time.perf_counter() > self.end:
                    self.say("no time left for", kind, job, size)
                    continue
                try:
                    run = self.decode if job == "decode" else self.prefill
                    run(kind, model, size, context, options, times.setdefault((job, size), Found()))
                except Exception:
                    self.say("FAILED", kind, job, size, traceback.format_exc()[-1500:])
                if self.device == "cuda":
                    torch.cuda.empty_cache()
        if options.profile and self.device == "cuda":
            self.tables += choices(full, self.clock)
        print("\n".join(self.tables), flush=True)
        for (job, size), found in times.items():
            self.layers(job, size, found, context, full.config)

    def check(self, model: DeepseekV41) -> None:
        """Every stage, and a prompt, one beside a request that decodes, and a step, against the references in torch."""
        long, short = (300, 280) if self.small else (1100, 500)
        lines: list[str] = []
        share = None if self.device == "cuda" else 0.01
        check_layers(model, self.device, long, short, lines.append, share)
        for line in lines:
            self.say(line)

    def layers(
        self, job: str, size: int, found: Found, context: int, config: DeepseekV41Config
    ) -> None:
        """Lines of one layer of each kind, from the differences of models."""
        whole, on_device, on_host = found.whole, found.on_device, found.on_host
        if "S" not in whole:
            return
        for kind, name in (("SS", "pool source"), ("SR", "reuse")):
            if kind not in whole:
                continue
            # On the device: a prompt's host launches a layer while an earlier one runs.
            ms = on_device[kind] - on_device["S"]
            parts = least_ms(config, size, context, kind == "SS", prompt=job == "prefill")
            total = sum(parts.values())
            host = {"host_ms": round(on_host[kind] - on_host["S"], 4)} if on_host else {}
            self.write(
                f"{job} {size}: a layer, {name}", ms, least_ms=round(total, 4), share=round(total / ms, 3), **host,
                parts={k: round(v, 4) for k, v in parts.items()},
            )  # fmt: skip
        if "SS" in whole:
            rest = 2 * on_device["S"] - on_device["SS"]
            self.write(
                f"{job} {size}: rest of a step",
                2 * whole["S"] - whole["SS"],
                device_ms=round(rest, 4),
            )


def main() -> None:
    """Runs the benchmark."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--small", action="store_true")
    parser.add_argument("--profile", action="store_true")
    parser.add_argument("--torch", action="store_true")
    parser.add_argument("--check", action="store_true")
    parser.add_argument("--only", choices=("prefill", "decode"))
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument("--out", default=str(Path(os.environ.get("OUT", ".")) / "layer.jsonl"))
    options = parser.parse_args()
    torch.manual_seed(0)
    with torch.inference_mode():
        Bench(Path(options.out), options.device, options.small, options.seconds).run(options)


if __name__ == "__main__":
    main()
