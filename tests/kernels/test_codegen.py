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
from deepinfer.kernels.configs import gemm as configs
from deepinfer.kernels.configs import topk as topk_configs
from deepinfer.kernels.triton.gemm_portable import gemm_portable_kernel
from deepinfer.kernels.triton.indexer_keys import recast_keys_kernel
from deepinfer.kernels.triton.topk_select import topk_select_kernel

gemm_launch = pytest.importorskip("deepinfer.kernels.triton.gemm_launch")
from triton.experimental.gluon import language as gl  # noqa: E402

from deepinfer.kernels.triton.gemm_tall import gemm_tall_kernel  # noqa: E402
from deepinfer.kernels.triton.grouped_swapped import grouped_swapped_kernel  # noqa: E402
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


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("entry", sorted({(r[4], p) for p, t in ((False, configs.MASKED_FP8), (False, configs.DENSE_FP8), (True, configs.MASKED_MXFP4)) for r in t}))  # fmt: skip
def test_few_tokens_on_hopper(entry, packed) -> None:
    sizes, its = entry
    if its is not packed:
        pytest.skip("an entry of the other table")
    tuning = gemm_launch.SwappedTuning(*sizes)
    span = tuning.span if packed else 1
    rows = 64 * tuning.parts
    w = (
        descriptor("u32", rows, 16 * span, 64 * span, 32)
        if packed
        else descriptor("fp8e4nv", rows, 128, 128, 8)
    )
    whole = packed or bool(tuning.arrange)
    layout = gl.NVMMASharedLayout(swizzle_byte_width=0, element_bitwidth=32, rank=1)
    scales = f"tensordesc<fp32[{max(tuning.block_m, 32)}],{layout!r}>"
    options, registers = gemm_launch.register_shares(tuning)
    report = compile_for(
        grouped_swapped_kernel,
        {
            "w_desc": w,
            "x_desc": descriptor("fp8e4nv", tuning.block_m, 128, 128, 8),
            "s_desc": scales if whole else descriptor("fp8e4nv", tuning.block_m, 128, 128, 8),
            "out": "*bf16", "w_scale": "*i32" if packed else "*fp32", "x_scale": "*fp32", "counts": "*i32",
            **integers("num_groups", "N", "max_m", "steps", "s_stride", "stride_og", "stride_om", "stride_wg", "stride_wn",
                       "stride_xg", "stride_xm", "stride_xk"),
        },
        {
            "COUNTED": True, "WHOLE": whole, "PACKED": packed, "SPAN": span, "PARTS": tuning.parts, "BLOCK_M": tuning.block_m,
            "DEPTH": tuning.depth, "REGISTERS": registers,
        },
        90,
        aligned=("out", "w_scale", "x_scale", "counts", "N", "stride_og", "stride_om"),
        num_warps=4,
        **options,
    )  # fmt: skip
    assert report.shared_bytes <= SHARED_BYTES[90]
    assert report.stack_bytes <= SMALL_STACK
    assert report.count("QGMMA") >= 4 * tuning.parts
    assert report.count("HMMA", "HGMMA") == 0
    assert report.count("UTMALDG") >= 2


@pytest.mark.parametrize("scaled", [True, False])
@pytest.mark.parametrize("grouped", [False, True])
def test_many_tokens_on_hopper(scaled, grouped) -> None:
    for row in configs.TALL_FP8 if scaled else configs.TALL_BF16:
        tuning = gemm_launch.TallTuning(*row[4])
        dtype, columns, bits = ("fp8e4nv", 128, 8) if scaled else ("bf16", 64, 16)
        report = compile_for(
            gemm_tall_kernel,
            {
                "x_desc": descriptor(dtype, 64, columns, 128, bits),
                "w_desc": descriptor(dtype, tuning.block_n, columns, 128, bits),
                "out": "*bf16", "x_scale": "*fp32", "w_scale": "*fp32", "layout": "*i32",
                **integers("M", "N", "steps", "stride_om", "stride_xm", "stride_xk", "stride_wg", "stride_wn"),
            },
            {
                "SCALED": scaled, "GROUPED": grouped, "PARTS": tuning.parts, "BLOCK_N": tuning.block_n,
                "BAND": tuning.band, "DEPTH": tuning.depth,
            },
            90,
            aligned=("out", "x_scale", "w_scale", "layout", "N", "stride_om"),
            num_warps=4,
        )  # fmt: skip
        assert report.shared_bytes <= SHARED_BYTES[90]
        assert report.stack_bytes == 0
        assert report.count("QGMMA" if scaled else "HGMMA") >= 8
        assert report.count("HMMA") == 0


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
@pytest.mark.parametrize(("mode", "kind"), [(0, "bf16"), (2, "fp8"), (1, "fp8_32"), (2, "fp4")])
def test_portable_products_on_every_chip(chip, mode, kind) -> None:
    strides = ("stride_xg", "stride_xm", "stride_wg", "stride_wn", "stride_og", "stride_om")
    scales = ("stride_sg", "stride_sm", "stride_sk", "stride_fg", "stride_fn")
    scaled, packed = kind != "bf16", kind == "fp4"
    value = "*bf16" if kind == "bf16" else "*fp8e4nv"
    small = kind == "fp8_32"
    if chip < 89 and scaled:
        value = "*u8"  # Triton has no e4m3 there: the values are widened by hand
    for row in configs.PORTABLE:
        block_m, block_n, warps, stages = row[4]
        report = compile_for(
            gemm_portable_kernel,
            {
                "x": value, "weight": "*u8" if packed else value, "out": "*bf16", "rows_of": "*i32",
                "x_scale": "*u8" if small else "*fp32", "w_scale": "*u8" if small or packed else "*fp32",
                **integers("M", "N", "K", "num_groups", *strides, *scales),
            },
            {
                "MODE": mode, "SCALED": scaled, "X_GROUP": 32 if small else 128,
                "W_ROWS": {"fp8": 128, "fp8_32": 32}.get(kind, 1), "W_GROUP": 32 if small or packed else 128,
                "X_E8M0": small, "W_E8M0": small or packed, "PACKED": packed, "WIDEN": chip < 89 and scaled,
                "BLOCK_M": block_m, "BLOCK_N": block_n,
                "BLOCK_K": 64 if not scaled else 32 if small or packed else 128, "NUM_STAGES": stages,
            },
            chip,
            aligned=("x", "weight", "out", "rows_of", "x_scale", "w_scale", "N", "K", *strides),
            num_warps=warps,
        )  # fmt: skip
        assert report.shared_bytes <= SHARED_BYTES[chip]
        assert report.stack_bytes <= SMALL_STACK
        assert report.count("HMMA", "QMMA", "HGMMA", "QGMMA", "UTCHMMA", "UTCQMMA") > 0


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
