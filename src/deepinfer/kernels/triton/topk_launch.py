"""Launch of the selection of the k largest, for arguments that were already checked."""

from __future__ import annotations

import os
from dataclasses import dataclass

import torch
import triton
from torch import Tensor

from deepinfer.kernels.triton.topk_select import topk_select_kernel

__all__ = ["TopkTuning", "WideTuning", "topk_select", "topk_wide"]


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
        capacity: Elements gathered for the exact search, a power of two; more than k.
        num_warps: Warps a row.
    """

    groups: int
    capacity: int
    num_warps: int


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
    scratch = torch.empty((rows, tuning.capacity), dtype=torch.int32, device=x.device)
    topk_wide_kernel[(rows,)](
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
        num_warps=tuning.num_warps,
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
    topk_select_kernel[(rows,)](
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
        BLOCK_K=triton.next_power_of_2(min(k, 1024)),
        num_warps=1 if os.environ.get("TRITON_INTERPRET") == "1" else tuning.num_warps,
    )
