"""Launches of the kernels that draw by marking the tokens that can win, for arguments that were already checked."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import triton
from torch import Tensor

from deepinfer.kernels.configs import sampling as configs
from deepinfer.kernels.triton.launches import interpreted, warps
from deepinfer.kernels.triton.sampling_candidates import choice_kernel, marks_kernel
from deepinfer.kernels.triton.sampling_cuts import Filters, empty
from deepinfer.kernels.triton.sampling_rounds import next_round_kernel
from deepinfer.kernels.triton.sampling_settle import settle_kernel
from deepinfer.kernels.triton.sampling_weigh import weigh_kernel

__all__ = ["best_tokens", "draw_by_rounds"]


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
    expected: int = configs.EXPECTED,
    row_warps: int = 8,
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
        expected: Tokens of a chunk that are marked, about.
        row_warps: Warps of the program that chooses among the marked tokens of a row.
    """
    filters = Filters(temperature, None, None, None, 0)
    _mark_and_choose(
        logits, filters, seeds, positions, stream, out, cuts, sizes, expected, row_warps, None
    )


class _Open(NamedTuple):
    """What a choice leaves of rows that it cannot answer.

    Attributes:
        levels: Tokens in question, shape [rows, 4], int32.
        ends: Logit of the end of the tokens that count, shape [rows], fp32.
        end_ids: Last id at it, shape [rows], int32; -2 where the token is written.
        waiting: Token that is to be judged, -1 for none, shape [rows], int32.
        facts: Highest logit, what may be before a kept token, and its error, shape [rows, 4], fp32.
        counts: Number of open rows of each round in every fourth place, shape [8, 4], int32.
        lists: Open rows of each round, shape [8, rows in fours], int32.
        arrived: Chunks of the row that are weighed, shape [rows], int32.
    """

    levels: Tensor
    ends: Tensor
    end_ids: Tensor
    waiting: Tensor
    facts: Tensor
    counts: Tensor
    lists: Tensor
    arrived: Tensor

    @classmethod
    def of(cls, logits: Tensor) -> _Open:
        """Room for the rows of some logits."""
        rows = logits.shape[0]

        def ints(*shape: int) -> Tensor:
            return empty(logits, *shape, dtype=torch.int32)

        return cls(
            ints(rows, 4), empty(logits, rows), ints(rows), ints(rows), empty(logits, rows, 4), ints(8, 4),
            ints(8, triton.cdiv(rows, 4) * 4), ints(rows),
        )  # fmt: skip


def _share_of(filters: Filters, other: Tensor) -> tuple[Tensor, bool]:
    """What may be before a token that is kept, and whether that is a number of tokens: of top-k alone."""
    if filters.top_p is None and filters.top_k is not None:
        return filters.top_k, True
    return filters.top_p if filters.top_p is not None else other, False


def _mark_and_choose(
    logits: Tensor,
    filters: Filters,
    seeds: Tensor,
    positions: Tensor,
    stream: int,
    out: Tensor,
    cuts: tuple[Tensor, Tensor] | None,
    sizes: tuple[int, int] | None,
    expected: int,
    row_warps: int,
    state: _Open | None,
) -> None:
    """Writes tokens; with a `state` they are judged, and those of rows that groups do not answer for are left out."""
    rows, vocab = logits.shape
    block, num_warps = sizes or configs.lookup("marks", vocab)
    chunks, groups = triton.cdiv(vocab, block), block // 16
    padded = triton.next_power_of_2(chunks)
    tops, sums = empty(logits, rows, chunks), empty(logits, rows, chunks)
    marks = empty(logits, rows, chunks, groups, dtype=torch.int16)
    maxima = masses = tops
    if state is not None:
        maxima, masses = empty(logits, rows, chunks, groups), empty(logits, rows, chunks, groups)
    # Most groups have one marked token at most, and a row far fewer than its chunks.
    most_groups = min(
        padded * groups, max(256, triton.next_power_of_2(int(1.5 * expected * chunks)))
    )
    most = 128
    scratch = empty(logits, rows, most_groups + most, dtype=torch.int32)
    temperature = filters.temperature if filters.temperature is not None else tops
    share, by_rank = _share_of(filters, tops)
    cut = cuts if cuts is not None else (tops, marks)
    opened = state or _Open(*(scratch,) * 8)
    flags: dict[str, Any] = {
        "WARM": filters.temperature is not None,
        "CUT": cuts is not None,
        "JUDGED": state is not None,
        "EXPECTED": expected,
        "BLOCK": block,
    }
    where = (vocab, logits.stride(0), chunks)
    marks_kernel[(rows * chunks,)](
        logits, temperature, seeds, positions, *cut, marks, tops, sums, maxima, masses, opened.counts,
        *where, stream, num_warps=warps(num_warps), **flags,
    )  # fmt: skip
    choice_kernel[(rows,)](
        logits, temperature, share, seeds, positions, *cut, marks, tops, sums, maxima, masses, scratch,
        *opened, out, *where, opened.lists.stride(0), stream,
        RANK=by_rank, FAST=not interpreted(), CHUNKS=padded, LIST=most_groups, MOST=most, num_warps=warps(row_warps),
        # So that a processor has room for two rows.
        maxnreg=64 if row_warps == 16 else None, **flags,
    )  # fmt: skip


