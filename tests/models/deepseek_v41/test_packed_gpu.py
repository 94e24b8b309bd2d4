"""Packed weights over packed rows at widths that the kernels for Hopper take, against the layers' own steps."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import Tensor

from deepinfer.kernels.fused import fused_kernels
from deepinfer.models.deepseek_v41 import DeepseekV41, ForwardBatch, Segment, SlotCache
from deepinfer.models.deepseek_v41.decode_inputs import DecodeInputs, row_values
from deepinfer.models.deepseek_v41.decode_step import DecodeStep
from deepinfer.models.deepseek_v41.packed_products import prepare_products
from deepinfer.models.packed import PackedWeight

FP8 = ("wq_a", "wq_b", "wkv", "wo_b", "shared_experts.w1", "shared_experts.w2", "shared_experts.w3")
LENGTHS = {0: 700, 1: 300}
DEVICE = "cuda"
pytestmark = pytest.mark.gpu


@pytest.fixture(scope="module")
def models(small_config, random_model) -> tuple[DeepseekV41, DeepseekV41]:
    """One of plain values, one of the same values as bytes; layers that own, reuse and cut pools."""
    config = small_config(
        hidden_size=256, num_hidden_layers=4, moe_intermediate_size=128, num_attention_heads=64, head_dim=512,
        qk_rope_head_dim=64, q_lora_rank=128, o_groups=2, o_lora_rank=128, n_routed_experts=8, index_n_heads=8,
        index_head_dim=128, index_topk=64, sliding_window=128, compress_ratios=(2, 2, 1, 1),
        kv_source_layer_ids=(0, 2), index_source_layer_ids=(0, 2, 3), candidate_source_layer_id=2,
        candidate_topk_blocks=48, candidate_block_size=8, engram_layer_ids=(), engram_num_embeddings=(),
        num_nextn_predict_layers=0, dspark_target_layer_ids=(), max_position_embeddings=2048, image_token_id=None,
    )  # fmt: skip
    made = []
    for packed in (False, True):
        model = random_model(config, "full", torch.bfloat16)
        for name, p in list(model.named_parameters()):
            path, last = name.rsplit(".", 1)
            routed = last in ("w13", "w2") and path.endswith("experts")
            if not (routed or path.endswith((*FP8, "indexer.wq_b"))) or "compressor" in path:
                continue
            kind = "mxfp4" if routed else "fp8_block"
            generator = torch.Generator().manual_seed(len(name) + p.numel())
            weight = PackedWeight.empty(tuple(p.shape), kind, device="cpu", dtype=p.dtype)
            weight.codes.random_(0, 256 if routed else 57, generator=generator)
            if not routed:
                sign = torch.randint(0, 2, p.shape, generator=generator, dtype=torch.uint8)
                weight.codes.add_(sign << 7)
            weight.scale.random_(122, 124, generator=generator)
            value = weight if packed else weight.unpack()
            owner = model.get_submodule(path)
            setattr(owner, last, torch.nn.Parameter(value, requires_grad=False))
        model.to(DEVICE)
        vars(model)["row_kernels"] = (lambda: fused_kernels(DEVICE)) if packed else lambda: None
        made.append(model)
    prepare_products(made[1])
    return made[0], made[1]


def prompts(model: DeepseekV41, cache: SlotCache, ids: np.ndarray) -> Tensor:
    """Logits of two prompts in one step, the longer one in two."""
    device = model.embed.weight.device
    out = []
    for parts in ([(0, 0, 400)], [(0, 400, 300), (1, 0, 300)]):
        segments = tuple(Segment(*part) for part in parts)
        row = np.concatenate([ids[s.slot, s.start : s.end] for s in segments])
        batch = ForwardBatch(torch.from_numpy(row).to(device), segments)
        out.append(model.compute_logits(model(batch, cache).hidden))
    return torch.cat(out)


def worst(found: Tensor, wanted: Tensor) -> float:
    """Median over rows of their relative errors: single rows may route to other experts."""
    return float(((found - wanted).norm(dim=1) / wanted.norm(dim=1)).median())


def test_prompts_and_steps(models) -> None:
    ids = np.random.default_rng(0).integers(5, 150, (2, 768))
    caches = [m.new_cache(2, 768, 400, storage="packed") for m in models]
    wanted, found = (prompts(m, c, ids) for m, c in zip(models, caches, strict=True))
    assert torch.isfinite(found).all()
    assert worst(found, wanted) < 0.15
    device = models[0].embed.weight.device
    step = DecodeStep(models[1], caches[1])
    segments = [Segment(slot, length, 1) for slot, length in LENGTHS.items()]
    row = [[int(ids[s.slot, s.start])] for s in segments]
    inputs = DecodeInputs.empty(2, 1, device)
    inputs.fill(row, [row_values(s, 0) for s in segments])
    flat = torch.tensor([t for r in row for t in r], device=device)
    caches[1].begin(tuple(segments))
    found = step(inputs, 768).logits
    wanted = models[0].compute_logits(
        models[0](ForwardBatch(flat, tuple(segments)), caches[0]).hidden
    )
    assert worst(found, wanted) < 0.15


def test_caches_agree(models) -> None:
    """Rows of the first source; sums in another order tell them apart, and on Hopper small codes under one power for 128."""
    ids = np.random.default_rng(1).integers(5, 150, (2, 768))
    caches = [m.new_cache(2, 768, 400, storage="packed") for m in models]
    for model, cache in zip(models, caches, strict=True):
        prompts(model, cache, ids)
    forms, read = caches[0].formats, []
    for rows in (c.rows for c in caches):
        keys = torch.cat(rows.key_parts(0), -1)
        data = (forms.window, rows.window_data[0]), (forms.pool, rows.pools[0]), (forms.key, keys)
        read.append([form.unpack(part, torch.float32) for form, part in data])
    for one, other in zip(*read, strict=True):
        assert float(one.norm()) > 0
        assert float((one != other).float().mean()) < 0.05
