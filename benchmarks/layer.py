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
import dataclasses
import datetime
import json
import math
import os
import platform
import time
import traceback
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from layer_check import check_layers
from layer_parts import Parts
from torch import nn

from deepinfer.kernels import KVCacheFormat, quantize_and_insert_k_cache, use_backend
from deepinfer.kernels.fused import fused_kernels
from deepinfer.kernels.reference import fused as reference
from deepinfer.models.deepseek_v41 import (
    DeepseekV41,
    DeepseekV41Config,
    ForwardBatch,
    Segment,
    SlotCache,
    packed_stack,
    wide_products,
)
from deepinfer.models.deepseek_v41.decode_inputs import DecodeInputs, row_values
from deepinfer.models.deepseek_v41.decode_step import DecodeStep
from deepinfer.models.deepseek_v41.packed_products import prepare_products
from deepinfer.models.packed import PackedWeight

# Cycles of the device in which the host launches a whole step: 40 ms.
_AHEAD_CYCLES = 70_000_000
ROOT = Path(__file__).resolve().parent.parent
COPY_TB_S, BF16_TFLOP_S, FP8_TFLOP_S = 4.26, 700.0, 1150.0
FP8_NAMES = (
    "wq_a",
    "wq_b",
    "wkv",
    "wo_b",
    "shared_experts.w1",
    "shared_experts.w2",
    "shared_experts.w3",
)
SMALL = {
    "hidden_size": 256, "moe_intermediate_size": 128, "num_attention_heads": 8, "q_lora_rank": 128,
    "o_groups": 2, "o_lora_rank": 128, "n_routed_experts": 8, "index_n_heads": 8, "index_topk": 64,
}  # fmt: skip


KINDS = {"S": (1, (0,)), "SR": (2, (0,)), "SS": (2, (0, 1))}


def layer_config(kind: str, small: bool) -> DeepseekV41Config:
    """The published widths with few layers over pools of ratio 2, and a small vocabulary."""
    flash = DeepseekV41Config.from_pretrained(ROOT / "tests/data/deepseek_v41_flash")
    layers, sources = KINDS[kind]
    return dataclasses.replace(
        flash,
        num_hidden_layers=layers, compress_ratios=(2,) * layers, kv_source_layer_ids=sources,
        index_source_layer_ids=sources, candidate_source_layer_id=None, engram_layer_ids=(), engram_num_embeddings=(),
        num_nextn_predict_layers=0, dspark_target_layer_ids=(), vocab_size=1024, engram_compressed_vocab_size=1024,
        dspark_noise_token_id=3, bos_token_id=0, eos_token_id=1, image_token_id=None, vision=None,
        **(SMALL if small else {}),
    )  # fmt: skip


def sharing(full: DeepseekV41, kind: str, small: bool) -> DeepseekV41:
    """A model with fewer layers of a kind and the weights of another one."""
    model = DeepseekV41(
        layer_config(kind, small), rounding="full", device="meta", dtype=full.embed.weight.dtype
    )
    for name, module in model.named_modules():
        twin = full.get_submodule(name)
        for key in list(module._parameters):
            module._parameters[key] = twin._parameters[key]
        for key in ("joined", "prepared", "wide_parts", "wide_whole", "mix_parts"):
            if key in vars(twin):
                setattr(module, key, vars(twin)[key])
    return model


def random_model(
    config: DeepseekV41Config, device: str, dtype: torch.dtype | None = None
) -> DeepseekV41:
    """A model with random weights, packed as in the published checkpoint."""
    dtype = dtype or (torch.bfloat16 if device == "cuda" else torch.float32)
    model = DeepseekV41(config, rounding="full", device="meta", dtype=dtype)
    for name, p in list(model.named_parameters()):
        *path, last = name.split(".")
        module = model.get_submodule(".".join(path))
        is_fp8 = ".".join(path).endswith((*FP8_NAMES, "indexer.wq_b")) and "compressor" not in path
        if last in ("w13", "w2") or is_fp8:
            value: torch.Tensor = packed(tuple(p.shape), last in ("w13", "w2"), device, dtype)
        else:
            value = torch.randn(p.shape, device=device) * (
                p.shape[-1] ** -0.5 if p.dim() > 1 else 0.1
            )
            is_offset = name.endswith(("base", "bias", "bias_vl", "sink"))
            value = (value if p.dim() > 1 or is_offset else 1 + value).to(p.dtype)
        setattr(module, last, nn.Parameter(value, requires_grad=False))
    return model


