"""Launches of the kernels over rows of logits, for arguments that were already checked."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import triton
from torch import Tensor

from deepinfer.kernels.configs import sampling as configs
from deepinfer.kernels.triton.launches import interpreted, on_device, warps
from deepinfer.kernels.triton.sampling_bracket import bracket_mass_kernel, bracket_tokens_kernel
from deepinfer.kernels.triton.sampling_cut import (
    chunk_maxima_kernel,
    few_cut_kernel,
    row_cut_kernel,
)
from deepinfer.kernels.triton.sampling_draw import (
    best_of_chunks_kernel,
    best_of_row_kernel,
    best_token_kernel,
)
from deepinfer.kernels.triton.sampling_edit import apply_cut_kernel
from deepinfer.kernels.triton.sampling_gather_launch import draw_gathered
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
    "cut_rows",
    "draw_by_rounds",
    "draw_filtered",
    "draw_gathered",
    "on_device",
]


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


def best_tokens(
    logits: Tensor,
    out: Tensor,
    *,
    temperature: Tensor | None = None,
    seeds: Tensor | None = None,
    positions: Tensor | None = None,
    stream: int = 0,
    cuts: tuple[Tensor, Tensor] | None = None,
    sizes: tuple[int, int] | None = None,
    row_sizes: tuple[int, int, int] | None = None,
) -> None:
    """Writes the token of the highest logit of each row, or of the highest sum of logit and noise.

    Args:
        logits: Shape [rows, vocab], last stride 1.
        out: Shape [rows], int64.
        temperature: Shape [rows], fp32 or fp64; None for 1.
        seeds: Shape [rows], int64; None for the highest logit.
        positions: Shape [rows], integers.
        stream: Purpose of the noise.
        cuts: Logit and id at which each row is cut.
        sizes: Tokens of a chunk, and warps.
        row_sizes: For the highest logit by one program a row: tokens at once, warps, and loads that are under way.
    """
    rows, vocab = logits.shape
    drawn = seeds is not None
    if row_sizes is not None and not drawn:
        best_of_row_kernel[(rows,)](
            logits, out, vocab, logits.stride(0),
            BLOCK=row_sizes[0], STAGES=row_sizes[2], num_warps=warps(row_sizes[1]),
        )  # fmt: skip
        return
    block, num_warps = sizes or configs.lookup("gumbel" if drawn else "argmax", vocab)
    chunks = triton.cdiv(vocab, block)
    tokens = torch.empty((rows, chunks), dtype=torch.int32, device=logits.device)
    tops = torch.empty((rows, chunks), dtype=torch.float32, device=logits.device)
    cut, cut_id = cuts if cuts is not None else (tops, tokens)
    options = (
        temperature if temperature is not None else tops,
        seeds if seeds is not None else tokens,
        positions if positions is not None else tokens,
        cut,
        cut_id,
        tokens,
        tops,
    )
    flags = {"DRAWN": drawn, "WARM": temperature is not None, "CUT": cuts is not None}
    best_token_kernel[(rows * chunks,)](
        logits, *options, vocab, logits.stride(0), chunks, stream,
        FAST=not interpreted(), BLOCK=block, num_warps=warps(num_warps), **flags,
    )  # fmt: skip
    best_of_chunks_kernel[(rows,)](
        logits, *options, out, vocab, logits.stride(0), chunks, stream,
        CHUNKS=triton.next_power_of_2(chunks), num_warps=warps(4 if drawn else 1), **flags,
    )  # fmt: skip


def cut_rows(
    logits: Tensor,
    filters: Filters,
    seeds: Tensor | None = None,
    positions: Tensor | None = None,
    stream: int = 0,
    out: Tensor | None = None,
    sizes: tuple[int, int] | None = None,
    row_warps: int | None = None,
    span: int | None = None,
    capacity: int = 2048,
    bracket_warps: int | None = None,
) -> tuple[Tensor, Tensor]:
    """Finds the cut of each row.

    Args:
        logits: Shape [rows, vocab], last stride 1.
        filters: Options of the rows.
        seeds: Shape [rows], int64; given to draw the tokens of rows that are cut among few candidates.
        positions: Shape [rows], integers.
        stream: Purpose of the noise.
        out: Where these tokens go, shape [rows], int64.
        sizes: Tokens of a chunk, and warps.
        row_warps: Warps of the program of a row; None for a choice by `widest`.
        span: Tokens of groups that it looks at together; None for a choice by `widest`.
        capacity: Candidates of a row with a top-k, a power of two.
        bracket_warps: Warps of the programs that look for brackets.

    Returns:
        The logit of the cut, shape [rows], fp32, and the last id that is kept at it, shape [rows], int32: -2 where the
        token was drawn.
    """
    rows, vocab = logits.shape
    block, num_warps = sizes or configs.lookup("maxima", vocab)
    chunks, groups = triton.cdiv(vocab, block), block // 32
    padded = triton.next_power_of_2(chunks)

    def empty(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
        return torch.empty(shape, dtype=dtype, device=logits.device)

    maxima, tops = empty(rows, chunks, groups), empty(rows, chunks)
    cuts, cut_ids = empty(rows), empty(rows, dtype=torch.int32)
    grid, common = (rows * chunks,), {"BLOCK": block, "num_warps": warps(num_warps)}
    chunk_maxima_kernel[grid](
        logits, maxima, tops, vocab, logits.stride(0), chunks, GROUPS=groups, **common
    )
    few = 0 < filters.widest <= configs.MOST_TOP_K
    given = [t if t is not None else tops for t in filters[:4]]
    bins = filters.top_p is not None and not few
    exact = found = counts = tops
    each = max(256, 4096 // padded)
    if bins:
        coarse, fine = empty(rows, chunks, 16), empty(rows, chunks, 16)
        exact = empty(rows, chunks, 2, dtype=torch.int64)
        found = empty(rows, chunks, each, dtype=torch.int32)
        counts = empty(rows, chunks, dtype=torch.int32)
        flags = {
            "WARM": filters.temperature is not None,
            "TOP_K": filters.top_k is not None,
            "MIN_P": filters.min_p is not None,
            "CHUNKS": padded,
            "BLOCK": block,
            "num_warps": warps(bracket_warps or configs.lookup("bracket", vocab)[1]),
        }
        for is_fine, sums in ((False, coarse), (True, fine)):
            bracket_mass_kernel[grid](
                logits, *given, tops, coarse, sums, vocab, logits.stride(0), chunks,
                FINE=is_fine, **flags,
            )  # fmt: skip
        bracket_tokens_kernel[grid](
            logits, *given, tops, coarse, fine, exact, found, counts, vocab,
            logits.stride(0), chunks, EACH=each, **flags,
        )  # fmt: skip
    is_wide = filters.widest > 256 or not few
    span = span or (8192 if is_wide else 2048)
    row_warps = row_warps or (16 if is_wide else 8)
    most = 2 * configs.MOST_TOP_K
    scratch = empty(rows, most + capacity + 1, dtype=torch.int32)
    seeds_or = seeds if seeds is not None else tops
    positions_or = positions if positions is not None else tops
    to = out if out is not None else tops
    where = (vocab, logits.stride(0), chunks, stream)
    flags = {
        "WARM": filters.temperature is not None,
        "TOP_P": filters.top_p is not None,
        "MIN_P": filters.min_p is not None,
        "SAMPLE": seeds is not None,
        "CHUNKS": padded,
        "MOST_K": most,
        "CAPACITY": capacity,
    }
    row_cut_kernel[(rows,)](
        logits, *given, seeds_or, positions_or, maxima, tops, exact, found, counts, scratch, cuts,
        cut_ids, to, *where,
        TOP_K=filters.top_k is not None, BINS=bins, FEW=few, BLOCK=block, GROUPS=groups,
        ALL_GROUPS=padded * groups, EACH=each, SPAN=span, STEPS=32 if is_wide else 14,
        FAST=not interpreted(), num_warps=warps(row_warps), **flags,
    )  # fmt: skip
    if filters.top_k is not None:
        few_cut_kernel[(rows,)](
            logits, *given, seeds_or, positions_or, tops, scratch, cuts, cut_ids, to, *where,
            num_warps=1, **flags,
        )  # fmt: skip
    return cuts, cut_ids


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
        sizes: As in `cut_rows`, `draw_gathered` or `draw_by_rounds`.
    """
    if 0 < filters.widest <= configs.FEW_TOP_K:
        cut_rows(logits, filters, seeds, positions, stream, out, **sizes)
    elif 0 < filters.widest <= configs.MOST_TOP_K and filters.top_k is not None:
        temperature, top_k, top_p, min_p, _ = filters
        options = (temperature, top_k, top_p, min_p)
        draw_gathered(logits, options, seeds, positions, stream, out, **sizes)
    else:
        draw_by_rounds(logits, filters, seeds, positions, stream, out, **sizes)


