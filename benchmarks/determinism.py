"""What deterministic mode costs, and whether it holds: on the CPU by default, on one GPU with `--device cuda`.

CPU: decode steps at batch 1 and 16 and a prefill chunk of a random model of nano's size, fast and deterministic side
by side in one run, on one thread, in processor time; then the distinct results over several situations, in both modes.

GPU: first every batch-invariant kernel against float64; then rows in batches of many sizes, bit for bit, with
`torch.mm` as the control; then products of real widths against `torch.mm` from recorded graphs whose weights do not
fit the cache; then whole models (nano's size, and 8 layers of real widths with random weights): distinct results,
recorded steps against general ones, and the time of prefill and decode in both modes. JSON lines go to $OUT (or
--out), a table comes last. Parts that no longer fit into --seconds are left out and named.
Run: PYTHONPATH=src python benchmarks/determinism.py [--device cuda] [--seconds 150]
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import platform
import statistics
import subprocess
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from model_step import cpu_name, random_model, small_config
from torch import Tensor

from deepinfer import SamplingParams
from deepinfer.engine.graphs import DecodeGraphs, GraphBucket, GraphRow
from deepinfer.kernels import batch_invariant as bi
from deepinfer.kernels.fused import fused_kernels
from deepinfer.models import load_model
from deepinfer.models.deepseek_v41 import DeepseekV41, DeepseekV41Config, ForwardBatch, Segment
from deepinfer.models.deepseek_v41.engram import EngramHash
from deepinfer.testing.determinism import Situation, unique_model_rows, unique_rows
from deepinfer.testing.engine_determinism import engine_situations, unique_engine_streams

WIDTHS = (
    (1280, 5120), (32768, 1280), (5120, 8192), (512, 5120), (4608, 5120), (5120, 2304), (8192, 2048),
)  # fmt: skip
COUNTS = (1, 16, 64, 256, 1024, 4096)
BATCHES = (1, 2, 7, 15, 16, 17, 31, 33, 63, 64, 65, 128, 257, 512, 600, 1025)


class Report:
    """Cases as JSON lines and as rows of the last table."""

    def __init__(
        self, path: Path, seconds: float, device: str, only: tuple[str, ...] = ("",)
    ) -> None:
        self._only = only
        self._file = path.open("a")
        self._began = time.perf_counter()
        self._end = self._began + seconds
        git = ["git", "-C", str(Path(__file__).resolve().parent), "rev-parse", "--short", "HEAD"]
        self._machine = {
            "device": device,
            "versions": {"python": platform.python_version(), "torch": torch.__version__},
            "commit": subprocess.run(git, capture_output=True, text=True).stdout.strip(),
            "date": datetime.date.today().isoformat(),
        }
        self.lines: list[str] = []

    def add(self, case: str, **values: Any) -> None:
        """Writes a case and shows it."""
        found = {k: float(f"{v:.4g}") if isinstance(v, float) else v for k, v in values.items()}
        at = round(time.perf_counter() - self._began, 1)
        line = {"part": "determinism", "case": case, **found, **self._machine}
        self._file.write(json.dumps(line) + "\n")
        self._file.flush()
        self.lines.append(f"{case:40s} " + " ".join(f"{k}={v}" for k, v in found.items()))
        print(f"[{at:6.1f}s] {self.lines[-1]}", flush=True)

    def run(self, case: str, work: Callable[[], object]) -> None:
        """Runs a part if it is asked for and there is time; a failure is a line, and the next parts still run."""
        if not case.startswith(self._only):
            return
        if time.perf_counter() > self._end:
            self.add(case, skipped="no time left")
            return
        try:
            work()
        except Exception as error:
            self.add(case, error=f"{type(error).__name__}: {error}"[:400])
            traceback.print_exc()


# ---- kernels on the GPU ----


def randn(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> Tensor:
    """Normal values on the GPU."""
    generator = torch.Generator(device="cuda").manual_seed(seed)
    return torch.randn(shape, generator=generator, device="cuda").to(dtype)


def cancelling(rows: int, out: int, inner: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Factors whose products are nothing but rounding errors, which show every other order of sums."""
    x, w = randn(rows, inner, dtype=dtype), randn(out, inner, dtype=dtype, seed=1)
    generator = torch.Generator().manual_seed(2)
    one, two = torch.randperm(inner, generator=generator)[: inner // 2 * 2].chunk(2)
    x[:, two.cuda()], w[:, two.cuda()] = -x[:, one.cuda()], w[:, one.cuda()]
    return x, w


def relative(found: Tensor, wanted: Tensor) -> float:
    """Relative distance in the 2-norm."""
    wanted = wanted.double()
    return float((found.double() - wanted).norm() / wanted.norm())


def check_values(report: Report) -> None:
    """Every kernel against float64."""
    limits = {torch.bfloat16: 4e-3, torch.float32: 2e-6}
    for dtype, limit in limits.items():
        name, worst = str(dtype)[6:], {}
        for rows in (1, 16, 33, 64, 200, 600, 1024):
            for out, inner in ((1280, 5120), (24, 4096), (16, 320), (100, 72), (20000, 256)):
                x, w = randn(rows, inner, dtype=dtype), randn(out, inner, dtype=dtype, seed=1)
                error = relative(bi.linear(x, w), x.double() @ w.double().T)
                worst[rows] = max(worst.get(rows, 0.0), error)
        report.add(
            f"value linear {name}", error=max(worst.values()), good=max(worst.values()) < limit
        )
        x, w = randn(70, 8, 512, dtype=dtype), randn(8, 128, 512, dtype=dtype)
        error = relative(
            bi.grouped_linear(x, w), torch.einsum("tgk,gnk->tgn", x.double(), w.double())
        )
        report.add(f"value grouped_linear {name}", error=error, good=error < limit)
        counts = [0, 3, 70, 1, 0, 16, 130, 0]
        x, w = randn(220, 256, dtype=dtype), randn(8, 192, 256, dtype=dtype)
        wanted = torch.cat(
            [p.double() @ w[e].double().T for e, p in enumerate(x.split(counts)) if len(p)]
        )
        error = relative(bi.expert_linear(x, w, torch.tensor(counts, device="cuda")), wanted)
        report.add(f"value expert_linear {name}", error=error, good=error < limit)
        for heads, dim in ((16, 512), (8, 128), (64, 512)):
            if dtype is torch.float32 and dim > 128:
                continue
            q, kv, sink = (
                randn(9, heads, dim, dtype=dtype),
                randn(900, dim, dtype=dtype),
                randn(heads),
            )
            generator = torch.Generator(device="cuda").manual_seed(3)
            index = torch.randint(900, (9, 640), generator=generator, device="cuda")
            valid = torch.rand(9, 640, generator=generator, device="cuda") > 0.3
            valid[3] = False
            logits = torch.einsum("thd,trd->thr", q.double(), kv[index].double()) * dim**-0.5
            logits = logits.masked_fill(~valid.unsqueeze(1), -torch.inf)
            column = sink.double().view(1, -1, 1).expand(9, -1, 1)
            shares = torch.cat((logits, column), -1).softmax(-1)[..., :-1]
            wanted = torch.einsum("thr,trd->thd", shares, kv[index].double())
            found = bi.sparse_attention(q, kv, index, valid, sink, dim**-0.5)
            error = relative(found, wanted)
            report.add(
                f"value attention {name} h{heads} d{dim}", error=error, good=error < 2 * limit
            )
        q, k, w = (
            randn(2, 5, 64, 128, dtype=dtype),
            randn(2, 700, 128, dtype=dtype),
            randn(2, 5, 64),
        )
        dots = torch.einsum("gthd,grd->gthr", q.double(), k.double()).relu()
        error = relative(bi.index_scores(q, w, k), (dots * w.double().unsqueeze(-1)).sum(2))
        report.add(f"value index_scores {name}", error=error, good=error < 2e-6)
        x, gains = randn(40, 5120, dtype=dtype), randn(5120, dtype=dtype)
        square = x.double().square().mean(-1, True)
        error = relative(
            bi.rms_norm(x, gains, 1e-6), x.double() * (square + 1e-6).rsqrt() * gains.double()
        )
        report.add(f"value rms_norm {name}", error=error, good=error < limit)
    x = randn(7, 129280) * 3
    error = relative(bi.log_softmax(x), x.double().log_softmax(-1))
    report.add("value log_softmax", error=error, good=error < 1e-6)
    x = randn(99, 4, 4)
    k = torch.softmax(x.double(), -1) + 1e-6
    k = k / (k.sum(-2, True) + 1e-6)
    for _ in range(19):
        k = k / (k.sum(-1, True) + 1e-6)
        k = k / (k.sum(-2, True) + 1e-6)
    error = relative(bi.sinkhorn(x, 20, 1e-6), k)
    report.add("value sinkhorn", error=error, good=error < 2e-6)
    streams, output = randn(9, 4, 3000, dtype=torch.bfloat16), randn(9, 3000, dtype=torch.bfloat16)
    post, mix = randn(9, 4), randn(9, 4, 4)
    wanted = post.double().unsqueeze(-1) * output.double().unsqueeze(1)
    wanted += torch.einsum("tij,tic->tjc", mix.double(), streams.double())
    error = relative(bi.mix_streams(streams, output, post, mix), wanted)
    report.add("value mix_streams", error=error, good=error < 4e-3)


def check_rows(report: Report) -> None:
    """Rows of one batch against the same rows of every other size."""
    for dtype in (torch.bfloat16, torch.float32):
        name = str(dtype)[6:]
        for out, inner in ((1280, 5120), (20000, 1280), (24, 8192), (320, 96)):
            x, w = cancelling(max(BATCHES), out, inner, dtype)
            for label, fn in (("linear", bi.linear), ("control mm", F.linear)):
                whole, bad = fn(x, w), []
                for rows in BATCHES:
                    for first in {0, max(BATCHES) - rows}:
                        part = fn(x[first : first + rows].clone(), w)
                        if not torch.equal(part, whole[first : first + rows]):
                            bad.append(rows)
                report.add(f"rows {label} {name} {out}x{inner}", bad_sizes=sorted(set(bad)))
        w = randn(16, 320, 256, dtype=dtype)
        x = randn(2000, 256, dtype=dtype)
        alone = bi.expert_linear(x[:1], w, torch.tensor([0, 1] + [0] * 14, device="cuda"))
        bad = []
        for count in (1, 2, 15, 16, 17, 64, 65, 300, 1900):
            for at in {0, count - 1}:
                batch = x.clone()
                batch[5 + at] = x[0]
                counts = torch.tensor([5, count, 1995 - count] + [0] * 13, device="cuda")
                if not torch.equal(bi.expert_linear(batch, w, counts)[5 + at], alone[0]):
                    bad.append(count)
        report.add(f"rows expert_linear {name}", bad_sizes=sorted(set(bad)))
        x, w = cancelling(2000, 16 * 320, 256, dtype)
        w = w.view(16, 320, 256)
        generator = torch.Generator(device="cuda").manual_seed(3)
        experts = torch.randint(16, (2000, 4), generator=generator, device="cuda")
        kernels = fused_kernels("cuda")
        for label, fn in (
            ("pair_linear", bi.pair_linear),
            ("control grouped", kernels.grouped_linear),
        ):
            whole = fn(x, w, kernels.expert_order(experts, 16), 4)
            bad = []
            for rows in BATCHES:
                for first in {0, 2000 - rows}:
                    end = first + rows
                    order = kernels.expert_order(experts[first:end].clone(), 16)
                    if not torch.equal(
                        fn(x[first:end].clone(), w, order, 4), whole[4 * first : 4 * end]
                    ):
                        bad.append(rows)
            report.add(f"rows {label} {name}", bad_sizes=sorted(set(bad)))
    x = randn(2048, 5120, dtype=torch.bfloat16)
    gains = randn(5120, dtype=torch.bfloat16)
    for label, fn in (
        ("rms_norm", lambda r: bi.rms_norm(r, gains, 1e-6)),
        ("row_sum", bi.row_sum),
        ("log_softmax", bi.log_softmax),
        ("sigmoid", lambda r: bi.sigmoid(r.float())),
        ("control mean", lambda r: r.float().square().mean(-1)),
    ):
        found = unique_rows(fn, x, (1, 2, 255, 256, 257, 2048), places=2)
        report.add(f"rows {label}", distinct=found.count)


def graph_time_us(calls: list[Callable[[], object]], repeats: int = 5) -> float:
    """Median time of one call, from replays of a recording of all of them."""
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        for call in calls[:2]:
            call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for call in calls:
            call()
    graph.replay()
    times = []
    for _ in range(repeats):
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end) * 1e3 / len(calls))
    return statistics.median(times)


