"""Log probabilities of tokens, the same bits for a row alone and in any batch."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from deepinfer.core.errors import ShapeError
from deepinfer.core.types import TokenLogprob
from deepinfer.sampling.filters import MASS_BITS, probability_mass, top_logits

__all__ = ["log_partition", "prompt_logprobs", "token_logprobs"]

_CHUNK_ELEMENTS = {"cpu": 1 << 18, "cuda": 1 << 26}


def log_partition(logits: Tensor) -> Tensor:
    """Log of the sum of exponentials of each row.

    Probabilities are summed as integers, so the result does not depend on how the sum is split; its relative
    error is below 2e-8 for a vocabulary of 129,280.

    Args:
        logits: Shape [rows, vocab], fp32; each row has a finite highest logit.

    Returns:
        Shape [rows], float64.
    """
    highest = logits.amax(dim=-1).to(torch.float64)
    mass = probability_mass(logits.to(torch.float64) - highest.unsqueeze(-1)).sum(dim=-1)
    return highest + mass.to(torch.float64).log_() - MASS_BITS * math.log(2.0)


def token_logprobs(
    logits: Tensor, token_ids: Sequence[int] | Tensor, num_top: Sequence[int]
) -> list[TokenLogprob]:
    """Log probability and rank of one token of each row, and of the row's likeliest tokens.

    Args:
        logits: Shape [rows, vocab], fp32; each row has a finite highest logit.
        token_ids: The tokens, shape [rows], int64.
        num_top: Likeliest tokens to list, one number a row; tokens of probability 0 are left out.

    Returns:
        One entry a row. Ties rank by token id, lower first.

    Raises:
        ShapeError: The numbers of rows differ.
    """
    ids = torch.as_tensor(token_ids, dtype=torch.int64, device=logits.device)
    if not logits.shape[0] == ids.shape[0] == len(num_top):
        raise ShapeError(
            f"logits have {logits.shape[0]} rows, token_ids {ids.shape[0]}, num_top {len(num_top)}; give one of each "
            "for every row.",
            argument="token_ids",
            expected=(logits.shape[0],),
            found=tuple(ids.shape),
        )
    out: list[TokenLogprob] = []
    elements = _CHUNK_ELEMENTS.get(logits.device.type, 1 << 24)
    chunk = max(1, elements // max(1, logits.shape[-1]))
    for start in range(0, logits.shape[0], chunk):
        stop = start + chunk
        out += _chunk_logprobs(logits[start:stop], ids[start:stop], num_top[start:stop])
    return out


def _chunk_logprobs(logits: Tensor, ids: Tensor, num_top: Sequence[int]) -> list[TokenLogprob]:
    partition = log_partition(logits)
    chosen = logits.gather(-1, ids.unsqueeze(-1))
    earlier = torch.arange(logits.shape[-1], device=logits.device) < ids.unsqueeze(-1)
    above = (logits > chosen) | ((logits == chosen) & earlier)
    ranks = (above.sum(dim=-1) + 1).tolist()
    values = (chosen.squeeze(-1).to(torch.float64) - partition).clamp_(max=0.0).tolist()
    widest = min(max(num_top, default=0), logits.shape[-1])
    top_ids: list[list[int]] = [[]] * len(ranks)
    top_values: list[list[float]] = [[]] * len(ranks)
    if widest:
        best, scores = top_logits(logits, widest)
        relative = scores.to(torch.float64) - partition.unsqueeze(-1)
        top_ids = best.tolist()
        top_values = relative.clamp_(max=0.0).tolist()
    return [
        TokenLogprob(
            token_id=token,
            logprob=value,
            rank=rank,
            top=tuple(
                (other, logprob)
                for other, logprob in zip(others[:count], logprobs[:count], strict=True)
                if logprob > -math.inf
            ),
        )
        for token, value, rank, others, logprobs, count in zip(
            ids.tolist(), values, ranks, top_ids, top_values, num_top, strict=True
        )
    ]


def prompt_logprobs(
    logits: Tensor, next_token_ids: Sequence[int] | Tensor, num_top: int
) -> tuple[TokenLogprob, ...]:
    """Log probabilities of the tokens of a prompt, each given those before it.

    Args:
        logits: Logits at positions p, shape [tokens, vocab], fp32.
        next_token_ids: The prompt's tokens at positions p + 1, shape [tokens], int64.
        num_top: Likeliest tokens to list at each position.

    Returns:
        One entry a token.

    Raises:
        ShapeError: The numbers of rows differ.
    """
    return tuple(token_logprobs(logits, next_token_ids, [num_top] * logits.shape[0]))
