"""Launches of the kernels over rows of logits, for arguments that were already checked."""

from __future__ import annotations

from typing import Any

import torch
import triton
from torch import Tensor

from deepinfer.kernels.configs import sampling as configs
from deepinfer.kernels.topk import topk
from deepinfer.kernels.triton.launches import interpreted, on_device, warps
from deepinfer.kernels.triton.sampling_cuts import (
    Filters,
    bounds_of,
    by_groups,
    cut_mass,
    cut_rows,
    empty,
)
from deepinfer.kernels.triton.sampling_draw import (
    best_of_chunks_kernel,
    best_token_kernel,
    chunk_top_kernel,
)
from deepinfer.kernels.triton.sampling_edit import apply_cut_kernel
from deepinfer.kernels.triton.sampling_list import finish_kernel
from deepinfer.kernels.triton.sampling_rounds import (
    first_judge_kernel,
    first_round_kernel,
    next_round_kernel,
)
from deepinfer.kernels.triton.sampling_settle import settle_kernel

__all__ = [
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


def highest_tokens(logits: Tensor, out: Tensor, sizes: tuple[int, int] | None = None) -> None:
    """Writes the token of the highest logit of each row.

    Args:
        logits: Shape [rows, vocab], last stride 1.
        out: Shape [rows], int64.
        sizes: Tokens of a chunk, and warps.
    """
    _best(logits, (logits, logits, logits), 0, out, sizes, None, drawn=False, warm=False)


def best_tokens(
    logits: Tensor,
    out: Tensor,
    seeds: Tensor,
    positions: Tensor,
    *,
    temperature: Tensor | None = None,
    stream: int = 0,
    cuts: tuple[Tensor, Tensor] | None = None,
    sizes: tuple[int, int] | None = None,
) -> None:
    """Writes the token of the highest sum of logit and noise of each row.

    Args:
        logits: Shape [rows, vocab], last stride 1.
        out: Shape [rows], int64.
        seeds: Shape [rows], int64.
        positions: Shape [rows], integers.
        temperature: Shape [rows], fp32 or fp64; None for 1.
        stream: Purpose of the noise.
        cuts: Logit and id at which each row is cut.
        sizes: Tokens of a chunk, and warps.
    """
    warm = temperature if temperature is not None else seeds
    _best(
        logits, (warm, seeds, positions), stream, out, sizes, cuts,
        drawn=True, warm=temperature is not None,
    )  # fmt: skip


def _best(
    logits: Tensor,
    options: tuple[Tensor, Tensor, Tensor],
    stream: int,
    out: Tensor,
    sizes: tuple[int, int] | None,
    cuts: tuple[Tensor, Tensor] | None,
    *,
    drawn: bool,
    warm: bool,
) -> None:
    rows, vocab = logits.shape
    block, num_warps = sizes or configs.lookup("gumbel" if drawn else "argmax", vocab)
    chunks = triton.cdiv(vocab, block)
    tokens, tops = empty(logits, rows, chunks, dtype=torch.int32), empty(logits, rows, chunks)
    cut = cuts if cuts is not None else (tops, tokens)
    where = (vocab, logits.stride(0), chunks, stream)
    flags = {"DRAWN": drawn, "WARM": warm, "CUT": cuts is not None}
    best_token_kernel[(rows * chunks,)](
        logits, *options, *cut, tokens, tops, *where,
        FAST=not interpreted(), BLOCK=block, num_warps=warps(num_warps), **flags,
    )  # fmt: skip
    best_of_chunks_kernel[(rows,)](
        logits, *options, *cut, tokens, tops, out, *where,
        CHUNKS=triton.next_power_of_2(chunks), num_warps=warps(4 if drawn else 1), **flags,
    )  # fmt: skip


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
    """
    rows, vocab = logits.shape
    width = min(filters.widest, vocab)
    found = empty(logits, rows, width, dtype=torch.int32)
    values = logits.float() if logits.dtype == torch.float16 else logits
    block, num_warps = configs.lookup("argmax", vocab)
    chunks = triton.cdiv(vocab, block)
    tops = empty(logits, rows, chunks)
    # The selection does not look at NaN, of which one makes a row that is not drawn.
    chunk_top_kernel[(rows * chunks,)](
        logits, tops, vocab, logits.stride(0), chunks, BLOCK=block, num_warps=warps(num_warps)
    )
    topk(values, width, output_idx=found, return_value=False, backend="triton")
    capacity = max(256, triton.next_power_of_2(width))
    given = [t if t is not None else tops for t in filters[:4]]
    finish_kernel[(rows,)](
        logits, *given, seeds, positions, tops, tops, found, found, tops, found, out,
        vocab, logits.stride(0), chunks, stream, width,
        WARM=filters.temperature is not None, TOP_K=True, TOP_P=filters.top_p is not None,
        MIN_P=filters.min_p is not None, DRAWN=True, FAST=not interpreted(),
        CHUNKS=triton.next_power_of_2(chunks), CAPACITY=capacity,
        num_warps=warps(finish_warps or max(1, min(16, capacity // 256))),
    )  # fmt: skip


def draw_filtered(
    logits: Tensor,
    filters: Filters,
    seeds: Tensor,
    positions: Tensor,
    stream: int,
    out: Tensor,
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
        sizes: As in `draw_by_groups` or `draw_listed` where every row has a top-k as small, else as in `draw_by_rounds`.
    """
    if filters.top_k is not None and 0 < filters.widest <= configs.MOST_TOP_K:
        few = filters.widest <= configs.FEW_TOP_K
        draw = draw_by_groups if few else draw_listed
        draw(logits, filters, seeds, positions, stream, out, **sizes)
        return
    cuts = None
    if filters.top_k is not None or filters.min_p is not None:
        cuts = cut_rows(logits, filters)
        # Many tokens are kept, of which groups tell little.
        sizes.setdefault("sample", configs.SAMPLE)
    if filters.top_p is not None:
        draw_by_rounds(logits, filters, seeds, positions, stream, out, cuts, **sizes)
    else:
        best_tokens(
            logits, out, seeds, positions, temperature=filters.temperature, stream=stream, cuts=cuts
        )


def draw_by_rounds(
    logits: Tensor,
    filters: Filters,
    seeds: Tensor,
    positions: Tensor,
    stream: int,
    out: Tensor,
    cuts: tuple[Tensor, Tensor] | None = None,
    sizes: tuple[int, int] | None = None,
    next_sizes: tuple[int, int] | None = None,
    settle_sizes: tuple[int, int] | None = None,
    judge_warps: int = 16,
    rounds: int | None = None,
    programs: int | None = None,
    group: int = 16,
    sample: int = 0,
) -> None:
    """Writes the token of each row, drawn and judged by its top-p, until one is kept.

    Args:
        logits: Shape [rows, vocab], last stride 1.
        filters: Options of the rows; of top-k and min-p, `cuts` are looked at.
        seeds: Shape [rows], int64.
        positions: Shape [rows], integers.
        stream: Purpose of the noise.
        out: Shape [rows], int64.
        cuts: Logit and id at which each row is cut; None where all tokens count.
        sizes: Tokens of a chunk of the first round, and warps.
        next_sizes: The same for the next rounds.
        settle_sizes: The same for the program of a row that finishes what they leave.
        judge_warps: Warps of the program that judges the first round of a row.
        rounds: Rounds of several programs a row behind the first, at most 7; None for a choice by the number of rows.
        programs: Programs of such a round; None for all that the processors of the GPU hold at once.
        group: Tokens of a group, a power of two from 8.
        sample: Tokens of a row that bounds are taken from, a power of two; 0 for no bounds.
    """
    rows, vocab = logits.shape
    given = [t if t is not None else logits for t in (filters.temperature, filters.top_p)]
    warm = {"WARM": filters.temperature is not None}
    fast = {"FAST": not interpreted()}
    block, num_warps = sizes or configs.lookup("first_round", vocab)
    ends, end_ids = empty(logits, rows), empty(logits, rows, dtype=torch.int32)
    state = (ends, end_ids, torch.empty_like(end_ids), empty(logits, rows, 2))
    if sample:
        *bound, counts = bounds_of(logits, filters, cuts, sample, align=block, by_mass=True)
    else:
        bound = [empty(logits, rows, 2), empty(logits, rows, 2, dtype=torch.int32)]
        counts = torch.empty_like(end_ids)
    cut = cuts if cuts is not None else bound
    flags = warm | {"CUT": cuts is not None}
    bounded = {"BOUNDS": sample > 0}
    chunks, groups = triton.cdiv(vocab, block), block // group
    padded = triton.next_power_of_2(chunks)
    rounds = configs.rounds_of(rows) if rounds is None else rounds

    def parts(*last: int, dtype: torch.dtype = torch.float32) -> Tensor:
        return empty(logits, rows, chunks, *last, dtype=dtype)

    tokens, tops, sums = parts(dtype=torch.int32), parts(), parts(3)
    maxima, masses = parts(groups), parts(groups)
    num_open = empty(logits, 8, 4, dtype=torch.int32)
    open_rows = empty(logits, rounds + 1, triton.cdiv(rows, 4) * 4, dtype=torch.int32)
    where = (vocab, logits.stride(0), chunks, stream)
    made = (tokens, tops, maxima, masses, sums)
    first_round_kernel[(rows * chunks,)](
        logits, given[0], seeds, positions, *cut, *bound, *made, num_open, *where,
        DRAWN=True, BLOCK=block, GROUPS=groups, PARTS=group // 4, num_warps=warps(num_warps),
        **flags, **fast, **bounded,
    )  # fmt: skip
    first_judge_kernel[(rows,)](
        logits, *given, seeds, positions, *cut, *bound, *made, *state, num_open, open_rows, counts,
        out, *where,
        CHUNKS=padded, GROUPS=groups, ALL_GROUPS=padded * groups, num_warps=warps(judge_warps),
        **flags, **bounded,
    )  # fmt: skip
    block, num_warps = next_sizes or configs.lookup("next_round", vocab)
    chunks = triton.cdiv(vocab, block)
    tokens, sums = parts(dtype=torch.int32), parts()
    most = programs or configs.PROGRAMS
    for i in range(rounds):
        # Few rows are open, so a fixed number of programs shares their chunks.
        next_round_kernel[(min(rows * chunks, most),)](
            logits, *given, seeds, positions, *bound, *state, num_open[i], open_rows[i],
            num_open[i + 1], open_rows[i + 1], counts, tokens, sums, out, vocab,
            logits.stride(0), chunks, stream,
            CHUNKS=triton.next_power_of_2(chunks), BLOCK=block, num_warps=warps(num_warps),
            **warm, **fast,
        )  # fmt: skip
    block, num_warps = settle_sizes or configs.lookup("settle", vocab)
    settle_kernel[(rows,)](
        logits, *given, seeds, positions, *cut, *state, out, vocab, logits.stride(0), stream,
        BLOCK=block, num_warps=warps(num_warps), **flags, **fast,
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
