"""Launches of the kernels over rows of logits, for arguments that were already checked."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import triton
from torch import Tensor

from deepinfer.kernels import contract
from deepinfer.kernels.configs import sampling as configs
from deepinfer.kernels.configs import topk as topk_configs
from deepinfer.kernels.topk import topk
from deepinfer.kernels.triton.launches import interpreted, on_device, warps
from deepinfer.kernels.triton.sampling_candidates import choice_kernel, marks_kernel
from deepinfer.kernels.triton.sampling_cuts import (
    Filters,
    by_groups,
    cut_mass,
    cut_rows,
    empty,
)
from deepinfer.kernels.triton.sampling_draw import chunk_top_kernel
from deepinfer.kernels.triton.sampling_edit import apply_cut_kernel
from deepinfer.kernels.triton.sampling_highest import (
    highest_of_chunk_kernel,
    highest_of_row_kernel,
    highest_of_whole_row_kernel,
)
from deepinfer.kernels.triton.sampling_list import finish_kernel, neighbour_maxima_kernel
from deepinfer.kernels.triton.sampling_rounds import next_round_kernel
from deepinfer.kernels.triton.sampling_settle import settle_kernel
from deepinfer.kernels.triton.sampling_weigh import weigh_kernel
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
        facts: Highest logit and mass, shape [rows, 2], fp32.
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
            ints(rows, 4), empty(logits, rows), ints(rows), ints(rows), empty(logits, rows, 2), ints(8, 4),
            ints(8, triton.cdiv(rows, 4) * 4), ints(rows),
        )  # fmt: skip


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
    """Writes tokens; with top-p, and a `state`, of the rows that groups answer for."""
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
    temperature, top_p = (
        t if t is not None else tops for t in (filters.temperature, filters.top_p)
    )
    cut = cuts if cuts is not None else (tops, marks)
    opened = state or _Open(*(scratch,) * 8)
    flags: dict[str, Any] = {
        "WARM": filters.temperature is not None,
        "CUT": cuts is not None,
        "TOP_P": state is not None,
        "EXPECTED": expected,
        "BLOCK": block,
    }
    where = (vocab, logits.stride(0), chunks)
    marks_kernel[(rows * chunks,)](
        logits, temperature, seeds, positions, *cut, marks, tops, sums, maxima, masses, opened.counts,
        *where, stream, num_warps=warps(num_warps), **flags,
    )  # fmt: skip
    choice_kernel[(rows,)](
        logits, temperature, top_p, seeds, positions, *cut, marks, tops, sums, maxima, masses, scratch,
        *opened, out, *where, opened.lists.stride(0), stream,
        FAST=not interpreted(), CHUNKS=padded, LIST=most_groups, MOST=most, num_warps=warps(row_warps),
        # So that a processor has room for two rows.
        maxnreg=64 if row_warps == 16 else None, **flags,
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
    sizes = topk_configs.lookup_by_groups(*x.shape, k, x.itemsize)
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
    weigh_sizes: tuple[int, int] | None = None,
    next_sizes: tuple[int, int] | None = None,
    settle_sizes: tuple[int, int] | None = None,
    row_warps: int = 16,
    rounds: int = 2,
    programs: int = configs.PROGRAMS,
    expected: int = configs.EXPECTED,
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
    temperature, top_p = (t if t is not None else out for t in (filters.temperature, filters.top_p))
    warm = {"WARM": filters.temperature is not None}
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
        logits, temperature, top_p, state.levels, *ends, *lists(0), state.arrived,
        empty(logits, rows, parts, 4), out, vocab, logits.stride(0), parts,
        CHUNKS=triton.next_power_of_2(parts), BLOCK=block, SPAN=span, num_warps=warps(num_warps), **warm,
    )  # fmt: skip
    tokens, sums = empty(logits, rows, chunks, dtype=torch.int32), empty(logits, rows, chunks)
    for i in range(1, rounds + 1):
        next_round_kernel[grid](
            logits, temperature, top_p, seeds, positions, *ends, *lists(i), state.arrived, tokens, sums,
            out, *where, stream, **warm, **fast, **few,
        )  # fmt: skip
    block, num_warps = settle_sizes or configs.lookup("settle", vocab)
    cut = cuts if cuts is not None else (state.ends, state.end_ids)
    settle_kernel[(rows,)](
        logits, temperature, top_p, seeds, positions, *cut, *ends, out, vocab, logits.stride(0), stream,
        CUT=cuts is not None, BLOCK=block, num_warps=warps(num_warps), **warm, **fast,
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
