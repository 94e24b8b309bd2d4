"""RMS norms by every backend: against fp64, rows alone, NaN in its row; norm with rotation and cast; operations."""

from __future__ import annotations

import os

import pytest
import torch

from deepinfer.core.errors import ShapeError
from deepinfer.kernels import norm
from deepinfer.kernels.reference import norm as reference
from deepinfer.kernels.reference.swiglu import cast_rows
from deepinfer.kernels.rope import apply_rope

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
BACKENDS = ["torch", "triton"] if INTERPRETED else ["torch"]
pytestmark = [
    pytest.mark.filterwarnings("ignore:Conversion of an array:DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:invalid value encountered:RuntimeWarning"),
]


def randn(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def exact(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    wide = x.double()
    return wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps) * weight.double()


def phases(places: int, pairs: int) -> torch.Tensor:
    angles = randn(places, pairs, seed=5) * 9
    return torch.stack((angles.cos(), angles.sin()), -1)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("channels", [5120, 1280, 512, 96, 7, 1])
def test_norm_of_any_width(backend, channels) -> None:
    wide, weight = randn(5, channels + 3) * 3, randn(channels, seed=1)
    x = wide[:, 2 : 2 + channels]
    found = norm.rms_norm(x, weight, 1e-5, backend=backend)
    assert torch.allclose(found.double(), exact(x, weight, 1e-5), rtol=2e-6, atol=1e-6)
    out = torch.full((5, channels), 7.0)
    assert norm.rms_norm(x, weight, 1e-5, out=out, backend=backend) is out
    assert torch.equal(out, found)
    assert norm.rms_norm(x, weight, 1e-5, backend=backend).is_contiguous()


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("channels", [640, 96])
def test_addition_and_norm_in_place(backend, channels) -> None:
    x, residual, weight = randn(3, 2, channels), randn(3, 2, channels, seed=1), randn(channels)
    x, residual = x.half(), residual.half()
    total = (x.float() + residual.float()).half()
    given = x.clone(), residual.clone()
    found = norm.fused_add_rms_norm(*given, weight, 1e-6, backend=backend)
    assert found[0] is given[0]
    assert found[1] is given[1]
    assert torch.equal(found[1], total)
    assert torch.allclose(found[0].double(), exact(total, weight, 1e-6), rtol=1e-3, atol=1e-6)


@pytest.mark.parametrize("backend", BACKENDS)
def test_rows_do_not_hang_on_their_neighbours(backend) -> None:
    x, weight = randn(19, 96), randn(96)
    whole = norm.rms_norm(x, weight, backend=backend)
    spoiled = x.clone()
    spoiled[::2] = torch.nan
    found = norm.rms_norm(spoiled, weight, backend=backend)
    assert torch.equal(found[1::2], whole[1::2])
    assert found[::2].isnan().all()
    if backend == "triton":
        for rows in (slice(0, 1), slice(3, 18), slice(18, 19)):
            assert torch.equal(norm.rms_norm(x[rows], weight, backend=backend), whole[rows])


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("format", ["fp8", "mxfp4", "nvfp4"])
@pytest.mark.parametrize("kind", ["norm", "rope", "both", "cast"])
def test_norm_rotation_and_cast(backend, format, kind) -> None:
    x = randn(5, 4, 160)[:, 1:, :128]
    weight = randn(128, seed=2) if kind in ("norm", "both") else None
    table = phases(11, 16) if kind in ("rope", "both") else None
    positions = None if table is None else torch.tensor([0, 10, 3, 3, 7])
    found = norm.rms_norm_rope_quant(
        x, weight, 1e-6, table, positions, format=format, backend=backend
    )
    values = x if weight is None else norm.rms_norm(x, weight, 1e-6)
    values = values if table is None else apply_rope(values, table, positions)
    wanted = cast_rows(values, format, 32)
    for a, b in zip(found, wanted, strict=True):
        assert a.dtype == b.dtype
        assert a.shape == b.shape
        differing = (a.view(torch.uint8) != b.view(torch.uint8)).float().mean()
        assert differing <= (0 if weight is None else 0.002)
    one = norm.rms_norm_rope_quant(
        x[:, 0], weight, 1e-6, table, positions, format=format, backend=backend
    )
    assert torch.equal(one[0].view(torch.uint8), found[0].view(torch.uint8)[:, 0])


@pytest.mark.parametrize("backend", [None, "torch"])
def test_no_rows(backend) -> None:
    weight = torch.ones(64)
    assert norm.rms_norm(torch.empty(0, 64), weight, backend=backend).shape == (0, 64)
    q, scale = norm.rms_norm_rope_quant(torch.empty(0, 2, 64), weight, backend=backend)
    assert (q.shape, scale.shape) == ((0, 2, 64), (0, 2, 2))
    none = torch.empty(0, 64)
    norm.fused_add_rms_norm(none, none.clone(), weight, backend=backend)


def test_wrong_arguments() -> None:
    x = randn(3, 2, 64)
    with pytest.raises(ShapeError, match="weight has shape"):
        norm.rms_norm(x, torch.ones(32))
    with pytest.raises(ShapeError, match="out is"):
        norm.rms_norm(x, torch.ones(64), out=torch.empty(3, 64))
    with pytest.raises(ShapeError, match="residual has shape"):
        norm.fused_add_rms_norm(x, x[:2], torch.ones(64))
    turned = x.transpose(0, 1)
    with pytest.raises(ShapeError, match="must be contiguous"):
        norm.fused_add_rms_norm(turned, turned.contiguous(), torch.ones(64), backend="torch")
    with pytest.raises(ShapeError, match="multiple of 32 channels"):
        norm.rms_norm_rope_quant(x[..., :40], None)
    with pytest.raises(ShapeError, match="positions has shape"):
        norm.rms_norm_rope_quant(x, None, 1e-6, phases(9, 8), torch.zeros(2, dtype=torch.int64))


@pytest.mark.skipif(INTERPRETED, reason="the compiler of torch needs no interpreter")
def test_in_torch_compile() -> None:
    x, weight, table = randn(4, 64), randn(64, seed=1), phases(4, 8)

    def step(x: torch.Tensor, residual: torch.Tensor) -> tuple[torch.Tensor, ...]:
        y = norm.rms_norm(x, weight)
        norm.fused_add_rms_norm(y, residual, weight)
        q, scale = norm.rms_norm_rope_quant(y, weight, 1e-6, table)
        return y, residual, q.float(), scale.view(torch.uint8) + 0

    compiled = torch.compile(step, fullgraph=True, backend="aot_eager")
    for a, b in zip(compiled(x, x * 2), step(x, x * 2), strict=True):
        assert torch.equal(a, b)
    ops = torch.ops.deepinfer
    torch.library.opcheck(ops.rms_norm, (None, x, weight, 1e-6, torch.empty(4, 64)))
    torch.library.opcheck(ops.fused_add_rms_norm, (None, x.clone(), x.clone(), weight, 1e-6))
    q, scale = torch.empty(4, 1, 64, dtype=torch.uint8), torch.empty(4, 1, 2, dtype=torch.uint8)
    torch.library.opcheck(
        ops.rms_norm_rope_quant, (None, x[:, None], weight, 1e-6, table, None, 1, q, scale)
    )


def test_the_reference_is_the_definition() -> None:
    x, weight = randn(3, 64), randn(64, seed=1)
    assert torch.equal(norm.rms_norm(x, weight), reference.rms_norm(x, weight))


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_sum_is_not_made_onto_what_is_added(backend) -> None:
    x = randn(4, 32)
    with pytest.raises(ShapeError, match="residual is x itself"):
        norm.fused_add_rms_norm(x, x, torch.ones(32), backend=backend)