def time_products(report: Report) -> None:
    """Products against `torch.mm`; weights rotate, so that they come from memory."""
    for out, inner in WIDTHS:
        copies = max(2, min(24, int(3e8 / (out * inner * 2))))
        weights = [randn(out, inner, dtype=torch.bfloat16, seed=i) for i in range(copies)]
        for rows in COUNTS:
            x = randn(rows, inner, dtype=torch.bfloat16)
            ours = graph_time_us([lambda w=w, x=x: bi.linear(x, w) for w in weights])
            theirs = graph_time_us([lambda w=w, x=x: F.linear(x, w) for w in weights])
            moved = 2.0 * (out * inner + rows * (out + inner))
            report.add(
                f"time {out}x{inner} rows {rows}", us=ours, mm_us=theirs, ratio=theirs / ours,
                tflops=2e-6 * rows * out * inner / ours, gbytes_s=moved / ours * 1e-3,
            )  # fmt: skip
        del weights
    for out, inner, rows in ((24, 20480, 1), (24, 20480, 64), (24, 20480, 1024), (384, 5120, 1),
                             (384, 5120, 64), (384, 5120, 1024)):  # fmt: skip
        weights = [randn(out, inner, seed=i) for i in range(8)]
        x = randn(rows, inner)
        ours = graph_time_us([lambda w=w, x=x: bi.linear(x, w) for w in weights])
        theirs = graph_time_us([lambda w=w, x=x: F.linear(x, w) for w in weights])
        report.add(
            f"time fp32 {out}x{inner} rows {rows}", us=ours, mm_us=theirs, ratio=theirs / ours
        )


