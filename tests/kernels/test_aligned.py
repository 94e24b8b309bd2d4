"""The cast by groups of 32 channels with one scale for 128: its bytes by definition, what it loses, its contract."""

from __future__ import annotations

import math
import os

import pytest
import torch

from deepinfer.core.errors import ShapeError
from deepinfer.kernels import fp8_gemm_nt, per_token_cast_to_fp8_aligned
from deepinfer.kernels.reference.cast import per_block_cast_to_fp8, per_token_cast_to_fp8

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
BACKENDS = [None, "torch", "triton"] if INTERPRETED else [None, "torch"]
pytestmark = [
    pytest.mark.filterwarnings("ignore:Conversion of an array:DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:invalid value encountered:RuntimeWarning"),
    pytest.mark.filterwarnings("ignore:overflow encountered:RuntimeWarning"),
]


def randn(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def in_one_scale(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Values of a cast by 32 channels, to the nearest code of the largest scale of 128; and that scale."""
    codes, scale = per_token_cast_to_fp8(x, 32)
    scale = scale.float().unflatten(-1, (-1, 4))
    top = scale.amax(-1, keepdim=True)
    shifted = codes.double().unflatten(-1, (-1, 4, 32)) * (scale / top).double()[..., None]
    return shifted.float().to(torch.float8_e4m3fn).flatten(-3), top[..., 0]


def uneven(rows: int, channels: int) -> torch.Tensor:
    """Rows whose groups of 32 lie up to 2^20 apart, one of them zeros."""
    x = randn(rows, channels)
    power = torch.randint(
        -10, 11, (rows, channels // 32), generator=torch.Generator().manual_seed(5)
    )
    power[0] = 0
    x = x.unflatten(-1, (-1, 32)) * torch.exp2(power.float())[..., None]
    x[1, 2] = 0
    return x.flatten(-2)


@pytest.mark.parametrize("backend", BACKENDS)
def test_groups_are_brought_to_one_scale(backend) -> None:
    x = uneven(7, 256)
    q, scale = per_token_cast_to_fp8_aligned(x, backend=backend)
    assert q.dtype == torch.float8_e4m3fn
    wanted, top = in_one_scale(x)
    assert torch.equal(scale, top)
    assert torch.equal(q.view(torch.uint8), wanted.view(torch.uint8))
    # What was lost is less than half a step of the smallest codes, and nothing of larger ones.
    value = q.double() * scale.double().repeat_interleave(128, -1)
    codes, power = per_token_cast_to_fp8(x, 32)
    exact = codes.double() * power.double().repeat_interleave(32, -1)
    most = top.double().repeat_interleave(128, -1)
    assert ((value - exact).abs() <= most * 2.0**-10).all()
    large = exact.abs() >= most * 2.0**-6
    assert torch.equal(value[large], exact[large])
    x[2, 5], x[3, 200] = math.inf, math.nan
    _, scale = per_token_cast_to_fp8_aligned(x, backend=backend)
    assert scale.isnan().tolist() == [[r == 2, r == 3] for r in range(7)]
    assert torch.equal(scale[4:], top[4:])


@pytest.mark.parametrize("backend", BACKENDS)
def test_rows_that_lie_apart_more_axes_and_none(backend) -> None:
    whole = torch.full((3, 2, 300), torch.nan)
    whole[..., 8:264] = uneven(6, 256).view(3, 2, 256)
    q, scale = per_token_cast_to_fp8_aligned(whole[..., 8:264], backend=backend)
    wanted, top = in_one_scale(uneven(6, 256))
    assert q.shape == (3, 2, 256)
    assert scale.shape == (3, 2, 2)
    assert torch.equal(q.view(torch.uint8).flatten(0, 1), wanted.view(torch.uint8))
    assert torch.equal(scale.flatten(0, 1), top)
    q, scale = per_token_cast_to_fp8_aligned(torch.empty(0, 256), backend=backend)
    assert q.shape == (0, 256)
    assert scale.shape == (0, 2)


def test_products_take_it() -> None:
    x, w = uneven(5, 256), per_block_cast_to_fp8(randn(128, 256, seed=1), 128)
    found = fp8_gemm_nt(per_token_cast_to_fp8_aligned(x), (w[0], w[1].float()), torch.empty(5, 128))
    q, scale = in_one_scale(x)
    values = q.double() * scale.double().repeat_interleave(128, -1)
    wanted = values @ (w[0].double() * w[1].double().repeat_interleave(128, 1)).T
    assert torch.allclose(found.double(), wanted, rtol=1e-5, atol=1e-5 * float(wanted.abs().max()))


@pytest.mark.parametrize("x", [torch.ones(2, 96), torch.ones(2, 128, dtype=torch.int32)])
def test_what_it_refuses(x) -> None:
    with pytest.raises(ShapeError):
        per_token_cast_to_fp8_aligned(x)


@pytest.mark.skipif(INTERPRETED, reason="tracing does not need Triton")
def test_the_operation_can_be_traced() -> None:
    x = uneven(3, 128)
    codes = torch.empty(3, 128, dtype=torch.uint8)
    op = torch.ops.deepinfer.per_token_cast_to_fp8_aligned
    torch.library.opcheck(op, (None, x, codes, torch.empty(3, 1)))
    traced = torch.compile(per_token_cast_to_fp8_aligned, fullgraph=True, backend="aot_eager")
    for found, wanted in zip(traced(x), in_one_scale(x), strict=True):
        assert torch.equal(found.float(), wanted.float())
