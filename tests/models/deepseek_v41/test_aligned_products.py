"""FP8 products with one power of two for 128 channels, made from the form with one for 32."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from deepinfer.kernels import per_token_cast_to_fp8_aligned
from deepinfer.kernels.reference import fused
from deepinfer.models.deepseek_v41 import packed_products, packed_stack
from deepinfer.models.deepseek_v41.aligned_products import align_weight, fits
from deepinfer.models.deepseek_v41.moe import SharedExpert
from deepinfer.models.packed import PackedWeight


def packed(rows: int, columns: int, spread: int, seed: int = 0) -> PackedWeight:
    generator = torch.Generator().manual_seed(seed)
    weight = PackedWeight.empty((rows, columns), "fp8_block", device="cpu", dtype=torch.bfloat16)
    values = torch.randn(rows, columns, generator=generator) * 60
    weight.codes.copy_(values.to(torch.float8_e4m3fn).view(torch.uint8))
    weight.scale.random_(118, 119 + spread, generator=generator)
    return weight


def values(codes: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    wide = scale.repeat_interleave(128, 1)
    if len(scale) < len(codes):
        wide = wide.repeat_interleave(128, 0)
    return codes.float() * wide


@pytest.mark.parametrize("spread", [0, 2, 9])
def test_weights_keep_their_values(spread) -> None:
    weight = packed(256, 384, spread)
    codes, scale = align_weight(weight)
    assert codes.dtype == torch.float8_e4m3fn
    assert scale.shape == (2, 3)
    wanted, found = weight.unpack().float(), values(codes, scale)
    top = scale.repeat_interleave(128, 0).repeat_interleave(128, 1)
    assert float(((found - wanted).abs() / top).max()) <= 2**-10
    large = wanted.abs() >= top * 2**-6
    assert torch.equal(found[large], wanted[large])
    if spread == 0:
        assert torch.equal(found, wanted)
    else:
        assert bool(large.any())


def test_inputs_keep_their_values() -> None:
    y = torch.randn(5, 256, generator=torch.Generator().manual_seed(1)).to(torch.bfloat16)
    y *= 2.0 ** torch.arange(-3, 5).repeat_interleave(32)
    codes, scale = per_token_cast_to_fp8_aligned(y)
    assert scale.shape == (5, 2)
    error = (values(codes, scale) - y.float()).abs()
    assert bool((error <= y.float().abs() * 2**-4 + scale.repeat_interleave(128, 1) * 2**-10).all())
    assert per_token_cast_to_fp8_aligned(y[:0])[0].shape == (0, 256)


def test_what_fits() -> None:
    assert fits(packed(256, 128, 0))
    assert not fits(packed(64, 128, 0))
    assert not fits(packed(128, 96, 0))
    assert not fits(torch.zeros(128, 128))


def test_shared_expert(monkeypatch) -> None:
    shared = SharedExpert(256, 128, device="meta", dtype=torch.bfloat16)
    for i, (name, rows, columns) in enumerate(
        (("w1", 128, 256), ("w3", 128, 256), ("w2", 256, 128))
    ):
        value = torch.nn.Parameter(packed(rows, columns, 3, i), requires_grad=False)
        getattr(shared, name).weight = value
    moe = SimpleNamespace(shared_experts=shared, limit=10.0)
    run = SimpleNamespace(kernels=fused)
    y = torch.randn(40, 256, generator=torch.Generator().manual_seed(5)).to(torch.bfloat16)
    packed_products.prepare_products(shared)
    assert shared.joined.aligned is None
    wanted = packed_stack._shared(moe, y, run)
    monkeypatch.setattr(packed_products, "_is_hopper", lambda device: True)
    packed_products.align_products(shared)
    assert shared.w2.weight.aligned is not None
    found = packed_stack._shared(moe, y, run)
    error = float((found.float() - wanted.float()).norm() / wanted.float().norm())
    assert 0 < error < 0.02
    monkeypatch.setattr(packed_stack, "_ALIGNED", False)
    assert torch.equal(packed_stack._shared(moe, y, run), wanted)