# ---- models ----


def wide_config() -> DeepseekV41Config:
    """Eight layers whose attention has the real widths."""
    fields = {
        "vocab_size": 32768, "hidden_size": 2048, "num_hidden_layers": 8, "moe_intermediate_size": 768,
        "num_attention_heads": 16, "head_dim": 512, "qk_rope_head_dim": 64, "q_lora_rank": 512,
        "o_lora_rank": 512, "o_groups": 4, "n_routed_experts": 32, "num_experts_per_tok": 6,
        "sliding_window": 128, "compress_ratios": [0, 2, 2, 2, 1, 1, 1, 1],
        "kv_source_layer_ids": [1, 2, 4], "index_source_layer_ids": [1, 2, 4, 6],
        "candidate_source_layer_id": 4, "index_n_heads": 64, "index_head_dim": 128, "index_topk": 512,
        "candidate_topk_blocks": 256, "candidate_block_size": 4, "max_position_embeddings": 16384,
        "rope_scaling": {
            "rope_type": "yarn", "factor": 4, "beta_fast": 32, "beta_slow": 1,
            "original_max_position_embeddings": 4096,
        },
        "engram_layer_ids": [1], "engram_vocab_size": 20000, "engram_n_heads": 4,
        "engram_head_dim": 256, "engram_compressed_vocab_size": 32768, "num_nextn_predict_layers": 0,
        "dspark_target_layer_ids": [],
    }  # fmt: skip
    names = ("engram_layer_ids", "engram_vocab_size", "engram_n_heads")
    rows = EngramHash.table_rows(**{k: fields[k] for k in names})
    return DeepseekV41Config(**fields, engram_num_embeddings=rows)


