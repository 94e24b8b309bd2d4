"""The selection of the k largest: every path of its tables."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from deepinfer.kernels.codegen import CHIPS, CompileCase
from deepinfer.kernels.configs import topk as configs

if TYPE_CHECKING:
    from deepinfer.kernels.triton.topk_launch import ByGroupsTuning

__all__ = ["cases"]

_ALIGNED = ("x", "lengths", "out", "scratch_index", "stride_x", "stride_out")


def cases() -> list[CompileCase]:
    """One entry of each kernel and dtype on every chip, the others on Hopper."""
    found: list[CompileCase] = []
    chips: tuple[int, ...]
    for bits, rows, n, k, chips in (
        (16, 64, 131072, 512, (90, 120)),
        (16, 32, 131072, 512, (80,)),
        (32, 64, 129280, 512, (90,)),
        (16, 1024, 32768, 512, (90,)),
        (16, 768, 65536, 1024, (90,)),
        (32, 6, 1048576, 512, (90,)),
        (16, 64, 131072, 4096, (90,)),
    ):
        entry = f"{'bf16' if bits == 16 else 'fp32'} {rows} x {n} k {k}"
        found.append(_maxima(bits, rows, n, k, chips, entry))
        found.append(_by_groups(bits, rows, n, k, chips, f"{entry}, by groups"))
    found.append(_grouped(16, 131072, 512, (90,), "bf16 131072 k 512"))
    for bits, n, k, chips in (
        (16, 131072, 512, CHIPS),
        (32, 8192, 512, (90,)),
        (16, 131072, 4096, (90,)),
    ):
        entry = f"{'bf16' if bits == 16 else 'fp32'} {n} k {k}"
        found.append(_select(bits, n, k, chips, entry))
    for bits, rows, n, k, chips in (
        (16, 4096, 8192, 512, (80, 90, 120)),
        (32, 4096, 16384, 512, (90,)),
        (16, 512, 16384, 4096, (90,)),
        (16, 256, 32768, 2048, (90,)),
        (16, 256, 256, 64, (90,)),
        (32, 256, 4096, 512, (90,)),
    ):
        entry = f"{'bf16' if bits == 16 else 'fp32'} {rows} x {n} k {k}, wide"
        found.append(_wide(bits, rows, n, k, chips, entry))
    return [*found, _slots(), _block_maxima()]


def _slots() -> CompileCase:
    from deepinfer.kernels.triton.topk_slots import physical_slots_kernel

    sizes = ("total", "columns", "num_requests", "num_pages", "stride_i", "stride_t", "stride_o")
    return CompileCase(
        "topk_to_physical_indices", "pages of 64", physical_slots_kernel,
        {"index": "*i32", "table": "*i32", "requests": "*i64", "out": "*i32", **dict.fromkeys(sizes, "i32")},
        {"HAS_REQUESTS": True, "PAGE": 64, "BLOCK": 1024}, ("index", "table", "requests", "out"), {}, tested=(90,),
    )  # fmt: skip


def _block_maxima() -> CompileCase:
    from deepinfer.kernels.triton.topk_slots import block_max_kernel

    sizes = ("columns", "blocks", "chunks", "stride_s", "stride_o")
    return CompileCase(
        "candidate_block_max", "blocks of 128", block_max_kernel,
        {"scores": "*fp32", "lengths": "*i32", "out": "*fp32", **dict.fromkeys(sizes, "i32")},
        {"SIZE": 128, "BLOCK": 32}, ("scores", "lengths", "out", "stride_s"), {}, tested=(90,),
    )  # fmt: skip


def _signature(bits: int, *integers: str) -> dict[str, str]:
    pointer = "*i16" if bits == 16 else "*i32"
    return {"x": pointer, "lengths": "*i32", "out": "*i32", "scratch_index": "*i32",
            **dict.fromkeys(integers, "i32")}  # fmt: skip


def _tuning(bits: int, rows: int, n: int, k: int) -> ByGroupsTuning:
    from deepinfer.kernels.triton.topk_launch import ByGroupsTuning

    sizes = configs.lookup_by_groups(rows, n, k, bits // 8)
    return ByGroupsTuning(*(sizes or (16, 4096, 4, 2048, 1024, 3, 8)))


def _maxima(
    bits: int, rows: int, n: int, k: int, chips: tuple[int, ...], entry: str
) -> CompileCase:
    from deepinfer.kernels.triton.topk_select import group_maxima_kernel

    tuning = _tuning(bits, rows, n, k)
    return CompileCase(
        "topk", f"{entry}, maxima", group_maxima_kernel,
        {"x": "*i16" if bits == 16 else "*i32", "lengths": "*i32", "maxima": "*fp32",
         **dict.fromkeys(("n", "chunks", "least_length", "stride_x", "stride_maxima"), "i32")},
        {"HAS_LENGTHS": True, "BITS": bits, "BLOCK": tuning.block, "GROUP": tuning.group,
         "EARLY": tuning.early and min(chips) >= 90},
        ("x", "maxima", "stride_x", "stride_maxima"), {"num_warps": tuning.block_warps}, chips,
    )  # fmt: skip


def _grouped(bits: int, n: int, k: int, chips: tuple[int, ...], entry: str) -> CompileCase:
    from deepinfer.kernels.triton import topk_launch as launch
    from deepinfer.kernels.triton.topk_select import topk_grouped_kernel

    tuning = launch.GroupedTuning(*(configs.lookup_grouped(n, k) or (0,) * 7))
    integers = ("n", "k", "fill", "least_length", "stride_x", "stride_out", "stride_maxima")
    return CompileCase(
        "topk", f"{entry}, grouped", topk_grouped_kernel,
        {**_signature(bits, *integers), "maxima": "*fp32"},
        {"HAS_LENGTHS": True, "BITS": bits, **launch.grouped_constants(tuning, n, k)},
        (*_ALIGNED, "maxima", "stride_maxima"), {"num_warps": tuning.num_warps}, chips, stack_bytes=128,
    )  # fmt: skip


def _by_groups(
    bits: int, rows: int, n: int, k: int, chips: tuple[int, ...], entry: str
) -> CompileCase:
    from deepinfer.kernels.triton import topk_launch as launch
    from deepinfer.kernels.triton.topk_grouped import topk_by_groups_kernel

    # Chips before Hopper do not begin early.
    tuning = _tuning(bits, rows, n, k)
    tuning = replace(tuning, early=tuning.early and min(chips) >= 90)
    integers = ("n", "k", "fill", "least_length", "stride_x", "stride_out", "stride_maxima")
    pointer = "*i16" if bits == 16 else "*i32"
    limit = {"maxnreg": tuning.max_registers} if tuning.max_registers else {}
    return CompileCase(
        "topk", entry, topk_by_groups_kernel,
        {"x": pointer, "lengths": "*i32", "out": "*i32", "maxima": pointer, "groups_of": "*i32", "found": "*i64",
         **dict.fromkeys(integers, "i32")},
        {"HAS_LENGTHS": True, "BITS": bits, **launch.by_groups_constants(tuning, n)},
        ("x", "lengths", "out", "maxima", "groups_of", "found", "stride_x", "stride_out", "stride_maxima"),
        {"num_warps": tuning.num_warps, **limit}, chips, stack_bytes=64,
    )  # fmt: skip


def _select(bits: int, n: int, k: int, chips: tuple[int, ...], entry: str) -> CompileCase:
    from deepinfer.kernels.triton.topk_select import topk_select_kernel

    block, groups, capacity, warps = configs.lookup(64, n, k)
    return CompileCase(
        "topk", f"{entry}, rows", topk_select_kernel,
        _signature(bits, "n", "k", "fill", "stride_x", "stride_out"),
        {"HAS_LENGTHS": True, "BITS": bits, "BLOCK": block, "GROUPS": groups, "CAPACITY": capacity,
         "BLOCK_K": min(k, 1024)},
        _ALIGNED, {"num_warps": warps}, chips, stack_bytes=128,
    )  # fmt: skip


def _wide(bits: int, rows: int, n: int, k: int, chips: tuple[int, ...], entry: str) -> CompileCase:
    from deepinfer.kernels.triton.topk_wide import topk_wide_kernel

    groups, capacity, warps, registers = configs.lookup_wide(rows, n, k)
    return CompileCase(
        "topk", entry, topk_wide_kernel,
        {"x": "*i16" if bits == 16 else "*i32", "lengths": "*i32", "out": "*i32", "found": "*i64",
         **dict.fromkeys(("n", "k", "fill", "stride_x", "stride_out"), "i32")},
        {"HAS_LENGTHS": True, "BITS": bits, "GROUPS": groups, "CAPACITY": capacity, "SHORT": n <= capacity},
        ("x", "lengths", "out", "found", "stride_x", "stride_out"),
        {"num_warps": warps, **({"maxnreg": registers} if registers else {})}, chips, stack_bytes=64,
    )  # fmt: skip
