"""Operations in torch.compile, and what is asked for in which order."""

from __future__ import annotations

import shutil

import pytest
import torch

from deepinfer.core.errors import ConfigError, UnsupportedHardware
from deepinfer.kernels import gemm, indexer, quant, sampling
from deepinfer.kernels.explaining import explain
from deepinfer.kernels.reference.cast import per_block_cast_to_fp8, per_token_cast_to_fp8
from deepinfer.kernels.registry import operation, use_backend
from deepinfer.kernels.topk import topk


def operands():
    g = torch.Generator().manual_seed(0)
    a, a_scale = per_token_cast_to_fp8(torch.randn((6, 256), generator=g), 128)
    b, b_scale = per_block_cast_to_fp8(torch.randn((40, 256), generator=g), 128)
    return (a, a_scale.float()), (b, b_scale.float())


def test_operations_pass_the_checks_of_torch() -> None:
    a, b = (
        torch.randn(6, 64).bfloat16(),
        torch.randn(40, 64).bfloat16(),
    )  # torch's checks do not know e4m3
    xs = ws = None
    torch.library.opcheck(torch.ops.deepinfer.gemm_nt, (None, a, xs, b, ws, torch.empty(6, 40)))
    x = torch.randn(3, 50)
    torch.library.opcheck(
        torch.ops.deepinfer.topk, (None, x, 4, None, torch.empty(3, 4, dtype=torch.int32), -1)
    )
    counts = torch.tensor([6], dtype=torch.int32)
    args = (None, a[None], xs, b[None], ws, torch.empty(1, 6, 40), counts, None)
    torch.library.opcheck(torch.ops.deepinfer.m_grouped_gemm_nt_masked, args)
    layout = torch.zeros(6, dtype=torch.int32)
    args = (None, a, xs, b[None], ws, torch.empty(6, 40), layout, None)
    torch.library.opcheck(torch.ops.deepinfer.m_grouped_gemm_nt_contiguous, args)


def test_a_whole_graph_holds_the_kernels() -> None:
    (a, xs), (b, ws) = operands()

    def step(a, xs, b, ws):
        y = gemm.fp8_gemm_nt((a, xs), (b, ws))
        return topk(y.float(), 5, return_value=False)[1], y * 2

    compiled = torch.compile(step, fullgraph=True, backend="aot_eager")
    for found, wanted in zip(compiled(a, xs, b, ws), step(a, xs, b, ws), strict=True):
        assert torch.equal(found, wanted)


@pytest.mark.filterwarnings("ignore:`torch.jit:DeprecationWarning")  # of inductor's own imports
@pytest.mark.skipif(shutil.which("g++") is None, reason="torch compiles for a CPU with g++")
def test_inductor_takes_scales_in_one_byte() -> None:
    """Its pass that reuses memory does not know e8m0 and would not compile any product with such scales."""
    w, ws = per_block_cast_to_fp8(torch.randn(40, 256))
    x = torch.randn(6, 256)

    def step(x, w, ws):
        return gemm.fp8_gemm_nt(quant.per_token_cast_to_fp8(x), (w, ws))

    wanted = step(x, w, ws)
    assert torch.equal(torch.compile(step, fullgraph=True)(x, w, ws), wanted)


def test_other_widths_and_options_do_not_break_the_graph() -> None:
    halves = torch.compile(lambda x: quant.silu_and_mul(x), fullgraph=True, backend="aot_eager")
    for width in (64, 128, 24):
        x = torch.randn(3, width)
        assert torch.equal(halves(x), quant.silu_and_mul(x))
    filtered = torch.compile(
        lambda x, p: sampling.top_k_top_p_mask(x, None, p), fullgraph=True, backend="aot_eager"
    )
    for p in (0.9, 0.8, 0.5):
        assert torch.equal(filtered(x, p), sampling.top_k_top_p_mask(x, None, p))


def test_scores_in_a_whole_graph() -> None:
    q = torch.randn(3, 8, 64).to(torch.float8_e4m3fn)
    keys, scale = torch.randn(20, 64).to(torch.float8_e4m3fn), torch.rand(20)
    weights = torch.randn(3, 8)
    starts, ends = torch.zeros(3, dtype=torch.int32), torch.full((3,), 20, dtype=torch.int32)
    step = torch.compile(indexer.fp8_mqa_logits, fullgraph=True, backend="aot_eager")
    wanted = indexer.fp8_mqa_logits(q, (keys, scale), weights, starts, ends)
    assert torch.equal(step(q, (keys, scale), weights, starts, ends), wanted)


def test_the_call_comes_before_the_block_and_the_block_before_the_environment(monkeypatch) -> None:
    (a, xs), (b, ws) = operands()
    args = (a, xs, b, ws, torch.empty(6, 40))
    monkeypatch.setenv("DEEPINFER_ACCELERATOR", "cpu")
    assert explain("gemm_nt", *args).wish == "torch"
    with use_backend("triton"):
        assert explain("gemm_nt", *args).wish == "triton"
        assert explain("gemm_nt", *args).backend is None
        assert explain("gemm_nt", *args, backend="torch").backend == "torch"
        with use_backend(None):
            assert explain("gemm_nt", *args).backend == "torch"


def test_own_implementations(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("DEEPINFER_ACCELERATOR", raising=False)
    op = operation("topk")
    with pytest.raises(ConfigError, match="already"):
        op.register("torch", supports=lambda *_: None)
    seen = []
    before = list(op.implementations)
    try:
        op.register("mine", supports=lambda *args: "no" if args[1] > 3 else None, priority=99)(
            lambda *args: seen.append(args[1])
        )
        topk(torch.randn(2, 9), 2, return_value=False)
        topk(torch.randn(2, 9), 4, return_value=False)
        assert seen == [2]
        with pytest.raises(UnsupportedHardware, match="'mine' of topk cannot serve this call: no"):
            topk(torch.randn(2, 9), 4, backend="mine")
    finally:
        op.implementations[:] = before