def gpu_model(config: DeepseekV41Config) -> DeepseekV41:
    """A model with random weights, made on the GPU."""
    model = DeepseekV41(config, rounding="full", device="cuda", dtype=torch.bfloat16)
    generator = torch.Generator(device="cuda").manual_seed(1)
    for name, p in model.named_parameters():
        p.normal_(generator=generator)
        if p.dim() >= 2 and not name.endswith(("q_weight", "k_weight")):
            p.mul_(0.5 if "embed" in name else p.shape[-1] ** -0.5)
        else:
            p.mul_(0.2).add_(0 if name.endswith(("base", "bias", "bias_vl", "sink")) else 1)
    return model


def check_model(report: Report, name: str, model: DeepseekV41, length: int) -> None:
    """Distinct results in several situations, and recorded steps against general ones."""
    generator = torch.Generator().manual_seed(4)
    ids = torch.randint(5, model.config.vocab_size, (length,), generator=generator).tolist()
    cases = [
        Situation((length,)), Situation((64,), 3, 1), Situation((100, 7), 15, 9, first=False),
        Situation((length - 12, 1), 63, 40), Situation((length - 25, 5), 7, 0),
        Situation((256,), 1, 1, first=False),
    ]  # fmt: skip
    for mode in (True, False):
        model.set_deterministic(mode)
        found = unique_model_rows(model, ids, cases)
        report.add(
            f"unique {name} {'deterministic' if mode else 'control'}",
            distinct=found.count, of=len(cases), largest_difference=found.largest_difference,
        )  # fmt: skip
    model.set_deterministic(True)
    whole = model.logits(ids)
    cached = model.new_cache(1, length + 2, length)
    hidden = model(ForwardBatch.from_segments([(0, 0, ids)], device="cuda"), cached).hidden
    report.add(f"plain pass {name}", equal=torch.equal(model.compute_logits(hidden), whole))
    cut = length - 8
    cache = model.new_cache(4, length + 64, length)
    for slot in range(4):
        model(ForwardBatch.from_segments([(slot, 0, ids[: cut - slot])], device="cuda"), cache)
    graphs = DecodeGraphs(model, cache)
    for rows in (4, 1):
        graphs.warmup([GraphBucket(rows, 1, length + 64)])
    equal = True
    for step in range(6):
        slots = (0,) if step % 2 else (0, 1, 2, 3)
        held = {slot: cache.lengths[slot] for slot in slots}
        run = graphs.try_run([GraphRow(Segment(s, at, 1), [ids[at]]) for s, at in held.items()])
        if run is None:
            raise RuntimeError(str(graphs.stats.misses or graphs.unsupported))
        for (_, at), row in zip(held.items(), run.offsets, strict=True):
            equal &= torch.equal(run.logits[row], whole[at])
    report.add(f"recorded steps {name}", equal=equal)


