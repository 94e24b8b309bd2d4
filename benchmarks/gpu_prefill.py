"""Prefill at the widths of DeepSeek-V4.1-Flash on one GPU: layers that stop early, step costs, packed replays.

Weights are random bf16, made on the GPU; 8 routed experts, of which each token uses 6, small Engram tables and a small
vocabulary let 40 layers fit and change nothing in the work of a token. Rows are rounded to the formats of the cache
("cache"): rounding activations as well ("full") would add steps that a real kernel fuses.

1. "check": prompts whose rows stop behind the last KV source against the whole sequence under masks.
2. "prefill": time of cold prompts in chunks, all rows in all layers against narrowed ones, 40 layers; the share of time
   that narrowing takes away beside the share of operations.
3. "cost": steps of 10 layers with chunks behind prefixes of up to a million tokens, with and without decoding rows,
   which run from recordings; their prefixes are random rows that nothing computed. The step-cost model is fitted to one
   half of the steps and judged by the other: on the device's own time, the host being ahead, and on the time of a step
   that the device waits for ("as launched").
4. "replay": 1, 8 and 64 requests that each run a window again behind a prefix hit and a short suffix, in one ragged
   batch against one forward a request, 10 layers.

JSON lines, every timed step among them, go to `gpu_prefill.jsonl` in $OUT (or --out); a table comes last. Parts that no
longer fit into --seconds are left out and named. `--device cpu --tiny` tries everything with small sizes.
Run: PYTHONPATH=src python benchmarks/gpu_prefill.py [--seconds 75]
"""

from __future__ import annotations

import argparse
import dataclasses
import datetime
import gc
import json
import math
import os
import platform
import shutil
import statistics
import subprocess
import time
import traceback
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from model_step import small_config
from torch import Tensor

from deepinfer.core.plan import BlockUpdate
from deepinfer.engine.graphs import DecodeGraphs, GraphBucket, GraphRow
from deepinfer.models.deepseek_v41 import (
    DeepseekV41,
    DeepseekV41Config,
    ForwardBatch,
    Segment,
    SlotCache,
)
from deepinfer.models.deepseek_v41.engram import EngramHash
from deepinfer.models.deepseek_v41.flops import prefill_flops
from deepinfer.models.deepseek_v41.full_pass import Truncation
from deepinfer.scheduling import Chunk, StepSample, StepTimeModel, StepWork, fit_step_cost
from deepinfer.scheduling.step_work import bucket_name, bucket_of

ROOT = Path(__file__).resolve().parents[1]
SUFFIX = 16
_PAUSE_CYCLES = 50_000_000  # about 27 ms
SHORT = {  # 10 layers with the shares of 40: pools of both ratios, and a selection that is reused
    "num_hidden_layers": 10,
    "compress_ratios": (0, 2, 2, 2, 2, 1, 1, 1, 1, 1),
    "kv_source_layer_ids": (1, 5),
    "index_source_layer_ids": (1, 5, 8),
    "candidate_source_layer_id": 5,
    "engram_layer_ids": (1,),
}
TINY = {
    "hidden_size": 64, "moe_intermediate_size": 32, "num_attention_heads": 2, "head_dim": 64,
    "qk_rope_head_dim": 32, "q_lora_rank": 32, "o_lora_rank": 32, "o_groups": 1, "sliding_window": 16,
    "index_n_heads": 2, "index_head_dim": 32, "index_topk": 16, "candidate_topk_blocks": 8,
    "candidate_block_size": 4, "engram_n_heads": 2, "engram_head_dim": 32,
}  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class Sizes:
    """What is run.

    Attributes:
        prompts: Tokens of the prompts, shortest first.
        step_tokens: Tokens of a chunk of theirs.
        check_tokens: Tokens of the checked prompt of 10 layers.
        prefixes: Ranges of prefixes that are sampled in turn.
        chunks: Range of chunk sizes.
        pairs: Most of prefix times chunk, which index scores take memory for.
        rounds: Most steps timed of each range; a fifth of them is timed even when time is short.
        decode_slots: Slots of decoding rows, and of resumed requests.
        decode_tokens: Tokens that such a slot has room for.
        block: Tokens in a block.
        replays: Numbers of resumed requests.
    """

    prompts: tuple[int, ...] = (2048, 8192, 16384)
    step_tokens: int = 4096
    check_tokens: int = 448
    prefixes: tuple[tuple[int, int], ...] = (
        (0, 0), (512, 16_383), (16_384, 65_535), (65_536, 262_143), (262_144, 1_000_000),
    )  # fmt: skip
    chunks: tuple[int, int] = (512, 8192)
    pairs: int = 300_000_000
    rounds: int = 40
    decode_slots: int = 64
    decode_tokens: int = 16_384
    block: int = 128
    replays: tuple[int, ...] = (1, 8, 64)


