"""Launches of the kernels over rows of logits, for arguments that were already checked."""

from __future__ import annotations

from typing import Any

import torch
import triton
from torch import Tensor

from deepinfer.kernels import contract
from deepinfer.kernels.configs import sampling as configs
from deepinfer.kernels.configs import topk as topk_configs
from deepinfer.kernels.topk import topk
from deepinfer.kernels.triton.launches import interpreted, on_device, warps
from deepinfer.kernels.triton.sampling_cuts import (
    Filters,
    by_groups,
    cut_mass,
    cut_rows,
    empty,
)
from deepinfer.kernels.triton.sampling_draw import chunk_top_kernel
from deepinfer.kernels.triton.sampling_draws import best_tokens, draw_by_rounds
from deepinfer.kernels.triton.sampling_edit import apply_cut_kernel
from deepinfer.kernels.triton.sampling_highest import (
    highest_of_chunk_kernel,
    highest_of_row_kernel,
    highest_of_whole_row_kernel,
)
from deepinfer.kernels.triton.sampling_list import finish_kernel, neighbour_maxima_kernel
from deepinfer.kernels.triton.topk_launch import ByGroupsTuning, by_groups_constants

__all__ = [
    "ByGroupsTuning",
    "Filters",
    "apply_cuts",
    "best_tokens",
    "cut_mass",
    "cut_rows",
    "draw_by_groups",
    "draw_by_rounds",
    "draw_filtered",
    "draw_listed",
    "highest_tokens",
    "mask_filtered",
    "on_device",
]


def highest_tokens(
    logits: Tensor,
    out: Tensor,
    sizes: tuple[int, int] | None = None,
    stages: int = 0,
) -> None:
    """Writes the token of the highest logit of each row.

    Args:
        logits: Shape [rows, vocab], last stride 1.
        out: Shape [rows], int64.
        sizes: Tokens of a chunk, and warps.
        stages: Blocks of a row on their way at once to the one program that it has then; 0 for a program a chunk.
    """
    rows, vocab = logits.shape
    block, num_warps = sizes or configs.lookup("argmax", vocab)
    if stages:
        highest_of_whole_row_kernel[(rows,)](
            logits, out, vocab, logits.stride(0), BLOCK=block, STAGES=stages, num_warps=warps(num_warps)
        )  # fmt: skip
        return
    chunks = triton.cdiv(vocab, block)
    tokens, tops = empty(logits, rows, chunks, dtype=torch.int32), empty(logits, rows, chunks)
    where = (vocab, logits.stride(0), chunks)
    highest_of_chunk_kernel[(rows * chunks,)](
        logits, tokens, tops, *where, BLOCK=block, num_warps=warps(num_warps)
    )
    highest_of_row_kernel[(rows,)](
        tokens, tops, out, chunks, CHUNKS=triton.next_power_of_2(chunks), num_warps=1
    )


def draw_by_groups(
    logits: Tensor,
    filters: Filters,
    seeds: Tensor,
    positions: Tensor,
    stream: int,
    out: Tensor,
    sizes: tuple[int, int] | None = None,
    capacity: int = 2048,
) -> None:
    """Writes the token of each row, drawn among what its filters keep; for a top-k up to `configs.FEW_TOP_K`.

    Args:
        logits: Shape [rows, vocab], last stride 1.
        filters: Options of the rows, with a top-k in each of them.
        seeds: Shape [rows], int64.
        positions: Shape [rows], integers.
        stream: Purpose of the noise.
        out: Shape [rows], int64.
        sizes: Tokens of a chunk, and warps.
        capacity: Candidates of a row, a power of two.
    """
    by_groups(logits, filters, (seeds, positions, stream, out), sizes, capacity)


