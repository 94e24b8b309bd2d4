"""Launches of the kernels of speculation, for arguments that were already checked."""

from __future__ import annotations

import torch
import triton
from torch import Tensor

from deepinfer.kernels.configs import sampling as configs
from deepinfer.kernels.triton import spec_rows as rows_kernels
from deepinfer.kernels.triton import spec_standard as standard
from deepinfer.kernels.triton.launches import interpreted, on_device, warps
from deepinfer.kernels.triton.sampling_launch import best_tokens
from deepinfer.kernels.triton.spec_ngram import ngram_kernel

__all__ = ["ngram", "on_device", "verify_coupled", "verify_standard"]

_REQUESTS = 256


def _row_options(
    lengths: Tensor,
    temperature: Tensor | None,
    seeds: Tensor,
    positions: Tensor,
    drafts: int,
    num_rows: int,
) -> tuple[Tensor | None, Tensor, Tensor]:
    """Temperature, seed and position of every row of the flat logits."""
    row_seeds = torch.empty((num_rows,), dtype=torch.int64, device=seeds.device)
    row_positions = torch.empty_like(row_seeds)
    warm = torch.empty_like(row_seeds, dtype=torch.float64) if temperature is not None else None
    rows_kernels.row_options_kernel[(lengths.shape[0],)](
        lengths,
        temperature if temperature is not None else row_seeds,
        seeds,
        positions,
        warm if warm is not None else row_seeds,
        row_seeds,
        row_positions,
        num_rows,
        WARM=temperature is not None,
        DRAFTS=drafts,
        WIDTH=triton.next_power_of_2(drafts + 1),
        REQUESTS=_REQUESTS,
        num_warps=1,
    )
    return warm, row_seeds, row_positions


def verify_coupled(
    target: Tensor,
    drafts: Tensor,
    lengths: Tensor,
    positions: Tensor,
    seeds: Tensor,
    temperature: Tensor | None,
    out: Tensor,
    num_accepted: Tensor,
    sizes: tuple[int, int] | None = None,
) -> None:
    """Writes the verdict of the coupled rule; arguments as in the reference."""
    requests, width = drafts.shape
    num_rows = target.shape[0]
    warm, row_seeds, row_positions = _row_options(
        lengths, temperature, seeds, positions, width, num_rows
    )
    own = torch.empty((num_rows,), dtype=torch.int64, device=target.device)
    best_tokens(
        target, own, temperature=warm, seeds=row_seeds, positions=row_positions, stream=0, sizes=sizes
    )  # fmt: skip
    rows_kernels.coupled_accept_kernel[(requests,)](
        own,
        drafts,
        lengths,
        out,
        num_accepted,
        drafts.stride(0),
        num_rows,
        DRAFTS=width,
        WIDTH=triton.next_power_of_2(width + 1),
        REQUESTS=_REQUESTS,
        num_warps=1,
    )


def verify_standard(
    target: Tensor,
    drafts: Tensor,
    lengths: Tensor,
    positions: Tensor,
    seeds: Tensor,
    temperature: Tensor | None,
    draft_logits: Tensor | None,
    out: Tensor,
    num_accepted: Tensor,
    sizes: tuple[int, int] | None = None,
) -> None:
    """Writes the verdict of the standard rule; arguments as in the reference."""
    requests, width = drafts.shape
    num_rows, vocab = target.shape
    block, num_warps = sizes or configs.lookup("verify", vocab)
    chunks = triton.cdiv(vocab, block)
    padded, wide = triton.next_power_of_2(chunks), triton.next_power_of_2(width + 1)
    drawn = draft_logits is not None and width > 0
    q = draft_logits if draft_logits is not None else target[None]
    device = target.device
    all_rows = num_rows + (requests * width if drawn else 0)
    tops = torch.empty((all_rows, chunks), dtype=torch.float32, device=device)
    sums = torch.empty_like(tops)
    best = torch.empty_like(tops, dtype=torch.int32)
    warm = temperature
    if temperature is not None:
        warm, _, _ = _row_options(lengths, temperature, seeds, positions, width, num_rows)
    strides = (target.stride(0), q.stride(0), q.stride(1))
    flags = {"WARM": temperature is not None}
    warm = warm if warm is not None else tops
    each = temperature if temperature is not None else tops
    standard.law_sums_kernel[(all_rows * chunks,)](
        target, q, warm, each, lengths, tops, sums, best, vocab, num_rows, *strides, chunks,
        DRAFTS=max(width, 1), BLOCK=block, num_warps=warps(num_warps), **flags,
    )  # fmt: skip
    next_rows = torch.empty((requests, 2), dtype=torch.int64, device=device)
    next_laws = torch.empty((requests, 4), dtype=torch.float64, device=device)
    standard.standard_accept_kernel[(requests,)](
        target, q, drafts, lengths, each, seeds, positions, tops, sums, best, out, num_accepted,
        next_rows, next_laws, vocab, num_rows, *strides, drafts.stride(0), chunks,
        DRAWN=drawn, DRAFTS=width, WIDTH=wide, REQUESTS=_REQUESTS, CHUNKS=padded, num_warps=1, **flags,
    )  # fmt: skip
    tokens = torch.empty((requests, chunks), dtype=torch.int32, device=device)
    scores = torch.empty((requests, chunks), dtype=torch.float64, device=device)
    standard.residual_chunk_kernel[(requests * chunks,)](
        target, q, drafts, each, seeds, positions, num_accepted, next_rows, next_laws, tokens, scores,
        vocab, *strides, drafts.stride(0), chunks,
        DRAWN=drawn, FAST=not interpreted(), BLOCK=block, num_warps=warps(num_warps), **flags,
    )  # fmt: skip
    standard.chosen_token_kernel[(requests,)](
        drafts, num_accepted, next_rows, next_laws, tokens, scores, out, drafts.stride(0), chunks,
        DRAFTS=width, CHUNKS=padded, num_warps=1,
    )  # fmt: skip


def ngram(
    tokens: Tensor,
    lengths: Tensor,
    min_n: int,
    max_n: int,
    window: int,
    out: Tensor,
    matched: Tensor,
    sizes: tuple[int, int] = (2048, 8),
) -> None:
    """Writes proposals; arguments as in the reference."""
    ngram_kernel[(tokens.shape[0],)](
        tokens,
        lengths,
        out,
        matched,
        window,
        tokens.shape[1],
        tokens.stride(0),
        NUM_DRAFTS=out.shape[1],
        MIN_N=min_n,
        MAX_N=max_n,
        BLOCK=sizes[0],
        WIDTH=triton.next_power_of_2(out.shape[1]),
        num_warps=warps(sizes[1]),
    )