def draw_by_rounds(
    logits: Tensor,
    filters: Filters,
    seeds: Tensor,
    positions: Tensor,
    stream: int,
    out: Tensor,
    cuts: tuple[Tensor, Tensor] | None = None,
    sizes: tuple[int, int] | None = None,
    weigh_sizes: tuple[int, int] | None = None,
    next_sizes: tuple[int, int] | None = None,
    settle_sizes: tuple[int, int] | None = None,
    row_warps: int = 16,
    rounds: int = 2,
    programs: int = configs.PROGRAMS,
    expected: int = configs.EXPECTED,
) -> None:
    """Writes the token of each row, drawn and judged by its top-p, or its top-k if there is none, until one is kept.

    Args:
        logits: Shape [rows, vocab], last stride 1.
        filters: Options of the rows. With top-p, of top-k and min-p, `cuts` are looked at; without, min-p is not.
        seeds: Shape [rows], int64.
        positions: Shape [rows], integers.
        stream: Purpose of the noise.
        out: Shape [rows], int64.
        cuts: Logit and id at which each row is cut; None where all tokens count.
        sizes: Tokens of a chunk of the first pass, and warps.
        weigh_sizes: The same for a block of the pass that weighs, whose chunks have 8192 tokens.
        next_sizes: The same for the passes behind it.
        settle_sizes: The same for the program of a row that finishes what they leave.
        row_warps: Warps of the program that chooses among the marked tokens of a row.
        rounds: Passes of several programs a row behind that which weighs, at most 6.
        programs: Programs of a pass that open rows share.
        expected: Tokens of a chunk that are marked, about.
    """
    rows, vocab = logits.shape
    state = _Open.of(logits)
    _mark_and_choose(
        logits, filters, seeds, positions, stream, out, cuts, sizes, expected, row_warps, state
    )
    temperature = filters.temperature if filters.temperature is not None else out
    share, by_rank = _share_of(filters, out)
    warm = {"WARM": filters.temperature is not None, "RANK": by_rank}
    fast = {"FAST": not interpreted()}
    block, num_warps = next_sizes or configs.lookup("next_round", vocab)
    chunks = triton.cdiv(vocab, block)
    few = {
        "CHUNKS": triton.next_power_of_2(chunks),
        "BLOCK": block,
        "num_warps": warps(num_warps),
    }
    where = (vocab, logits.stride(0), chunks)
    grid = (min(rows * chunks, programs),)
    ends = (state.ends, state.end_ids, state.waiting, state.facts)

    def lists(i: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        return state.counts[i], state.lists[i], state.counts[i + 1], state.lists[i + 1]

    # Few rows are open, so a fixed number of programs shares their chunks.
    block, num_warps = weigh_sizes or configs.lookup("weigh", vocab)
    span = min(max(1, 8192 // block), triton.cdiv(vocab, block))
    parts = triton.cdiv(vocab, block * span)
    weigh_kernel[(min(rows * parts, programs),)](
        logits, temperature, state.levels, *ends, *lists(0), state.arrived,
        empty(logits, rows, parts, 4), out, vocab, logits.stride(0), parts,
        CHUNKS=triton.next_power_of_2(parts), BLOCK=block, SPAN=span, num_warps=warps(num_warps), **warm,
    )  # fmt: skip
    tokens, sums = empty(logits, rows, chunks, dtype=torch.int32), empty(logits, rows, chunks)
    for i in range(1, rounds + 1):
        next_round_kernel[grid](
            logits, temperature, seeds, positions, *ends, *lists(i), state.arrived, tokens, sums,
            out, *where, stream, **warm, **fast, **few,
        )  # fmt: skip
    block, num_warps = settle_sizes or configs.lookup("settle", vocab)
    cut = cuts if cuts is not None else (state.ends, state.end_ids)
    settle_kernel[(rows,)](
        logits, temperature, share, seeds, positions, *cut, *ends, out, vocab, logits.stride(0), stream,
        CUT=cuts is not None, BLOCK=block, num_warps=warps(num_warps), **warm, **fast,
    )  # fmt: skip
