"""Products with fp32 weights as three bf16 products."""

from __future__ import annotations

import torch
from torch import nn

from deepinfer.models.deepseek_v41 import packed_products, wide_products
from deepinfer.models.deepseek_v41.wide_products import split_weight, wide_linear


def test_parts_are_the_weight() -> None:
    weight = torch.randn(24, 64, generator=torch.Generator().manual_seed(0))
    parts = split_weight(weight)
    assert parts.dtype == torch.bfloat16
    assert torch.equal(parts.view(3, 24, 64).double().sum(0).float(), weight)


def test_weights_of_a_pair_share_memory() -> None:
    first, second = nn.Linear(64, 16, bias=False), nn.Linear(64, 16, bias=False)
    wanted = torch.cat([first.weight.detach(), second.weight.detach()])
    whole = packed_products._join_wide(first, second)
    assert torch.equal(whole, wanted)
    assert torch.equal(torch.cat([first.weight, second.weight]), wanted)
    assert second.weight.data_ptr() == whole[16:].data_ptr()
    assert packed_products._join_wide(first, None) is None


def test_equal_to_fp32_products(monkeypatch) -> None:
    monkeypatch.setattr(wide_products, "_MANY_SUMS", 4 * 24)
    generator = torch.Generator().manual_seed(1)
    owner = nn.Module()
    weights = [torch.randn(n, 256, generator=generator) for n in (16, 8)]
    owner.wide_parts = split_weight(torch.cat(weights))
    y = torch.randn(8, 256, generator=generator).to(torch.bfloat16)
    exact = [y.double() @ w.double().T for w in weights]
    for rows in (
        8,
        3,
        -3,
    ):  # with parts; with too few rows for them; these with both weights at once
        owner.wide_whole = torch.cat(weights) if rows < 0 else None
        rows = abs(rows)
        for found, wanted in zip(wide_linear(owner, weights, y[:rows]), exact, strict=True):
            assert found.dtype == torch.float32
            assert float((found - wanted[:rows]).abs().max()) < 1e-4
            assert float((found - wanted[:rows]).norm() / wanted[:rows].norm()) < 5e-7
    owner.wide_whole = torch.cat(weights) + 1
    assert float((wide_linear(owner, weights, y[:3])[0] - exact[0][:3]).abs().max()) > 1
    owner.wide_parts.view(3, 24, 256)[2].zero_()
    worse = torch.cat(wide_linear(owner, weights, y), 1) - torch.cat(exact, 1)
    assert float(worse.norm()) > 5e-7 * float(torch.cat(exact, 1).norm())
