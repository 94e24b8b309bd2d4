"""Temperature, top-k, top-p and min-p over rows of logits.

The order is fixed: temperature, min-p, top-k, then top-p over what is left, renormalised. Equal logits rank by
token id, lower first. Sums of probabilities are sums of integers (units of 2**-42 of the highest one), so they
do not depend on the order of summation, and a row gives the same bits alone, in any batch and on any device.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

__all__ = [
    "MASS_BITS",
    "Candidates",
    "filter_logits",
    "probability_mass",
    "rank_keys",
    "top_logits",
]

MASS_BITS = 42
"""The highest probability of a row counts as 2**42; a vocabulary of 2**20 still sums within 64 bits."""

_ID_MASK = 0xFFFFFFFF
_FIRST_TRY = 1024
_SPARE = 16


@dataclass(frozen=True, slots=True, kw_only=True)
class Candidates:
    """The tokens of each row that filters keep, highest logit first, ties to the lower id.

    Attributes:
        token_ids: Shape [rows, candidates], int64.
        scores: Logit minus the row's highest, over the temperature, shape [rows, candidates], float64; -inf
            where a filter drops the token.
    """

    token_ids: Tensor
    scores: Tensor


def rank_keys(logits: Tensor) -> Tensor:
    """Unique integers in the order of the logits, ties to the lower token id.

    Args:
        logits: Shape [rows, vocab], fp32, without NaN.

    Returns:
        Shape [rows, vocab], int64: higher logit, higher key; equal logits (0.0 and -0.0 too), lower id, higher
        key. Any sort or top-k of them, stable or not, gives one and the same order.
    """
    ids = torch.arange(logits.shape[-1], dtype=torch.int64, device=logits.device)
    return _keys(logits, ids)


def _keys(logits: Tensor, token_ids: Tensor) -> Tensor:
    bits = (logits + 0.0).view(torch.int32)
    ordered = bits ^ ((bits >> 31) & 0x7FFFFFFF)
    return ordered.to(torch.int64).bitwise_left_shift_(32).bitwise_or_(_ID_MASK - token_ids)


def top_logits(logits: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """The k highest logits of each row, ties to the lower token id.

    Args:
        logits: Shape [rows, vocab], fp32, without NaN.
        k: How many, from 1; more than the vocabulary means all.

    Returns:
        Token ids, shape [rows, k], int64, and logits, shape [rows, k], fp32, both highest first.
    """
    # On a GPU the look at the values would make the host wait.
    if k + _SPARE < logits.shape[-1] and logits.is_cpu:
        values, token_ids = logits.topk(k + _SPARE, dim=-1)
        if bool((values[:, -1] < values[:, k - 1]).all()):
            # All tokens that equal the last one are among these, so only these need the unique order.
            keys = _keys(values, token_ids).sort(dim=-1, descending=True).values[:, :k]
            token_ids = _ID_MASK - (keys & _ID_MASK)
            return token_ids, logits.gather(-1, token_ids)
    keys = rank_keys(logits)
    if k >= logits.shape[-1]:
        keys = keys.sort(dim=-1, descending=True).values
    else:
        keys = keys.topk(k, dim=-1).values
    token_ids = _ID_MASK - (keys & _ID_MASK)
    return token_ids, logits.gather(-1, token_ids)


def probability_mass(relative: Tensor) -> Tensor:
    """Unnormalised probabilities as integers.

    Args:
        relative: Log probability relative to the row's highest, so at most 0, any shape, float64.

    Returns:
        round(exp(relative) * 2**42), the same shape, int64.
    """
    return torch.exp(relative).mul_(2.0**MASS_BITS).round_().to(torch.int64)


def filter_logits(
    logits: Tensor,
    temperature: Tensor,
    top_k: Tensor,
    top_p: Tensor,
    min_p: Tensor,
    *,
    widest: int | None = None,
) -> Candidates:
    """Applies temperature and filters; every row depends on itself only.

    At least the highest logit of a row always stays. Tokens at -inf never do.

    Args:
        logits: Shape [rows, vocab], fp32, without NaN; each row has a finite highest logit.
        temperature: Above 0, shape [rows], float64.
        top_k: Highest logits to keep, 0 or less for all, shape [rows], int64.
        top_p: Above 0; 1 or more keeps all. The smallest set of tokens, highest first, whose share of what the
            other filters left reaches this, shape [rows], float64.
        min_p: From 0 to 1. Tokens of at least this share of the highest probability, shape [rows], float64.
        widest: The largest number of tokens that the top-k of a row keeps, where the host knows it: no look at values
            makes it wait for a GPU then, where rows without top-k are sorted as a whole.

    Returns:
        The kept tokens of each row.
    """
    vocab = logits.shape[-1]
    top_k = torch.where((top_k <= 0) | (top_k > vocab), vocab, top_k)
    known = widest is not None
    widest = int(top_k.max()) if widest is None else widest
    if widest < vocab or (known and not logits.is_cpu):
        return _keep(logits, widest, temperature, top_k, top_p, min_p, None)
    # Rows without top-k: the tokens that top-p or min-p keep are nearly always among the first thousand; the
    # share of the rest is known from the whole row, so the answer is the same as after a full sort.
    narrow = int(torch.where(top_k < vocab, top_k, 0).max())
    width = min(max(_FIRST_TRY, narrow), vocab)
    total = _row_mass(logits, temperature, min_p) if bool((top_p < 1.0).any()) else None
    first = _keep(logits, width, temperature, top_k, top_p, min_p, total)
    if width == vocab:
        return first
    incomplete = first.scores[:, -1].isfinite() & (top_k == vocab)
    if not bool(incomplete.any()):
        return first
    whole = _keep(logits, vocab, temperature, top_k, top_p, min_p, total)
    most = max(1, int((whole.scores > -math.inf).sum(dim=-1).max()))  # what is kept comes first
    return Candidates(token_ids=whole.token_ids[:, :most], scores=whole.scores[:, :most])


def _relative(logits: Tensor, highest: Tensor, temperature: Tensor) -> Tensor:
    return logits.to(torch.float64).sub_(highest).div_(temperature.unsqueeze(-1))


def _log_min_p(min_p: Tensor) -> Tensor:
    return min_p.log().unsqueeze(-1)  # log 0 = -inf keeps all


def _row_mass(logits: Tensor, temperature: Tensor, min_p: Tensor) -> Tensor:
    """Mass of all tokens that min-p keeps, shape [rows], int64."""
    highest = logits.amax(dim=-1, keepdim=True).to(torch.float64)
    relative = _relative(logits, highest, temperature)
    mass = probability_mass(relative)
    return mass.masked_fill_(relative < _log_min_p(min_p), 0).sum(dim=-1)


def _keep(
    logits: Tensor,
    width: int,
    temperature: Tensor,
    top_k: Tensor,
    top_p: Tensor,
    min_p: Tensor,
    total: Tensor | None,
) -> Candidates:
    """Filters among the `width` highest logits; `total` is the mass of rows without top-k."""
    token_ids, values = top_logits(logits, width)
    relative = _relative(values, values[:, :1].to(torch.float64), temperature)
    place = torch.arange(width, device=logits.device).unsqueeze(0)
    kept = (place < top_k.unsqueeze(-1)) & (relative >= _log_min_p(min_p))
    kept &= relative > -math.inf
    mass = probability_mass(relative).masked_fill_(~kept, 0)
    before = mass.cumsum(dim=-1) - mass
    within = mass.sum(dim=-1)
    if total is not None:
        within = torch.where(top_k < logits.shape[-1], within, total)
    target = within.to(torch.float64).mul_(top_p).ceil_().to(torch.int64)
    kept &= (before < target.unsqueeze(-1)) | (top_p >= 1.0).unsqueeze(-1)
    return Candidates(token_ids=token_ids, scores=relative.masked_fill_(~kept, -math.inf))
