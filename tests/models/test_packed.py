"""Packed weights behave as the dequantised tensors they stand for, and stay packed where they can."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from deepinfer.models import PackedWeight, load_model
from deepinfer.models.formats import Storage, quantise, scale_name


def packed(*shape: int, storage: Storage, dtype: torch.dtype = torch.float32) -> PackedWeight:
    values = torch.randn(*shape, generator=torch.Generator().manual_seed(0))
    stored = quantise("x.weight", values.flatten(0, -2), storage)
    weight = PackedWeight.empty(shape, storage, device="cpu", dtype=dtype)
    weight.codes.copy_(stored["x.weight"].view(torch.uint8).view(weight.codes.shape))
    weight.scale.copy_(stored[scale_name("x.weight")].view(torch.uint8).view(weight.scale.shape))
    return weight


KINDS: list[tuple[tuple[int, ...], Storage]] = [
    ((64, 96), "fp8_block"), ((64, 96), "fp8_group"), ((64, 96), "mxfp4"), ((3, 64, 96), "mxfp4"),
]  # fmt: skip


@pytest.mark.parametrize(("shape", "storage"), KINDS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_operations_see_the_values(
    shape: tuple[int, ...], storage: Storage, dtype: torch.dtype
) -> None:
    weight = packed(*shape, storage=storage, dtype=dtype)
    values = weight.unpack()
    assert type(values) is Tensor
    assert (weight.shape, weight.dtype) == (values.shape, values.dtype) == (shape, dtype)
    x = torch.randn(5, 96, dtype=dtype)
    matrix = weight if len(shape) == 2 else weight[1]
    assert torch.equal(F.linear(x, matrix), F.linear(x, values if len(shape) == 2 else values[1]))
    assert torch.equal(weight + 1, values + 1)
    assert torch.equal(weight.sum(), values.sum())
    assert torch.equal(weight.mT, values.mT)
    assert torch.equal(torch.cat([weight, weight]), torch.cat([values, values]))
    assert torch.equal(weight.float(), values.float())
    out = torch.zeros(shape, dtype=dtype)
    out.copy_(weight)
    assert torch.equal(out, values)


@pytest.mark.parametrize(("shape", "storage"), KINDS)
def test_choosing_rows(
    shape: tuple[int, ...], storage: Storage, monkeypatch: pytest.MonkeyPatch
) -> None:
    weight = packed(*shape, storage=storage)
    values = weight.unpack()
    free = storage != "fp8_block"
    if free:
        monkeypatch.setattr(PackedWeight, "unpack", lambda self: pytest.fail("unpacked as a whole"))
    assert torch.equal(weight[1], values[1])
    assert torch.equal(weight[-1], values[-1])
    for index in (
        torch.tensor([2, 0, 2]),
        torch.tensor([[0], [1]]),
        torch.tensor([], dtype=torch.int64),
    ):
        assert torch.equal(weight[index], values[index])
        if weight.dim() == 2:
            assert torch.equal(F.embedding(index, weight), values[index])
    monkeypatch.undo()
    assert torch.equal(weight[1:3], values[1:3])
    mask = torch.arange(shape[0]) % 2 == 0
    assert torch.equal(weight[mask], values[mask])
    assert torch.equal(weight[0, 1], values[0, 1])
    with pytest.raises(IndexError):
        weight[shape[0]]


def test_moves_and_casts_keep_it_packed() -> None:
    weight = packed(64, 64, storage="fp8_block")
    half = weight.to(torch.bfloat16)
    assert isinstance(half, PackedWeight)
    assert half.dtype == torch.bfloat16
    assert torch.equal(half.unpack(), weight.unpack().bfloat16())
    for same in (weight.detach(), weight.clone(), copy.deepcopy(weight), weight.to("cpu")):
        assert isinstance(same, PackedWeight)
        assert torch.equal(same.unpack(), weight.unpack())
    assert weight.clone().codes.data_ptr() != weight.codes.data_ptr()
    assert weight.to("meta").is_meta
    assert torch.equal(weight.int(), weight.unpack().int())
    assert "fp8_block" in repr(weight)
    assert weight.size_bytes == 64 * 64 + 4


def test_in_a_module(save_tiny: Callable[..., Path]) -> None:
    folder = save_tiny()
    model = load_model(folder, packed=True)
    plain = load_model(folder)
    ids = [3, 1, 4, 1, 5, 9, 2, 6]
    assert torch.equal(model.logits(ids), plain.logits(ids))
    with torch.inference_mode():
        assert torch.equal(model.logits(ids), plain.logits(ids))
    with torch.enable_grad():
        assert torch.equal(model.logits(ids), plain.logits(ids))
    moved = model.to("cpu")
    assert moved.logits(ids).equal(plain.logits(ids))
    state = model.state_dict()
    assert isinstance(state["layers.0.attn.wq_a.weight"], PackedWeight)
    assert list(state) == list(plain.state_dict())
    copied = copy.deepcopy(model)
    assert torch.equal(copied.logits(ids), plain.logits(ids))


def test_cached_steps_and_drafts(save_tiny: Callable[..., Path]) -> None:
    from deepinfer.models.deepseek_v41 import ForwardBatch

    folder = save_tiny()
    results = []
    for packed_weights in (False, True):
        model = load_model(folder, packed=packed_weights)
        cache = model.new_cache(1, 64)
        rows = []
        for start, ids in ((0, [3, 1, 4, 1, 5]), (5, [9]), (6, [2, 6])):
            out = model(ForwardBatch.from_segments([(0, start, ids)]), cache)
            rows.append(model.compute_logits(out.hidden))
        results.append(torch.cat(rows))
        bias = model.draft.markov_bias(torch.tensor([1, 2]))
        results[-1] = torch.cat([results[-1], bias])
    assert torch.equal(*results)


def test_bf16_module_cast_keeps_bytes() -> None:
    layer = nn.Module()
    layer.weight = nn.Parameter(packed(64, 64, storage="fp8_block"), requires_grad=False)
    values = layer.weight.unpack()
    layer.to(torch.bfloat16)
    assert isinstance(layer.weight, PackedWeight)
    assert torch.equal(layer.weight.unpack(), values.bfloat16())


def test_packed_takes_a_fraction_of_the_memory(save_tiny: Callable[..., Path]) -> None:
    folder = save_tiny()

    def size(model: nn.Module) -> int:
        kept = (p for name, p in model.named_parameters() if "experts" in name)
        return sum(p.size_bytes if isinstance(p, PackedWeight) else p.nbytes for p in kept)

    assert size(load_model(folder, packed=True)) < size(load_model(folder)) / 6


def test_pickle_round_trip() -> None:
    weight = packed(64, 64, storage="mxfp4")
    again = pickle.loads(pickle.dumps(weight))
    assert isinstance(again, PackedWeight)
    assert torch.equal(again.unpack(), weight.unpack())
