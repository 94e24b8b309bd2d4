"""Launches of the kernels that find where filters cut rows, for arguments that were already checked."""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
from torch import Tensor

from deepinfer.kernels.configs import sampling as configs
from deepinfer.kernels.triton.launches import interpreted, warps
from deepinfer.kernels.triton.sampling_bounds import bounds_kernel
from deepinfer.kernels.triton.sampling_groups import (
    chunk_maxima_kernel,
    few_cut_kernel,
    row_cut_kernel,
)
from deepinfer.kernels.triton.sampling_list import finish_kernel, gather_kernel
from deepinfer.kernels.triton.sampling_mass import (
    chunk_masses_kernel,
    mass_bounds_kernel,
    mass_finish_kernel,
    mass_gather_kernel,
    narrow_kernel,
)

__all__ = ["Filters", "bounds_of", "by_groups", "cut_mass", "cut_rows", "empty"]


class Filters(NamedTuple):
    """Options of rows; None where a filter is off in all of them.

    Attributes:
        temperature: Shape [rows].
        top_k: Shape [rows], integers.
        top_p: Shape [rows].
        min_p: Shape [rows].
        widest: The largest top-k of a row, from 1, if the host knows it and every row has one; else 0.
    """

    temperature: Tensor | None
    top_k: Tensor | None
    top_p: Tensor | None
    min_p: Tensor | None
    widest: int


