"""The row-wise steps in Triton against their references.

They run on a GPU, or slowly on the CPU with TRITON_INTERPRET=1 in a process of its own (and numpy < 2.4 for Triton
3.6); without either they are skipped. The interpreter is exact for fp32 only.
"""

from __future__ import annotations

import os

import pytest
import torch

from deepinfer.kernels.reference import fused as reference

pytest.importorskip("triton")
pytestmark = pytest.mark.filterwarnings("ignore:Conversion of an array:DeprecationWarning")
INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
if not INTERPRETED and not torch.cuda.is_available():
    pytest.skip("needs a GPU or TRITON_INTERPRET=1", allow_module_level=True)

from deepinfer.core.errors import ShapeError  # noqa: E402
from deepinfer.kernels.triton import fused  # noqa: E402
from deepinfer.kernels.triton.wide_products import WideTuning  # noqa: E402

DEVICE = "cpu" if INTERPRETED else "cuda"
DTYPES = [torch.float32] if INTERPRETED else [torch.float32, torch.bfloat16]


def randn(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=generator).to(dtype).to(DEVICE)


def close(found: torch.Tensor, wanted: torch.Tensor, dtype: torch.dtype, rounded: bool = False) -> None:  # fmt: skip
    assert found.dtype == wanted.dtype
    assert found.shape == wanted.shape
    found, wanted = found.float(), wanted.float()
    error = (found - wanted).abs()
    bound = 1e-5 if dtype == torch.float32 else 1e-2
    good = error <= bound * wanted.abs().clamp_min(1)
    if rounded:  # a value at the border between two codes may land on either
        assert good.float().mean() > 0.99
    else:
        assert good.all()


@pytest.mark.parametrize("dtype", DTYPES)
def test_scatter_rows(dtype) -> None:
    table, rows = randn(7, 24, dtype=dtype), randn(4, 24, seed=1, dtype=dtype)
    index = torch.tensor([3, -1, 0, 6], device=DEVICE)
    wanted = table.clone()
    reference.scatter_rows(wanted, index, rows)
    fused.scatter_rows(table, index, rows)
    assert torch.equal(table, wanted)
    ids = torch.arange(5, device=DEVICE)
    fused.scatter_rows(
        ids, torch.tensor([4, -1], device=DEVICE), torch.tensor([9, 8], device=DEVICE)
    )
    assert ids.tolist() == [0, 1, 2, 3, 9]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("channels", [32, 96, 320])
@pytest.mark.parametrize("rounding", ["none", "fp8", "mxfp4", "nvfp4"])
@pytest.mark.parametrize("kind", ["norm", "rope", "inverse", "all", "plain"])
def test_norm_rope_round(dtype, channels, rounding, kind) -> None:
    x = randn(3, 2, channels, dtype=dtype) * 3
    weight = randn(channels, seed=1, dtype=dtype) if kind in ("norm", "all") else None
    angles = randn(3, 8, seed=2) * 9
    phases = None
    if kind in ("rope", "inverse", "all"):
        phases = torch.stack((angles.cos(), angles.sin()), -1)
    options = {"inverse": kind == "inverse", "rounding": rounding}
    wanted = reference.norm_rope_round(x, weight, 1e-6, phases, **options)
    close(fused.norm_rope_round(x, weight, 1e-6, phases, **options), wanted, dtype, True)
    table = torch.zeros(5, channels, dtype=dtype, device=DEVICE)
    index = torch.tensor([4, -1, 1], device=DEVICE)
    fused.norm_rope_round(
        x[:, :1], weight, 1e-6, phases, out=table, index=index, rounding=rounding, inverse=kind == "inverse"
    )  # fmt: skip
    close(table[[4, 1]], wanted[[0, 2], 0], dtype, True)
    assert not table[[0, 2, 3]].any()
    assert fused.norm_rope_round(x, weight, 1e-6, phases, out=x, **options) is x
    close(x, wanted, dtype, True)


