"""The kernels on a GPU: against the references, repeated, and each row alone; poisoned where nothing may be read."""

from __future__ import annotations

import pytest
import torch

from deepinfer.kernels import indexer
from deepinfer.kernels.reference.cast import per_token_cast_to_fp4
from deepinfer.kernels.topk import topk

pytestmark = pytest.mark.gpu


def calc_diff(x: torch.Tensor, y: torch.Tensor) -> float:
    x, y = x.double(), y.double()
    return float(1 - 2 * (x * y).sum() / (x * x + y * y).sum())


@pytest.mark.parametrize("heads", [8, 16, 32, 64])
@pytest.mark.parametrize("kind", ["fp8", "fp4"])
def test_index_scores(heads, kind) -> None:
    q = torch.randn(67, heads, 128, device="cuda").to(torch.float8_e4m3fn)
    keys = torch.randn(3001, 128, device="cuda")
    kv = per_token_cast_to_fp4(keys) if kind == "fp4" else (keys.to(torch.float8_e4m3fn), torch.rand(3001, device="cuda"))  # fmt: skip
    w = torch.randn(67, heads, device="cuda")
    first = torch.randint(0, 900, (67,), device="cuda", dtype=torch.int32)
    last = torch.randint(900, 3002, (67,), device="cuda", dtype=torch.int32)
    f = indexer.fp8_fp4_mqa_logits if kind == "fp4" else indexer.fp8_mqa_logits
    found, wanted = (f(q, kv, w, first, last, backend=name) for name in ("hopper", "torch"))
    seen = wanted.isfinite()
    assert torch.equal(found == -torch.inf, ~seen)
    assert calc_diff(found[seen], wanted[seen]) < 5e-6
    for _ in range(20):
        assert torch.equal(f(q, kv, w, first, last, backend="hopper"), found)


@pytest.mark.parametrize("backend", ["wide", "triton"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize(("n", "k"), [(256, 256), (5000, 512), (40_000, 1024), (100_000, 4096)])
def test_selection(backend, dtype, n, k) -> None:
    x = torch.randn(6, n, device="cuda").to(dtype)
    x[1], x[2, ::2] = 1.5, torch.nan
    x[3] = torch.randint(-2, 3, (n,), device="cuda").to(dtype)
    end = torch.tensor([n, n, n, n, k - 1, 0], device="cuda", dtype=torch.int32)
    found = topk(x, k, end=end, return_value=False, backend=backend)[1]
    assert torch.equal(found, topk(x, k, end=end, return_value=False, backend="torch")[1])
