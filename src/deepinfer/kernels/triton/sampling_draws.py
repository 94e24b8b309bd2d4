"""Launches of the kernels that draw among the tokens that can win, for arguments that were already checked."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import triton
from torch import Tensor

from deepinfer.kernels.configs import sampling as configs
from deepinfer.kernels.triton.launches import interpreted, warps
from deepinfer.kernels.triton.sampling_candidates import choice_kernel, group_scores_kernel
from deepinfer.kernels.triton.sampling_options import Draw, Filters, empty
from deepinfer.kernels.triton.sampling_settle import settle_kernel
from deepinfer.kernels.triton.sampling_weigh import weigh_kernel

__all__ = ["best_tokens", "draw_judged"]


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
    row_warps: int = 16,
    strict: bool = False,
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
        expected: Tokens of a row that are looked at, about.
        row_warps: Warps of the program that chooses among the tokens of a row.
        strict: Whether nothing is drawn at a temperature of NaN, instead of the highest logit.
    """
    filters, draw = Filters(temperature, None, None, None, 0), Draw(seeds, positions, stream, out)
    _score_and_choose(logits, filters, draw, cuts, sizes, expected, row_warps, strict, None)


class _Open(NamedTuple):
    """What a choice leaves of rows that it cannot answer.

    Attributes:
        levels: Tokens in question, shape [rows, 8], int32.
        ends: Logit of the end of the tokens that count, shape [rows], fp32.
        end_ids: Last id at it, shape [rows], int32; -2 where the token is written.
        waiting: Token that is to be judged, -1 for none, shape [rows], int32.
        facts: Highest logit, what may be before a kept token, and its error, shape [rows, 4], fp32.
        counts: Number of open rows of both passes that weigh, in the first of four places, shape [2, 4], int32.
        lists: These rows, shape [2, rows in fours], int32.
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
            ints(rows, 8), empty(logits, rows), ints(rows), ints(rows), empty(logits, rows, 4), ints(2, 4),
            ints(2, triton.cdiv(rows, 4) * 4), ints(rows),
        )  # fmt: skip


def _share_of(filters: Filters, other: Tensor) -> tuple[Tensor, bool]:
    """What may be before a token that is kept, and whether that is a number of tokens: of top-k alone."""
    if filters.top_p is None and filters.top_k is not None:
        return filters.top_k, True
    return filters.top_p if filters.top_p is not None else other, False


def _score_and_choose(
    logits: Tensor,
    filters: Filters,
    draw: Draw,
    cuts: tuple[Tensor, Tensor] | None,
    sizes: tuple[int, int] | None,
    expected: int,
    row_warps: int,
    strict: bool,
    state: _Open | None,
) -> None:
    """Writes tokens; with a `state` they are judged, and those of rows that groups do not answer for are left out."""
    rows, vocab = logits.shape
    seeds, positions, stream, out = draw
    block, num_warps = sizes or configs.lookup("scores", vocab)
    chunks = triton.cdiv(vocab, block)
    shape = (rows, chunks, block // 16)
    groups, masses, scores = (empty(logits, *shape) for _ in range(3))
    scratch = empty(logits, rows, configs.LISTED_GROUPS + 1, dtype=torch.int32)
    temperature = filters.given(groups)[0]
    share, by_rank = _share_of(filters, groups)
    cut = cuts if cuts is not None else (groups, scratch)
    opened = state or _Open(*(scratch,) * 8)
    flags: dict[str, Any] = {
        **filters.flags("WARM"),
        "CUT": cuts is not None,
        "FAST": not interpreted(),
        "LIST": configs.LISTED_GROUPS,
        "BLOCK": block,
    }
    where = (vocab, logits.stride(0), chunks)
    group_scores_kernel[(rows, chunks)](
        logits, temperature, seeds, positions, *cut, groups, masses, scores, scratch, opened.counts, *where, stream,
        num_warps=warps(num_warps), **flags,
    )  # fmt: skip
    choice_kernel[(rows,)](
        logits, temperature, share, seeds, positions, *cut, groups, masses, scores, scratch, *opened, out,
        *where, stream,
        STRICT=strict, JUDGED=state is not None, RANK=by_rank, EXPECTED=expected, CHUNKS=triton.next_power_of_2(chunks),
        # Of many rows a processor holds two.
        num_warps=warps(row_warps), maxnreg=64 if row_warps == 16 and rows > configs.PROCESSORS else None, **flags,
    )  # fmt: skip


def draw_judged(
    logits: Tensor,
    filters: Filters,
    draw: Draw,
    cuts: tuple[Tensor, Tensor] | None = None,
    sizes: tuple[int, int] | None = None,
    weigh_sizes: tuple[int, int] | None = None,
    weigh_registers: int | None = 80,
    settle_sizes: tuple[int, int] | None = None,
    row_warps: int = 16,
    programs: int = configs.PROGRAMS,
    expected: int = configs.EXPECTED,
) -> None:
    """Writes the token of each row, drawn first and judged by its top-p, or its top-k if there is none, then.

    Args:
        logits: Shape [rows, vocab], last stride 1.
        filters: Options of the rows. With top-p, of top-k and min-p, `cuts` are looked at; without, min-p is not.
        draw: What draws the tokens.
        cuts: Logit and id at which each row is cut; None where all tokens count.
        sizes: Tokens of a chunk of the first pass, and warps.
        weigh_sizes: The same for a block of a pass that weighs, whose chunks have 8192 tokens.
        weigh_registers: Registers of a thread of it, so that many programs hide what each waits for; None for all.
        settle_sizes: The same for the program of a row that finishes what they leave.
        row_warps: Warps of the program that chooses among the tokens of a row.
        programs: Programs of a pass that open rows share.
        expected: Tokens of a row that are looked at, about.
    """
    rows, vocab = logits.shape
    seeds, positions, stream, out = draw
    state = _Open.of(logits)
    _score_and_choose(logits, filters, draw, cuts, sizes, expected, row_warps, True, state)
    temperature = filters.given(out)[0]
    share, by_rank = _share_of(filters, out)
    flags = filters.flags("WARM") | {"RANK": by_rank}
    ends = (state.ends, state.end_ids, state.waiting, state.facts)
    block, num_warps = weigh_sizes or configs.lookup("weigh", vocab)
    span = min(max(1, 8192 // block), triton.cdiv(vocab, block))
    chunks = triton.cdiv(vocab, block * span)
    sums = empty(logits, rows, chunks, 4)
    for i in range(2):
        # Few rows are open, so a fixed number of programs shares their chunks.
        weigh_kernel[(min(rows * chunks, programs),)](
            logits, temperature, state.levels, *ends, state.counts[i], state.lists[i], state.counts[1],
            state.lists[1], state.arrived, sums, out, vocab, logits.stride(0), chunks,
            FIRST=4 * i, CHUNKS=triton.next_power_of_2(chunks), BLOCK=block, SPAN=span,
            num_warps=warps(num_warps), maxnreg=weigh_registers, **flags,
        )  # fmt: skip
    block, num_warps = settle_sizes or configs.lookup("settle", vocab)
    cut = cuts if cuts is not None else (state.ends, state.end_ids)
    settle_kernel[(rows,)](
        logits, temperature, share, seeds, positions, *cut, *ends, out, vocab, logits.stride(0), stream,
        CUT=cuts is not None, FAST=not interpreted(), BLOCK=block, num_warps=warps(num_warps), **flags,
    )  # fmt: skip