@pytest.mark.filterwarnings("ignore:invalid value:RuntimeWarning")
@pytest.mark.parametrize("rounding", ["fp8", "mxfp4", "nvfp4"])
def test_rounding_is_exact(rounding) -> None:
    scale = torch.logspace(-9, 4, 16, base=10, device=DEVICE)[:, None, None]
    x = randn(16, 4, 64) * scale
    x[:, 0] = 0
    x[:, 1, 3] = x[:, 1].abs().amax(-1) * 2
    wanted = reference.norm_rope_round(x, rounding=rounding)
    assert torch.equal(fused.norm_rope_round(x, rounding=rounding), wanted)
    broken = x[:2].clone()
    broken[0, 1, 40], broken[1, 2, 3] = torch.nan, torch.inf
    wanted = reference.norm_rope_round(broken, rounding=rounding)
    found = fused.norm_rope_round(broken, rounding=rounding)
    assert torch.equal(found.isnan(), wanted.isnan())


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("rounding", ["none", "fp8"])
def test_swiglu_round(dtype, weighted, rounding) -> None:
    gate, up = (randn(5, 192, dtype=dtype) * 6).chunk(2, -1)
    weights = randn(5, seed=3) if weighted else None
    wanted = reference.swiglu_round(gate, up, weights, 4.0, rounding=rounding)
    found = fused.swiglu_round(gate, up, weights, 4.0, rounding=rounding)
    close(found, wanted, dtype, rounding != "none")


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("channels", [64, 96, 320])
@pytest.mark.parametrize("rounds", [False, True])
def test_streams(dtype, channels, rounds) -> None:
    streams = randn(3, 4, channels, dtype=dtype)
    pre, fn = randn(3, 4, seed=1).abs(), randn(24, 4 * channels, seed=2) / 9
    base, scale = randn(24, seed=3), randn(3, seed=4)
    gains = randn(channels, seed=5, dtype=dtype)
    options = {"iterations": 20, "norm_eps": 1e-20, "eps": 1e-6, "round_input": rounds}
    wanted = reference.enter_streams(streams, pre, fn, base, scale, gains, **options)
    found = fused.enter_streams(streams, pre, fn, base, scale, gains, **options)
    for i in range(4):
        close(found[i], wanted[i], dtype, i == 3)
    output, routed = randn(3, channels, seed=6, dtype=dtype), randn(3, 2, channels, dtype=dtype)
    for more in (None, routed):
        left = reference.leave_streams(streams, output, wanted[1], more)
        close(fused.leave_streams(streams, output, wanted[1], more), left, dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("tokens", [0, 1, 5, 33])
def test_wide_linear(dtype, tokens) -> None:
    x = randn(tokens, 204, dtype=dtype)[:, :200]
    for outputs in (24, 100):
        weight = randn(outputs, 200, seed=outputs)
        exact = x.double() @ weight.double().T
        for tuning in (None, WideTuning(64, 3, 16), WideTuning(128, 1, 32)):
            found = fused.wide_linear(x, weight, tuning)
            assert found.dtype == torch.float32
            assert found.shape == (tokens, outputs)
            assert float((found - exact).norm()) <= 5e-7 * float(exact.norm())
    with pytest.raises(ShapeError, match="fp32"):
        fused.wide_linear(x, weight.half())


@pytest.mark.filterwarnings("ignore:invalid value:RuntimeWarning")
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("tokens", "heads", "channels"), [(0, 4, 128), (3, 8, 128), (5, 32, 128), (1, 2, 64)])  # fmt: skip
def test_index_queries(dtype, tokens, heads, channels) -> None:
    x = randn(tokens, heads * channels + 64, dtype=dtype)[:, : heads * channels]
    x = x.unflatten(1, (heads, channels)).clone()
    phases, weights = randn(tokens, 16, 2, seed=1), randn(tokens, heads + 3, seed=2)[:, :heads]
    x *= randn(tokens, heads, 1, seed=3, dtype=dtype).mul(3).exp()
    wanted = reference.index_queries(x, phases, weights, 0.37)
    found = fused.index_queries(x, phases, weights, 0.37)
    assert [t.dtype for t in found] == [torch.float8_e4m3fn, torch.float32]
    assert [t.shape for t in found] == [t.shape for t in wanted]
    values = [codes.float() * scaled.unsqueeze(-1) for codes, scaled in (found, wanted)]
    if tokens:
        close(*values, torch.float32, True)
        x[0, 1, 5] = torch.nan
        broken = fused.index_queries(x, phases, weights, 0.37)[1].isnan()
        assert broken[0, 1]
        assert broken.sum() == 1


@pytest.mark.parametrize("dtype", DTYPES)
def test_wide_rows_are_free_of_the_batch(dtype) -> None:
    x, weight = randn(70, 640, dtype=dtype), randn(100, 640, seed=1)
    whole = fused.wide_linear(x, weight)
    for rows in (slice(0, 1), slice(3, 20), slice(40, 70)):
        assert torch.equal(fused.wide_linear(x[rows], weight), whole[rows])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("channels", [32, 1300])
