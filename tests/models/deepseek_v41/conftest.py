"""The golden checkpoint, a random model of the same architecture, and ways to run them."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from deepinfer.models.deepseek_v41 import (
    DeepseekV41,
    DeepseekV41Config,
    ForwardBatch,
    SlotCache,
)

DATA = Path(__file__).resolve().parents[2] / "data"
MODES = {"plain": "none", "qat": "cache", "actqat": "full"}


@pytest.fixture(autouse=True)
def one_thread() -> None:
    torch.set_num_threads(1)


@pytest.fixture(scope="session")
def golden_folder() -> Path:
    return DATA / "oracle_v41"


@pytest.fixture(scope="session")
def golden(golden_folder: Path) -> dict[str, Tensor]:
    files = ("golden", "golden_actqat", "intermediates")
    return {k: v for f in files for k, v in load_file(golden_folder / f"{f}.safetensors").items()}


@pytest.fixture(scope="session")
def golden_ids(golden: dict[str, Tensor]) -> Tensor:
    return golden["input_ids.0"].long()


@pytest.fixture(scope="session")
def load_golden(golden_folder: Path) -> Callable[..., DeepseekV41]:
    """Builds the golden model at a rounding level; each call gives a fresh one."""
    config = DeepseekV41Config.from_pretrained(golden_folder)
    state = _stack_experts(load_file(golden_folder / "model.safetensors"))
    token_map = json.loads((golden_folder / "engram_token_map.json").read_text())

    def load(mode: str = "plain", dtype: torch.dtype = torch.float32) -> DeepseekV41:
        model = DeepseekV41(config, rounding=MODES[mode], dtype=dtype)
        model.load_state_dict(state)
        model.set_engram_token_map(token_map)
        return model

    return load


@pytest.fixture(scope="session")
def golden_model(load_golden: Callable[..., DeepseekV41]) -> DeepseekV41:
    """The golden model without rounding; do not change it."""
    return load_golden("plain")


def _stack_experts(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Published names to the module's names: routed experts are stacked."""
    state, experts = {}, {}
    for name, tensor in tensors.items():
        if ".experts." in name:
            prefix, rest = name.split(".experts.")
            number, part, _ = rest.split(".")
            experts.setdefault(prefix, {})[int(number), part] = tensor
        else:
            state[name] = tensor
    for prefix, parts in experts.items():
        count = 1 + max(number for number, _ in parts)
        w13 = [torch.cat((parts[e, "w1"], parts[e, "w3"])) for e in range(count)]
        state[f"{prefix}.experts.w13"] = torch.stack(w13)
        state[f"{prefix}.experts.w2"] = torch.stack([parts[e, "w2"] for e in range(count)])
    return state


@pytest.fixture(scope="session")
def run_chunks() -> Callable[..., tuple[Tensor, SlotCache]]:
    return _run_chunks


def _run_chunks(
    model: DeepseekV41,
    ids: Tensor,
    sizes: Sequence[int],
    cache: SlotCache | None = None,
    slot: int = 0,
) -> tuple[Tensor, SlotCache]:
    """Logits of a sequence run in chunks; the last size repeats."""
    cache = cache or model.new_cache(2, 96, 40)
    rows, at = [], cache.lengths[slot]
    sizes = list(sizes)
    while at < len(ids):
        size = sizes.pop(0) if len(sizes) > 1 else sizes[0]
        part = ids[at : at + size].tolist()
        out = model(ForwardBatch.from_segments([(slot, at, part)]), cache)
        rows.append(model.compute_logits(out.hidden))
        at += len(part)
    return torch.cat(rows), cache


@pytest.fixture(scope="session")
def small_config() -> Callable[..., DeepseekV41Config]:
    return _small_config


def _small_config(**changes: object) -> DeepseekV41Config:
    """A random-weight configuration in which every mechanism bites within 64 tokens."""
    fields = {
        "vocab_size": 160, "hidden_size": 64, "num_hidden_layers": 8, "moe_intermediate_size": 32,
        "num_attention_heads": 4, "head_dim": 32, "qk_rope_head_dim": 8, "q_lora_rank": 32,
        "o_lora_rank": 16, "o_groups": 2, "n_routed_experts": 8, "num_experts_per_tok": 2,
        "sliding_window": 8, "compress_ratios": [0, 2, 2, 2, 1, 1, 1, 1, 0],
        "kv_source_layer_ids": [1, 2, 4], "index_source_layer_ids": [1, 2, 4, 6],
        "candidate_source_layer_id": 4, "index_n_heads": 2, "index_head_dim": 32, "index_topk": 8,
        "candidate_topk_blocks": 4, "candidate_block_size": 4, "max_position_embeddings": 512,
        "rope_scaling": {
            "rope_type": "yarn", "factor": 4, "beta_fast": 32, "beta_slow": 1,
            "original_max_position_embeddings": 64,
        },
        "engram_layer_ids": [0, 2], "engram_num_embeddings": [5190, 5436], "engram_vocab_size": 850,
        "engram_n_heads": 2, "engram_head_dim": 32, "engram_compressed_vocab_size": 160,
        "num_nextn_predict_layers": 1, "dspark_block_size": 4, "dspark_noise_token_id": 3,
        "dspark_target_layer_ids": [5, 7], "dspark_markov_rank": 8, "dspark_n_routed_experts": 4,
        "dspark_num_experts_per_tok": 2, "image_token_id": 159,
    }  # fmt: skip
    return DeepseekV41Config(**{**fields, **changes})


@pytest.fixture(scope="session")
def random_model() -> Callable[..., DeepseekV41]:
    return _random_model


def _random_model(
    config: DeepseekV41Config, rounding: str = "none", dtype: torch.dtype = torch.float32
) -> DeepseekV41:
    """A model with random weights from a fixed seed."""
    model = DeepseekV41(config, rounding=rounding, dtype=dtype)
    generator = torch.Generator().manual_seed(1234)
    for name, p in model.named_parameters():
        if p.dim() >= 2 and not name.endswith(("q_weight", "k_weight")):
            scale = 0.5 if "embed" in name else p.shape[-1] ** -0.5
            p.copy_(torch.randn(p.shape, generator=generator) * scale)
        else:
            noise = torch.randn(p.shape, generator=generator) * 0.2
            p.copy_(noise if name.endswith(("base", "bias", "bias_vl", "sink")) else 1 + noise)
    return model


@pytest.fixture(scope="session")
def small_model() -> DeepseekV41:
    """A random model without rounding; do not change it."""
    return _random_model(_small_config())
