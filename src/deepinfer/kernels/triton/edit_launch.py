"""Launches of the kernels that change logits or take their logarithms, for arguments that were already checked."""

from __future__ import annotations

import torch
import triton
from torch import Tensor

from deepinfer.kernels.configs import sampling as configs
from deepinfer.kernels.triton.launches import on_device, warps
from deepinfer.kernels.triton.sampling_edit import penalty_kernel, token_bitmask_kernel
from deepinfer.kernels.triton.sampling_logprobs import logprob_chunk_kernel, logprob_row_kernel

__all__ = ["log_probs", "on_device", "penalties", "token_bitmask"]


def token_bitmask(logits: Tensor, bitmask: Tensor, rows: Tensor | None, width: int) -> None:
    """Writes -inf where a bit is 0.

    Args:
        logits: Shape [rows, columns], any strides.
        bitmask: Shape [mask rows, words], int32, any strides.
        rows: Row of the logits for each row of the bitmask, shape [mask rows], integers, negative or
            behind the last for none; or None.
        width: Columns that the bitmask speaks of.
    """
    columns = logits.shape[1]
    block, num_warps = configs.lookup("bitmask", columns)
    chunks = triton.cdiv(columns, block)
    token_bitmask_kernel[(bitmask.shape[0] * chunks,)](
        logits,
        bitmask,
        rows if rows is not None else bitmask,
        logits.shape[0],
        columns,
        width,
        logits.stride(0),
        logits.stride(1),
        bitmask.stride(0),
        bitmask.stride(1),
        chunks,
        ROWS=rows is not None,
        BLOCK=block,
        num_warps=warps(num_warps),
    )


def penalties(
    logits: Tensor,
    output: Tensor,
    prompt: Tensor | None,
    presence: Tensor,
    frequency: Tensor,
    repetition: Tensor,
) -> None:
    """Changes the logits of the tokens of each row's prompt and output.

    Args:
        logits: Shape [rows, vocab], last stride 1.
        output: Shape [rows, length], integers, -1 where there is none.
        prompt: The same for prompts, shape [rows, length], or None.
        presence: Shape [rows].
        frequency: Shape [rows].
        repetition: Shape [rows].
    """
    rows, vocab = logits.shape
    num_prompt = 0 if prompt is None else prompt.shape[1]
    prompt = output if prompt is None else prompt
    blocks = triton.cdiv(num_prompt + output.shape[1], configs.PENALTY_BLOCK)
    seen = torch.empty((rows, vocab), dtype=torch.int32, device=logits.device)
    for phase in range(3 if blocks else 0):
        penalty_kernel[(rows * blocks,)](
            logits,
            prompt,
            output,
            seen,
            presence,
            frequency,
            repetition,
            num_prompt,
            output.shape[1],
            vocab,
            logits.stride(0),
            prompt.stride(0),
            output.stride(0),
            blocks,
            PHASE=phase,
            BLOCK=configs.PENALTY_BLOCK,
            num_warps=warps(4),
            enable_fp_fusion=False,
        )


def log_probs(
    logits: Tensor,
    tokens: Tensor,
    found_ids: Tensor | None,
    logprobs: Tensor,
    ranks: Tensor,
    best_ids: Tensor,
    best_logprobs: Tensor,
    sizes: tuple[int, int] | None = None,
) -> None:
    """Writes log probabilities and ranks.

    Args:
        logits: Shape [rows, vocab], last stride 1.
        tokens: Shape [rows], integers.
        found_ids: The likeliest tokens, shape [rows, n], int32, contiguous, in any order up to `MOST_SORTED`, else highest
            first; or None.
        logprobs: Shape [rows], fp32.
        ranks: Shape [rows], int64.
        best_ids: These tokens, highest first, shape [rows, n], int32, contiguous.
        best_logprobs: Shape [rows, n], fp32, contiguous.
        sizes: Tokens of a chunk, and warps.
    """
    rows, vocab = logits.shape
    block, num_warps = sizes or configs.lookup("logprobs", vocab)
    chunks = triton.cdiv(vocab, block)
    tops = torch.empty((rows, chunks), dtype=torch.float32, device=logits.device)
    sums, counts = torch.empty_like(tops), torch.empty_like(tops, dtype=torch.int32)
    logprob_chunk_kernel[(rows * chunks,)](
        logits, tokens, tops, sums, counts, vocab, logits.stride(0), chunks,
        BLOCK=block, num_warps=warps(num_warps),
    )  # fmt: skip
    n = 0 if found_ids is None else found_ids.shape[1]
    logprob_row_kernel[(rows,)](
        logits, tokens, tops, sums, counts, found_ids if found_ids is not None else counts,
        logprobs, ranks, best_ids, best_logprobs, vocab, logits.stride(0), chunks, n,
        CHUNKS=triton.next_power_of_2(chunks), TOP=triton.next_power_of_2(n) if n else 0,
        SORT=n <= configs.MOST_SORTED, num_warps=1,
    )  # fmt: skip
