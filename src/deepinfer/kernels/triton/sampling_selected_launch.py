"""Launches of draws among the highest tokens of rows, for arguments that were already checked."""

from __future__ import annotations

import torch
import triton
from torch import Tensor

from deepinfer.kernels import contract
from deepinfer.kernels.configs import sampling as configs
from deepinfer.kernels.configs import topk as topk_configs
from deepinfer.kernels.topk import topk
from deepinfer.kernels.triton.launches import interpreted, warps
from deepinfer.kernels.triton.sampling_options import Draw, Filters, empty
from deepinfer.kernels.triton.sampling_selected import (
    chunk_top_kernel,
    draw_selected_kernel,
    neighbour_maxima_kernel,
)
from deepinfer.kernels.triton.topk_launch import ByGroupsTuning, by_groups_constants

__all__ = ["draw_selected"]


def draw_selected(
    logits: Tensor,
    filters: Filters,
    draw: Draw,
    row_warps: int | None = None,
    joined: bool = True,
) -> None:
    """Writes the token of each row, drawn among the highest; for a top-k up to `configs.MOST_TOP_K`.

    Args:
        logits: Shape [rows, vocab], last stride 1.
        filters: Options of the rows, with a top-k in each of them, and `widest`.
        draw: What draws the tokens.
        row_warps: Warps of the program that draws from the selected tokens of a row.
        joined: Whether the first pass of the selection looks for NaN, where it can.
    """
    rows, vocab = logits.shape
    width = min(filters.widest, vocab)
    selected = empty(logits, rows, width, dtype=torch.int32)
    values = logits.float() if logits.dtype == torch.float16 else logits
    tuning = _tuning_by_groups(values, width) if joined else None
    if tuning:
        block = tuning.block
        tops = empty(logits, rows, triton.cdiv(vocab, block))
        _select_by_groups(values, width, selected, tops, tuning)
    else:
        block, num_warps = configs.lookup("argmax", vocab)
        chunks = triton.cdiv(vocab, block)
        tops = empty(logits, rows, chunks)
        chunk_top_kernel[(rows, chunks)](
            logits, tops, vocab, logits.stride(0), chunks, BLOCK=block, num_warps=warps(num_warps)
        )
        topk(values, width, output_idx=selected, return_value=False, backend="triton")
    chunks = tops.shape[1]
    capacity = max(256, triton.next_power_of_2(width))
    num_warps = row_warps or max(1, min(16, capacity // 256))
    draw_selected_kernel[(rows,)](
        logits, *filters.given(tops), draw.seeds, draw.positions, tops, selected, draw.out,
        vocab, logits.stride(0), chunks, draw.stream, width,
        CHUNKS=triton.next_power_of_2(chunks), CAPACITY=capacity, FAST=not interpreted(),
        # So that a processor has room for two rows.
        num_warps=warps(num_warps), maxnreg=64 if num_warps == 16 else None,
        **filters.flags("WARM", "TOP_P", "MIN_P"),
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
    neighbour_maxima_kernel[(rows, chunks)](
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