SMALL = Sizes(
    prompts=(64, 128), step_tokens=64, check_tokens=80, prefixes=((0, 0), (16, 63), (64, 255)),
    chunks=(16, 64), pairs=8192, rounds=10, decode_slots=4, decode_tokens=128, block=16, replays=(1, 4),
)  # fmt: skip


class Report:
    """Cases as JSON lines and as rows of the last table."""

    def __init__(self, path: Path, seconds: float, device: str, only: tuple[str, ...]) -> None:
        self._only = only
        self._path = path
        self._began = time.perf_counter()
        self._seconds = seconds
        commit = ""
        if shutil.which("git"):
            git = ["git", "-C", str(ROOT), "rev-parse", "--short", "HEAD"]
            commit = subprocess.run(git, capture_output=True, text=True).stdout.strip()
        self._machine = {
            "device": device,
            "versions": {"python": platform.python_version(), "torch": torch.__version__},
            "commit": commit,
            "date": datetime.date.today().isoformat(),
        }
        self.lines: list[str] = []

    def left(self, share: float = 1.0) -> float:
        """Seconds until a share of the time is over."""
        return self._began + share * self._seconds - time.perf_counter()

    def note(self, case: str, **values: Any) -> None:
        """Writes a line to the file alone."""
        found = {k: float(f"{v:.5g}") if isinstance(v, float) else v for k, v in values.items()}
        line = {"part": "gpu_prefill", "case": case, **found, **self._machine}
        with self._path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(line) + "\n")

    def add(self, case: str, **values: Any) -> None:
        """Writes a case and shows it."""
        self.note(case, **values)
        found = {k: float(f"{v:.4g}") if isinstance(v, float) else v for k, v in values.items()}
        self.lines.append(f"{case:34s} " + " ".join(f"{k}={v}" for k, v in found.items()))
        at = time.perf_counter() - self._began
        print(f"[{at:6.1f}s] {self.lines[-1]}", flush=True)

    def run(self, case: str, work: Callable[[], object], least_s: float = 2.0) -> None:
        """Runs a part if it is asked for and the time is there; a failure is a line too."""
        if not case.startswith(self._only):
            return
        if self.left() < least_s:
            self.add(case, skipped="no time left")
            return
        try:
            work()
        except Exception as error:
            self.add(case, error=f"{type(error).__name__}: {error}"[:400])
            traceback.print_exc()


