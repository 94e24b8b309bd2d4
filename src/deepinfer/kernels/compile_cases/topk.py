"""The selection of the k largest: every path of its tables."""

from __future__ import annotations

from deepinfer.kernels.codegen import CHIPS, CompileCase
from deepinfer.kernels.configs import topk as configs

__all__ = ["cases"]

_ALIGNED = ("x", "lengths", "out", "scratch_index", "stride_x", "stride_out")


def cases() -> list[CompileCase]:
    """One entry of each kernel and dtype on every chip, the others on Hopper."""
    found: list[CompileCase] = []
    chips: tuple[int, ...]
    for bits, n, k, chips in (
        (16, 131072, 512, (80, 90, 120)),
        (32, 129280, 512, (90,)),
        (16, 32768, 512, (90,)),
        (32, 1048576, 512, (90,)),
        (16, 131072, 2048, (90,)),
    ):
        entry = f"{'bf16' if bits == 16 else 'fp32'} {n} k {k}"
        found.append(_maxima(bits, n, k, chips, entry))
        found.append(_by_groups(bits, n, k, chips, f"{entry}, by groups"))
    found.append(_grouped(16, 131072, 512, (90,), "bf16 131072 k 512"))
    for bits, n, k, chips in (
        (16, 131072, 512, CHIPS),
        (32, 8192, 512, (90,)),
        (16, 131072, 4096, (90,)),
    ):
        entry = f"{'bf16' if bits == 16 else 'fp32'} {n} k {k}"
        found.append(_select(bits, n, k, chips, entry))
    for bits, n, k, chips in (
        (16, 8192, 512, (80, 90, 120)),
        (32, 8192, 512, (90,)),
        (16, 32768, 4096, (90,)),
    ):
        found.append(
            _wide(bits, n, k, chips, f"{'bf16' if bits == 16 else 'fp32'} {n} k {k}, wide")
        )
    return found


def _signature(bits: int, *integers: str) -> dict[str, str]:
    pointer = "*i16" if bits == 16 else "*i32"
    return {"x": pointer, "lengths": "*i32", "out": "*i32", "scratch_index": "*i32",
            **dict.fromkeys(integers, "i32")}  # fmt: skip


def _maxima(bits: int, n: int, k: int, chips: tuple[int, ...], entry: str) -> CompileCase:
    from deepinfer.kernels.triton.topk_select import group_maxima_kernel

    sizes = configs.lookup_by_groups(64, n, k, bits // 8) or (
        16,
        4096,
        4,
        1024,
        3,
        8,
        0,
        4,
        False,
    )
    return CompileCase(
        "topk", f"{entry}, maxima", group_maxima_kernel,
        {"x": "*i16" if bits == 16 else "*i32", "lengths": "*i32", "maxima": "*fp32",
         **dict.fromkeys(("n", "chunks", "least_length", "stride_x", "stride_maxima"), "i32")},
        {"HAS_LENGTHS": True, "BITS": bits, "BLOCK": sizes[1], "GROUP": sizes[0], "EARLY": False},
        ("x", "maxima", "stride_x", "stride_maxima"), {"num_warps": sizes[2]}, chips,
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


def _by_groups(bits: int, n: int, k: int, chips: tuple[int, ...], entry: str) -> CompileCase:
    from deepinfer.kernels.triton import topk_launch as launch
    from deepinfer.kernels.triton.topk_grouped import topk_by_groups_kernel

    sizes = configs.lookup_by_groups(64, n, k, bits // 8)
    tuning = launch.ByGroupsTuning(*(sizes or (16, 4096, 4, 1024, 3, 8, 0, 4, False)))
    integers = ("n", "k", "fill", "least_length", "stride_x", "stride_out", "stride_maxima")
    pointer = "*i16" if bits == 16 else "*i32"
    limit = {"maxnreg": tuning.max_registers} if tuning.max_registers else {}
    return CompileCase(
        "topk", entry, topk_by_groups_kernel,
        {"x": pointer, "lengths": "*i32", "out": "*i32", "maxima": pointer, "groups_of": "*i32", "found": "*i64",
         **dict.fromkeys(integers, "i32")},
        {"HAS_LENGTHS": True, "BITS": bits, **launch.by_groups_constants(tuning, n)},
        ("x", "lengths", "out", "maxima", "groups_of", "found", "stride_x", "stride_out", "stride_maxima"),
        {"num_warps": tuning.num_warps, **limit}, chips, stack_bytes=128,
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


def _wide(bits: int, n: int, k: int, chips: tuple[int, ...], entry: str) -> CompileCase:
    from deepinfer.kernels.triton.topk_wide import topk_wide_kernel

    groups, capacity, warps = configs.lookup_wide(n, k)
    return CompileCase(
        "topk", entry, topk_wide_kernel, _signature(bits, "n", "k", "fill", "stride_x", "stride_out"),
        {"HAS_LENGTHS": True, "BITS": bits, "GROUPS": groups, "CAPACITY": capacity},
        _ALIGNED, {"num_warps": warps}, chips, stack_bytes=128,
    )  # fmt: skip