def packed(shape: tuple[int, ...], fp4: bool, device: str, dtype: torch.dtype) -> PackedWeight:
    """Random codes and scales of about the size that keeps activations at one."""
    weight = PackedWeight.empty(shape, "mxfp4" if fp4 else "fp8_block", device=device, dtype=dtype)
    typical = 127 - round(math.log2((2.5 if fp4 else 60) * shape[-1] ** 0.5))
    weight.scale.random_(typical - 1, typical + 2)
    if fp4:
        weight.codes.random_(0, 256)
    else:
        for part in weight.codes.split(1024):
            part.copy_(
                (torch.randn(part.shape, device=device) * 60)
                .to(torch.float8_e4m3fn)
                .view(torch.uint8)
            )
    return weight


def filled_cache(model: DeepseekV41, rows: int, context: int, step: int) -> SlotCache:
    """A packed cache whose slots hold `context` random tokens."""
    cache = model.new_cache(rows, context + max(step, 16), max(step, 16), storage="packed")
    table = cache.rows
    targets = [(t, KVCacheFormat.V41_MXFP8) for t in table.window_data]
    targets.append((table.pool_data, KVCacheFormat.V41_NVFP4))
    for data in table.index_keys.values():
        data.random_(120, 136)  # codes, and scales of about 1
    for data, form in targets:
        for start in range(0, len(data), 65536):
            part = data[start : start + 65536]
            values = torch.randn(len(part), form.channels, device=data.device)
            quantize_and_insert_k_cache(
                values, part, torch.arange(len(part), device=data.device), form, 1
            )
    cache.tokens.random_(3, 1000)
    cache.lengths[:] = [context] * rows
    return cache


