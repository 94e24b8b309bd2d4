"""What a program does around the model changes nothing in it: settings of torch, copies, pickles."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager

import pytest
import torch
from torch import Tensor

from deepinfer.models.deepseek_v41 import DeepseekV41, ForwardBatch

IDS = [(i * 7 + i * i) % 120 + 5 for i in range(40)]


@contextmanager
def default_dtype(dtype: torch.dtype) -> Iterator[None]:
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(torch.float32)


def everything(model: DeepseekV41) -> list[Tensor]:
    """One sequence whole, in a long and in short steps, and a draft."""
    cache = model.new_cache(2, 64, 32)
    out = [model.logits(IDS)]
    for start, stop in ((0, 30), (30, 32), (32, 33)):
        step = model.forward(ForwardBatch.from_segments([(1, start, IDS[start:stop])]), cache)
        positions = range(start, stop)
        model.mtp.extend_context(step.features, positions, [1] * len(positions), cache)
        out.append(model.compute_logits(step.hidden))
    return [*out, *model.mtp.draft_greedy([IDS[33]], [33], [1], cache)]


@pytest.mark.parametrize(
    "setting",
    [
        lambda: default_dtype(torch.float64),
        lambda: default_dtype(torch.bfloat16),
        lambda: torch.autocast("cpu", dtype=torch.bfloat16),
        lambda: torch.device("meta"),
    ],
    ids=["float64", "bfloat16", "autocast", "device"],
)
def test_same_bits(setting, load_golden) -> None:
    model = load_golden("actqat")
    wanted = everything(model)
    context: AbstractContextManager[object] = setting()
    with context:
        found = everything(model)
    for one, other in zip(found, wanted, strict=True):
        assert one.dtype == other.dtype
        assert one.device == other.device
        assert torch.equal(one, other)


@pytest.mark.parametrize("twice", [copy.deepcopy, lambda m: pickle.loads(pickle.dumps(m))])
def test_copies_of_a_used_model(twice, load_golden) -> None:
    model = load_golden("actqat")
    wanted = everything(model)
    other = twice(model)
    for one, two in zip(everything(other), wanted, strict=True):
        assert torch.equal(one, two)
    other.layers[0].attn.wq_a.weight.zero_()
    assert not torch.equal(everything(other)[0], wanted[0])
    assert torch.equal(everything(model)[0], wanted[0])
