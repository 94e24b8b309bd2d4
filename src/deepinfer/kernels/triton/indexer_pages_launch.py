"""Launch of the index scores over paged keys on Hopper, for arguments that were already checked."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from deepinfer.kernels.configs.indexer import SPLIT
from deepinfer.kernels.triton.gemm_launch import num_sms
from deepinfer.kernels.triton.indexer_pages import page_scores_kernel
from deepinfer.kernels.triton.launches import cdiv

__all__ = ["PageTuning", "page_scores"]


@dataclass(frozen=True)
class PageTuning:
    """How pages are copied and multiplied.

    Attributes:
        queries: Queries of a product, 1, 2 or 4.
        depth: Slots of 128 keys in the ring of shared memory, a multiple of the parts.
        parts: Warpgroups that multiply, 2 to 4.
        together: Whether both halves of a slot are multiplied at once; for one query of a product.
        folded: Whether the scales of MXFP4 keys become exponents of e4m3 codes, see `fold`.
    """

    queries: int
    depth: int
    parts: int
    together: bool
    folded: bool


def page_scores(
    q: Tensor,
    cache: Tensor,
    weights: Tensor,
    lengths: Tensor,
    table: Tensor,
    meta: Tensor,
    out: Tensor,
    page_size: int,
    packed: bool,
    tuning: PageTuning,
) -> None:
    """Scores of the queries of each request over its pages.

    Args:
        q: Shape [requests, next_n, heads, 128], e4m3, contiguous.
        cache: Shape [pages, bytes], uint8, INDEXER_FP8 or INDEXER_MXFP4; pages begin at multiples of 16 bytes.
        weights: Shape [requests * next_n, heads], fp32, last stride 1.
        lengths: Keys that each query sees, shape [requests, next_n], int32, contiguous.
        table: Pages of each request, shape [requests, most pages], int32, last stride 1.
        meta: Shares of the work, shape [shares + 1, 2], int32, contiguous.
        out: Shape [requests * next_n, most keys], last stride 1.
        page_size: Keys of a page: a multiple of 64, or whatever if the table has one page a request.
        packed: Whether the cache is INDEXER_MXFP4.
        tuning: Sizes.
    """
    next_n, heads = q.shape[1:3]
    width = 64 if packed else 128
    words = cache[:, : page_size * (width + 4)].view(torch.int32)
    stride = cache.stride(0)
    flat = gl.NVMMASharedLayout(swizzle_byte_width=0, element_bitwidth=32, rank=2)
    s_desc = TensorDescriptor(words, list(words.shape), [stride // 4, 1], [1, 64], flat)
    bits = 32 if packed else 8
    wide = gl.NVMMASharedLayout(swizzle_byte_width=width, element_bitwidth=bits, rank=3)
    keys = words if packed else cache.view(torch.float8_e4m3fn)
    width = width * 8 // bits
    k_desc = TensorDescriptor(
        keys, [len(cache), page_size, width], [stride * 8 // bits, width, 1], [1, 64, width], wide
    )
    programs = meta.shape[0] - 1
    each = cdiv(programs, num_sms(q.device.index))
    page_scores_kernel[(cdiv(programs, each),)](
        k_desc,
        s_desc,
        q.view(torch.uint8),
        weights,
        lengths,
        table,
        meta,
        out,
        next_n,
        min(out.shape[1], table.shape[1] * page_size),
        len(cache),
        each,
        programs,
        len(q),
        weights.stride(0),
        table.stride(0),
        out.stride(0),
        HEADS=heads,
        QUERIES=tuning.queries,
        CHUNKS=cdiv(next_n, tuning.queries),
        PAGE=page_size,
        FP4=int(packed) + int(packed and tuning.folded),
        SPLIT=SPLIT,
        DEPTH=tuning.depth,
        PARTS=tuning.parts,
        TOGETHER=tuning.together,
        num_warps=4,
    )
