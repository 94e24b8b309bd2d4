"""On a GPU: the same bits as on the CPU, for the casts, the loader and packed weights."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from deepinfer.kernels import (
    cast_back,
    per_block_cast_to_fp8,
    per_token_cast_to_fp4,
    per_token_cast_to_fp8,
    round_fp8,
    round_mxfp4,
    round_nvfp4,
)
from deepinfer.models import PackedWeight, load_model, save_pretrained

pytestmark = pytest.mark.gpu


def values() -> torch.Tensor:
    x = torch.randn(256, 512, generator=torch.Generator().manual_seed(0))
    return x * 2.0 ** torch.randint(-20, 20, (256, 1), generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize("function", [round_fp8, round_mxfp4, round_nvfp4])
def test_rounding_is_the_same(function: Callable[[torch.Tensor], torch.Tensor]) -> None:
    x = values()
    assert torch.equal(function(x.cuda()).cpu(), function(x))
    x[3, 5] = torch.nan
    assert torch.equal(function(x.cuda()).isnan().cpu(), function(x).isnan())


@pytest.mark.parametrize(
    ("cast", "block"),
    [
        (per_block_cast_to_fp8, (32, 32)),
        (per_token_cast_to_fp8, (1, 32)),
        (per_token_cast_to_fp4, (1, 32)),
        (lambda x: per_token_cast_to_fp4(x, 16), (1, 16)),
    ],
)
def test_casts_are_the_same(cast, block) -> None:
    x = values()
    q, scale = cast(x)
    q_gpu, scale_gpu = cast(x.cuda())
    assert torch.equal(q.view(torch.uint8), q_gpu.cpu().view(torch.uint8))
    assert torch.equal(scale.view(torch.uint8), scale_gpu.cpu().view(torch.uint8))
    assert torch.equal(
        cast_back(q_gpu, scale_gpu, block=block).cpu(), cast_back(q, scale, block=block)
    )


@pytest.mark.parametrize("packed", [False, True])
def test_loading_is_the_same(save_tiny: Callable[..., Path], tmp_path: Path, packed: bool) -> None:
    folder = save_tiny()
    cpu = load_model(folder, dtype=torch.bfloat16)
    gpu = load_model(folder, device="cuda", packed=packed)
    for (name, a), (_, b) in zip(cpu.named_parameters(), gpu.named_parameters(), strict=True):
        assert b.is_cuda, name
        plain = b.unpack() if isinstance(b, PackedWeight) else b
        assert plain.dtype == a.dtype, name
        assert torch.equal(plain.cpu(), a), name
    moved = gpu.to("cpu")
    assert not packed or any(isinstance(p, PackedWeight) for p in moved.parameters())
    save_pretrained(
        load_model(folder, device="cuda", packed=True), tmp_path / "again", max_shard_bytes=100_000
    )
    for path in folder.glob("*.safetensors"):
        assert path.read_bytes() == (tmp_path / "again" / path.name).read_bytes()
