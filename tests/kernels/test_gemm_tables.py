"""Which kernel of Hopper serves a product, and with which tiles; nothing is launched."""

from __future__ import annotations

import contextlib
import importlib.util
import os

import pytest
import torch

if importlib.util.find_spec("triton") is None or os.environ.get("TRITON_INTERPRET") == "1":
    pytest.skip("it needs Triton's compiler", allow_module_level=True)
from deepinfer.kernels import gemm_backends, prepare_mxfp4_weights
from deepinfer.kernels.configs import gemm as configs

gemm_launch = pytest.importorskip("deepinfer.kernels.triton.gemm_launch")
from deepinfer.kernels.triton import (  # noqa: E402
    folded_decoded_launch,
    folded_ragged_launch,
    grouped_folded_launch,
)

FP8 = torch.float8_e4m3fn


@pytest.fixture
def calls(monkeypatch):
    """Names and sizes of what would have been launched."""
    found = []
    for module, name in (
        (gemm_launch, "grouped_swapped"), (gemm_launch, "gemm_tall"),
        (grouped_folded_launch, "grouped_folded"), (folded_decoded_launch, "folded_decoded"),
        (folded_ragged_launch, "folded_ragged"),
    ):  # fmt: skip
        monkeypatch.setattr(module, name, lambda *a, name=name, **k: found.append((name, a[-1])))
    monkeypatch.setattr(gemm_launch, "num_sms", lambda index: 132)
    monkeypatch.setattr(torch.cuda, "device", lambda device: contextlib.nullcontext())
    return found


def tokens(kind: str, *shape: int):
    if kind == "bf16":
        return torch.zeros(shape, dtype=torch.bfloat16), None
    group, dtype = (32, torch.uint8) if kind.endswith("_32") else (128, torch.float32)
    x = torch.zeros(shape, dtype=torch.uint8).view(FP8)
    return x, torch.zeros(*shape[:-1], shape[-1] // group, dtype=dtype)


def weights(kind: str, *shape: int):
    if kind == "bf16":
        return torch.zeros(shape, dtype=torch.bfloat16), None
    lead, n, k = shape[:-2], shape[-2], shape[-1]
    if kind.startswith("fp4"):
        values = torch.zeros(*lead, n, k // 2, dtype=torch.uint8)
        return prepare_mxfp4_weights(values, torch.full((*lead, n, k // 32), 120, dtype=torch.uint8))  # fmt: skip
    x = torch.zeros(shape, dtype=torch.uint8).view(FP8)
    if kind == "fp8_32":
        return x, torch.zeros(*lead, n // 32, k // 32, dtype=torch.uint8)
    return x, torch.zeros(*lead, -(-n // 128), k // 128)


@pytest.mark.parametrize(("kind", "few", "many"), [
    ("bf16", "gemm_tall", "gemm_tall"),
    ("fp8", "grouped_swapped", "gemm_tall"),
    ("fp8_32", "grouped_swapped", "gemm_tall"),
    ("fp4", "grouped_folded", None),
    ("fp4_32", "grouped_folded", "folded_decoded"),
])  # fmt: skip
def test_the_number_of_tokens_chooses(calls, kind, few, many) -> None:
    b = weights(kind, 640, 256)
    for rows in (1, 16, 300, 9000):
        gemm_backends._dense_hopper(*tokens(kind, rows, 256), *b, torch.zeros(rows, 640))
    names = [name for name, _ in calls]
    assert names[:2] == [few, few]
    assert many is None or names[2:] == [many, many]
    if few == "grouped_folded":
        assert calls[0][1].block_m == (8 if kind == "fp4_32" else 16)


@pytest.mark.parametrize("kind", ["bf16", "fp8", "fp8_32", "fp4", "fp4_32"])
@pytest.mark.parametrize("expected", [None, 4, 16, 40, 500, 2000])
def test_tiles_of_groups_lie_in_one_group(calls, kind, expected) -> None:
    layout = torch.zeros(256, dtype=torch.int32)
    b = weights(kind, 2, 640, 256)
    out = torch.zeros(256, 640)
    gemm_backends._contiguous_hopper(*tokens(kind, 256, 256), *b, out, layout, expected)
    name, tuning = calls[0]
    if name == "folded_ragged":
        assert expected in (None, 500)
        return
    rows = {"gemm_tall": 64 * getattr(tuning, "parts", 0), "folded_decoded": 64 * getattr(tuning, "parts_m", 0)}.get(
        name, getattr(tuning, "block_m", 0)
    )  # fmt: skip
    assert gemm_backends.CONTIGUOUS_ALIGNMENT % rows == 0
    if kind != "bf16":
        assert rows == {4: 16, 16: 32, 40: 64}.get(expected or 0, 128)


def test_only_the_weights_choose_the_order_of_a_sum(calls) -> None:
    for n, k in ((640, 1024), (1280, 5120), (5120, 8192), (4096, 7168)):
        calls.clear()
        b = weights("fp8", n, k)
        for rows in (1, 33, 64, 65, 1000):
            gemm_backends._dense_hopper(*tokens("fp8", rows, k), *b, torch.zeros(rows, n))
        assert {tuning.split for _, tuning in calls} == {configs.dense_split(n, k)}


def test_tokens_with_powers_of_two_are_the_tall_operand_from_33_on(calls) -> None:
    b = weights("fp8_32", 5120, 256)
    for rows in (16, 32, 33, 64, 300):
        gemm_backends._dense_hopper(*tokens("fp8_32", rows, 256), *b, torch.zeros(rows, 5120))
    assert [name for name, _ in calls] == ["grouped_swapped"] * 2 + ["gemm_tall"] * 3
    assert [tuning.parts for _, tuning in calls[2:]] == [1, 1, 2]


def test_few_weights_have_small_tiles(calls) -> None:
    for kind in ("fp8", "fp8_32"):
        b = weights(kind, 1280, 5120)
        gemm_backends._dense_hopper(*tokens(kind, 64, 5120), *b, torch.zeros(64, 1280))
    assert [tuning.block_m for _, tuning in calls] == [16, 16]


def test_a_span_divides_the_steps() -> None:
    assert gemm_backends._spanned((16, 1, 5, 2, 3), 256) == (16, 1, 5, 2, 3)
    assert gemm_backends._spanned((16, 1, 5, 2, 3), 384) == (16, 1, 5, 1, 3)
    assert gemm_backends._spanned((2, 1, 6), 384) == (2, 1, 6)


@pytest.mark.parametrize("kind", ["bf16", "fp8"])
def test_few_tiles_are_narrow(calls, kind) -> None:
    b = weights(kind, 4096, 256)
    for rows in (256, 512, 1024, 4096):
        gemm_backends._dense_hopper(*tokens(kind, rows, 256), *b, torch.zeros(rows, 4096))
    assert [tuning.block_n for _, tuning in calls] == [128, 128, 256, 256]
