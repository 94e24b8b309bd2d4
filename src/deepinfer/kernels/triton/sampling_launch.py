"""Launches of the kernels over rows of logits, for arguments that were already checked."""

from __future__ import annotations

from typing import Any

import torch
import triton
from torch import Tensor

from deepinfer.kernels.configs import sampling as configs
from deepinfer.kernels.triton.launches import on_device, warps
from deepinfer.kernels.triton.sampling_cuts import cut_by_groups, cut_mass, cut_rows
from deepinfer.kernels.triton.sampling_draws import best_tokens, draw_judged
from deepinfer.kernels.triton.sampling_edit import apply_cut_kernel
from deepinfer.kernels.triton.sampling_highest import (
    highest_of_chunk_kernel,
    highest_of_row_kernel,
)
from deepinfer.kernels.triton.sampling_options import Draw, Filters, empty
from deepinfer.kernels.triton.sampling_selected_launch import draw_selected

__all__ = [
    "Draw",
    "Filters",
    "apply_cuts",
    "best_tokens",
    "cut_by_groups",
    "cut_mass",
    "cut_rows",
    "draw_filtered",
    "draw_judged",
    "draw_selected",
    "highest_tokens",
    "mask_filtered",
    "on_device",
]


def highest_tokens(logits: Tensor, out: Tensor, sizes: tuple[int, int] | None = None) -> None:
    """Writes the token of the highest logit of each row.

    Args:
        logits: Shape [rows, vocab], last stride 1.
        out: Shape [rows], int64.
        sizes: Tokens of a chunk, and warps.
    """
    rows, vocab = logits.shape
    block, num_warps = sizes or configs.lookup("argmax", vocab)
    chunks = triton.cdiv(vocab, block)
    tokens, tops = empty(logits, rows, chunks, dtype=torch.int32), empty(logits, rows, chunks)
    where = (vocab, logits.stride(0), chunks)
    highest_of_chunk_kernel[(rows, chunks)](
        logits, tokens, tops, *where, BLOCK=block, num_warps=warps(num_warps)
    )
    highest_of_row_kernel[(rows,)](
        tokens, tops, out, chunks, CHUNKS=triton.next_power_of_2(chunks), num_warps=1
    )


def draw_filtered(
    logits: Tensor, filters: Filters, draw: Draw, by_rank: bool | None = None, **sizes: Any
) -> None:
    """Writes the token of each row, drawn among what its filters keep.

    Args:
        logits: Shape [rows, vocab], last stride 1.
        filters: Options of the rows.
        draw: What draws the tokens.
        by_rank: Whether a draw by top-k alone is judged by ranks; None for a choice by how large top-k is.
        sizes: As in `cut_by_groups` or `draw_selected` where every row has a top-k as small, else as in `draw_judged`.
    """
    k_alone = filters.top_k is not None and filters.top_p is None and filters.min_p is None
    if by_rank is None:
        by_rank = filters.widest > configs.MOST_TOP_K
    # Ranks are counted in fp32.
    if by_rank and k_alone and logits.shape[1] < 1 << 24:
        draw_judged(logits, filters, draw, **sizes)
        return
    if filters.top_k is not None and 0 < filters.widest <= configs.FEW_TOP_K:
        cut_by_groups(logits, filters, draw, **sizes)
        return
    if filters.top_k is not None and 0 < filters.widest <= configs.MOST_TOP_K:
        draw_selected(logits, filters, draw, **sizes)
        return
    cuts = None
    if filters.top_k is not None or filters.min_p is not None:
        cuts = cut_rows(logits, filters)
    if filters.top_p is not None:
        draw_judged(logits, filters, draw, cuts, **sizes)
    else:
        best_tokens(
            logits, draw.out, draw.seeds, draw.positions,
            temperature=filters.temperature, stream=draw.stream, cuts=cuts, strict=True,
        )  # fmt: skip


def mask_filtered(logits: Tensor, filters: Filters, out: Tensor) -> None:
    """Writes the logits with -inf at what the filters drop.

    Args:
        logits: Shape [rows, vocab], last stride 1.
        filters: Options of the rows.
        out: Shape [rows, vocab], last stride 1; may be `logits`.
    """
    cuts = None
    if filters.top_k is not None and 0 < filters.widest <= configs.FEW_TOP_K:
        apply_cuts(logits, cut_by_groups(logits, filters), out)
        return
    # A temperature of 0 is a top-k of 1.
    if any(t is not None for t in (filters.temperature, filters.top_k, filters.min_p)):
        cuts = cut_rows(logits, filters)
    if filters.top_p is not None:
        cuts = cut_mass(logits, filters, cuts)
    if cuts is None:
        out.copy_(logits)
    else:
        apply_cuts(logits, cuts, out)


def apply_cuts(logits: Tensor, cuts: tuple[Tensor, Tensor], out: Tensor) -> None:
    """Writes the logits with -inf at what the cuts drop.

    Args:
        logits: Shape [rows, vocab], last stride 1.
        cuts: Logit and id at which each row is cut.
        out: Shape [rows, vocab], last stride 1; may be `logits`.
    """
    rows, vocab = logits.shape
    block, num_warps = configs.lookup("edit", vocab)
    chunks = triton.cdiv(vocab, block)
    apply_cut_kernel[(rows, chunks)](
        logits, *cuts, out, vocab, logits.stride(0), out.stride(0),
        BLOCK=block, num_warps=warps(num_warps),
    )  # fmt: skip
