"""Choosing tokens from rows of logits in plain torch: highest, drawn, filtered, masked, penalised."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from deepinfer.kernels.reference.noise import token_gumbel
from deepinfer.kernels.reference.topk import order_keys

__all__ = [
    "apply_penalties",
    "apply_token_bitmask",
    "argmax_sample",
    "gumbel_sample",
    "keep_top_k_top_p",
    "log_probs",
    "top_k_top_p_mask",
    "top_k_top_p_sample",
]

_MASS = 2.0**42


def argmax_sample(logits: Tensor, out: Tensor) -> None:
    """Writes the token of the highest logit of each row, ties to the lowest id; -1 where that logit is not finite.

    Args:
        logits: Shape [rows, vocab].
        out: Shape [rows], int64.
    """
    values = logits.float()
    highest = values.amax(-1, keepdim=True)
    out.copy_(_first(values == highest).masked_fill(~highest[:, 0].isfinite(), -1))


def gumbel_sample(
    logits: Tensor,
    temperature: Tensor | None,
    seeds: Tensor,
    positions: Tensor,
    stream: int,
    out: Tensor,
) -> None:
    """Writes the token of the highest `logit / temperature + noise` of each row; -1 where no token can be drawn.

    Args:
        logits: Shape [rows, vocab].
        temperature: Shape [rows], or None for 1; 0 takes the highest logit.
        seeds: Shape [rows], int64.
        positions: Shape [rows], integers.
        stream: Purpose of the noise.
        out: Shape [rows], int64.
    """
    values = logits.float()
    highest = values.amax(-1, keepdim=True)
    ids = torch.arange(values.shape[1], device=values.device).unsqueeze(0)
    warm = _column(temperature, values, 1.0)
    drawn = warm > 0
    scores = (values.double() - highest.double()) / torch.where(drawn, warm, 1.0)
    noisy = scores + token_gumbel(seeds, positions, ids, stream)
    scores = torch.where(drawn, noisy, scores).masked_fill(values == -math.inf, -math.inf)
    best = _first(scores == scores.amax(-1, keepdim=True))
    out.copy_(best.masked_fill(~highest[:, 0].isfinite(), -1))


def keep_top_k_top_p(
    logits: Tensor,
    temperature: Tensor | None,
    top_k: Tensor | None,
    top_p: Tensor | None,
    min_p: Tensor | None,
) -> Tensor:
    """Which tokens stay; arguments as in `top_k_top_p_mask`.

    Returns:
        Shape [rows, vocab], bool. Nothing stays in a row without a finite highest logit.
    """
    values = logits.float()
    vocab = values.shape[1]
    highest = values.amax(-1, keepdim=True)
    good = highest.isfinite()
    values = torch.where(good, values, 0.0)
    highest = torch.where(good, highest, 0.0)
    warm = _column(temperature, values, 1.0)
    k = _column(top_k, values, 0.0).long()
    k = torch.where((k <= 0) | (k > vocab), vocab, k)
    p, least = _column(top_p, values, 1.0), _column(min_p, values, 0.0).clamp_min(0.0)
    greedy = warm <= 0
    k = torch.where(greedy, 1, k)
    p, least = torch.where(greedy, 1.0, p), torch.where(greedy, 0.0, least)
    warm = torch.where(greedy, 1.0, warm)
    order = order_keys(values).argsort(dim=-1, descending=True, stable=True)
    relative = (values.gather(-1, order).double() - highest.double()) / warm
    place = torch.arange(vocab, device=values.device)
    kept = (place < k) & (relative >= least.log()) & (relative > -math.inf)
    mass = (relative.exp() * _MASS).round().long().masked_fill(~kept, 0)
    target = (mass.sum(-1, keepdim=True).double() * p).ceil().long().clamp_min(1)
    kept &= (mass.cumsum(-1) - mass < target) | (p >= 1)
    return torch.zeros_like(kept).scatter(-1, order, kept) & good


def top_k_top_p_mask(
    logits: Tensor,
    temperature: Tensor | None,
    top_k: Tensor | None,
    top_p: Tensor | None,
    min_p: Tensor | None,
    widest: int,
    out: Tensor,
) -> None:
    """Writes the logits with -inf at what min-p, top-k and top-p drop, in this order; ties rank by the lower id.

    Args:
        logits: Shape [rows, vocab].
        temperature: Shape [rows], or None for 1.
        top_k: Shape [rows], integers, 0 or less for all; None for all.
        top_p: Shape [rows]; None for 1.
        min_p: Shape [rows]; None for 0.
        widest: Not used here.
        out: Shape [rows, vocab]. A row without a finite highest logit is written as it is.
    """
    kept = keep_top_k_top_p(logits, temperature, top_k, top_p, min_p)
    good = logits.float().amax(-1, keepdim=True).isfinite()
    out.copy_(torch.where(kept | ~good, logits, -math.inf))


def top_k_top_p_sample(
    logits: Tensor,
    temperature: Tensor | None,
    top_k: Tensor | None,
    top_p: Tensor | None,
    min_p: Tensor | None,
    seeds: Tensor,
    positions: Tensor,
    stream: int,
    widest: int,
    out: Tensor,
) -> None:
    """Draws a token of each row among what the filters keep; see `top_k_top_p_mask` and `gumbel_sample`."""
    masked = torch.empty_like(logits)
    top_k_top_p_mask(logits, temperature, top_k, top_p, min_p, widest, masked)
    gumbel_sample(masked, temperature, seeds, positions, stream, out)


def apply_token_bitmask(logits: Tensor, bitmask: Tensor, rows: Tensor | None, width: int) -> None:
    """Sets the logits of tokens whose bit is 0 to -inf, and those behind `width`.

    Args:
        logits: Shape [rows, columns].
        bitmask: Shape [mask rows, words], int32.
        rows: Row of the logits for each row of the bitmask, shape [mask rows], what is no row for none; None for the same.
        width: Columns that the bitmask speaks of.
    """
    at = torch.arange(width, device=logits.device)
    allowed = (bitmask[:, at >> 5] >> (at & 31).to(torch.int32)) & 1 > 0
    for k in range(bitmask.shape[0]):
        row = k if rows is None else int(rows[k])
        if 0 <= row < len(logits):
            logits[row, :width].masked_fill_(~allowed[k], -math.inf)
            logits[row, width:] = -math.inf


def apply_penalties(
    logits: Tensor,
    output_ids: Tensor,
    prompt_ids: Tensor | None,
    presence: Tensor,
    frequency: Tensor,
    repetition: Tensor,
) -> None:
    """Applies repetition, frequency and presence penalties in place, in this order.

    Args:
        logits: Shape [rows, vocab].
        output_ids: Tokens generated so far, shape [rows, length]; what is no id of the vocabulary is left out.
        prompt_ids: The same for prompts, shape [rows, length], or None.
        presence: Shape [rows].
        frequency: Shape [rows].
        repetition: Shape [rows].
    """
    rows, vocab = logits.shape
    counts = _counts(output_ids, vocab, rows)
    seen = counts > 0
    if prompt_ids is not None:
        seen |= _counts(prompt_ids, vocab, rows) > 0
    factor = repetition.float().unsqueeze(-1)
    x = logits.float()
    y = torch.where(seen & (factor != 1), torch.where(x > 0, x / factor, x * factor), x)
    less = counts.float() * frequency.float().unsqueeze(-1) + presence.float().unsqueeze(-1)
    logits.copy_(torch.where(counts > 0, y - less, y))


def log_probs(
    logits: Tensor,
    tokens: Tensor,
    found_ids: Tensor | None,
    logprobs: Tensor,
    ranks: Tensor,
    best_ids: Tensor,
    best_logprobs: Tensor,
) -> None:
    """Writes log probabilities of a token of each row and of its likeliest ones, and the token's rank from 1.

    Args:
        logits: Shape [rows, vocab].
        tokens: Shape [rows], integers; one that is no token gets NaN and rank 0.
        found_ids: The likeliest tokens in any order, -1 for none, shape [rows, n], or None.
        logprobs: Shape [rows], fp32.
        ranks: Shape [rows], int64.
        best_ids: These tokens, highest first, ties to the lower id, shape [rows, n].
        best_logprobs: Shape [rows, n], fp32.
    """
    values = logits.double()
    total = values.logsumexp(-1, keepdim=True)
    total = torch.where(total == math.inf, math.nan, total)
    tokens = tokens.long()
    is_token = (tokens >= 0) & (tokens < values.shape[1])
    tokens = torch.where(is_token, tokens, 0).unsqueeze(-1)
    chosen = values.gather(-1, tokens)
    earlier = torch.arange(values.shape[1], device=values.device) < tokens
    rank = 1 + ((values > chosen) | ((values == chosen) & earlier)).sum(-1)
    logprobs.copy_((chosen - total)[:, 0].clamp(max=0.0).masked_fill(~is_token, math.nan))
    ranks.copy_(rank.masked_fill(~is_token, 0))
    if found_ids is not None:
        ids = found_ids.long()
        ids = torch.where(ids < 0, values.shape[1], ids).sort(-1).values
        ids = torch.where(ids == values.shape[1], -1, ids)
        keys = order_keys(logits.gather(-1, ids.clamp_min(0)))
        keys = keys.masked_fill(ids < 0, torch.iinfo(torch.int64).min)
        best_ids.copy_(ids.gather(-1, keys.argsort(dim=-1, descending=True, stable=True)))
        best = values.gather(-1, best_ids.long().clamp_min(0)) - total
        best_logprobs.copy_(best.clamp(max=0.0).masked_fill(best_ids < 0, -math.inf))


def _first(good: Tensor) -> Tensor:
    """Lowest index at which a row holds, shape [rows]; 0 where it holds nowhere."""
    return good.to(torch.int8).argmax(-1)


def _column(value: Tensor | None, like: Tensor, default: float) -> Tensor:
    """An option of the rows as fp64, shape [rows, 1]."""
    if value is None:
        return torch.full((like.shape[0], 1), default, dtype=torch.float64, device=like.device)
    return value.double().unsqueeze(-1)


def _counts(ids: Tensor, vocab: int, rows: int) -> Tensor:
    """How often each token occurs in each row, shape [rows, vocab], int64."""
    good = (ids >= 0) & (ids < vocab)
    counts = torch.zeros((rows, vocab), dtype=torch.int64, device=ids.device)
    return counts.scatter_add_(1, torch.where(good, ids, 0).long(), good.long())