def least_ms(
    config: DeepseekV41Config, rows: int, context: int, source: bool, prompt: bool = False
) -> dict[str, float]:
    """The least time of each part of a layer in ms, from bytes and operations."""
    c, hidden, heads, dim = config, config.hidden_size, config.num_attention_heads, config.head_dim

    def floor(size_bytes: float, flops: float = 0.0, rate: float = BF16_TFLOP_S) -> float:
        return max(size_bytes / COPY_TB_S / 1e9, flops / rate / 1e9)

    def product(n: int, k: int, element: float, rate: float) -> float:
        return floor(n * k * element + rows * (k + 2 * n), 2 * rows * n * k, rate)

    fp8 = 1 + 1 / 1024
    pairs = rows * c.num_experts_per_tok
    active = c.n_routed_experts * (1 - (1 - c.num_experts_per_tok / c.n_routed_experts) ** rows)
    expert = 3 * hidden * c.moe_intermediate_size
    keys = min(context // 2, c.index_topk)
    parts = {
        "streams": floor(4 * rows * hidden * 2 * 4 + 2 * 24 * 4 * hidden * 4),
        "query and window": product(c.q_lora_rank + dim, hidden, fp8, FP8_TFLOP_S)
        + product(heads * dim, c.q_lora_rank, fp8, FP8_TFLOP_S),
        "attention": floor(
            rows * (c.sliding_window * 528 + keys * 288 + 4 * heads * dim),
            4 * rows * heads * (c.sliding_window + keys) * dim,
        ),
        "output": floor(heads * dim * c.o_lora_rank * 2 + rows * heads * dim * 2, 2 * rows * heads * dim * c.o_lora_rank)
        + product(hidden, c.o_groups * c.o_lora_rank, fp8, FP8_TFLOP_S),
        "router": product(c.n_routed_experts, hidden, 4, BF16_TFLOP_S),
        "shared expert": product(3 * c.moe_intermediate_size, hidden, fp8, FP8_TFLOP_S),
        "experts": floor(
            active * expert * (0.5 + 1 / 32) + pairs * (2 * hidden + 6 * c.moe_intermediate_size),
            2 * pairs * expert, FP8_TFLOP_S,
        ),
    }  # fmt: skip
    if source:
        # A prompt's tokens see half of its rows on average, and share the keys.
        scored = context / 4 if prompt else context / 2
        read = context / 2 * 68 if prompt else rows * scored * 68
        parts["index"] = floor(
            read + 4 * rows * scored * 2,
            2 * rows * scored * c.index_n_heads * c.index_head_dim, FP8_TFLOP_S,
        ) + product(c.index_n_heads * c.index_head_dim, c.q_lora_rank, fp8, FP8_TFLOP_S)  # fmt: skip
        parts["pool"] = product(2 * dim, hidden, 4, BF16_TFLOP_S)
    return parts


class Bench:
    """Times cases and writes them."""

    def __init__(self, path: Path, device: str, small: bool, seconds: float) -> None:
        self.file, self.device, self.small = path.open("a"), device, small
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

    def time(self, call: Any, record: bool, repeats: int = 10) -> float:
        """Median milliseconds of a call, recorded as a graph if asked for."""
        call()
        if self.device != "cuda":
            began = time.perf_counter()
            call()
            return 1e3 * (time.perf_counter() - began)
        run = self.recorded(call) if record else call
        return self.median(run, repeats)

    def recorded(self, call: Any) -> Any:
        """A call that replays another one."""
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            call()
        return graph.replay

    def median(self, run: Any, repeats: int, ahead: bool = False) -> float:
        """Median milliseconds between two events; `ahead` lets the host launch everything before the first of them."""
        torch.cuda.synchronize()
        found = []
        for _ in range(repeats):
            if ahead:
                torch.cuda._sleep(_AHEAD_CYCLES)
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            begin.record()
            run()
            end.record()
            torch.cuda.synchronize()
            found.append(begin.elapsed_time(end))
        return sorted(found)[len(found) // 2]

    def host(self, run: Any, repeats: int) -> float:
        """Median milliseconds until a call has launched everything."""
        found = []
        for _ in range(repeats):
            torch.cuda.synchronize()
            began = time.perf_counter()
            run()
            found.append(1e3 * (time.perf_counter() - began))
        torch.cuda.synchronize()
        return sorted(found)[len(found) // 2]

    def host_functions(self, case: str, run: Any) -> None:
        """Where the host spends its time."""
        import cProfile
        import io
        import pstats

        watch = cProfile.Profile()
        for _ in range(5):
            torch.cuda.synchronize()
            watch.enable()
            run()
            watch.disable()
        text = io.StringIO()
        found = pstats.Stats(watch, stream=text)
        found.sort_stats("tottime").print_stats(25)
        found.sort_stats("cumtime").print_stats(30)
        rows = [line for line in text.getvalue().splitlines() if line.strip()]
        self.tables.append("\n".join([f"-- {case}: the host, five steps", *rows]))

    def parts(self, case: str, model: DeepseekV41, call: Any, record: bool, total: float, least: dict[str, float]) -> None:  # fmt: skip
        """Tells the parts of a step apart, and the kernels that take longest."""
        watch = Parts(model.config, self.device, fused_kernels(self.device))
        with watch.watch():
            if self.device != "cuda":
                call()
            elif record:
                replay = self.recorded(call)
                for _ in range(3):
                    replay()
            else:
                torch.cuda._sleep(_AHEAD_CYCLES)
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
        self, kind: str, model: DeepseekV41, rows: int, context: int, options: Any, found: dict[str, float],
        on_device: dict[str, float],
    ) -> None:  # fmt: skip
        """A recorded step of one token a request."""
        cache = filled_cache(model, rows, context, 16)
        inputs = DecodeInputs.empty(rows, 1, self.device)
        segments = [Segment(s, context, 1) for s in range(rows)]
        inputs.fill([[5 + s] for s in range(rows)], [row_values(s, 0) for s in segments])
        step = DecodeStep(model, cache)

        def call() -> None:
            step(inputs, context + 16)

        ms = self.time(call, record=True, repeats=30)
        more: dict[str, Any] = {"context": context}
        if options.torch and kind == "S":
            plain = DecodeStep(model, cache, reference)  # type: ignore[arg-type]
            with use_backend("torch"):
                more["torch_ms"] = round(
                    self.time(lambda: plain(inputs, context + 16), False, 3), 2
                )
        if self.device == "cuda" and kind != "SR":
            packed_stack._ALIGNED = False
            more["scales_of_32_ms"] = round(self.time(call, record=True, repeats=20), 4)
            packed_stack._ALIGNED = True
        found[kind] = on_device[kind] = ms
        self.write(f"decode, {rows} requests, layers {kind}", ms, **more)
        if options.profile and kind == "S":
            least = least_ms(model.config, rows, context, True)
            self.parts(f"decode {rows}, layers {kind}", model, call, True, ms, least)

    def prefill(
        self, kind: str, model: DeepseekV41, tokens: int, _: int, options: Any, found: dict[str, float],
        on_device: dict[str, float],
    ) -> None:  # fmt: skip
        """A prompt in one step, launched kernel by kernel."""
        cache = model.new_cache(1, tokens + 16, tokens, storage="packed")
        ids = torch.randint(3, 1000, (tokens,), device=self.device)

        def call() -> None:
            cache.reset(0)
            model(ForwardBatch(ids, (Segment(0, 0, tokens),)), cache)

        ms = self.time(call, record=False, repeats=5)
        more = {}
        if self.device == "cuda":
            more["device_ms"] = round(self.median(call, 5, ahead=True), 4)
            more["host_ms"] = round(self.host(call, 5), 4)
            if kind != "SR":
                packed_stack._ALIGNED = False
                more["scales_of_32_ms"] = round(self.median(call, 5, ahead=True), 4)
                packed_stack._ALIGNED = True
        found[kind], on_device[kind] = ms, more.get("device_ms", ms)
        self.write(f"prefill, {tokens} tokens, layers {kind}", ms, **more)
        if options.profile and kind == "S":
            least = least_ms(model.config, tokens, tokens, True, prompt=True)
            self.parts(f"prefill {tokens}, layers {kind}", model, call, False, ms, least)
        if options.profile and self.device == "cuda" and tokens < 4096 and kind == "S":
            self.host_functions(f"prefill {tokens}, layers {kind}", call)

    def run(self, options: Any) -> None:
        """All cases; a failure is told of and the next one run."""
        context = 256 if self.small else 8192
        jobs = [("prefill", 512 if self.small else 8192)]
        jobs += [("decode", b) for b in ((4,) if self.small else (64, 256))]
        jobs += [("prefill", 128 if self.small else 2048)]
        times: dict[tuple[str, int], tuple[dict[str, float], dict[str, float]]] = {}
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
                    kept = times.setdefault((job, size), ({}, {}))
                    run(kind, model, size, context, options, *kept)
                except Exception:
                    self.say("FAILED", kind, job, size, traceback.format_exc()[-1500:])
                if self.device == "cuda":
                    torch.cuda.empty_cache()
        if options.profile and self.device == "cuda":
            self.choices(full)
        print("\n".join(self.tables), flush=True)
        for (job, size), found in times.items():
            self.layers(job, size, *found, context, full.config)

    def check(self, model: DeepseekV41) -> None:
        """Every stage, and a prompt, one beside a request that decodes, and a step, against the references in torch."""
        long, short = (300, 280) if self.small else (1100, 500)
        lines: list[str] = []
        share = None if self.device == "cuda" else 0.01
        check_layers(model, self.device, long, short, lines.append, share)
        for line in lines:
            self.say(line)

    def choices(self, model: DeepseekV41) -> None:
        """Both forms of steps whose form follows from the number of tokens, and sizes of their kernels."""
        layer, hidden = model.layers[0], model.config.hidden_size
        run = SimpleNamespace(kernels=fused_kernels(self.device))
        gate, pool = layer.ffn.gate, layer.attn.compressor
        pair = [pool.wkv.weight, pool.wgate.weight]
        for rows in (16, 64, 128, 256, 512, 1024):
            streams = torch.randn(rows, 4, hidden, device=self.device, dtype=torch.bfloat16)
            pre = torch.rand(rows, 4, device=self.device)
            y = streams[:, 0].contiguous()

            def enter() -> None:
                packed_stack.enter(layer, streams, pre, run, "attn")  # noqa: B023

            def router() -> None:
                wide_products.wide_linear(gate, (gate.weight,), y)  # noqa: B023

            def compressor() -> None:
                wide_products.wide_linear(pool, pair, y)  # noqa: B023

            for module, name, call in (
                (packed_stack, "_MANY_TOKENS", enter),
                (wide_products, "_MANY_SUMS", router),
                (wide_products, "_MANY_SUMS", compressor),
            ):
                kept, found = getattr(module, name), []
                for least in (1, 1 << 60):
                    setattr(module, name, least)
                    found.append(self.time(call, record=True))
                setattr(module, name, kept)
                times = f"form for many tokens {found[0]:.4f} ms, for few {found[1]:.4f} ms"
                self.tables.append(f"-- {call.__name__}, {rows} tokens: {times}; {name} {kept}")
            for name, weight in (("router", gate.weight), ("compressor", pool.wide_whole)):
                self.tables.append(self.wide_sizes(f"{name}, {rows} tokens", y, weight))

    def wide_sizes(self, case: str, y: torch.Tensor, weight: torch.Tensor) -> str:
        """Times and errors of products with an fp32 weight, by the sizes of the kernel."""
        from deepinfer.kernels.triton.wide_products import WideTuning, tuning_for, wide_linear

        exact = y.double() @ weight.double().T
        usual = tuning_for(len(y), *weight.shape)
        sizes = [usual, dataclasses.replace(usual, pieces=2 * usual.pieces)]
        sizes += [dataclasses.replace(usual, tokens=n) for n in (16, 32, 128) if n <= len(y)]
        sizes.append(WideTuning(32, usual.pieces, usual.tokens, 6))
        found = []
        for one in dict.fromkeys(sizes):
            error = (wide_linear(y, weight, one) - exact).norm() / exact.norm()
            ms = self.time(lambda: wide_linear(y, weight, one), record=True)  # noqa: B023
            found.append(f"   {ms:.4f} ms, error {float(error):.1e}: {one}")
        other = torch.nn.functional.linear
        ms = self.time(lambda: other(y.float(), weight), record=True)
        error = (other(y.float(), weight) - exact).norm() / exact.norm()
        return "\n".join([f"-- {case}: torch {ms:.4f} ms, error {float(error):.1e}", *found])

    def layers(
        self, job: str, size: int, found: dict[str, float], on_device: dict[str, float], context: int,
        config: DeepseekV41Config,
    ) -> None:  # fmt: skip
        """Lines of one layer of each kind, from the differences of models."""
        if "S" not in found:
            return
        for kind, name in (("SS", "pool source"), ("SR", "reuse")):
            if kind not in found:
                continue
            # On the device: a prompt's host launches a layer while an earlier one runs.
            ms = on_device[kind] - on_device["S"]
            parts = least_ms(config, size, context, kind == "SS", prompt=job == "prefill")
            total = sum(parts.values())
            self.write(
                f"{job} {size}: a layer, {name}", ms, least_ms=round(total, 4), share=round(total / ms, 3),
                parts={k: round(v, 4) for k, v in parts.items()},
            )  # fmt: skip
        if "SS" in found:
            rest = 2 * on_device["S"] - on_device["SS"]
            self.write(
                f"{job} {size}: rest of a step",
                2 * found["S"] - found["SS"],
                device_ms=round(rest, 4),
            )


def longest_kernels(case: str, call: Any) -> str:
    """The kernels of a call that take longest."""
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CUDA]) as found:
        call()
        torch.cuda.synchronize()
    times: dict[str, list[float]] = {}
    for event in found.events():
        if event.device_time:
            times.setdefault(event.name[:70], []).append(event.device_time)
    each = sorted(times.items(), key=lambda kv: -sum(kv[1]))
    rows = [
        f"-- {case}: {sum(map(sum, times.values())) / 1e3:.3f} ms in {sum(map(len, times.values()))} kernels"
    ]
    rows += [f"   {sum(t):9.1f} us {len(t):4d} x {name}" for name, t in each[:24]]
    return "\n".join(rows)


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