def empty(x: Tensor, *shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    """A tensor with any content, where `x` is."""
    return torch.empty(shape, dtype=dtype, device=x.device)


def bounds_of(logits: Tensor, filters: Filters, size: int) -> tuple[Tensor, Tensor, Tensor]:
    """Bounds of top-k: logits and ids, shape [rows, 2]; and counters set to 0."""
    rows, vocab = logits.shape
    bounds, ids = empty(logits, rows, 2), empty(logits, rows, 2, dtype=torch.int32)
    counts = torch.empty_like(ids)
    temperature, top_k = (t if t is not None else ids for t in filters[:2])
    size = configs.chunk_of(vocab, size)
    bounds_kernel[(rows,)](
        logits, temperature, top_k, bounds, ids, counts, vocab, logits.stride(0),
        WARM=filters.temperature is not None, TOP_K=filters.top_k is not None, SIZE=size,
        num_warps=warps(max(1, size // 512)),
    )  # fmt: skip
    return bounds, ids, counts


def cut_rows(
    logits: Tensor,
    filters: Filters,
    sizes: tuple[int, int] | None = None,
    sample: int = configs.SAMPLE,
    capacity: int = configs.MOST_LISTED,
) -> tuple[Tensor, Tensor]:
    """Finds where top-k and min-p cut each row.

    Args:
        logits: Shape [rows, vocab], last stride 1.
        filters: Options of the rows; top-p is not looked at.
        sizes: Tokens of a chunk, and warps.
        sample: Tokens of a row that its bounds are taken from, a power of two.
        capacity: Tokens of the list of a row, a power of two.

    Returns:
        The logit of the cut, shape [rows], fp32, NaN for a row that cannot be drawn; and the last id that is kept at it,
        shape [rows], int32.
    """
    rows, vocab = logits.shape
    block, num_warps = sizes or configs.lookup("gather", vocab)
    capacity = min(capacity, configs.chunk_of(vocab, capacity))
    chunks = triton.cdiv(vocab, block)
    bounds, ids, counts = bounds_of(logits, filters, sample)
    tops = empty(logits, rows, chunks)
    found = empty(logits, rows, capacity, dtype=torch.int32)
    gather_kernel[(rows * chunks,)](
        logits, bounds, ids, tops, counts, found, vocab, logits.stride(0), chunks,
        BLOCK=block, CAPACITY=capacity, num_warps=warps(num_warps),
    )  # fmt: skip
    cuts, cut_ids = empty(logits, rows), empty(logits, rows, dtype=torch.int32)
    given = [t if t is not None else tops for t in filters[:4]]
    finish_kernel[(rows,)](
        logits, *given, cut_ids, cut_ids, tops, bounds, counts, found, cuts, cut_ids, cut_ids,
        vocab, logits.stride(0), chunks, 0, capacity,
        WARM=filters.temperature is not None, TOP_K=filters.top_k is not None, TOP_P=False,
        MIN_P=filters.min_p is not None, DRAWN=False, FAST=not interpreted(),
        CHUNKS=triton.next_power_of_2(chunks), CAPACITY=capacity,
        num_warps=warps(max(1, min(16, capacity // 256))),
    )  # fmt: skip
    return cuts, cut_ids


def by_groups(
    logits: Tensor,
    filters: Filters,
    draw: tuple[Tensor, Tensor, int, Tensor] | None,
    sizes: tuple[int, int] | None = None,
    capacity: int = 2048,
) -> tuple[Tensor, Tensor]:
    """Cuts rows with a top-k up to `configs.FEW_TOP_K`, or draws among what all filters keep."""
    rows, vocab = logits.shape
    block, num_warps = sizes or configs.lookup("maxima", vocab)
    chunks, groups = triton.cdiv(vocab, block), block // 32
    padded = triton.next_power_of_2(chunks)
    maxima, tops = empty(logits, rows, chunks, groups), empty(logits, rows, chunks)
    cuts, cut_ids = empty(logits, rows), empty(logits, rows, dtype=torch.int32)
    chunk_maxima_kernel[(rows * chunks,)](
        logits, maxima, tops, vocab, logits.stride(0), chunks,
        GROUPS=groups, BLOCK=block, num_warps=warps(num_warps),
    )  # fmt: skip
    given = [t if t is not None else tops for t in filters[:4]]
    most = 2 * configs.FEW_TOP_K
    scratch = empty(logits, rows, most + capacity + 1, dtype=torch.int32)
    seeds, positions, stream, out = draw or (cut_ids, cut_ids, 0, cut_ids)
    where = (vocab, logits.stride(0), chunks, stream)
    flags = {
        "WARM": filters.temperature is not None,
        "TOP_P": filters.top_p is not None,
        "MIN_P": filters.min_p is not None,
        "SAMPLE": draw is not None,
        "CHUNKS": padded,
        "MOST_K": most,
        "CAPACITY": capacity,
    }
    row_cut_kernel[(rows,)](
        logits, *given, seeds, positions, maxima, tops, scratch, cuts, cut_ids, out, *where,
        BLOCK=block, GROUPS=groups, ALL_GROUPS=padded * groups, SPAN=2048, STEPS=14,
        FAST=not interpreted(), num_warps=warps(8), **flags,
    )  # fmt: skip
    few_cut_kernel[(rows,)](
        logits, *given, seeds, positions, tops, scratch, cuts, cut_ids, out, *where,
        num_warps=1, **flags,
    )  # fmt: skip
    return cuts, cut_ids


def cut_mass(
    logits: Tensor,
    filters: Filters,
    cuts: tuple[Tensor, Tensor] | None,
    sizes: tuple[int, int] | None = None,
    passes: int = 3,
    capacity: int = configs.MOST_LISTED,
) -> tuple[Tensor, Tensor]:
    """Finds where top-p cuts each row among what other cuts keep.

    Args:
        logits: Shape [rows, vocab], last stride 1.
        filters: Options of the rows, with a top-p.
        cuts: Cuts by top-k and min-p, as from `cut_rows`; changed, and returned.
        sizes: Tokens of a chunk, and warps.
        passes: How often bounds are narrowed, to an eighth each time.
        capacity: Tokens of the list of a row, a power of two.

    Returns:
        As from `cut_rows`.
    """
    rows, vocab = logits.shape
    block, num_warps = sizes or configs.lookup("gather", vocab)
    temperature = filters.temperature if filters.temperature is not None else logits
    top_p = filters.top_p if filters.top_p is not None else logits
    capacity = min(capacity, configs.chunk_of(vocab, capacity))
    chunks, groups = triton.cdiv(vocab, block), block // 16
    padded = triton.next_power_of_2(chunks)

    def ints(*shape: int) -> Tensor:
        return empty(logits, *shape, dtype=torch.int32)

    made = cuts or (empty(logits, rows), ints(rows))
    tops, sums = empty(logits, rows, chunks), empty(logits, rows, chunks, 8)
    maxima, masses = empty(logits, rows, chunks, groups), empty(logits, rows, chunks, groups)
    bounds, bound_ids, counts = empty(logits, rows, 2), ints(rows, 2), ints(rows, 2)
    highests, facts, arrived = empty(logits, rows), empty(logits, rows, 4), ints(rows)
    exact = empty(logits, rows, chunks, 2, dtype=torch.int64)
    found = ints(rows, capacity)
    grid, where = (rows * chunks,), (vocab, logits.stride(0), chunks)
    warm = {"WARM": filters.temperature is not None}
    flags = warm | {"CUT": cuts is not None}
    few = {"BLOCK": block, "num_warps": warps(num_warps)}
    many = {"CHUNKS": padded, "num_warps": warps(16)}
    chunk_masses_kernel[grid](
        logits, temperature, *made, tops, sums, maxima, masses, *where, **few, **flags
    )
    mass_bounds_kernel[(rows,)](
        temperature, top_p, *made, tops, sums, maxima, masses, bounds, bound_ids, highests, facts, counts,
        arrived, vocab, chunks, GROUPS=groups, **many, **flags,
    )  # fmt: skip
    for _ in range(passes):
        narrow_kernel[grid](
            logits, temperature, bounds, bound_ids, facts, arrived, sums, *where, CHUNKS=padded, **few, **warm
        )  # fmt: skip
    mass_gather_kernel[grid](
        logits, temperature, top_p, *made, bounds, bound_ids, highests, exact, counts, found, *where,
        CAPACITY=capacity, **few, **flags,
    )  # fmt: skip
    mass_finish_kernel[(rows,)](
        logits, temperature, top_p, bounds, highests, exact, counts, found, *made, *where,
        CAPACITY=capacity, **many, **flags,
    )  # fmt: skip
    return made
