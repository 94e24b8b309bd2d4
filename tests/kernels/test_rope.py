"""Rotation by every backend: complex products, there and back, in place, tables, and operations."""

from __future__ import annotations

import os

import pytest
import torch

from deepinfer.core.errors import ShapeError
from deepinfer.kernels import explain
from deepinfer.kernels.reference import rope as reference
from deepinfer.kernels.rope import apply_rope

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
BACKENDS = ["torch", "triton"] if INTERPRETED else ["torch"]
pytestmark = [
    pytest.mark.filterwarnings("ignore:Conversion of an array:DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:invalid value encountered:RuntimeWarning"),
]


def phases(places: int, pairs: int) -> torch.Tensor:
    angles = torch.randn(places, pairs, generator=torch.Generator().manual_seed(3)) * 9
    return torch.stack((angles.cos(), angles.sin()), -1)


def heads(tokens: int, count: int, channels: int) -> torch.Tensor:
    x = torch.randn(tokens, count, channels + 5, generator=torch.Generator().manual_seed(4))
    return x[:, :, 2:-3]


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize(("channels", "pairs"), [(96, 16), (64, 32), (48, 3)])
def test_it_is_a_complex_product(backend, channels, pairs) -> None:
    x, table = heads(5, 3, channels), phases(5, pairs)
    found = apply_rope(x, table, backend=backend)
    tail = torch.view_as_complex(x[..., -2 * pairs :].unflatten(-1, (-1, 2)).double().contiguous())
    wanted = torch.view_as_real(tail * torch.view_as_complex(table.double())[:, None]).flatten(-2)
    assert torch.allclose(found[..., -2 * pairs :].double(), wanted, atol=1e-6)
    assert torch.equal(found[..., : -2 * pairs], x[..., : -2 * pairs])
    assert torch.equal(found, reference.apply_rope(x, table))
    back = apply_rope(found, table, inverse=True, backend=backend)
    assert torch.allclose(back, x, atol=2e-6)
    assert torch.equal(
        apply_rope(x[:, 0], table, backend=backend), reference.apply_rope(x[:, 0], table)
    )


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_a_table_by_positions_and_in_place(backend, dtype) -> None:
    x, table = heads(4, 2, 32), phases(50, 8)
    positions = torch.tensor([49, 0, 7, 7], dtype=dtype)
    wanted = reference.apply_rope(x, table[positions.long()])
    assert torch.equal(apply_rope(x, table, positions, backend=backend), wanted)
    changed = torch.full((4, 2, 40), 5.0)
    changed[..., 4:-4] = x
    place = changed[..., 4:-4]
    assert apply_rope(place, table, positions, out=place, backend=backend) is place
    assert torch.equal(place, wanted)
    assert (changed[..., :4] == 5).all()
    assert (changed[..., -4:] == 5).all()
    out = torch.empty(4, 2, 32)
    assert apply_rope(x, table, positions, out=out, backend=backend) is out
    assert torch.equal(out, wanted)


@pytest.mark.parametrize("backend", BACKENDS)
def test_nan_stays_in_its_pair(backend) -> None:
    x = heads(3, 1, 32).clone()
    x[1, 0, 20], x[0, 0, 2] = torch.nan, torch.inf
    found = apply_rope(x, phases(3, 8), backend=backend)
    assert found.isnan().nonzero().tolist() == [[1, 0, 20], [1, 0, 21]]
    assert found[0, 0, 2] == torch.inf


def test_no_tokens_and_wrong_arguments() -> None:
    assert apply_rope(torch.empty(0, 2, 32), phases(0, 8)).shape == (0, 2, 32)
    assert apply_rope(torch.empty(0, 2, 32), phases(0, 8), backend="torch").shape == (0, 2, 32)
    x = heads(4, 2, 32)
    with pytest.raises(ShapeError, match="at least two channels for each pair"):
        apply_rope(x, phases(4, 17))
    with pytest.raises(ShapeError, match="phases have 3 rows for 4 tokens"):
        apply_rope(x, phases(3, 8))
    with pytest.raises(ShapeError, match="phases has dtype float64"):
        apply_rope(x, phases(4, 8).double())
    with pytest.raises(ShapeError, match="out is"):
        apply_rope(x, phases(4, 8), out=torch.empty(4, 32))


@pytest.mark.skipif(INTERPRETED, reason="the compiler of torch needs no interpreter")
def test_in_torch_compile() -> None:
    x, table = heads(4, 2, 32).contiguous(), phases(4, 8)

    def step(x: torch.Tensor) -> torch.Tensor:
        y = apply_rope(x * 2, table)
        return apply_rope(y, table, inverse=True, out=y) + 1

    assert torch.equal(torch.compile(step, fullgraph=True, backend="aot_eager")(x), step(x))
    ops = torch.ops.deepinfer
    torch.library.opcheck(ops.apply_rope, (None, x, table, None, False, torch.empty_like(x)))
    torch.library.opcheck(ops.apply_rope, (None, None, table, None, True, x.clone()))


def test_more_heads_than_32_bits_number_are_not_for_the_kernel(monkeypatch) -> None:
    monkeypatch.delenv("DEEPINFER_ACCELERATOR", raising=False)
    x = torch.empty(1).expand(2**28, 8, 4)  # no memory behind it
    refusals = explain("apply_rope", x, phases(1, 2), None, False, x).refusals
    assert "2147483648 heads" in refusals["triton"]
