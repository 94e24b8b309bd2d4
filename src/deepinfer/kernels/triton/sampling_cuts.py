"""Launches of the kernels that find where filters cut rows, for arguments that were already checked."""

from __future__ import annotations

import torch
import triton
from torch import Tensor

from deepinfer.kernels.configs import sampling as configs
from deepinfer.kernels.triton.launches import interpreted, warps
from deepinfer.kernels.triton.sampling_bounds import (
    bounds_kernel,
    cut_between_kernel,
    gather_kernel,
)
from deepinfer.kernels.triton.sampling_groups import (
    chunk_maxima_kernel,
    few_cut_kernel,
    row_cut_kernel,
)
from deepinfer.kernels.triton.sampling_mass import (
    chunk_masses_kernel,
    mass_bounds_kernel,
    mass_finish_kernel,
    mass_gather_kernel,
    narrow_kernel,
)
from deepinfer.kernels.triton.sampling_options import Draw, Filters, empty

__all__ = ["cut_by_groups", "cut_mass", "cut_rows"]


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
    sample, capacity = (configs.chunk_of(vocab, most) for most in (sample, capacity))
    chunks = triton.cdiv(vocab, block)
    where = (vocab, logits.stride(0), chunks)
    bounds, ids = empty(logits, rows, 2), empty(logits, rows, 2, dtype=torch.int32)
    counts, tops = torch.empty_like(ids), empty(logits, rows, chunks)
    found = empty(logits, rows, capacity, dtype=torch.int32)
    cuts, cut_ids = empty(logits, rows), empty(logits, rows, dtype=torch.int32)
    temperature, top_k, _, min_p = filters.given(cuts)
    bounds_kernel[(rows,)](
        logits, temperature, top_k, bounds, ids, counts, vocab, logits.stride(0),
        SIZE=sample, num_warps=warps(max(1, sample // 512)), maxnreg=64, **filters.flags("WARM", "TOP_K"),
    )  # fmt: skip
    # More registers would leave room for too few programs.
    gather_kernel[(rows, chunks)](
        logits, bounds, ids, tops, counts, found, *where,
        BLOCK=block, CAPACITY=capacity, num_warps=warps(num_warps), maxnreg=64,
    )  # fmt: skip
    cut_between_kernel[(rows,)](
        logits, temperature, top_k, min_p, tops, bounds, counts, found, cuts, cut_ids, *where,
        CHUNKS=triton.next_power_of_2(chunks), CAPACITY=capacity,
        num_warps=warps(max(1, min(16, capacity // 256))), **filters.flags("WARM", "TOP_K", "MIN_P"),
    )  # fmt: skip
    return cuts, cut_ids


def cut_by_groups(
    logits: Tensor,
    filters: Filters,
    draw: Draw | None = None,
    sizes: tuple[int, int] | None = None,
    capacity: int = 2048,
) -> tuple[Tensor, Tensor]:
    """Cuts rows with a top-k up to `configs.FEW_TOP_K` by all filters, or draws among what they keep.

    Args:
        logits: Shape [rows, vocab], last stride 1.
        filters: Options of the rows, with a top-k in each of them.
        draw: What draws the tokens; None for the cuts alone.
        sizes: Tokens of a chunk, and warps.
        capacity: Candidates of a row, a power of two.

    Returns:
        As from `cut_rows`, when nothing is drawn.
    """
    rows, vocab = logits.shape
    block, num_warps = sizes or configs.lookup("maxima", vocab)
    chunks, groups = triton.cdiv(vocab, block), block // 32
    padded = triton.next_power_of_2(chunks)
    most = 2 * configs.FEW_TOP_K
    maxima, tops = empty(logits, rows, chunks, groups), empty(logits, rows, chunks)
    scratch = empty(logits, rows, most + capacity + 1, dtype=torch.int32)
    cuts, cut_ids = empty(logits, rows), empty(logits, rows, dtype=torch.int32)
    seeds, positions, stream, out = draw or (cut_ids, cut_ids, 0, cut_ids)
    where = (vocab, logits.stride(0), chunks)
    flags = filters.flags("WARM", "TOP_P", "MIN_P") | {
        "DRAWN": draw is not None,
        "FAST": not interpreted(),
    }
    sizes_of_lists = {"CHUNKS": padded, "MOST_K": most, "CAPACITY": capacity}
    options = (*filters.given(tops), seeds, positions)
    chunk_maxima_kernel[(rows, chunks)](
        logits, maxima, tops, *where, GROUPS=groups, BLOCK=block, num_warps=warps(num_warps)
    )
    row_cut_kernel[(rows,)](
        logits, *options, maxima, tops, scratch, cuts, cut_ids, out, *where, stream,
        BLOCK=block, GROUPS=groups, ALL_GROUPS=padded * groups, SPAN=2048, STEPS=14, num_warps=warps(8),
        **sizes_of_lists, **flags,
    )  # fmt: skip
    few_cut_kernel[(rows,)](
        logits, *options, tops, scratch, cuts, cut_ids, out, *where, stream,
        num_warps=1, **sizes_of_lists, **flags,
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
    temperature, _, top_p, _ = filters.given(logits)
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
    grid, where = (rows, chunks), (vocab, logits.stride(0), chunks)
    warm = filters.flags("WARM")
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
