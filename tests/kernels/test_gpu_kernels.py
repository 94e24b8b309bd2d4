"""The kernels on a GPU: against the references, repeated, and each row alone; poisoned where nothing may be read."""

from __future__ import annotations

import pytest
import torch

from deepinfer.kernels import gemm, indexer
from deepinfer.kernels.reference.cast import (
    per_block_cast_to_fp8,
    per_token_cast_to_fp4,
    per_token_cast_to_fp8,
)
from deepinfer.kernels.topk import topk

pytestmark = pytest.mark.gpu
ROWS = (1, 2, 3, 15, 16, 17, 63, 64, 65, 128, 257)


def calc_diff(x: torch.Tensor, y: torch.Tensor) -> float:
    x, y = x.double(), y.double()
    return float(1 - 2 * (x * y).sum() / (x * x + y * y).sum())


def tokens(*shape: int):
    q, s = per_token_cast_to_fp8(torch.randn(shape, device="cuda"), 128)
    return q, s.float()


def weights(kind: str, *shape: int):
    w = torch.randn(shape, device="cuda")
    if kind == "fp4":
        return per_token_cast_to_fp4(w)
    q, s = per_block_cast_to_fp8(w, 128)
    return q, s.float()


@pytest.mark.parametrize("kind", ["fp8", "fp4"])
@pytest.mark.parametrize("expected", [16, 32, 64])
def test_masked_products(kind, expected) -> None:
    a, b = tokens(5, 64, 1024), weights(kind, 5, 640, 1024)
    counts = torch.tensor([64, 0, 1, 17, 33], device="cuda", dtype=torch.int32)
    for g, count in enumerate(counts.tolist()):
        a[0].view(torch.uint8)[g, count:] = 0x7F
        a[1][g, count:] = torch.nan
    f = gemm.m_grouped_fp8_fp4_gemm_nt_masked if kind == "fp4" else gemm.m_grouped_fp8_gemm_nt_masked  # fmt: skip
    found, wanted = (
        torch.full((5, 64, 640), 777.0, device="cuda", dtype=torch.bfloat16) for _ in "ab"
    )
    f(a, b, found, counts, expected, backend="hopper")
    f(a, b, wanted, counts, expected, backend="torch")
    assert torch.equal(found == 777, wanted == 777)
    assert calc_diff(found, wanted) < 5e-6
    for _ in range(200):
        again = torch.full_like(found, 777.0)
        f(a, b, again, counts, expected, backend="hopper")
        assert torch.equal(again, found)


@pytest.mark.parametrize("kind", ["fp8", "fp4", "bf16"])
def test_rows_do_not_depend_on_their_number(kind) -> None:
    if kind == "bf16":
        a, b = torch.randn(257, 1024, device="cuda").bfloat16(), torch.randn(640, 1024, device="cuda").bfloat16()  # fmt: skip
        f = gemm.bf16_gemm_nt
    else:
        a, b = tokens(257, 1024), weights(kind, 640, 1024)
        f = gemm.fp8_fp4_gemm_nt if kind == "fp4" else gemm.fp8_gemm_nt
    whole = f(a, b, backend="hopper")
    assert calc_diff(whole, f(a, b, backend="torch")) < 5e-6
    for rows in ROWS:
        part = a[-rows:] if kind == "bf16" else (a[0][-rows:], a[1][-rows:])
        assert torch.equal(f(part, b, backend="hopper"), whole[-rows:]), rows


def test_contiguous_products() -> None:
    a, b = tokens(512, 1024), weights("fp8", 3, 640, 1024)
    layout = torch.full((512,), -1, device="cuda", dtype=torch.int32)
    layout[:100], layout[128:384] = 2, 0
    a[0].view(torch.uint8)[layout < 0] = 0x7F
    found, wanted = (
        torch.full((512, 640), 777.0, device="cuda", dtype=torch.bfloat16) for _ in "ab"
    )
    gemm.m_grouped_fp8_gemm_nt_contiguous(a, b, found, layout, backend="hopper")
    gemm.m_grouped_fp8_gemm_nt_contiguous(a, b, wanted, layout, backend="torch")
    assert torch.equal(found == 777, wanted == 777)
    assert calc_diff(found, wanted) < 5e-6


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
