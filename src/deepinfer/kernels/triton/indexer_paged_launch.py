"""Launch of the index scores over paged keys, for arguments that were already checked."""

from __future__ import annotations

import os
from dataclasses import dataclass

import torch
import triton
from torch import Tensor

from deepinfer.kernels.configs.indexer import SPLIT
from deepinfer.kernels.triton.indexer_paged import paged_scores_kernel

__all__ = ["PagedTuning", "paged_scores"]


@dataclass(frozen=True)
class PagedTuning:
    """How keys are read.

    Attributes:
        block: Keys at once, a power of two, 64 at least for warpgroup products.
        stages: Blocks in flight.
        num_warps: Warps of a program.
    """

    block: int
    stages: int
    num_warps: int


def paged_scores(
    q: Tensor,
    cache: Tensor,
    weights: Tensor,
    lengths: Tensor,
    table: Tensor,
    meta: Tensor,
    out: Tensor,
    page_size: int,
    packed: bool,
    tuning: PagedTuning,
) -> None:
    """Scores of the queries of each request over its pages.

    Args:
        q: Shape [requests, next_n, heads, dim], e4m3, contiguous.
        cache: Shape [pages, bytes], uint8, INDEXER_FP8 or INDEXER_MXFP4.
        weights: Shape [requests * next_n, heads], fp32, last stride 1.
        lengths: Keys that each query sees, shape [requests, next_n], int32, contiguous.
        table: Pages of each request, shape [requests, most pages], int32, last stride 1.
        meta: Work of each program, shape [programs + 1, 2], int32, contiguous.
        out: Shape [requests * next_n, most keys], last stride 1.
        page_size: Keys of a page.
        packed: Whether the cache is INDEXER_MXFP4.
        tuning: Sizes.
    """
    next_n, heads, d = q.shape[1:]
    interpreted = os.environ.get("TRITON_INTERPRET") == "1"
    native = not interpreted and torch.cuda.get_device_capability(q.device) >= (8, 9)
    paged_scores_kernel[(meta.shape[0] - 1,)](
        q.view(torch.uint8),
        cache,
        weights,
        lengths,
        table,
        meta,
        out,
        next_n,
        min(out.shape[1], table.shape[1] * page_size),
        len(cache),
        cache.stride(0),
        weights.stride(0),
        table.stride(0),
        out.stride(0),
        HEADS=heads,
        D=d,
        NEXT=triton.next_power_of_2(next_n),
        PAGE=page_size,
        FP4=packed,
        NATIVE=native,
        SPLIT=SPLIT,
        BLOCK=tuning.block,
        STAGES=tuning.stages,
        num_warps=tuning.num_warps,
    )