def test_add_engram(dtype, channels) -> None:
    streams = randn(5, 4, channels, dtype=dtype)
    projected = randn(5, 5 * channels, seed=1, dtype=dtype)
    projected[0, : 4 * channels] = 0  # a dot of zero
    gains = randn(4, channels, seed=2), randn(4, channels, seed=3)
    is_image = torch.tensor([False, True, False, False, True], device=DEVICE)
    for image in (None, is_image):
        wanted = reference.add_engram(streams, projected, *gains, 1e-6, image)
        close(fused.add_engram(streams, projected, *gains, 1e-6, image), wanted, dtype)
    assert torch.equal(fused.add_engram(streams, projected, *gains, 1e-6, is_image)[1], streams[1])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("channels", [32, 72])
def test_pair_latents(dtype, channels) -> None:
    first, second = randn(6, 2, channels) * 2, randn(6, 3, channels, seed=1)[:, 1:]
    weight = randn(channels, seed=2, dtype=dtype)
    wanted = reference.pair_latents(first, second, weight, 1e-6)
    close(fused.pair_latents(first, second, weight, 1e-6), wanted, dtype)
    assert fused.pair_latents(first[:0], second[:0], weight, 1e-6).shape == (0, channels)


@pytest.mark.parametrize("experts", [4, 16, 24])
def test_topk_gate(experts) -> None:
    scores, bias = randn(6, experts) * 8, randn(experts, seed=1)
    scores[0] = 0.5
    wanted = reference.topk_gate(scores, torch.zeros_like(bias), 3, 1.5)
    found = fused.topk_gate(scores, torch.zeros_like(bias), 3, 1.5)
    assert torch.equal(found[1], wanted[1])
    assert found[1][0].tolist() == [0, 1, 2]
    wanted, found = (m.topk_gate(scores, bias, 3, 1.5) for m in (reference, fused))
    assert torch.equal(found[1], wanted[1])
    close(found[0], wanted[0], torch.float32)


@pytest.mark.parametrize("columns", [1, 40, 700, 9000])
def test_topk_rows(columns) -> None:
    scores = (randn(4, columns) * 3).round()  # many ties
    scores[1, columns // 2 :] = -torch.inf
    scores[2] = 0.0
    scores[2, ::2] = -0.0
    for k in {1, columns // 3 + 1, columns}:
        wanted = scores.double().sort(dim=-1, descending=True, stable=True).indices[:, :k]
        wanted = wanted.sort(-1).values
        assert torch.equal(reference.topk_rows(scores, k), wanted)
        assert torch.equal(fused.topk_rows(scores, k), wanted)
    stack = scores.view(2, 2, columns).transpose(0, 1)
    assert torch.equal(fused.topk_rows(stack, 1), reference.topk_rows(stack, 1))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("tokens", [1, 3, 40, 300])
def test_grouped_linear(dtype, tokens) -> None:
    count, topk = 5, 2
    generator = torch.Generator().manual_seed(tokens)
    experts = torch.rand(tokens, count, generator=generator).topk(topk).indices.to(DEVICE)
    experts[experts == 3] = 4  # one without rows
    weight = randn(count, 80, 72, seed=1, dtype=dtype)
    x = randn(tokens, 72, seed=2, dtype=dtype)
    order = fused.expert_order(experts, count)
    wanted = reference.grouped_linear(x, weight, order, topk)
    close(fused.grouped_linear(x, weight, order, topk) / 8, wanted / 8, dtype)
    x = randn(tokens * topk, 72, seed=3, dtype=dtype)
    wanted = reference.grouped_linear(x, weight, order, 1)
    close(fused.grouped_linear(x, weight, order, 1) / 8, wanted / 8, dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("extra", [None, 0, 40, 300])
@pytest.mark.parametrize("dim", [32, 48, 512])
def test_sparse_attention(dtype, extra, dim) -> None:
    queries, table = randn(3, 4, dim, dtype=dtype), randn(200, dim, seed=1, dtype=dtype)
    generator = torch.Generator().manual_seed(2)
    index = torch.randint(-60, 100, (3, 20), generator=generator).clamp_min(-1).to(DEVICE)
    index[1] = -1
    more = None
    if extra is not None:
        more = torch.randint(-60, 200, (3, extra), generator=generator).clamp_min(-1).to(DEVICE)
        more[1] = -1
    sink = randn(4, seed=3)
    arguments = queries, table, index, more, sink, dim**-0.5
    wanted = reference.sparse_attention(*arguments, offset=100)
    found = fused.sparse_attention(*arguments, offset=100)
    close(found, wanted, dtype)
    assert not found[1].any()
    many = [t.repeat(60, 1) if t is not None and t.dim() == 2 and len(t) == 3 else t for t in arguments[2:4]]  # fmt: skip
    whole = fused.sparse_attention(
        queries.repeat(60, 1, 1), table, *many, *arguments[4:], offset=100
    )
    # By other programs, the same bits.
    if not INTERPRETED:
        assert torch.equal(whole[-3:], found)
