"""Times a decode step and a draft block of a small DeepSeek-V4.1 on the CPU beside their matrix products alone.

Step and products alternate in one run, on one thread, in processor time, which other work on the machine disturbs
little. The products are recorded from a real step (same weights, same shapes) and replayed; the mixing of the four
streams, with an inner size of 4, is not counted among them. Median of the repeats; one JSON line a case.
Run: python benchmarks/model_step.py [--rounding full none] [--batch 1 16] [--context 600] [--cache contiguous]
"""

from __future__ import annotations

import argparse
import datetime
import itertools
import json
import platform
import subprocess
import time
from collections.abc import Callable
from pathlib import Path

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from deepinfer.core.plan import BlockUpdate
from deepinfer.models.deepseek_v41 import DeepseekV41, DeepseekV41Config, ForwardBatch, SlotCache
from deepinfer.models.deepseek_v41.engram import EngramHash

BLOCK = 128
PRODUCTS = ("linear", "mm", "addmm", "bmm", "baddbmm", "matmul", "mv", "addmv", "_grouped_mm")


def small_config() -> DeepseekV41Config:
    """The size of `nano`."""
    fields = {
        "vocab_size": 2560, "hidden_size": 320, "num_hidden_layers": 12, "moe_intermediate_size": 64,
        "num_attention_heads": 8, "head_dim": 128, "qk_rope_head_dim": 32, "q_lora_rank": 128,
        "o_lora_rank": 96, "o_groups": 2, "n_routed_experts": 16, "num_experts_per_tok": 4,
        "sliding_window": 64, "compress_ratios": [0, 0, 2, 2, 2, 2, 1, 1, 1, 1, 1, 1, 0, 0],
        "kv_source_layer_ids": [2, 4, 6], "index_source_layer_ids": [2, 4, 6, 8, 10],
        "candidate_source_layer_id": 6, "index_n_heads": 4, "index_head_dim": 64, "index_topk": 64,
        "candidate_topk_blocks": 64, "candidate_block_size": 4, "max_position_embeddings": 8192,
        "rope_scaling": {
            "rope_type": "yarn", "factor": 4, "beta_fast": 32, "beta_slow": 1,
            "original_max_position_embeddings": 1024,
        },
        "engram_layer_ids": [1, 4], "engram_vocab_size": 8000, "engram_n_heads": 2,
        "engram_head_dim": 32, "engram_compressed_vocab_size": 2560, "num_nextn_predict_layers": 2,
        "dspark_block_size": 5, "dspark_noise_token_id": 3, "dspark_target_layer_ids": [9, 10, 11],
        "dspark_markov_rank": 48, "dspark_n_routed_experts": 8, "dspark_num_experts_per_tok": 2,
    }  # fmt: skip
    return DeepseekV41Config(
        **fields,
        engram_num_embeddings=EngramHash.table_rows(
            **{k: fields[k] for k in ("engram_layer_ids", "engram_vocab_size", "engram_n_heads")}
        ),
    )


def random_model(config: DeepseekV41Config, rounding: str) -> DeepseekV41:
    """A model with random weights from a fixed seed."""
    model = DeepseekV41(config, rounding=rounding)
    generator = torch.Generator().manual_seed(1)
    for name, p in model.named_parameters():
        noise = torch.randn(p.shape, generator=generator)
        if p.dim() >= 2 and not name.endswith(("q_weight", "k_weight")):
            p.copy_(noise * (0.5 if "embed" in name else p.shape[-1] ** -0.5))
        else:
            p.copy_(0.2 * noise + (0 if name.endswith(("base", "bias", "bias_vl", "sink")) else 1))
    return model


class ProductRecorder(TorchDispatchMode):
    """Keeps every matrix product that runs under it, with its operands."""

    def __init__(self, smallest_inner: int) -> None:
        super().__init__()
        self.smallest_inner = smallest_inner
        self.calls: list[Callable[[], object]] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        """Runs the operation, and keeps it when it is a product."""
        name = func._schema.name.split("::")[-1]
        if name in PRODUCTS:
            left = args[1] if name.startswith(("add", "badd")) else args[0]
            if left.shape[-1] > self.smallest_inner:
                kwargs_ = {k: v for k, v in (kwargs or {}).items() if k != "out"}
                operands = tuple(
                    a.clone() if torch.is_tensor(a) and a.numel() < 2**16 else a for a in args
                )
                call = getattr(torch, name, None) or torch.nn.functional.linear
                call = torch.nn.functional.linear if name == "linear" else call
                self.calls.append(lambda: call(*operands, **kwargs_))
        return func(*args, **(kwargs or {}))


