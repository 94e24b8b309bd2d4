"""Launch of the selection of the k largest, for arguments that were already checked."""

from __future__ import annotations

import os
from dataclasses import dataclass

import torch
from torch import Tensor

from deepinfer.kernels.triton.launches import cdiv, launch, next_power_of_2
from deepinfer.kernels.triton.topk_select import (
    group_maxima_kernel,
    topk_grouped_kernel,
    topk_select_kernel,
)

__all__ = [
    "ByGroupsTuning",
    "GroupedTuning",
    "TopkTuning",
    "WideTuning",
    "by_groups_constants",
    "grouped_constants",
    "topk_by_groups",
    "topk_grouped",
    "topk_select",
    "topk_wide",
]


@dataclass(frozen=True)
class TopkTuning:
    """How rows are searched.

    Attributes:
        block: Elements read at once, a power of two.
        groups: Disjoint groups whose maxima bound the k-th largest value; k at least.
        capacity: Elements gathered for the exact search; more than k.
        num_warps: Warps a row.
    """

    block: int
    groups: int
    capacity: int
    num_warps: int


@dataclass(frozen=True)
class WideTuning:
    """How rows are searched by `topk_wide`.

    Attributes:
        groups: Disjoint groups whose maxima bound the k-th largest value: 32, 64, 128 or 256 a warp, and k at least.
        capacity: Elements gathered for the exact search, a power of two; more than k. Shorter rows are held whole.
        num_warps: Warps a row.
        max_registers: Of a thread; 0 for as many as it wants.
    """

    groups: int
    capacity: int
    num_warps: int
    max_registers: int = 0


@dataclass(frozen=True)
class GroupedTuning:
    """How long rows are searched by `topk_grouped`.

    Attributes:
        group: Neighbours of which the maximum is kept, a power of two.
        block: Elements of a program that makes maxima, a power of two.
        block_warps: Its warps.
        groups: Disjoint groups whose maxima bound the k-th largest value, a power of two; k at least.
        capacity: Elements gathered for the exact search, a power of two; more than k.
        tile: Groups gathered at once, a power of two.
        num_warps: Warps a row.
    """

    group: int
    block: int
    block_warps: int
    groups: int
    capacity: int
    tile: int
    num_warps: int


def grouped_constants(tuning: GroupedTuning, n: int, k: int) -> dict[str, int]:
    """Sizes of the kernel that selects, for rows of n elements.

    Args:
        tuning: Sizes.
        n: Elements of a row.
        k: How many are selected.
    """
    count = next_power_of_2(cdiv(n, tuning.group))
    return {
        "BLOCK": 4096, "GROUPS": tuning.groups, "CAPACITY": tuning.capacity,
        "BLOCK_K": next_power_of_2(min(k, 1024)), "GROUP": tuning.group,
        "ALL": max(count, tuning.groups), "TILE": tuning.tile,
    }  # fmt: skip


def topk_grouped(
    x: Tensor, k: int, lengths: Tensor | None, out: Tensor, fill: int, tuning: GroupedTuning
) -> None:
    """As `topk_select`, in two steps: the maxima of small groups, by many programs a row, and the selection.

    Args:
        x: Shape [rows, n], bf16 or fp32, last stride 1.
        k: How many to select.
        lengths: Elements of each row that count, shape [rows], int32, or None for all.
        out: Shape [rows, k], integers, last stride 1.
        fill: Written behind the last index of a row with fewer than k elements.
        tuning: Sizes.
    """
    rows, n = x.shape
    bits = 8 * x.itemsize
    interpreted = os.environ.get("TRITON_INTERPRET") == "1"
    raw = x.view(torch.int16 if bits == 16 else torch.int32)
    chunks = cdiv(n, tuning.block)
    width = chunks * tuning.block // tuning.group
    maxima = torch.empty((rows, width), dtype=raw.dtype, device=x.device)
    scratch = torch.empty((rows, 2 * tuning.capacity), dtype=torch.int32, device=x.device)
    # With fewer groups than this the bound would say little.
    least = tuning.groups * tuning.group
    given = lengths if lengths is not None else out
    flags = {"HAS_LENGTHS": lengths is not None, "BITS": bits}
    launch(
        group_maxima_kernel, rows * chunks,
        raw, given, maxima, n, chunks, least, x.stride(0), width, **flags,
        BLOCK=tuning.block, GROUP=tuning.group, EARLY=False, num_warps=1 if interpreted else tuning.block_warps,
    )  # fmt: skip
    launch(
        topk_grouped_kernel, rows,
        raw, given, out, maxima, scratch, n, k, fill, least, x.stride(0), out.stride(0), width, **flags,
        **grouped_constants(tuning, n, k), num_warps=1 if interpreted else tuning.num_warps,
    )  # fmt: skip


@dataclass(frozen=True)
class ByGroupsTuning:
    """How long rows are searched by `topk_by_groups`.

    Attributes:
        group: Neighbours of which the maximum is kept, a power of two from 4 on.
        block: Elements of a program that makes maxima, a power of two.
        block_warps: Its warps.
        coarse: Groups that groups are joined to for the bound, a power of two: 2 * k, 256 * num_warps at least.
        capacity: Elements gathered for the exact search, a power of two; more than k.
        tiles: Parts of groups that a thread gathers at once, up to 4.
        num_warps: Warps a row.
        early: Whether the program that selects may begin before all maxima are made, and wait for them (Hopper).
        max_registers: Of a thread of the program that selects; 0 for as many as it wants.
    """

    group: int
    block: int
    block_warps: int
    coarse: int
    capacity: int
    tiles: int
    num_warps: int
    early: bool = False
    max_registers: int = 0


