"""Launch of the index scores over paged keys, for arguments that were already checked."""

from __future__ import annotations

import os
from dataclasses import dataclass

import torch
from torch import Tensor

from deepinfer.kernels.configs.indexer import SPLIT
from deepinfer.kernels.triton.indexer_paged import paged_scores_kernel
from deepinfer.kernels.triton.indexer_shares import share_splits_kernel
from deepinfer.kernels.triton.launches import cdiv, next_power_of_2

__all__ = ["PagedTuning", "paged_scores", "share_splits"]


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
        NEXT=next_power_of_2(next_n),
        PAGE=page_size,
        FP4=packed,
        NATIVE=native,
        SPLIT=SPLIT,
        BLOCK=tuning.block,
        STAGES=tuning.stages,
        num_warps=tuning.num_warps,
    )


def share_splits(lengths: Tensor, meta: Tensor) -> None:
    """Equal shares of the splits of all requests.

    Args:
        lengths: Keys of each request, shape [requests], or of each of its queries, shape [requests, next_n], int32.
        meta: Shape [shares + 1, 2], int32, contiguous.
    """
    many = lengths if lengths.dim() == 2 else lengths[:, None]
    requests, next_n = many.shape
    shares = meta.shape[0] - 1
    share_splits_kernel[(cdiv(shares + 1, 8),)](
        many, meta, requests, next_n, shares, many.stride(0), many.stride(1), SPLIT=SPLIT, BLOCK=256, PLACES=8
    )  # fmt: skip
