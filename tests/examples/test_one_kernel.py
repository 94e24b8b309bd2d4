"""The example step of a layer: near to plain torch, with rows in the pages of their requests."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from types import ModuleType

import pytest
import torch


@pytest.fixture(scope="module")
def example() -> ModuleType:
    path = Path(__file__).parents[2] / "examples" / "one_kernel.py"
    spec = importlib.util.spec_from_file_location("example_one_kernel", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_kernels_come_near_to_plain_torch(example: ModuleType) -> None:
    error, same = example.compare("cpu", requests=2, tokens=18)
    assert 0 < error < 0.03  # 1 % of it is the rounding of keys to e4m3
    assert same > 0.7


def test_a_request_writes_its_own_pages_only(example: ModuleType) -> None:
    layer, cache = example.Layer("cpu"), example.Cache(2, 2, "cpu")
    x = torch.randn(2, example.HIDDEN).bfloat16()
    positions = torch.tensor([3, 64], dtype=torch.int32)  # the second has no page so far behind
    _, picked = example.step(layer, cache, x, positions)
    assert [page for page in range(4) if cache.rows[page].any()] == [int(cache.table[0, 0])]
    assert picked[0].max() <= 3