class Bench:
    """A device and what is made on it."""

    def __init__(self, report: Report, device: str, sizes: Sizes, *, tiny: bool) -> None:
        self.report, self.device, self.sizes, self.tiny = report, device, sizes, tiny

    # ---- making ----

    def config(self, **changes: Any) -> DeepseekV41Config:
        """The published configuration with few experts, small tables and no draft."""
        flash = DeepseekV41Config.from_pretrained(ROOT / "tests/data/deepseek_v41_flash")
        vocab = 512 if self.tiny else 8192
        fields = {
            "compress_ratios": flash.compress_ratios[: flash.num_hidden_layers],
            "n_routed_experts": 8, "vocab_size": vocab, "engram_compressed_vocab_size": vocab,
            "engram_vocab_size": 64 if self.tiny else 20_000, "engram_layer_ids": flash.engram_layer_ids,
            "engram_n_heads": flash.engram_n_heads, "num_nextn_predict_layers": 0,
            "dspark_target_layer_ids": (), "dspark_noise_token_id": 3, "bos_token_id": 0,
            "eos_token_id": 1, "image_token_id": None, "vision": None,
            **(TINY if self.tiny else {}), **changes,
        }  # fmt: skip
        names = ("engram_layer_ids", "engram_vocab_size", "engram_n_heads")
        rows = EngramHash.table_rows(*(fields[name] for name in names))
        return dataclasses.replace(flash, **fields, engram_num_embeddings=rows)

    def model(
        self, config: DeepseekV41Config, rounding: str, dtype: torch.dtype = torch.bfloat16
    ) -> DeepseekV41:
        """A model with random weights from a fixed seed, made on the device."""
        model = DeepseekV41(config, rounding=rounding, device=self.device, dtype=dtype)
        generator = torch.Generator(self.device).manual_seed(1)
        for name, p in model.named_parameters():
            p.normal_(generator=generator)
            if p.dim() >= 2 and not name.endswith(("q_weight", "k_weight")):
                p.mul_(0.5 if "embed" in name else p.shape[-1] ** -0.5)
            else:
                p.mul_(0.2).add_(0 if name.endswith(("base", "bias", "bias_vl", "sink")) else 1)
        model.set_engram_token_map(range(config.vocab_size))
        return model

    def ids(self, model: DeepseekV41, count: int, seed: int = 7) -> np.ndarray:
        """Random tokens, shape [count], int64."""
        return np.random.default_rng(seed).integers(5, model.config.vocab_size, count)

    def forward(self, model: DeepseekV41, cache: SlotCache, segments: Iterable[Segment]) -> Tensor:
        """Runs random tokens at some positions; the hidden rows that ran every layer."""
        segments = tuple(segments)
        ids = self.ids(model, sum(s.num_tokens for s in segments))
        on_device = torch.from_numpy(ids).to(self.device)
        return model(ForwardBatch(on_device, segments, None, ids), cache).hidden

    def seconds(self, work: Callable[[], object], *, ahead: bool = False) -> float:
        """How long the device takes: idle gaps included, or with the host ahead by a pause of the device before."""
        if self.device == "cpu":
            start = time.perf_counter()
            work()
            return time.perf_counter() - start
        torch.cuda.synchronize()
        first, last = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        if ahead:
            torch.cuda._sleep(_PAUSE_CYCLES)
        first.record()
        work()
        last.record()
        last.synchronize()
        return first.elapsed_time(last) / 1e3

    def memory_gb(self) -> float:
        """Most memory that tensors took since the last call."""
        if self.device == "cpu":
            return 0.0
        most = torch.cuda.max_memory_allocated() / 1e9
        torch.cuda.reset_peak_memory_stats()
        return most

    def free(self) -> None:
        """Gives unused memory back."""
        gc.collect()
        if self.device != "cpu":
            torch.cuda.empty_cache()

    # ---- parts ----

    def check_small(self) -> None:
        """`check` on a model of nano's size in fp32, whose differences are rounding errors alone."""
        config = dataclasses.replace(
            small_config(), num_nextn_predict_layers=0, dspark_target_layer_ids=(),
            compress_ratios=small_config().compress_ratios[:12],
        )  # fmt: skip
        self.check("nano size fp32", self.model(config, "none", torch.float32), 300, limit=1e-3)

    def check(self, name: str, model: DeepseekV41, tokens: int, limit: float | None = None) -> None:
        """Narrowed chunks against masks over the whole sequence; the control is the sequence without the cut.

        Without a limit the error must be near that of chunks that are not narrowed: both ways round at other places.
        """
        ids = torch.from_numpy(self.ids(model, tokens)).to(self.device)
        start = tokens - model.config.sliding_window

        def chunks(full_start: int) -> Tensor:
            cache = model.new_cache(1, tokens, tokens)
            rows, at = [], 0
            for size in (tokens // 3, tokens // 4, tokens - tokens // 3 - tokens // 4):
                segment = Segment(0, at, size, full_start=full_start)
                rows.append(model(ForwardBatch(ids[at : at + size], (segment,)), cache).hidden)
                at += size
            kept = torch.cat(rows)[start - tokens :]
            return model.compute_logits(kept).double()

        def errors(found: Tensor, wanted: Tensor) -> Tensor:
            # One choice of experts that falls the other way moves a row far, so the median judges.
            far = (found - wanted).norm(dim=-1) / wanted.norm(dim=-1)
            return far.nan_to_num(torch.inf)

        found = chunks(start)
        wanted = model.logits(ids, truncation=Truncation(full_start=start))[start:].double()
        whole = model.logits(ids)[start:].double()
        error, cut = errors(found, wanted), float(errors(found, whole).median())
        base, median = float(errors(chunks(0), whole).median()), float(error.median())
        self.report.add(
            f"check {name}", rows=len(found), median_error=median, worst_error=float(error.max()),
            whole_median=base, control_median=cut, good=median < (limit or 1.5 * base + 1e-6) < cut,
        )  # fmt: skip

    def prefill(self) -> None:
        """Times cold prompts with all rows in all layers, and narrowed."""
        report, sizes = self.report, self.sizes
        model = self.model(self.config(), "cache")
        config = model.config
        report.add(
            "prefill model", layers=config.num_hidden_layers, hidden=config.hidden_size, rounding="cache",
            parameters_G=sum(p.numel() for p in model.parameters()) / 1e9, made_s=-report.left(0),
        )  # fmt: skip
        cache = model.new_cache(1, sizes.prompts[-1], sizes.step_tokens)

        def run(tokens: int, narrowed: bool) -> None:
            start = max(0, tokens - config.sliding_window) if narrowed else 0
            hidden = None
            for at in range(0, tokens, sizes.step_tokens):
                size = min(sizes.step_tokens, tokens - at)
                segment = Segment(0, at, size, full_start=start)
                hidden = self.forward(model, cache, [segment])
            logits = model.compute_logits(hidden[-1:])
            if not logits.isfinite().all():
                raise ValueError(f"{tokens} tokens gave logits that are not finite")

        slowest = 0.0
        for tokens in sizes.prompts:
            if slowest and report.left(0.45) < 3.0 * slowest:
                report.add(f"prefill {tokens} tokens", skipped="no time left")
                continue
            times: dict[bool, list[float]] = {False: [], True: []}
            for _ in range(4):
                for narrowed, found in times.items():
                    cache.lengths[0], cache.full_spans[0] = 0, (0, 0)
                    found.append(self.seconds(lambda t=tokens, n=narrowed: run(t, n)))
                slowest = times[False][-1] + times[True][-1]
                if report.left(0.4) < slowest:
                    break
            # The first pair warms up, unless there was time for no other.
            kept = {k: v[1:] or v for k, v in times.items()}
            full, narrow = (statistics.median(kept[k]) for k in (False, True))
            flops = [prefill_flops(config, tokens, narrowed=k) for k in (False, True)]
            report.add(
                f"prefill {tokens} tokens", full_ms=full * 1e3, narrowed_ms=narrow * 1e3,
                removed_time=1 - narrow / full, removed_flops=1 - flops[1] / flops[0],
                full_tflops=flops[0] / full / 1e12, narrowed_tflops=flops[1] / narrow / 1e12,
                repeats=len(kept[False]), spread=max(kept[False]) / min(kept[False]) - 1, GB=self.memory_gb(),
            )  # fmt: skip

    def short(self) -> None:
        """The parts that run 10 layers."""
        model = self.model(self.config(**SHORT), "cache")
        tokens = self.sizes.check_tokens
        self.report.run("check", lambda: self.check("10 layers bf16", model, tokens))
        cache = self.filled_cache(model)
        self.report.run("cost", lambda: self.cost(model, cache), 6)
        self.report.run("replay", lambda: self.replay(model, cache))

    def filled_cache(self, model: DeepseekV41) -> SlotCache:
        """Slot 0 has room for the longest prefix, the others for decoding rows; every row is random."""
        sizes = self.sizes
        longest = sizes.prefixes[-1][1] + sizes.chunks[1]
        longest = min(
            -(-longest // sizes.block) * sizes.block, model.config.max_position_embeddings
        )
        counts = [
            longest // sizes.block,
            *[sizes.decode_tokens // sizes.block] * sizes.decode_slots,
        ]
        cache = model.new_cache(
            len(counts), longest, sizes.chunks[1], num_blocks=sum(counts), block_size=sizes.block
        )
        generator = torch.Generator(self.device).manual_seed(2)
        cache.rows.kv.normal_(generator=generator)[cache.rows.null_row] = 0
        for keys in cache.index_keys.values():
            keys.normal_(generator=generator)
        cache.tokens.random_(5, model.config.vocab_size, generator=generator)
        order, at = np.random.default_rng(3).permutation(sum(counts)).tolist(), 0
        for slot, count in enumerate(counts):
            blocks = tuple(order[at : at + count])
            cache.apply_updates([BlockUpdate(slot=slot, first=0, blocks=blocks)])
            at += count
        self.report.add(
            "short cache", slots=len(counts), longest=longest, GB=cache.size_bytes / 1e9
        )
        return cache

    def cost(self, model: DeepseekV41, cache: SlotCache) -> None:
        """Times steps of many shapes, then fits and judges the cost model."""
        sizes, window = self.sizes, model.config.sliding_window
        rng = np.random.default_rng(5)
        steps: list[tuple[StepWork, float, float]] = []
        graphs: DecodeGraphs | None = None
        if self.device != "cpu":  # as an engine runs decoding rows
            graphs = DecodeGraphs(model, cache)
            most = sizes.decode_tokens
            warm_up = graphs.warmup(
                GraphBucket(rows, 1, context)
                for rows in (sizes.decode_slots // 4, sizes.decode_slots // 2, sizes.decode_slots)
                for context in (most // 4, most)
            )
            self.report.add("cost recordings", shapes=len(warm_up.buckets), seconds=warm_up.seconds)

        def draw(low: int, high: int) -> int:
            return round(math.exp(rng.uniform(math.log(low), math.log(high)))) if high else 0

        def one(kind: int, warm: bool = False) -> None:
            """A step whose chunk has a prefix from a range, or one of decoding rows alone."""
            segments, state, chunks = [], {}, []
            if kind < len(sizes.prefixes):
                prefix, ends = draw(*sizes.prefixes[kind]), bool(rng.integers(2))
                most = min(sizes.chunks[1], sizes.pairs // max(prefix, 1))
                tokens = draw(min(sizes.chunks[0], most), most)
                if warm:
                    prefix, ends = sizes.prefixes[kind][1], True
                    tokens = min(sizes.chunks[1], sizes.pairs // max(prefix, 1))
                last = prefix + tokens if ends else prefix + 2 * tokens + window
                full_start = max(0, last - window)
                segments.append(Segment(0, prefix, tokens, full_start=full_start))
                state[0] = prefix
                chunks.append(Chunk(prefix, tokens, ends))
            alone = not segments
            rows = int(rng.integers(1, sizes.decode_slots + 1)) if alone or rng.integers(2) else 0
            context = draw(window, sizes.decode_tokens - 1)
            contexts = rng.integers(context // 2 + 1, context + 1, rows).tolist()
            for slot, held in enumerate(contexts, 1):
                segments.append(Segment(slot, held, 1, full_start=max(0, held - 2 * window)))
                state[slot] = held

            decoding = segments[len(chunks) :] if graphs else []
            eager = segments[: len(segments) - len(decoding)]

            def run() -> None:
                if graphs and decoding:
                    recorded = graphs.try_run([GraphRow(s, [7]) for s in decoding])
                    if recorded is None:
                        raise RuntimeError(str(graphs.stats.misses or graphs.unsupported))
                if eager:
                    hidden = self.forward(model, cache, eager)
                    if len(hidden):
                        model.compute_logits(hidden[-1 - len(eager) + len(chunks) :])

            took = []
            for turn in range(3):
                for slot, held in state.items():
                    cache.lengths[slot] = cache._high_water[slot] = held
                    cache.full_spans[slot] = (max(0, held - 2 * window), held)
                took.append(self.seconds(run, ahead=turn > 0))
            if warm:
                return
            steps.append((StepWork.of(chunks, contexts), min(took[1:]), took[0]))
            self.report.note(
                "cost step", seconds=min(took[1:]), launched_seconds=took[0], chunks=chunks, decode=contexts
            )  # fmt: skip

        kinds = len(sizes.prefixes) + 1
        for kind in range(kinds):
            one(kind, warm=True)
        while len(steps) < sizes.rounds * kinds:
            enough = len(steps) >= sizes.rounds // 5 * kinds
            if self.report.left(0.88 if enough else 1.0) < 0:
                break
            for kind in range(kinds):
                one(kind)
        self.report.add("cost steps", steps=len(steps), GB=self.memory_gb())
        if graphs:
            graphs.close()
        self.judge_all(steps)

    def judge_all(self, steps: Sequence[tuple[StepWork, float, float]]) -> None:
        """Judges steps, each with the device's time and the time as launched, as a whole and in parts."""
        device = [(work, seconds) for work, seconds, _ in steps]
        self.judge("all", device)
        # Steps in which some row runs every layer: what an engine with decoding requests sees.
        self.judge("whole depth", [s for s in device if s[0].ended_prompts or s[0].decode_rows])
        self.judge("chunks alone", [s for s in device if not s[0].decode_rows])
        self.judge("as launched", [(work, seconds) for work, _, seconds in steps])

    def judge(self, name: str, steps: Sequence[tuple[StepWork, float]]) -> None:
        """Fits one half of the steps; errors of the other half by bucket of prefixes."""
        halves: tuple[list[StepSample], list[StepSample]] = ([], [])
        seen: dict[int, int] = defaultdict(int)
        for work, seconds in steps:
            halves[seen[bucket_of(work)] % 2].append(StepSample(work, seconds))
            seen[bucket_of(work)] += 1
        report = fit_step_cost(halves[0])
        if report.coefficients is None:
            self.report.add(
                f"cost fit {name}", rejected=str(report.rejection), samples=len(halves[0])
            )
            return
        model = StepTimeModel(report.coefficients)
        errors: dict[str, list[float]] = defaultdict(list)
        for sample in halves[1]:
            work = sample.work
            error = model.seconds(work) / sample.seconds - 1
            errors[f"prefix {bucket_name(bucket_of(work))}"].append(error)
            errors["every step"].append(error)
            if work.max_prefix >= 0:
                mixed, ended = bool(work.decode_rows), bool(work.ended_prompts)
                errors[f"mixed {mixed}, ended {ended}"].append(error)
                errors["chunks < 2048" if work.tokens < 2048 else "chunks >= 2048"].append(error)
        units = dataclasses.asdict(report.coefficients)
        self.report.add(
            f"cost fit {name}", rejected=str(report.rejection or "no"), samples=len(halves[0]),
            outliers=report.num_outliers, residual=report.residual_share,
            **{k: float(f"{v:.3g}") for k, v in units.items()},
        )  # fmt: skip
        shown = {}
        for group, found in sorted(errors.items()):
            absolute = np.abs(found)
            median = float(np.median(absolute))
            self.report.note(
                f"cost {name}: {group}", steps=len(found), median_error=median,
                p90_error=float(np.quantile(absolute, 0.9)), median_bias=float(np.median(found)),
            )  # fmt: skip
            shown[group.replace(" ", "_")] = f"{median:.1%}({len(found)})"
        self.report.add(f"cost error {name}", **shown)

    def replay(self, model: DeepseekV41, cache: SlotCache) -> None:
        """Times requests that resume behind a prefix hit, packed and one by one."""
        sizes, window = self.sizes, model.config.sliding_window
        hit = sizes.decode_tokens // 2
        full_start = hit + SUFFIX - window

        def segments(slot: int) -> list[Segment]:
            bounds = hit - window, hit, full_start
            return [
                Segment(slot, hit - window, window, *bounds),
                Segment(slot, hit, SUFFIX, *bounds),
            ]

        def run(groups: Sequence[Sequence[int]]) -> None:
            for slots in groups:
                hidden = self.forward(model, cache, [s for slot in slots for s in segments(slot)])
                model.compute_logits(hidden[-len(slots) :])

        base = None
        for count in sizes.replays:
            slots = range(1, count + 1)
            ways = {"packed": [list(slots)], "single": [[slot] for slot in slots]}
            times: dict[str, list[float]] = {name: [] for name in ways}
            for _ in range(4):
                for name, groups in ways.items():
                    for slot in slots:
                        cache.lengths[slot] = cache.adopted[slot] = cache._high_water[slot] = hit
                        cache.window_starts[slot], cache.full_spans[slot] = hit, (0, 0)
                    times[name].append(self.seconds(lambda g=groups: run(g)))
                if self.report.left() < times["single"][-1]:
                    break
            packed, single = (statistics.median(times[n][1:] or times[n]) for n in ways)
            base = base or packed
            self.report.add(
                f"replay {count} requests", tokens=count * (window + SUFFIX), hit=hit,
                packed_ms=packed * 1e3, single_ms=single * 1e3, speedup=single / packed,
                against_one=packed / base, us_per_token=packed / count / (window + SUFFIX) * 1e6,
            )  # fmt: skip


def judge_again(args: argparse.Namespace) -> None:
    """Fits and judges the steps that an earlier run wrote to a file."""
    lines = [json.loads(line) for line in args.steps.read_text(encoding="utf-8").splitlines()]
    lines = [line for line in lines if line["case"] == "cost step"]
    report = Report(args.out / "gpu_prefill.jsonl", math.inf, lines[0]["device"], ("",))
    report._machine |= {key: lines[0][key] for key in report._machine}
    steps = [
        (
            StepWork.of([Chunk(*chunk) for chunk in line["chunks"]], line["decode"]),
            line["seconds"],
            line["launched_seconds"],
        )
        for line in lines
    ]
    Bench(report, "cpu", Sizes(), tiny=False).judge_all(steps)


def main(arguments: Sequence[str] | None = None) -> None:
    """Measures, and prints the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cuda")
    parser.add_argument("--tiny", action="store_true", help="small sizes, to try the script")
    parser.add_argument("--seconds", type=float, default=75, help="no case starts after this")
    parser.add_argument(
        "--only", nargs="+", default=[""], help="parts: check, prefill, short, cost, replay"
    )
    parser.add_argument("--out", type=Path, default=Path(os.environ.get("OUT", ".")))
    parser.add_argument("--steps", type=Path, help="judge the timed steps of this file again")
    args = parser.parse_args(arguments)
    if args.steps:
        judge_again(args)
        return
    name = torch.cuda.get_device_name() if args.device == "cuda" else "cpu"
    torch.backends.cuda.matmul.allow_tf32 = False
    args.out.mkdir(parents=True, exist_ok=True)
    only = tuple(args.only)
    if {"cost", "replay"} & {*only}:
        only = (*only, "short")
    report = Report(args.out / "gpu_prefill.jsonl", args.seconds, name, only)
    bench = Bench(report, args.device, SMALL if args.tiny else Sizes(), tiny=args.tiny)
    with torch.inference_mode():
        for part, work in (
            ("check nano size", bench.check_small),
            ("prefill", bench.prefill),
            ("short", bench.short),
        ):
            report.run(part, work, 5 if part == "short" else 2)
            bench.free()
    print("\n".join(["", f"{name}, torch {torch.__version__}", *report.lines]))


if __name__ == "__main__":
    main()
