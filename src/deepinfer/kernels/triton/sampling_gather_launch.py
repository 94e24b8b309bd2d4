"""Launches of the kernels that draw with a middling top-k, for arguments that were already checked."""

from __future__ import annotations

import torch
import triton
from torch import Tensor

from deepinfer.kernels.configs import sampling as configs
from deepinfer.kernels.triton.launches import interpreted, warps
from deepinfer.kernels.triton.sampling_cut import chunk_maxima_kernel
from deepinfer.kernels.triton.sampling_gather import bound_kernel, finish_kernel, gather_kernel

__all__ = ["draw_gathered"]


def draw_gathered(
    logits: Tensor,
    filters: tuple[Tensor | None, Tensor, Tensor | None, Tensor | None],
    seeds: Tensor,
    positions: Tensor,
    stream: int,
    out: Tensor,
    sizes: tuple[int, int] | None = None,
    capacity: int = 2048,
    bound_warps: int = 8,
    finish_warps: int = 8,
) -> None:
    """Writes the token of each row, drawn among what its filters keep.

    Args:
        logits: Shape [rows, vocab], last stride 1.
        filters: Temperature, top-k (of every row), top-p and min-p, shape [rows] each; None where one is off in all rows.
        seeds: Shape [rows], int64.
        positions: Shape [rows], integers.
        stream: Purpose of the noise.
        out: Shape [rows], int64.
        sizes: Tokens of a chunk, and warps.
        capacity: Tokens of the list of a row, a power of two.
        bound_warps: Warps of the program that bounds the cut of a row.
        finish_warps: Warps of the program that cuts the list of a row.
    """
    rows, vocab = logits.shape
    block, num_warps = sizes or configs.lookup("maxima", vocab)
    chunks, groups = triton.cdiv(vocab, block), block // 32
    padded = triton.next_power_of_2(chunks)

    def empty(*shape: int, dtype: torch.dtype = torch.int32) -> Tensor:
        return torch.empty(shape, dtype=dtype, device=logits.device)

    maxima = empty(rows, chunks, groups, dtype=torch.float32)
    tops = empty(rows, chunks, dtype=torch.float32)
    bounds, counts, found = empty(rows), empty(rows), empty(rows, capacity)
    given = [t if t is not None else tops for t in filters]
    temperature = filters[0]
    flags = {"WARM": temperature is not None, "CHUNKS": padded}
    chunk_maxima_kernel[(rows * chunks,)](
        logits, maxima, tops, vocab, logits.stride(0), chunks,
        BLOCK=block, GROUPS=groups, num_warps=warps(num_warps),
    )  # fmt: skip
    bound_kernel[(rows,)](
        maxima, tops, given[0], given[1], bounds, counts, vocab, chunks,
        GROUPS=groups, ALL_GROUPS=padded * groups, num_warps=warps(bound_warps), **flags,
    )  # fmt: skip
    gather_kernel[(rows * chunks,)](
        logits, tops, bounds, counts, found, vocab, logits.stride(0), chunks,
        BLOCK=block, CAPACITY=capacity, num_warps=warps(num_warps),
    )  # fmt: skip
    finish_kernel[(rows,)](
        logits, *given, seeds, positions, tops, bounds, counts, found, out, vocab, logits.stride(0),
        chunks, stream,
        TOP_P=filters[2] is not None, MIN_P=filters[3] is not None, FAST=not interpreted(),
        CAPACITY=capacity, num_warps=warps(finish_warps), **flags,
    )  # fmt: skip
