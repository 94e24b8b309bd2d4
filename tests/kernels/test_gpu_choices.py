"""Routing, sampling and verification on a GPU: against the references, repeated, and each row alone."""

from __future__ import annotations

import pytest
import torch

from deepinfer.kernels import moe, prepare_mxfp4_weights, sampling, spec
from deepinfer.kernels.experts import fused_experts
from deepinfer.kernels.reference.cast import per_token_cast_to_fp4

pytestmark = pytest.mark.gpu
VOCAB = 129_280


def options(rows: int) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.randint(0, 2**62, (rows,), device="cuda"), torch.arange(rows, device="cuda")


def hard_rows(rows: int) -> torch.Tensor:
    x = torch.randn(rows, VOCAB, device="cuda") * 3
    x[1], x[2, 5], x[3], x[4, 7] = -torch.inf, torch.nan, 1.5, torch.inf
    x[5] = torch.randint(-2, 3, (VOCAB,), device="cuda").float()
    return x


def test_tokens_of_rows() -> None:
    x, (seeds, positions) = hard_rows(12), options(12)
    warm = torch.rand(12, device="cuda", dtype=torch.float64) + 0.3
    warm[6] = 0.0
    top_k = torch.tensor([0, 50, 1, 50, 50, 1000, 0, 5, 2000, 1, 0, 50], device="cuda")
    calls = [
        lambda b: sampling.argmax_sample(x, backend=b),
        lambda b: sampling.gumbel_sample(x, seeds, positions, temperature=warm, backend=b),
        lambda b: sampling.top_k_top_p_sample(x, seeds, positions, top_k, 0.9, temperature=warm, backend=b),
        lambda b: sampling.top_k_top_p_sample(x, seeds, positions, 50, 0.9, backend=b),
        lambda b: sampling.top_k_top_p_sample(x, seeds, positions, top_p=0.9, min_p=1e-4, backend=b),
    ]  # fmt: skip
    for call in calls:
        wanted = call("torch")
        for _ in range(20):
            assert torch.equal(call("triton"), wanted)
    alone = sampling.gumbel_sample(x[9:10], seeds[9:10], positions[9:10], temperature=warm[9:10])
    assert torch.equal(alone, calls[1]("triton")[9:10])


@pytest.mark.parametrize("rule", ["coupled", "standard"])
def test_verdicts(rule) -> None:
    lengths = torch.tensor([5, 0, 3, 1], device="cuda")
    target = torch.randn(int((lengths + 1).sum()), VOCAB, device="cuda") * 3
    drafts = torch.randint(0, VOCAB, (4, 5), device="cuda")
    seeds, positions = options(4)
    first = (lengths + 1).cumsum(0) - (lengths + 1)
    for r in range(4):
        own = sampling.gumbel_sample(target[first[r]][None], seeds[r : r + 1], positions[r : r + 1])
        drafts[r, 0] = own[0]
    given = (target, drafts, lengths, positions, seeds)
    wanted = spec.speculative_verify(*given, rule=rule, backend="torch")
    for _ in range(20):
        found = spec.speculative_verify(*given, rule=rule, backend="triton")
        assert all(torch.equal(f, w) for f, w in zip(found, wanted, strict=True))


@pytest.mark.parametrize("tokens", [1, 64, 1000])
def test_routing(tokens) -> None:
    logits, bias = torch.randn(tokens, 384, device="cuda"), torch.randn(384, device="cuda")
    weights, ids = moe.topk_gate(logits, bias, 6, scale=1.5, backend="triton")
    wanted = moe.topk_gate(logits, bias, 6, scale=1.5, backend="torch")
    same = (ids == wanted[1]).all(-1)
    assert float(same.float().mean()) > 0.99
    assert torch.allclose(weights[same], wanted[0][same], atol=1e-6)
    for keys in ({}, {"max_m": tokens}):
        found = moe.get_fused_mapping(ids, 384, backend="triton", **keys)
        right = moe.get_fused_mapping(ids, 384, backend="torch", **keys)
        assert all(torch.equal(f, w) for f, w in zip(found[:5], right[:5], strict=True))


@pytest.mark.parametrize("layout", ["masked", "contiguous"])
def test_experts(layout) -> None:
    x = torch.randn(40, 512, device="cuda").bfloat16()
    w13 = per_token_cast_to_fp4(torch.randn(12, 512, 512, device="cuda") * 0.05)
    w2 = per_token_cast_to_fp4(torch.randn(12, 512, 256, device="cuda") * 0.05)
    weights, ids = moe.topk_gate(torch.randn(40, 12, device="cuda"), None, 3)
    ids[3] = -1
    keys = {"limit": 10.0, "scale_group": 32, "layout": layout}
    found = fused_experts(x, w13, w2, weights, ids, **keys)
    wanted = fused_experts(x, w13, w2, weights, ids, backend="torch", **keys).double()
    assert (found[3] == 0).all()
    y = found.double()
    assert float(1 - 2 * (y * wanted).sum() / (y * y + wanted * wanted).sum()) < 1e-3


def test_experts_of_prepared_weights_give_a_token_the_same_bits_in_every_batch() -> None:
    x = torch.randn(700, 512, device="cuda").bfloat16() * torch.randn(700, 1, device="cuda").exp()
    plain = [
        per_token_cast_to_fp4(torch.randn(12, 512, k, device="cuda") * 0.05) for k in (512, 256)
    ]
    ready = [prepare_mxfp4_weights(*p) for p in plain]
    weights, ids = moe.topk_gate(torch.randn(700, 12, device="cuda"), None, 3)
    keys = {"limit": 10.0, "scale_group": 32}
    whole = fused_experts(x, *ready, weights, ids, **keys)
    for layout in ("masked", "contiguous"):
        for n in (1, 5, 40, 200):
            some = fused_experts(x[:n], *ready, weights[:n], ids[:n], layout=layout, **keys)
            assert torch.equal(some, whole[:n]), (layout, n)
    wanted = fused_experts(x, *plain, weights, ids, backend="torch", **keys).double()
    y = whole.double()
    assert float(1 - 2 * (y * wanted).sum() / (y * y + wanted * wanted).sum()) < 1e-3