def time_model(
    report: Report, name: str, model: DeepseekV41, context: int, batches: tuple[int, ...]
) -> None:
    """Prompts one after the other, then decode steps from recordings, in both modes; what compiles runs before."""
    generator = torch.Generator().manual_seed(5)
    steps = 256
    prefill: dict[bool, float] = {}
    for batch in batches:
        prompts = torch.randint(
            5, model.config.vocab_size, (batch, context), generator=generator
        ).tolist()
        decode: dict[bool, float] = {}
        total: dict[bool, float] = {}
        for mode in (False, True):
            model.set_deterministic(mode)
            cache = model.new_cache(batch, context + steps + 44, context)
            graphs = DecodeGraphs(model, cache)
            graphs.warmup([GraphBucket(batch, 1, context + steps + 44)])

            def run(slot: int, cache=cache, prompts=prompts) -> None:
                batch = ForwardBatch.from_segments([(slot, 0, prompts[slot])], device="cuda")
                model.compute_logits(model(batch, cache).hidden[-1:])

            for _ in range(3):
                run(0)
                cache.reset(0)
            torch.cuda.synchronize()
            start = time.perf_counter()
            for slot in range(batch):
                run(slot)
            torch.cuda.synchronize()
            all_prompts = time.perf_counter() - start
            prefill[mode] = all_prompts / batch
            start = time.perf_counter()
            events = []
            for step in range(steps):
                rows = [GraphRow(Segment(s, context + step, 1), [7 + s]) for s in range(batch)]
                events.append([torch.cuda.Event(enable_timing=True) for _ in range(2)])
                events[-1][0].record()
                if graphs.try_run(rows) is None:
                    raise RuntimeError(str(graphs.stats.misses or graphs.unsupported))
                events[-1][1].record()
            torch.cuda.synchronize()
            total[mode] = all_prompts + time.perf_counter() - start
            decode[mode] = statistics.median(a.elapsed_time(b) for a, b in events) / 1e3
            graphs.close()
            del graphs, cache
        report.add(
            f"decode {name} batch {batch}", fast_ms=decode[False] * 1e3,
            deterministic_ms=decode[True] * 1e3, cost=decode[True] / decode[False] - 1,
        )  # fmt: skip
        report.add(
            f"end to end {name} {batch} x {context}/{steps}", fast_s=total[False],
            deterministic_s=total[True], cost=total[True] / total[False] - 1,
        )  # fmt: skip
    report.add(
        f"prefill {name} {context} tokens", fast_ms=prefill[False] * 1e3,
        deterministic_ms=prefill[True] * 1e3, cost=prefill[True] / prefill[False] - 1,
    )  # fmt: skip


def check_engine(report: Report) -> None:
    """Streams of tokens and log probabilities that engines give for one request of nano, and a control."""
    model = load_model("nano", device="cuda", dtype=torch.bfloat16)
    prompt = [(i * 7 + i * i) % 480 + 5 for i in range(150)]
    for hot in ({"temperature": 0}, {"temperature": 0.9, "seed": 5}):
        params = SamplingParams(max_tokens=32, ignore_eos=True, logprobs=0, **hot)
        cases = list(engine_situations())
        for mode, some in ((True, cases), (False, cases[::3])):
            found = unique_engine_streams(model, prompt, some, params, {"deterministic": mode})
            report.add(
                f"engine nano {'greedy' if len(hot) == 1 else 'sampled'} "
                f"{'deterministic' if mode else 'control'}",
                distinct=found.count, of=len(some),
            )  # fmt: skip