def draw_by_rounds(
    logits: Tensor,
    filters: Filters,
    seeds: Tensor,
    positions: Tensor,
    stream: int,
    out: Tensor,
    sizes: tuple[int, int] | None = None,
    next_sizes: tuple[int, int] | None = None,
    settle_sizes: tuple[int, int] | None = None,
    judge_warps: int = 16,
    rounds: int = 4,
    programs: int = 1056,
    group: int = 16,
    registers: int | None = None,
) -> None:
    """Writes the token of each row, drawn from all tokens and judged, until one is kept.

    Args:
        logits: Shape [rows, vocab], last stride 1.
        filters: Options of the rows.
        seeds: Shape [rows], int64.
        positions: Shape [rows], integers.
        stream: Purpose of the noise.
        out: Shape [rows], int64.
        sizes: Tokens of a chunk of the first round, and warps.
        next_sizes: The same for the next rounds.
        settle_sizes: The same for the program of a row that finishes what they leave.
        judge_warps: Warps of the program that judges the first round of a row.
        rounds: Rounds of several programs a row behind the first, at most 7.
        programs: Programs of such a round.
        group: Tokens of a group, a power of two from 8.
        registers: Most registers a thread of these programs; None for what the compiler takes.
    """
    rows, vocab = logits.shape

    def empty(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
        return torch.empty(shape, dtype=dtype, device=logits.device)

    given = [t if t is not None else logits for t in filters[:4]]
    warm = given[0]
    flags = {"WARM": filters.temperature is not None}
    kinds = flags | {
        "TOP_K": filters.top_k is not None,
        "TOP_P": filters.top_p is not None,
        "MIN_P": filters.min_p is not None,
    }
    fast = not interpreted()
    block, num_warps = sizes or configs.lookup("first_round", vocab)
    chunks, groups = triton.cdiv(vocab, block), block // group
    padded = triton.next_power_of_2(chunks)
    tokens, tops = empty(rows, chunks, dtype=torch.int32), empty(rows, chunks)
    maxima, masses = empty(rows, chunks, groups), empty(rows, chunks, groups)
    num_open = empty(8, 4, dtype=torch.int32)
    open_rows = empty(rounds + 1, triton.cdiv(rows, 4) * 4, dtype=torch.int32)
    where = (vocab, logits.stride(0), chunks, stream)
    first_round_kernel[(rows * chunks,)](
        logits, warm, seeds, positions, tokens, tops, maxima, masses, num_open, *where,
        MASS=kinds["TOP_P"], FAST=fast, BLOCK=block, GROUPS=groups, PARTS=group // 4,
        num_warps=warps(num_warps), **flags,
    )  # fmt: skip
    cuts, facts = empty(rows), empty(rows, 4)
    cut_ids, waiting = empty(rows, dtype=torch.int32), empty(rows, dtype=torch.int32)
    arrived = empty(rows, dtype=torch.int32)
    state = (cuts, cut_ids, waiting, facts)
    first_judge_kernel[(rows,)](
        logits, *given, seeds, positions, tokens, tops, maxima, masses, *state, num_open,
        open_rows, arrived, out, *where,
        CHUNKS=padded, GROUPS=groups, ALL_GROUPS=padded * groups, SIZE=group,
        num_warps=warps(judge_warps), **kinds,
    )  # fmt: skip
    block, num_warps = next_sizes or configs.lookup("next_round", vocab)
    chunks = triton.cdiv(vocab, block)
    tokens, tops = empty(rows, chunks, dtype=torch.int32), empty(rows, chunks)
    counts, sums = empty(rows, chunks, dtype=torch.int32), empty(rows, chunks, 2)
    limits = {} if registers is None else {"maxnreg": registers}
    for i in range(rounds):
        # Few rows are open, so a fixed number of programs shares their chunks.
        next_round_kernel[(min(rows * chunks, programs),)](
            logits, *given, seeds, positions, *state, num_open[i], open_rows[i], num_open[i + 1],
            open_rows[i + 1], arrived, tokens, tops, counts, sums, out, vocab, logits.stride(0), chunks,
            stream,
            FAST=fast, CHUNKS=triton.next_power_of_2(chunks), BLOCK=block, num_warps=warps(num_warps),
            **kinds, **limits,
        )  # fmt: skip
    block, num_warps = settle_sizes or configs.lookup("settle", vocab)
    settle_kernel[(rows,)](
        logits, *given, seeds, positions, *state, out, vocab, logits.stride(0), stream,
        FAST=fast, BLOCK=block, num_warps=warps(num_warps), **kinds,
    )  # fmt: skip


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
