"""Launch of the index scores of Hopper, for arguments that were already checked."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from deepinfer.kernels.triton.descriptors import tensor_map, tile_layout
from deepinfer.kernels.triton.gemm_launch import num_sms
from deepinfer.kernels.triton.indexer_keys import recast_keys_kernel
from deepinfer.kernels.triton.indexer_scores import index_scores_kernel
from deepinfer.kernels.triton.launches import cdiv, launch

__all__ = ["IndexTuning", "index_scores", "recast_keys"]


@dataclass(frozen=True)
class IndexTuning:
    """How index scores are tiled.

    Attributes:
        queries: Queries of a tile, 2, 4 or 8; queries times heads is 64, 128 or 256.
        depth: Tiles of 64 keys in the ring of shared memory.
        chunk: Keys a unit of work, a multiple of 64.
        parts: Warpgroups that multiply, 2 or 3.
        relu: How the positive part is taken, see `head_sums`.
    """

    queries: int
    depth: int
    chunk: int
    parts: int
    relu: int


def index_scores(
    q: Tensor,
    keys: Tensor,
    k_scale: Tensor,
    weights: Tensor,
    starts: Tensor,
    ends: Tensor,
    out: Tensor,
    tuning: IndexTuning,
) -> None:
    """Weighted sums over heads of the positive parts of q . k.

    Args:
        q: Queries, shape [T, heads, 128], e4m3, contiguous.
        keys: Shape [S, 128], e4m3, contiguous.
        k_scale: Shape [S], fp32, contiguous.
        weights: Shape [T, heads], fp32, last stride 1.
        starts: First key of each query, shape [T], int32.
        ends: Key behind the last one of each query, shape [T], int32.
        out: Shape [T, S], fp32 or bf16, last stride 1.
        tuning: Sizes of the tiles.
    """
    t, heads, d = q.shape
    s = keys.shape[0]
    layout = tile_layout(128, 8)
    wide = tuning.queries * heads
    q_desc = tensor_map(q.view(t * heads, d), [t * heads, d], [d, 1], [wide, d], layout)
    k_desc = tensor_map(keys, [s, d], [d, 1], [64, d], layout)
    units = -(-t // tuning.queries) * -(-s // tuning.chunk)
    launch(
        index_scores_kernel,
        min(units, num_sms(q.device.index)),
        q_desc,
        k_desc,
        out,
        weights,
        k_scale,
        starts,
        ends,
        t,
        s,
        out.stride(0),
        weights.stride(0),
        QUERIES=tuning.queries,
        HEADS=heads,
        CHUNK=tuning.chunk,
        DEPTH=tuning.depth,
        PARTS=tuning.parts,
        RELU=tuning.relu,
        num_warps=4,
    )


def recast_keys(keys: Tensor, codes: Tensor) -> tuple[Tensor, Tensor]:
    """MXFP4 keys as e4m3 with one scale each.

    Args:
        keys: Packed e2m1, shape [S, dim / 2], uint8, contiguous.
        codes: E8m0 bytes, shape [S, dim / 32], uint8, contiguous.

    Returns:
        Codes, shape [S, dim], e4m3; scales, shape [S], fp32.
    """
    s, half = keys.shape
    wide = torch.empty((s, 2 * half), dtype=torch.float8_e4m3fn, device=keys.device)
    scale = torch.empty((s,), dtype=torch.float32, device=keys.device)
    launch(recast_keys_kernel, cdiv(s, 64), keys, codes, wide, scale, s, DIM=2 * half, BLOCK=64)
    return wide, scale