def on_gpu(report: Report) -> None:
    """All parts of the GPU run."""
    torch.backends.cuda.matmul.allow_tf32 = False
    report.run("values", lambda: check_values(report))
    report.run("rows", lambda: check_rows(report))
    models: dict[str, DeepseekV41] = {}

    def make(name: str, config: Callable[[], DeepseekV41Config]) -> None:
        models[name] = gpu_model(config())
        models[name].set_engram_token_map(range(models[name].config.vocab_size))

    for name, config in (("nano size", small_config), ("real widths", wide_config)):
        report.run(f"make {name}", lambda n=name, c=config: make(n, c))
        if name in models:
            report.run(f"unique {name}", lambda n=name: check_model(report, n, models[n], 700))
    for name, model in models.items():
        report.run(
            f"time {name}", lambda n=name, m=model: time_model(report, n, m, 1024, (1, 16, 64))
        )
    report.run("engine", lambda: check_engine(report))
    report.run("products", lambda: time_products(report))


# ---- CPU ----


def on_cpu(report: Report, repeats: int) -> None:
    """All parts of the CPU run."""
    torch.set_num_threads(1)
    model = random_model(small_config(), "full")
    model.set_engram_token_map(range(model.config.vocab_size))
    generator = torch.Generator().manual_seed(2)
    context = 300
    for batch in (1, 16):
        prompts = torch.randint(5, 2560, (batch, context), generator=generator).tolist()
        caches = {}
        for mode in (False, True):
            model.set_deterministic(mode)
            caches[mode] = model.new_cache(batch, context + repeats + 8)
            for slot, prompt in enumerate(prompts):
                model(ForwardBatch.from_segments([(slot, 0, prompt)]), caches[mode])
        times: dict[bool, list[float]] = {False: [], True: []}
        for step in range(repeats):
            for mode in (False, True):
                model.set_deterministic(mode)
                start = time.process_time()
                rows = [(s, context + step, [7 + s]) for s in range(batch)]
                out = model(ForwardBatch.from_segments(rows), caches[mode])
                model.compute_logits(out.hidden)
                times[mode].append(time.process_time() - start)
        fast, slow = (statistics.median(times[m][3:]) * 1e3 for m in (False, True))
        report.add(
            f"decode step, batch {batch}", fast_ms=fast, deterministic_ms=slow, ratio=slow / fast
        )
    times = {False: [], True: []}
    for _ in range(max(repeats // 10, 3)):
        for mode in (False, True):
            model.set_deterministic(mode)
            start = time.process_time()
            model(ForwardBatch.from_segments([(0, 0, prompts[0])]), model.new_cache(1, context))
            times[mode].append(time.process_time() - start)
    fast, slow = (statistics.median(times[m]) * 1e3 for m in (False, True))
    report.add(f"prefill {context} tokens", fast_ms=fast, deterministic_ms=slow, ratio=slow / fast)
    cases = [
        Situation((1,)), Situation((7,), 3, 2), Situation((64,), 15, 9, first=False), Situation((120,)),
        Situation((90, 1), 7, 7),
    ]  # fmt: skip
    for mode in (True, False):
        found = unique_model_rows(model.set_deterministic(mode), prompts[0][:120], cases)
        report.add(
            f"unique {'deterministic' if mode else 'control'}",
            distinct=found.count, of=len(cases), largest_difference=found.largest_difference,
        )  # fmt: skip


def main() -> None:
    """Measures, and prints the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--seconds", type=float, default=150, help="no part starts after this")
    parser.add_argument("--repeats", type=int, default=60, help="decode steps on the CPU")
    parser.add_argument(
        "--only", nargs="+", default=[""], help="GPU: beginnings of the names of parts"
    )
    parser.add_argument("--out", type=Path, default=Path(os.environ.get("OUT", ".")))
    args = parser.parse_args()
    is_gpu = args.device == "cuda"
    device = torch.cuda.get_device_name() if is_gpu else f"{cpu_name()}, 1 thread"
    report = Report(args.out / "determinism.jsonl", args.seconds, device, tuple(args.only))
    with torch.inference_mode():
        if is_gpu:
            on_gpu(report)
        else:
            on_cpu(report, args.repeats)
    print("\n".join(["", f"{device}, torch {torch.__version__}", *report.lines]))


if __name__ == "__main__":
    main()
