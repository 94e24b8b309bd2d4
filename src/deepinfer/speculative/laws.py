"""The probabilities behind verification, as pure functions of the two laws.

Shapes: p is the target's law and q the draft's, [..., vocab], fp32 or fp64, rows that sum to 1. A greedy draft has no
law of its own: its q is one-hot.

Sources: Leviathan et al. 2023 and Chen et al. 2023 (standard), Sun et al. 2024 (block).
"""

from __future__ import annotations

import torch
from torch import Tensor

__all__ = [
    "block_acceptance",
    "first_argmax",
    "one_hot_law",
    "possible_law",
    "residual_law",
    "standard_acceptance",
]


def standard_acceptance(p: Tensor, q: Tensor, tokens: Tensor) -> Tensor:
    """Probability that the standard rule accepts a draft: min(1, p(x) / q(x)).

    Args:
        p: Target laws, shape [..., vocab].
        q: Draft laws, shape [..., vocab].
        tokens: Drafts, shape [...], int64, from 0.

    Returns:
        Probabilities, shape [...]. A draft that q cannot have drawn, q(x) = 0, counts as chosen: p(x).
    """
    return _ratio(p, q, tokens).clamp(max=1.0)


def residual_law(p: Tensor, q: Tensor, weight: Tensor | None = None) -> Tensor:
    """Law of the token that replaces a rejected draft: the part of p above q.

    Args:
        p: Target laws, shape [..., vocab].
        q: Draft laws, shape [..., vocab].
        weight: Factor of p, shape [...]; None is 1. The block rule weighs p with the acceptance so far.

    Returns:
        Laws, shape [..., vocab]; p itself where nothing of it is above q: then a rejection has probability 0, and only
        rounding can lead there.
    """
    scaled = p if weight is None else p * weight[..., None]
    rest = (scaled - q).clamp_min(0.0)
    total = rest.sum(-1, keepdim=True)
    return torch.where(total > 0, rest / total.clamp_min(torch.finfo(p.dtype).tiny), p)


def block_acceptance(
    p: Tensor, q: Tensor, tokens: Tensor, lengths: Tensor
) -> tuple[Tensor, Tensor]:
    """Thresholds of block verification: the longest prefix whose number is below its threshold is kept.

    Args:
        p: Target laws, shape [requests, drafts + 1, vocab]; row i judges draft i, the last is the law behind all.
        q: Draft laws, shape [requests, drafts, vocab], each possible: see `possible_law`.
        tokens: Drafts, shape [requests, drafts], int64.
        lengths: Drafts that are verified, shape [requests].

    Returns:
        Thresholds of keeping the first 1, 2, ... drafts, shape [requests, drafts]; 0 behind `lengths`. And the weights
        of p in the residual behind 0, 1, ... kept drafts, shape [requests, drafts + 1].
    """
    requests, drafts = tokens.shape
    one = torch.ones(requests, dtype=p.dtype, device=p.device)
    weights = [one]
    thresholds = []
    ratio = _ratio(p[:, :drafts], q, tokens).clamp(max=1e30)
    for position in range(drafts):
        kept = (weights[-1] * ratio[:, position]).clamp(max=1.0)
        weights.append(kept)
        if position + 1 < drafts:
            above = (kept[:, None] * p[:, position + 1] - q[:, position + 1]).clamp_min(0.0).sum(-1)
            inner = above / (above + 1.0 - kept).clamp_min(torch.finfo(p.dtype).tiny)
            is_last = lengths == position + 1
            thresholds.append(torch.where(is_last, kept, inner))
        else:
            thresholds.append(kept)
    stacked = torch.stack(thresholds, 1) if thresholds else tokens.to(p.dtype)
    steps = torch.arange(drafts, device=p.device)
    return torch.where(steps < lengths[:, None], stacked, 0.0), torch.stack(weights, 1)


def one_hot_law(tokens: Tensor, vocab: int, dtype: torch.dtype) -> Tensor:
    """The law of drafts that were chosen, not drawn.

    Args:
        tokens: Drafts, shape [...], int64; a negative one gives a row of zeros.
        vocab: Columns.
        dtype: Dtype of the law.

    Returns:
        Laws, shape [..., vocab].
    """
    law = torch.zeros(*tokens.shape, vocab, dtype=dtype, device=tokens.device)
    law.scatter_(-1, tokens.clamp_min(0)[..., None], (tokens >= 0).to(dtype)[..., None])
    return law


def possible_law(q: Tensor, tokens: Tensor) -> Tensor:
    """Laws that the drafts can come from: one-hot where q(x) = 0, for such a draft was chosen in another way.

    Args:
        q: Draft laws, shape [..., vocab].
        tokens: Drafts, shape [...], int64, from 0.

    Returns:
        Laws, shape [..., vocab].
    """
    is_drawn = q.gather(-1, tokens[..., None]) > 0
    return torch.where(is_drawn, q, one_hot_law(tokens, q.shape[-1], q.dtype))


def _ratio(p: Tensor, q: Tensor, tokens: Tensor) -> Tensor:
    index = tokens[..., None]
    target, draft = p.gather(-1, index)[..., 0], q.gather(-1, index)[..., 0]
    return torch.where(draft > 0, target / draft.clamp_min(torch.finfo(q.dtype).tiny), target)


def first_argmax(scores: Tensor) -> Tensor:
    """Index of the highest entry of each row, ties to the lowest; `argmax` leaves ties open.

    Args:
        scores: Shape [..., vocab]; a row of NaN gives its last index.

    Returns:
        Indices, shape [...], int64.
    """
    highest = scores.amax(-1, keepdim=True)
    index = torch.arange(scores.shape[-1], device=scores.device)
    return torch.where(scores == highest, index, scores.shape[-1] - 1).amin(-1)