def by_groups_constants(tuning: ByGroupsTuning, n: int) -> dict[str, int]:
    """Sizes of the kernel that selects, for rows of n elements.

    Args:
        tuning: Sizes.
        n: Elements of a row.
    """
    count = next_power_of_2(cdiv(n, tuning.group))
    return {
        "GROUPS": min(256 * tuning.num_warps, tuning.capacity), "CAPACITY": tuning.capacity, "GROUP": tuning.group,
        "ALL": max(count, tuning.coarse), "COARSE": tuning.coarse, "TILES": tuning.tiles, "EARLY": tuning.early,
    }  # fmt: skip


def _limit(registers: int) -> dict[str, int]:
    return {"maxnreg": registers} if registers else {}


def topk_by_groups(
    x: Tensor, k: int, lengths: Tensor | None, out: Tensor, fill: int, tuning: ByGroupsTuning
) -> None:
    """As `topk_grouped`, with the places of all elements in registers set by hand; rows begin at multiples of 16 bytes.

    Args:
        x: Shape [rows, n], bf16 or fp32, last stride 1.
        k: How many to select.
        lengths: Elements of each row that count, shape [rows], int32, or None for all.
        out: Shape [rows, k], integers, last stride 1.
        fill: Written behind the last index of a row with fewer than k elements.
        tuning: Sizes.
    """
    from deepinfer.kernels.triton.topk_grouped import topk_by_groups_kernel

    rows, n = x.shape
    bits = 8 * x.itemsize
    raw = x.view(torch.int16 if bits == 16 else torch.int32)
    chunks = cdiv(n, tuning.block)
    early = tuning.early and torch.cuda.get_device_capability(x.device) >= (9, 0)
    sizes = by_groups_constants(tuning, n) | {"EARLY": early}
    width = max(sizes["ALL"], chunks * tuning.block // tuning.group)
    maxima = torch.empty((rows, width), dtype=raw.dtype, device=x.device)
    groups = torch.empty((rows, sizes["ALL"]), dtype=torch.int32, device=x.device)
    found = torch.empty((rows, tuning.capacity), dtype=torch.int64, device=x.device)
    # With fewer groups than this the bound would say little.
    least = max(2 * k, 1024) * tuning.group
    given = lengths if lengths is not None else out
    flags = {"HAS_LENGTHS": lengths is not None, "BITS": bits}
    launch(
        group_maxima_kernel, rows * chunks,
        raw, given, maxima, n, chunks, least, x.stride(0), width, **flags,
        BLOCK=tuning.block, GROUP=tuning.group, EARLY=early, num_warps=tuning.block_warps,
    )  # fmt: skip
    launch(
        topk_by_groups_kernel, rows,
        raw, given, out, maxima, groups, found, n, k, fill, least, x.stride(0), out.stride(0), width, **flags,
        **sizes, num_warps=tuning.num_warps, launch_pdl=early, **_limit(tuning.max_registers),
    )  # fmt: skip


def topk_wide(
    x: Tensor, k: int, lengths: Tensor | None, out: Tensor, fill: int, tuning: WideTuning
) -> None:
    """As `topk_select`, for NVIDIA GPUs; rows must begin at multiples of 16 bytes to be read fast.

    Args:
        x: Shape [rows, n], bf16 or fp32, last stride 1.
        k: How many to select.
        lengths: Elements of each row that count, shape [rows], int32, or None for all.
        out: Shape [rows, k], integers, last stride 1.
        fill: Written behind the last index of a row with fewer than k elements.
        tuning: Sizes.
    """
    from deepinfer.kernels.triton.topk_wide import topk_wide_kernel

    rows, n = x.shape
    bits = 8 * x.itemsize
    short = n <= tuning.capacity
    scratch = torch.empty(
        (0 if short else rows, tuning.capacity), dtype=torch.int64, device=x.device
    )
    launch(
        topk_wide_kernel,
        rows,
        x.view(torch.int16 if bits == 16 else torch.int32),
        lengths if lengths is not None else out,
        out,
        scratch,
        n,
        k,
        fill,
        x.stride(0),
        out.stride(0),
        HAS_LENGTHS=lengths is not None,
        BITS=bits,
        GROUPS=tuning.groups,
        CAPACITY=tuning.capacity,
        SHORT=short,
        num_warps=tuning.num_warps,
        **_limit(tuning.max_registers),
    )


def topk_select(
    x: Tensor, k: int, lengths: Tensor | None, out: Tensor, fill: int, tuning: TopkTuning
) -> None:
    """Indices of the k largest elements of each row, ascending.

    Args:
        x: Shape [rows, n], bf16 or fp32, last stride 1.
        k: How many to select.
        lengths: Elements of each row that count, shape [rows], int32, or None for all.
        out: Shape [rows, k], int32, last stride 1.
        fill: Written behind the last index of a row with fewer than k elements.
        tuning: Sizes of blocks.
    """
    rows, n = x.shape
    bits = 8 * x.itemsize
    raw = x.view(torch.int16 if bits == 16 else torch.int32)
    scratch = torch.empty((rows, tuning.capacity), dtype=torch.int32, device=x.device)
    launch(
        topk_select_kernel,
        rows,
        raw,
        lengths if lengths is not None else out,
        out,
        scratch,
        n,
        k,
        fill,
        x.stride(0),
        out.stride(0),
        HAS_LENGTHS=lengths is not None,
        BITS=bits,
        BLOCK=tuning.block,
        GROUPS=tuning.groups,
        CAPACITY=tuning.capacity,
        BLOCK_K=next_power_of_2(min(k, 1024)),
        num_warps=1 if os.environ.get("TRITON_INTERPRET") == "1" else tuning.num_warps,
    )
