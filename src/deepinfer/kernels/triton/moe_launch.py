"""Launches of the kernels of routing, for arguments that were already checked."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from deepinfer.kernels.configs import moe as configs
from deepinfer.kernels.triton.aligned_groups import cast_aligned_kernel
from deepinfer.kernels.triton.launches import cdiv, launch, next_power_of_2, warps
from deepinfer.kernels.triton.moe_gate import topk_gate_kernel
from deepinfer.kernels.triton.moe_map import (
    block_sums_kernel,
    pair_counts_kernel,
    pair_places_kernel,
)
from deepinfer.kernels.triton.moe_rows import expand_kernel, reduce_kernel
from deepinfer.kernels.triton.moe_swiglu import swiglu_pairs_kernel
from deepinfer.kernels.triton.quant_launch import has_hardware_fp8

__all__ = ["cast_aligned", "expand", "gate", "mapping", "reduce", "swiglu"]

_SCORES = {"sqrtsoftplus": 0, "sigmoid": 1, "softmax": 2}


def gate(
    logits: Tensor,
    bias: Tensor | None,
    bias_vl: Tensor | None,
    is_image: Tensor | None,
    num_tokens: Tensor | None,
    score: str,
    renormalise: bool,
    scale: float,
    groups: int,
    topk_groups: int,
    weights: Tensor,
    experts: Tensor,
    num_warps: int = 1,
) -> None:
    """Writes experts and weights; arguments as in the reference."""
    tokens, count = logits.shape
    topk = weights.shape[1]
    rows = next_power_of_2(groups)
    launch(
        topk_gate_kernel,
        tokens,
        logits,
        bias if bias is not None else logits,
        bias_vl if bias_vl is not None else logits,
        is_image.view(torch.uint8) if is_image is not None else logits,
        num_tokens if num_tokens is not None else experts,
        weights,
        experts,
        tokens,
        logits.stride(0),
        scale,
        SCORE=_SCORES[score],
        BIAS=bias is not None,
        VISION=bias is not None and is_image is not None and bias_vl is not None,
        COUNTED=num_tokens is not None,
        RENORMALISE=renormalise,
        EXPERTS=count,
        GROUPS=groups,
        TOPK_GROUPS=topk_groups,
        TOPK=topk,
        ROWS=rows,
        COLUMNS=next_power_of_2(count // groups),
        WIDTH=next_power_of_2(topk),
        num_warps=warps(num_warps),
    )


def mapping(
    topk_ids: Tensor,
    num_experts: int,
    alignment: int,
    max_m: int | None,
    token_topk_to_pos: Tensor,
    pos_to_token_topk: Tensor,
    pos_to_expert: Tensor,
    expert_start: Tensor,
    expert_end: Tensor,
    sizes: tuple[int, int, int] | None = None,
    directly: int = configs.COUNT_DIRECTLY,
) -> None:
    """Writes places of pairs; arguments as in the reference."""
    pairs = topk_ids.numel()
    block, own, num_warps = sizes or configs.map_sizes(pairs)
    bins = next_power_of_2(num_experts + 1)
    counts = totals = token_topk_to_pos
    counted = pairs > directly
    if counted:
        blocks = cdiv(pairs, block)
        counts = torch.empty((blocks + 1, bins), dtype=torch.int32, device=topk_ids.device)
        totals = counts[blocks]
        launch(
            pair_counts_kernel, blocks,
            topk_ids, counts, pairs, EXPERTS=num_experts, BINS=bins, BLOCK=block,
            num_warps=warps(4),
        )  # fmt: skip
        columns = min(bins, 32)
        launch(
            block_sums_kernel,
            bins // columns,
            counts,
            totals,
            blocks,
            BINS=bins,
            COLUMNS=columns,
            num_warps=warps(4),
        )
    places = pos_to_token_topk.numel()
    programs = cdiv(pairs, own)
    padded = configs.PADDED_EXPERTS
    pads = cdiv(num_experts, padded) if places else 0
    tails = cdiv(places, 1024) if max_m is None else 0
    launch(
        pair_places_kernel,
        programs + pads + tails,
        topk_ids,
        counts,
        totals,
        token_topk_to_pos,
        pos_to_token_topk,
        pos_to_expert,
        expert_start,
        expert_end,
        pairs,
        places,
        max_m or 1,
        programs,
        pads,
        MASKED=max_m is not None,
        LISTED=places > 0,
        COUNTED=counted,
        ALIGN=alignment,
        EXPERTS=num_experts,
        BINS=bins,
        BLOCK=block,
        OWN=own,
        PADDED=padded,
        num_warps=warps(num_warps),
    )


def _words(x: Tensor, *others: Tensor) -> list[Tensor]:
    """The same rows in words of four bytes where all have whole ones, else in bytes or pairs of bytes."""
    for dtype, size in ((torch.int32, 4), (torch.int16, 2), (torch.uint8, 1)):
        if all(
            t.shape[-1] * t.itemsize % size == 0
            and t.stride(0) * t.itemsize % size == 0
            and t.data_ptr() % size == 0
            and t.itemsize <= size
            for t in (x, *others)
        ):
            return [t.view(dtype) for t in (x, *others)]
    return [x, *others]


def expand(
    x: Tensor,
    scale: Tensor | None,
    topk_weights: Tensor | None,
    places: Tensor,
    out: Tensor,
    out_scale: Tensor | None,
    out_weights: Tensor | None,
    sizes: tuple[int, int] | None = None,
) -> None:
    """Copies rows to their places; arguments as in the reference."""
    tokens, topk = places.shape
    x, out = _words(x, out)
    scales = 0
    if scale is not None and out_scale is not None:
        scale, out_scale = _words(scale, out_scale)
        scales = scale.shape[1]
    block, num_warps = sizes or configs.expand_block(x.shape[1])
    launch(
        expand_kernel,
        tokens * cdiv(x.shape[1], block),
        x,
        scale if scale is not None else x,
        topk_weights if topk_weights is not None else x,
        places,
        len(out),
        out,
        out_scale if out_scale is not None else out,
        out_weights if out_weights is not None else out,
        x.stride(0),
        scale.stride(0) if scale is not None else 0,
        out.stride(0),
        out_scale.stride(0) if out_scale is not None else 0,
        SCALED=scales > 0,
        WEIGHTED=topk_weights is not None and out_weights is not None,
        CHANNELS=x.shape[1],
        SCALES=scales,
        TOPK=topk,
        BLOCK=block,
        SCALE_BLOCK=next_power_of_2(max(scales, 1)),
        num_warps=warps(num_warps),
    )


def reduce(
    y: Tensor,
    topk_weights: Tensor | None,
    places: Tensor,
    added: Tensor | None,
    out: Tensor,
    sizes: tuple[int, int] | None = None,
) -> None:
    """Sums rows of tokens; arguments as in the reference."""
    tokens, channels = out.shape
    block, num_warps = sizes or configs.reduce_block(channels)
    launch(
        reduce_kernel,
        tokens * cdiv(channels, block),
        y,
        topk_weights if topk_weights is not None else y,
        places,
        len(y),
        added if added is not None else y,
        out,
        y.stride(0),
        added.stride(0) if added is not None else 0,
        out.stride(0),
        WEIGHTED=topk_weights is not None,
        ADDED=added is not None,
        CHANNELS=channels,
        TOPK=places.shape[1],
        BLOCK=block,
        num_warps=warps(num_warps),
        enable_fp_fusion=False,
    )


def cast_aligned(x: Tensor, q: Tensor, scale: Tensor, sizes: tuple[int, int] | None = None) -> None:
    """Casts rows with one scale for four groups; arguments as in the reference."""
    groups, num_warps = sizes or configs.aligned_sizes()
    launch(
        cast_aligned_kernel,
        cdiv(4 * scale.numel(), groups),
        x,
        q.view(torch.uint8),
        scale,
        scale.numel(),
        x.stride(0),
        CHANNELS=x.shape[1],
        HARDWARE=has_hardware_fp8(x),
        GROUPS=groups,
        num_warps=warps(num_warps),
        enable_fp_fusion=False,
    )


def swiglu(
    x: Tensor,
    topk_weights: Tensor,
    places: Tensor,
    limit: float,
    group: int,
    q: Tensor,
    scale: Tensor | None,
    sizes: tuple[int, int, int] | None = None,
) -> None:
    """Writes SwiGLU of the rows of all pairs; arguments as in the reference."""
    channels = x.shape[1] // 2
    groups, num_warps, mode = sizes or configs.swiglu_sizes(group)
    total = places.numel() * (channels // group)
    fp32 = scale is not None and scale.dtype == torch.float32
    aligned = scale is not None and scale.shape[1] * group * 4 == channels
    launch(
        swiglu_pairs_kernel,
        cdiv(total, groups),
        x,
        topk_weights,
        places,
        q.view(torch.uint8) if scale is not None else q,
        topk_weights if scale is None else scale if fp32 else scale.view(torch.uint8),
        total,
        x.stride(0),
        limit,
        CHANNELS=channels,
        HAS_LIMIT=math.isfinite(limit),
        MODE=0 if warps(num_warps) == 1 else mode,
        CAST=scale is not None,
        ALIGNED=aligned,
        SCALE_FP32=fp32,
        HARDWARE=has_hardware_fp8(x),
        GROUPS=groups,
        GROUP=group,
        num_warps=warps(num_warps),
        enable_fp_fusion=False,
    )