def draw_listed(
    logits: Tensor,
    filters: Filters,
    seeds: Tensor,
    positions: Tensor,
    stream: int,
    out: Tensor,
    finish_warps: int | None = None,
    joined: bool = True,
    selection: ByGroupsTuning | None = None,
) -> None:
    """Writes the token of each row, drawn among the highest; for a top-k up to `configs.MOST_TOP_K`.

    Args:
        logits: Shape [rows, vocab], last stride 1.
        filters: Options of the rows, with a top-k in each of them, and `widest`.
        seeds: Shape [rows], int64.
        positions: Shape [rows], integers.
        stream: Purpose of the noise.
        out: Shape [rows], int64.
        finish_warps: Warps of the program that draws from the list of a row.
        joined: Whether the first pass of the selection looks for NaN, where it can.
        selection: How it selects then; None for the table's choice.
    """
    rows, vocab = logits.shape
    width = min(filters.widest, vocab)
    found = empty(logits, rows, width, dtype=torch.int32)
    values = logits.float() if logits.dtype == torch.float16 else logits
    tuning = _tuning_by_groups(values, width) if joined else None
    tuning = selection if tuning and selection else tuning
    block, num_warps = (
        (tuning.block, tuning.block_warps) if tuning else configs.lookup("argmax", vocab)
    )
    chunks = triton.cdiv(vocab, block)
    tops = empty(logits, rows, chunks)
    # The selection does not look at NaN, of which one makes a row that is not drawn.
    if tuning:
        _select_by_groups(values, width, found, tops, tuning)
    else:
        chunk_top_kernel[(rows * chunks,)](
            logits, tops, vocab, logits.stride(0), chunks, BLOCK=block, num_warps=warps(num_warps)
        )
        topk(values, width, output_idx=found, return_value=False, backend="triton")
    capacity = max(256, triton.next_power_of_2(width))
    num_warps = finish_warps or max(1, min(16, capacity // 256))
    given = [t if t is not None else tops for t in filters[:4]]
    finish_kernel[(rows,)](
        logits, *given, seeds, positions, tops, tops, found, found, tops, found, out,
        vocab, logits.stride(0), chunks, stream, width,
        WARM=filters.temperature is not None, TOP_K=True, TOP_P=filters.top_p is not None,
        MIN_P=filters.min_p is not None, DRAWN=True, FAST=not interpreted(),
        CHUNKS=triton.next_power_of_2(chunks), CAPACITY=capacity,
        # So that a processor has room for two rows.
        num_warps=warps(num_warps), maxnreg=64 if num_warps == 16 else None,
    )  # fmt: skip


def _tuning_by_groups(x: Tensor, k: int) -> ByGroupsTuning | None:
    """How the k highest of rows are selected behind a pass over them that is ours; None where they are not."""
    sizes = topk_configs.lookup_by_groups(x.shape[0], x.shape[1], k, x.itemsize)
    if sizes is None or not x.is_cuda or not contract.has_gluon():
        return None
    tuning = ByGroupsTuning(*sizes)
    is_long = x.shape[1] >= max(2 * k, 1024) * tuning.group
    is_aligned = x.stride(0) * x.itemsize % 16 == 0 and x.data_ptr() % 16 == 0
    return tuning if is_long and is_aligned else None


def _select_by_groups(x: Tensor, k: int, out: Tensor, tops: Tensor, tuning: ByGroupsTuning) -> None:
    """As `topk_by_groups`; writes the highest logit of chunks of `tuning.block` tokens, too."""
    from deepinfer.kernels.triton.topk_grouped import topk_by_groups_kernel

    rows, n = x.shape
    chunks = triton.cdiv(n, tuning.block)
    sizes = by_groups_constants(tuning, n) | {"EARLY": False}
    width = max(sizes["ALL"], chunks * tuning.block // tuning.group)
    maxima = torch.empty((rows, width), dtype=x.dtype, device=x.device)
    groups = empty(x, rows, sizes["ALL"], dtype=torch.int32)
    found = empty(x, rows, tuning.capacity, dtype=torch.int64)
    neighbour_maxima_kernel[(rows * chunks,)](
        x, maxima, tops, n, x.stride(0), width, chunks,
        BLOCK=tuning.block, GROUP=tuning.group, num_warps=tuning.block_warps,
    )  # fmt: skip
    integers = torch.int16 if x.itemsize == 2 else torch.int32
    registers = {"maxnreg": tuning.max_registers} if tuning.max_registers else {}
    topk_by_groups_kernel[(rows,)](
        x.view(integers), out, out, maxima.view(integers), groups, found, n, k, -1, 0, x.stride(0),
        out.stride(0), width, HAS_LENGTHS=False, BITS=8 * x.itemsize, **sizes,
        num_warps=tuning.num_warps, **registers,
    )  # fmt: skip


def draw_filtered(
    logits: Tensor,
    filters: Filters,
    seeds: Tensor,
    positions: Tensor,
    stream: int,
    out: Tensor,
    by_rank: bool = False,
    **sizes: Any,
) -> None:
    """Writes the token of each row, drawn among what its filters keep.

    Args:
        logits: Shape [rows, vocab], last stride 1.
        filters: Options of the rows.
        seeds: Shape [rows], int64.
        positions: Shape [rows], integers.
        stream: Purpose of the noise.
        out: Shape [rows], int64.
        by_rank: Whether a draw by top-k alone is judged by ranks, however small top-k is.
        sizes: As in `draw_by_groups` or `draw_listed` where every row has a top-k as small, else as in `draw_by_rounds`.
    """
    draw = (seeds, positions, stream, out)
    k_alone = filters.top_k is not None and filters.top_p is None and filters.min_p is None
    by_rank |= k_alone and filters.widest > configs.MOST_TOP_K
    # Ranks are counted in fp32.
    if by_rank and k_alone and logits.shape[1] < 1 << 24:
        draw_by_rounds(logits, filters, *draw, **{"rounds": 4} | sizes)
        return
    if filters.top_k is not None and 0 < filters.widest <= configs.MOST_TOP_K:
        few = filters.widest <= configs.FEW_TOP_K
        (draw_by_groups if few else draw_listed)(logits, filters, *draw, **sizes)
        return
    cuts = None
    if filters.top_k is not None or filters.min_p is not None:
        cuts = cut_rows(logits, filters)
    if filters.top_p is not None:
        draw_by_rounds(logits, filters, *draw, cuts, **sizes)
    else:
        best_tokens(
            logits, out, seeds, positions, temperature=filters.temperature, stream=stream, cuts=cuts
        )


def mask_filtered(logits: Tensor, filters: Filters, out: Tensor) -> None:
    """Writes the logits with -inf at what the filters drop.

    Args:
        logits: Shape [rows, vocab], last stride 1.
        filters: Options of the rows.
        out: Shape [rows, vocab], last stride 1; may be `logits`.
    """
    cuts = None
    if filters.top_k is not None and 0 < filters.widest <= configs.FEW_TOP_K:
        apply_cuts(logits, by_groups(logits, filters, None), out)
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
    apply_cut_kernel[(rows * chunks,)](
        logits, *cuts, out, vocab, logits.stride(0), out.stride(0), chunks,
        BLOCK=block, num_warps=warps(num_warps),
    )  # fmt: skip
