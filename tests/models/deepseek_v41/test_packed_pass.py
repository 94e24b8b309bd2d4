"""Steps of fixed shape over packed rows against ragged ones over the same form."""

from __future__ import annotations

import copy
import random

import numpy as np
import pytest
import torch

from deepinfer.core.plan import BlockUpdate
from deepinfer.kernels import apply_rope
from deepinfer.kernels.fused import fused_kernels
from deepinfer.models.deepseek_v41 import (
    DeepseekV41,
    ForwardBatch,
    Segment,
    SlotCache,
    decode_stack,
    packed_stack,
    prompt_keys,
    step_pass,
    wide_products,
)
from deepinfer.models.deepseek_v41.decode_inputs import DecodeInputs, row_values
from deepinfer.models.deepseek_v41.decode_step import DecodeStep, why_no_fixed_shape
from deepinfer.models.deepseek_v41.packed_products import prepare_products
from deepinfer.models.deepseek_v41.packed_stack import takes_packed
from deepinfer.models.packed import PackedWeight

SLOTS, MAX_TOKENS, BLOCK = 4, 96, 16


@pytest.fixture(scope="module", params=["cache", "full"])
def model(request, small_config, random_model) -> DeepseekV41:
    heads = 8 if request.param == "full" else 2  # the scores of pages take 8 heads and more
    config = small_config(head_dim=512, index_head_dim=128, index_n_heads=heads)
    made = random_model(config, request.param)
    made.set_engram_token_map(range(160))
    return made


