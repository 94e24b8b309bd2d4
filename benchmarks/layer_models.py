"""Models of one or two layers of DeepSeek-V4.1-Flash at its real widths, with random packed weights and packed caches."""

from __future__ import annotations

import dataclasses
import math
from pathlib import Path

import torch
from torch import nn

from deepinfer.kernels import KVCacheFormat, quantize_and_insert_k_cache
from deepinfer.models.deepseek_v41 import DeepseekV41, DeepseekV41Config, SlotCache
from deepinfer.models.packed import PackedWeight

__all__ = ["KINDS", "filled_cache", "layer_config", "random_model", "sharing"]

ROOT = Path(__file__).resolve().parent.parent
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
# Layers, and which of them own a pool and select rows.
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