def new_cache(model: DeepseekV41, batch: int, tokens: int, kind: str) -> SlotCache:
    """A cache of one block a slot, or in blocks that lie in a random order, in the model's dtype or packed."""
    if kind == "contiguous":
        return model.new_cache(batch, tokens)
    per_slot = -(-tokens // BLOCK)
    cache = model.new_cache(
        batch, tokens, num_blocks=batch * per_slot, block_size=BLOCK,
        storage="packed" if kind == "packed" else "plain",
    )  # fmt: skip
    order = torch.randperm(batch * per_slot, generator=torch.Generator().manual_seed(3)).tolist()
    for slot in range(batch):
        blocks = tuple(order[slot * per_slot : (slot + 1) * per_slot])
        cache.apply_updates([BlockUpdate(slot=slot, first=0, blocks=blocks)])
    return cache


def measure(
    model: DeepseekV41, batch: int, context: int, repeats: int, draft: bool, storage: str
) -> dict[str, float]:
    """Median processor seconds of one step and of its products, alternating."""
    config = model.config
    cache = new_cache(model, batch, context + 8 * repeats + 64, storage)
    generator = torch.Generator().manual_seed(2)
    prompt = torch.randint(5, config.vocab_size, (batch, context), generator=generator)
    for at in range(0, context, 256):
        part = prompt[:, at : at + 256].tolist()
        for slot in range(batch):
            out = model(ForwardBatch.from_segments([(slot, at, part[slot])]), cache)
            positions = range(at, at + len(part[slot]))
            model.draft.extend_context(out.features, positions, [slot] * len(positions), cache)
    at = context

    def step() -> None:
        if draft:
            model.draft.draft_greedy([7] * batch, [context] * batch, range(batch), cache)
            return
        nonlocal at
        out = model(ForwardBatch.from_segments([(s, at, [7 + s]) for s in range(batch)]), cache)
        model.compute_logits(out.hidden)
        at += 1

    for _ in range(4):
        step()
    with ProductRecorder(config.hc_mult) as recorder:
        step()

    def products() -> None:
        with torch.inference_mode():
            for call in recorder.calls:
                call()

    times: dict[str, list[float]] = {"step": [], "products": []}
    for _ in range(repeats):
        for name, run in (("step", step), ("products", products)):
            start = time.process_time()
            run()
            times[name].append(time.process_time() - start)
    median = {name: sorted(values)[len(values) // 2] for name, values in times.items()}
    return {**median, "product_calls": len(recorder.calls)}


def main() -> None:
    """Measures every case and prints its lines."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounding", nargs="*", default=["full", "none"])
    parser.add_argument("--batch", type=int, nargs="*", default=[1, 16])
    parser.add_argument("--context", type=int, default=600)
    parser.add_argument(
        "--cache", nargs="*", default=["contiguous"], choices=["contiguous", "paged", "packed"]
    )
    parser.add_argument("--repeats", type=int, default=200)
    args = parser.parse_args()
    torch.set_num_threads(1)
    git = ["git", "-C", str(Path(__file__).resolve().parent), "rev-parse", "--short", "HEAD"]
    machine = {
        "device": f"{cpu_name()}, 1 thread",
        "versions": {"python": platform.python_version(), "torch": torch.__version__},
        "commit": subprocess.run(git, capture_output=True, text=True).stdout.strip(),
        "date": datetime.date.today().isoformat(),
    }
    for rounding in args.rounding:
        model = random_model(small_config(), rounding)
        cases = itertools.product(args.batch, args.cache, ("decode step", "draft block"))
        for batch, storage, case in cases:
            if storage != "packed" or rounding != "none":
                draft = case == "draft block"
                found = measure(model, batch, args.context, args.repeats, draft, storage)
                line = {
                    "part": "model",
                    "case": f"{case}, rounding {rounding}",
                    "cache": storage,
                    "batch": batch,
                    "context": args.context,
                    "value": round(found["step"] * 1e3, 3),
                    "unit": "ms",
                    "products_ms": round(found["products"] * 1e3, 3),
                    "ratio": round(found["step"] / found["products"], 2),
                    "product_calls": found["product_calls"],
                }
                print(json.dumps({**line, **machine}))


def cpu_name() -> str:
    """Model name of the processor, or its architecture."""
    info = Path("/proc/cpuinfo")
    for line in info.read_text().splitlines() if info.is_file() else ():
        if line.startswith("model name"):
            return line.split(":", 1)[1].strip()
    return platform.machine()


if __name__ == "__main__":
    main()
