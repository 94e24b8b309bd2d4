"""Hyper-connections by every backend: against fp64, the first axis of the mix, tokens alone, operations."""

from __future__ import annotations

import os

import pytest
import torch
from torch.fx.experimental.proxy_tensor import make_fx

from deepinfer.core.errors import ShapeError
from deepinfer.kernels import mhc
from deepinfer.kernels.norm import rms_norm
from deepinfer.kernels.reference import mhc as reference
from deepinfer.kernels.reference.hyper_connection import enter_streams, leave_streams

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
BACKENDS = ["torch", "triton"] if INTERPRETED else ["torch"]
pytestmark = [
    pytest.mark.filterwarnings("ignore:Conversion of an array:DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:invalid value encountered:RuntimeWarning"),
]


def randn(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def given(tokens: int, channels: int, n: int = 4) -> tuple[torch.Tensor, ...]:
    streams = randn(tokens, n + 1, channels + 3)[:, 1:, 1:-2]
    pre, fn = randn(tokens, n, seed=1).abs(), randn(n * (n + 2), n * channels, seed=2) * 0.1
    return streams, pre, fn, randn(n * (n + 2), seed=3), randn(3, seed=4)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("iterations", [1, 20])
def test_sinkhorn(backend, iterations) -> None:
    scores = randn(37, 4, 4) * 3
    found = mhc.sinkhorn(scores, iterations, backend=backend)
    k = torch.softmax(scores.double(), -1) + 1e-6
    for i in range(iterations):
        k = k / (k.sum(-1, keepdim=True) + 1e-6) if i else k
        k = k / (k.sum(-2, keepdim=True) + 1e-6)
    assert (found - k).abs().max() < 1e-6
    assert torch.allclose(found.sum(-2), torch.ones(37, 4), atol=1e-3)
    if iterations == 20:
        assert (found.sum(-1) - 1).abs().mean() < 1e-2
    scores[5, 2, 1] = torch.nan
    found = mhc.sinkhorn(scores, iterations, backend=backend)
    assert found[5].isnan().all()
    assert found[6].isfinite().all()


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("channels", [320, 48])
def test_what_enters_a_sublayer(backend, channels) -> None:
    streams, pre, fn, base, scale = given(5, channels)
    found = mhc.mhc_pre(streams, pre, fn, base, scale, backend=backend)
    wide = reference.mhc_pre(streams.float(), pre, fn, base, scale)
    flat = streams.double().flatten(1)
    m = flat @ fn.double().T / flat.square().mean(-1, keepdim=True).sqrt()
    post = 2 * torch.sigmoid(m[:, 4:8] * scale[1] + base[4:8])
    following = torch.sigmoid(m[:, :4] * scale[0] + base[:4]) + 1e-6
    summed = (pre.double().unsqueeze(-1) * streams.double()).sum(1)
    for a, b in zip(found, (summed, post, wide[2], following), strict=True):
        assert torch.allclose(a.double(), b.double(), atol=5e-6), (a - b).abs().max()
    weight = randn(channels, seed=9)
    normed = mhc.mhc_pre(
        streams, pre, fn, base, scale, norm_weight=weight, norm_eps=1e-6, backend=backend
    )[0]
    assert torch.allclose(normed, rms_norm(found[0], weight, 1e-6), atol=1e-6)


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_prepared_projection(backend) -> None:
    streams, pre, fn, base, scale = given(5, 48)
    prepared = mhc.prepare_mhc_projection(fn)
    assert (prepared.shape, prepared.dtype) == ((2, 24, 192), torch.bfloat16)
    whole = prepared.float().sum(0)
    assert ((whole - fn).abs() <= fn.abs() * 2.0**-16).all()
    assert not torch.equal(whole, fn)
    found = mhc.mhc_pre(streams, pre, prepared, base, scale, backend=backend)
    wanted = mhc.mhc_pre(streams, pre, whole, base, scale, backend=backend)
    for a, b in zip(found, wanted, strict=True):
        assert torch.equal(a, b)
    with pytest.raises(ShapeError, match="fn has shape"):
        mhc.mhc_pre(streams, pre, prepared[:1], base, scale, backend=backend)


@pytest.mark.skipif(not INTERPRETED, reason="needs TRITON_INTERPRET=1")
@pytest.mark.parametrize("split", [2, 3])
def test_products_with_coefficients_in_parts(split) -> None:
    """The way of bf16 streams, in fp16, which the interpreter multiplies rightly."""
    from deepinfer.kernels.triton import mhc_mixes as kernels

    tokens, channels = 19, 80
    streams, pre, fn, base, scale = given(tokens, channels)
    streams = streams.half().contiguous()
    parts = torch.full((split, 24, 4 * channels), 7.0, dtype=torch.float16)
    kernels.mhc_split_kernel[(8,)](fn, parts, fn.numel(), SPLIT=split, BLOCK=1024)
    assert torch.allclose(parts.float().sum(0), fn, atol=2e-7)
    sums, summed = torch.full((tokens, 3, 32), 7.0), torch.full((tokens, channels), 7.0).half()
    kernels.mhc_project_kernel[(3, 2)](
        streams, pre, parts, sums, summed, tokens, 3, 4 * channels, channels, CHANNELS=channels,
        TOKENS=16, BLOCK=16, BLOCKS=2, SPLIT=split,
    )  # fmt: skip
    assert (sums[..., 25:] == 0).all()
    following, post, mix = torch.empty(tokens, 4), torch.empty(tokens, 4), torch.empty(tokens, 16)
    sizes = {"CHANNELS": channels, "FAST": False}
    kernels.mhc_coefficients_kernel[(1,)](
        sums, base, scale, following, post, mix, tokens, 20, 1e-20, 1e-6, TOKENS=32, PARTS=3, PIECES=1, **sizes
    )  # fmt: skip
    # Pieces that are added by this kernel, and by who made them: the same bits.
    apart = torch.stack((sums * 0.25, sums * 0.75), 2)
    added = (apart[:, :, 0] + apart[:, :, 1]).contiguous()
    few = torch.empty(tokens, 4), torch.empty(tokens, 4), torch.empty(tokens, 16)
    kernels.mhc_coefficients_kernel[(1,)](
        added, base, scale, *few, tokens, 20, 1e-20, 1e-6, TOKENS=32, PARTS=3, PIECES=1, **sizes
    )  # fmt: skip
    again = torch.empty(tokens, 4), torch.empty(tokens, 4), torch.empty(tokens, 16)
    kernels.mhc_coefficients_kernel[(5,)](
        apart, base, scale, *again, tokens, 20, 1e-20, 1e-6, TOKENS=4, PARTS=3, PIECES=2, **sizes
    )  # fmt: skip
    for a, b in zip(again, few, strict=True):
        assert torch.equal(a, b)
    wanted = reference.mhc_pre(streams, pre, fn, base, scale)
    for a, b in zip((summed, post, mix.view(-1, 4, 4), following), wanted, strict=True):
        assert torch.allclose(a.float(), b.float(), atol=3e-6, rtol=2e-3)


def test_the_model_computes_the_same() -> None:
    streams, pre, fn, base, scale = given(5, 96)
    streams, weight = streams.contiguous(), randn(96, seed=9)
    y, post, mix, following = mhc.mhc_pre(streams, pre, fn, base, scale, norm_weight=weight)
    options = {"iterations": 20, "norm_eps": 1e-20, "eps": 1e-6, "round_input": False}
    wanted = enter_streams(streams, pre, fn, base, scale, weight, **options)
    assert torch.equal(following, wanted[0])
    assert torch.equal(torch.cat((post, mix.flatten(1)), 1), wanted[1])
    assert torch.equal(y, wanted[2])
    output = randn(5, 96, seed=7)
    assert torch.equal(
        mhc.mhc_post(streams, output, post, mix), leave_streams(streams, output, wanted[1])
    )


@pytest.mark.parametrize("backend", BACKENDS)
def test_what_leaves_a_sublayer(backend) -> None:
    """Stream i enters stream j with mix[i, j]: the transposed sum gives another result."""
    streams, pre, *_ = given(6, 80)
    output, mix = randn(6, 80, seed=5), randn(6, 4, 4, seed=6)
    found = mhc.mhc_post(streams, output, pre, mix, backend=backend)
    wanted = torch.einsum("tij,tic->tjc", mix.double(), streams.double())
    wanted += pre.double().unsqueeze(-1) * output.double().unsqueeze(1)
    assert torch.allclose(found.double(), wanted, atol=5e-6)
    turned = mhc.mhc_post(streams, output, pre, mix.transpose(1, 2), backend=backend)
    assert not torch.allclose(found, turned, atol=0.1)


@pytest.mark.parametrize("backend", BACKENDS)
def test_the_head_and_tokens_alone(backend) -> None:
    streams, pre, fn, base, scale = given(19, 80)
    found = mhc.mhc_head(streams, pre, backend=backend)
    wanted = torch.einsum("ti,tic->tc", pre.double(), streams.double())
    assert torch.allclose(found.double(), wanted, atol=2e-6)
    weight = randn(80)
    normed = mhc.mhc_head(streams, pre, weight, 1e-6, backend=backend)
    assert torch.allclose(normed, rms_norm(found, weight, 1e-6), atol=1e-6)
    spoiled = streams.clone()
    spoiled[::2] = torch.nan
    whole = mhc.mhc_pre(streams, pre, fn, base, scale, backend=backend)
    beside = mhc.mhc_pre(spoiled, pre, fn, base, scale, backend=backend)
    for a, b in zip(whole, beside, strict=True):
        assert torch.allclose(a[1::2], b[1::2], atol=1e-6)
        assert b[::2].isnan().any(-1).all()
        if backend == "triton":
            assert torch.equal(a[1::2], b[1::2])


@pytest.mark.parametrize("backend", [None, "torch"])
def test_no_tokens_and_other_numbers_of_streams(backend) -> None:
    streams, pre, fn, base, scale = given(0, 32)
    y, post, mix, following = mhc.mhc_pre(streams, pre, fn, base, scale, backend=backend)
    assert (y.shape, post.shape, mix.shape) == ((0, 32), (0, 4), (0, 4, 4))
    assert following.shape == (0, 4)
    assert mhc.mhc_post(streams, y, post, mix, backend=backend).shape == (0, 4, 32)
    streams, pre, fn, base, scale = given(3, 32, 2)
    y, post, mix, _ = mhc.mhc_pre(streams, pre, fn, base, scale, backend=backend)
    assert mhc.mhc_post(streams, y, post, mix, backend=backend).shape == (3, 2, 32)
    assert mhc.sinkhorn(mix, backend=backend).shape == (3, 2, 2)


def test_wrong_arguments() -> None:
    streams, pre, fn, base, scale = given(3, 32)
    with pytest.raises(ShapeError, match="fn has shape"):
        mhc.mhc_pre(streams, pre, fn[:20], base, scale)
    with pytest.raises(ShapeError, match="scale has dtype"):
        mhc.mhc_pre(streams, pre, fn, base, scale.double())
    with pytest.raises(ShapeError, match="mix has shape"):
        mhc.mhc_post(streams, streams[:, 0], pre, pre)
    with pytest.raises(ShapeError, match="output has dtype"):
        mhc.mhc_post(streams, streams[:, 0].half(), pre, randn(3, 4, 4))
    with pytest.raises(ShapeError, match="scores has shape"):
        mhc.sinkhorn(randn(3, 4, 5))


@pytest.mark.skipif(INTERPRETED, reason="the compiler of torch needs no interpreter")
def test_in_torch_compile() -> None:
    streams, pre, fn, base, scale = given(3, 32)
    streams = streams.contiguous()

    def step(streams: torch.Tensor) -> tuple[torch.Tensor, ...]:
        y, post, mix, following = mhc.mhc_pre(streams, pre, fn, base, scale)
        after = mhc.mhc_post(streams, y, post, mhc.sinkhorn(mix))
        return after, mhc.mhc_head(after, following)

    compiled = torch.compile(step, fullgraph=True, backend="aot_eager")
    for a, b in zip(compiled(streams), step(streams), strict=True):
        assert torch.equal(a, b)
    ops, mix = torch.ops.deepinfer, torch.empty(3, 4, 4)
    torch.library.opcheck(ops.sinkhorn, (None, randn(3, 4, 4), 3, 1e-6, mix))
    torch.library.opcheck(ops.mhc_head, (None, streams, pre, torch.empty(3, 32)))
    torch.library.opcheck(
        ops.mhc_post,
        (None, streams, randn(3, 32), pre, randn(3, 4, 4), torch.empty_like(streams)),
    )
    outputs = (torch.empty(3, 4), torch.empty(3, 4), mix, torch.empty(3, 32))
    torch.library.opcheck(
        ops.mhc_pre, (None, streams, pre, fn, base, scale, 20, 1e-20, 1e-6, *outputs)
    )


def test_prepared_projections_are_what_a_cast_leaves() -> None:
    fn = torch.cat((randn(24, 64), torch.tensor([[torch.inf, torch.nan, -0.0, 3.4e38] * 16])))
    high = fn.bfloat16()
    wanted = torch.stack((high, (fn - high.float()).bfloat16()))
    assert torch.equal(mhc.prepare_mhc_projection(fn).nan_to_num(7.0), wanted.nan_to_num(7.0))
    # A compiler may keep fp32 where a graph casts to bf16 and back; here no graph does.
    graph = make_fx(mhc.prepare_mhc_projection)(fn).graph
    assert not any(n.kwargs.get("dtype") == torch.float32 for n in graph.nodes)
    for wrong in (fn[0], fn.bfloat16(), fn.int()):
        with pytest.raises(ShapeError, match="fn has"):
            mhc.prepare_mhc_projection(wrong)


@pytest.mark.parametrize("wrong", ["one gain", "a gain less", "tokens", "integers", "a number"])
def test_gains_of_the_norm_are_those_of_the_channels(wrong: str) -> None:
    """A CPU would stretch them over the channels."""
    streams, pre, fn, base, scale = given(3, 32)
    gain = {
        "one gain": torch.ones(1), "a gain less": torch.ones(31), "tokens": torch.ones(3, 32),
        "integers": torch.ones(32).int(), "a number": torch.tensor(2.0),
    }[wrong]  # fmt: skip
    with pytest.raises(ShapeError, match=r"norm_weight (has shape|is)"):
        mhc.mhc_head(streams, pre, gain)
    with pytest.raises(ShapeError, match=r"norm_weight (has shape|is)"):
        mhc.mhc_pre(streams, pre, fn, base, scale, norm_weight=gain)