def shuffled_cache(model: DeepseekV41, seed: int) -> SlotCache:
    blocks = list(range(SLOTS * MAX_TOKENS // BLOCK))
    cache = model.new_cache(
        SLOTS, MAX_TOKENS, 40, num_blocks=len(blocks), block_size=BLOCK, storage="packed"
    )
    random.Random(seed).shuffle(blocks)
    each = MAX_TOKENS // BLOCK
    updates = [
        BlockUpdate(slot=s, first=0, blocks=tuple(blocks[s * each : (s + 1) * each]))
        for s in range(SLOTS)
    ]
    cache.apply_updates(updates)
    return cache


def prefill(model: DeepseekV41, cache: SlotCache, lengths: dict[int, int], ids: np.ndarray) -> None:
    for slot, length in lengths.items():
        for at in range(0, length, 32):
            count = min(32, length - at)
            part = torch.from_numpy(ids[slot, at : at + count].copy())
            model(ForwardBatch(part, (Segment(slot, at, count),)), cache)


def values(cache: SlotCache) -> list[torch.Tensor]:
    rows, formats = cache.rows, cache.rows._formats
    unpacked = [formats.window.unpack(rows.window_data, torch.float32)]
    unpacked += [formats.pool.unpack(p, torch.float32) for p in rows.pools.values()]
    for source in rows.index_keys:
        keys = torch.cat(rows.key_parts(source), -1)
        unpacked.append(formats.key.unpack(keys, torch.float32))
    return unpacked


@pytest.mark.parametrize("seed", range(2))
def test_equal_to_ragged_steps(model, seed) -> None:
    rng = random.Random(seed)
    one, other = shuffled_cache(model, seed), shuffled_cache(model, seed)
    ids = np.random.default_rng(seed).integers(5, 150, (SLOTS, MAX_TOKENS))
    lengths = {slot: rng.choice([1, 2, 7, 8, 31, 63]) for slot in range(SLOTS)}
    for cache in (one, other):
        prefill(model, cache, lengths, ids)
    step = DecodeStep(model, other)
    for _ in range(4):
        rows = []
        for slot in rng.sample(range(SLOTS), rng.randint(1, SLOTS)):
            at, count = one.lengths[slot], rng.randint(1, 4)
            rows.append((Segment(slot, at, count), ids[slot, at : at + count].tolist()))
        segments = tuple(s for s, _ in rows)
        out = model(ForwardBatch(torch.tensor([i for _, r in rows for i in r]), segments), one)
        wanted = model.compute_logits(out.hidden)
        other.begin(segments)
        inputs = DecodeInputs.empty(5, 4)
        inputs.fill([r for _, r in rows], [row_values(s, 0) for s in segments])
        found = step(inputs, MAX_TOKENS).logits
        other.commit(segments)
        used = [i * 4 + t for i, s in enumerate(segments) for t in range(s.num_tokens)]
        assert torch.allclose(found[used], wanted, atol=2e-3 * float(wanted.abs().max()))
        for a, b in zip(values(one), values(other), strict=True):
            # A sum in another order may move a value over a rounding edge; the sign of zeros is free.
            assert float((a != b).float().mean()) < 1e-3
        for source, tail in one.tails.items():
            assert torch.allclose(tail, other.tails[source], atol=1e-3)
        for segment, row in rows:
            back = rng.randint(0, len(row) - 1)
            for cache in (one, other):
                cache.truncate(segment.slot, segment.end - back)


@pytest.mark.parametrize("least", [1, 1000])
def test_ragged_steps_through_the_kernels_too(least, model, monkeypatch) -> None:
    monkeypatch.setattr(prompt_keys, "_MIN_TOKENS", least)
    ids = np.random.default_rng(7).integers(5, 150, (SLOTS, MAX_TOKENS))
    one, other = shuffled_cache(model, 3), shuffled_cache(model, 3)
    lengths = {0: 45, 1: 7, 2: 64}
    prefill(model, one, lengths, ids)
    monkeypatch.setattr(model, "row_kernels", lambda: fused_kernels("cpu"))
    prefill(model, other, lengths, ids)
    segments = (Segment(0, 45, 3), Segment(2, 64, 9), Segment(3, 0, 9))
    batch = ForwardBatch(torch.from_numpy(ids[0, :21].copy()), segments)
    found = model.compute_logits(model(batch, other).hidden)
    monkeypatch.undo()
    wanted = model.compute_logits(model(batch, one).hidden)
    # Without rounded inputs of products a sum in another order moves values over rounding edges soon.
    rows = slice(None) if model.rounding == "full" else slice(12, 21)
    assert torch.allclose(found[rows], wanted[rows], atol=1e-4 * float(wanted.abs().max()))


def test_other_widths_are_refused_with_the_reason(small_config, random_model) -> None:
    made = random_model(small_config(), "full")
    cache = made.new_cache(SLOTS, MAX_TOKENS, 40, storage="packed")
    assert "take 512" in why_no_fixed_shape(made, cache)


def pair_of_models(
    small_config, random_model, dtype: torch.dtype = torch.float32
) -> tuple[DeepseekV41, DeepseekV41]:
    """A model of plain values, and one that holds them as the published checkpoint does."""
    config = small_config(head_dim=512, index_head_dim=128, index_n_heads=8, o_lora_rank=32)
    plain = random_model(config, "full", dtype)
    plain.set_engram_token_map(range(160))
    made = copy.deepcopy(plain)
    generator = torch.Generator().manual_seed(5)
    for name, p in list(made.named_parameters()):
        *path, last = name.split(".")
        kind = "mxfp4" if last in ("w13", "w2") else "fp8_block"
        fp8 = path[-1] in ("wq_a", "wq_b", "wkv", "wo_b", "w1", "w2", "w3") and "mtp" not in path
        fp8 &= "compressor" not in path
        if not (kind == "mxfp4" or fp8) or p.shape[-1] % 32:
            continue
        weight = PackedWeight.empty(tuple(p.shape), kind, device="cpu", dtype=p.dtype)
        sign = torch.randint(0, 2, weight.codes.shape, generator=generator, dtype=torch.uint8) << 7
        weight.codes.random_(0, 128 if kind == "mxfp4" else 56, generator=generator)
        weight.codes.add_(sign)
        weight.scale.random_(123, 126, generator=generator)
        for model, value in ((made, weight), (plain, weight.unpack())):
            owner = model.get_submodule(".".join(path))
            setattr(owner, last, torch.nn.Parameter(value, requires_grad=False))
    assert all(takes_packed(layer) for layer in made.layers)
    return plain, made


@pytest.mark.parametrize("prepared", [False, True])
def test_packed_weights_multiply_as_their_values(prepared, small_config, random_model) -> None:
    plain, made = pair_of_models(small_config, random_model)
    if prepared:
        prepare_products(made)
        assert made.layers[0].attn.joined is not None
    ids = np.random.default_rng(2).integers(5, 150, (SLOTS, MAX_TOKENS))
    one, other = shuffled_cache(plain, 1), shuffled_cache(made, 1)
    prefill(plain, one, {0: 20, 2: 33}, ids)
    prefill(made, other, {0: 20, 2: 33}, ids)
    rows = [(Segment(0, 20, 1), [9]), (Segment(2, 33, 2), [10, 11])]
    found = []
    for model, cache in ((plain, one), (made, other)):
        inputs = DecodeInputs.empty(2, 2)
        inputs.fill([r for _, r in rows], [row_values(s, 0) for s, _ in rows])
        found.append(DecodeStep(model, cache)(inputs, MAX_TOKENS).logits[[0, 2, 3]])
    assert torch.allclose(*found, atol=1e-3 * float(found[0].abs().max()))


def run_prompts(model: DeepseekV41) -> torch.Tensor:
    """Logits behind several chunks of two requests and a step with a row that stops early."""
    ids = np.random.default_rng(7).integers(5, 150, (SLOTS, MAX_TOKENS))
    cache = shuffled_cache(model, 3)
    prefill(model, cache, {0: 45, 1: 7}, ids)
    segments = (Segment(0, 45, 3), Segment(1, 7, 30, full_start=25), Segment(3, 0, 9))
    batch = ForwardBatch(torch.from_numpy(ids[0, :42].copy()), segments)
    found = model.compute_logits(model(batch, cache).hidden)
    assert found.shape[0] == 3 + 12 + 9
    return found


def set_least(monkeypatch, least: int) -> None:
    monkeypatch.setattr(prompt_keys, "_MIN_TOKENS", least)
    monkeypatch.setattr(packed_stack, "_MANY_TOKENS", least)
    monkeypatch.setattr(wide_products, "_MANY_SUMS", least)


@pytest.mark.parametrize("least", [1, 1000])
def test_prompts_through_packed_weights(least, small_config, random_model, monkeypatch) -> None:
    plain, made = pair_of_models(small_config, random_model)
    prepare_products(made)
    set_least(monkeypatch, least)
    monkeypatch.setattr(made, "row_kernels", lambda: fused_kernels("cpu"))
    wanted, found = run_prompts(plain), run_prompts(made)
    assert torch.allclose(found, wanted, atol=1e-4 * float(wanted.abs().max()))


@pytest.mark.parametrize("least", [1, 1000])
def test_packed_layers_round_where_the_others_do(
    least, small_config, random_model, monkeypatch
) -> None:
    """In bf16 the bits are those of the row-wise steps, but for the outputs, which are turned back before they are rounded."""
    _, made = pair_of_models(small_config, random_model, torch.bfloat16)
    set_least(monkeypatch, least)
    monkeypatch.setattr(made, "row_kernels", lambda: fused_kernels("cpu"))
    attend = step_pass.StepPass.attend_back

    def apart(run, attention, queries, phases):
        out = attend(run, attention, queries, None)
        return out if phases is None else apply_rope(out, phases, inverse=True)

    monkeypatch.setattr(step_pass.StepPass, "attend_back", apart)
    found = run_prompts(made)
    monkeypatch.setattr(decode_stack, "takes_packed", lambda layer: False)
    assert torch.equal(found, run_prompts(made))
