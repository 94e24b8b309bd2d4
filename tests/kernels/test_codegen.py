"""Machine code of every kernel and table entry: spills, shared memory, tensor core instructions; no GPU needed."""

from __future__ import annotations

import importlib.util
import os

import pytest

if importlib.util.find_spec("triton") is None:
    pytest.skip("triton is not installed", allow_module_level=True)
if os.environ.get("TRITON_INTERPRET") == "1":
    pytest.skip("the interpreter replaces the compiler", allow_module_level=True)
from deepinfer.kernels.codegen import SHARED_BYTES, compile_for
from deepinfer.kernels.configs import topk as topk_configs
from deepinfer.kernels.triton.indexer_keys import recast_keys_kernel
from deepinfer.kernels.triton.topk_select import topk_select_kernel

gemm_launch = pytest.importorskip("deepinfer.kernels.triton.gemm_launch")
from deepinfer.kernels.triton.indexer_wide import index_scores_kernel  # noqa: E402
from deepinfer.kernels.triton.topk_wide import topk_wide_kernel  # noqa: E402

pytestmark = pytest.mark.slow
CHIPS = (80, 89, 90, 100, 120)
SMALL_STACK = 24  # bytes a thread, outside of the loops
STATED_STACK = (
    128  # bytes a thread, in the index scores of many queries and the selection of more than 1,024
)


def descriptor(dtype: str, rows: int, columns: int, row_bytes: int, bits: int) -> str:
    layout = gemm_launch.tile_layout(row_bytes, bits)
    return f"tensordesc<{dtype}[{rows}, {columns}],{layout!r}>"


def integers(*names: str) -> dict[str, str]:
    return dict.fromkeys(names, "i32")


@pytest.mark.parametrize("heads", [8, 32, 64])
def test_index_scores_on_hopper(heads) -> None:
    queries = (128 if heads >= 32 else 64) // heads
    report = compile_for(
        index_scores_kernel,
        {
            "q_desc": descriptor("fp8e4nv", queries * heads, 128, 128, 8),
            "k_desc": descriptor("fp8e4nv", 64, 128, 128, 8),
            "out": "*fp32", "weights": "*fp32", "k_scale": "*fp32", "starts": "*i32", "ends": "*i32",
            **integers("T", "S", "stride_ot", "stride_wt"),
        },
        {"QUERIES": queries, "HEADS": heads, "CHUNK": 8192, "DEPTH": 12},
        90,
        aligned=("out", "weights", "k_scale", "starts", "ends", "stride_ot", "stride_wt"),
        num_warps=4,
    )  # fmt: skip
    assert report.shared_bytes <= SHARED_BYTES[90]
    assert report.stack_bytes <= STATED_STACK
    assert report.count("QGMMA") >= 12


@pytest.mark.parametrize("chip", CHIPS)
@pytest.mark.parametrize(
    ("bits", "n", "k"), [(16, 131072, 512), (32, 8192, 512), (16, 32768, 4096)]
)
def test_selection_on_every_chip(chip, bits, n, k) -> None:
    block, groups, capacity, warps = topk_configs.lookup(64, n, k)
    report = compile_for(
        topk_select_kernel,
        {
            "x": "*i16" if bits == 16 else "*i32", "lengths": "*i32", "out": "*i32", "scratch_index": "*i32",
            **integers("n", "k", "fill", "stride_x", "stride_out"),
        },
        {
            "HAS_LENGTHS": True, "BITS": bits, "BLOCK": block, "GROUPS": groups, "CAPACITY": capacity,
            "BLOCK_K": min(k, 1024),
        },
        chip,
        aligned=("x", "lengths", "out", "scratch_index", "stride_x", "stride_out"),
        num_warps=warps,
    )  # fmt: skip
    assert report.shared_bytes <= SHARED_BYTES[chip]
    assert report.stack_bytes <= (STATED_STACK if k > 1024 else SMALL_STACK)


@pytest.mark.parametrize("chip", CHIPS)
@pytest.mark.parametrize(
    ("bits", "n", "k"), [(16, 131072, 512), (32, 8192, 512), (16, 32768, 4096)]
)
def test_wide_selection_on_every_chip(chip, bits, n, k) -> None:
    groups, capacity, warps = topk_configs.lookup_wide(n, k)
    report = compile_for(
        topk_wide_kernel,
        {
            "x": "*i16" if bits == 16 else "*i32", "lengths": "*i32", "out": "*i32", "scratch_index": "*i32",
            **integers("n", "k", "fill", "stride_x", "stride_out"),
        },
        {"HAS_LENGTHS": True, "BITS": bits, "GROUPS": groups, "CAPACITY": capacity},
        chip,
        aligned=("x", "lengths", "out", "scratch_index", "stride_x", "stride_out"),
        num_warps=warps,
    )  # fmt: skip
    assert report.shared_bytes <= SHARED_BYTES[chip]
    assert report.stack_bytes <= (STATED_STACK if k > 1024 else SMALL_STACK)


@pytest.mark.parametrize("chip", [c for c in CHIPS if c >= 89])
def test_recast_keys(chip) -> None:
    report = compile_for(
        recast_keys_kernel,
        {"packed": "*u8", "codes": "*u8", "wide": "*fp8e4nv", "scale": "*fp32", "num_keys": "i32"},
        {"DIM": 128, "BLOCK": 64},
        chip,
        aligned=("packed", "codes", "wide", "scale"),
    )
    assert report.stack_bytes == 0
