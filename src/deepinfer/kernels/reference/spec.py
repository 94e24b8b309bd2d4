"""Verification of drafts, and drafts from a request's own text, in plain torch."""

from __future__ import annotations

import torch
from torch import Tensor

from deepinfer.kernels.reference.noise import token_gumbel, token_uniform
from deepinfer.kernels.reference.sampling import gumbel_sample

__all__ = ["ngram_propose", "verify_coupled", "verify_standard"]

_ACCEPT, _RESIDUAL, _BONUS = 2, 3, 4
_RARE = 4e-6  # a refused draft that the target forbids and the drafter chose so rarely changes nothing but itself


def _rows(lengths: Tensor, width: int, num_rows: int) -> tuple[Tensor, Tensor]:
    """Row of each request and step in the flat logits, and whether it exists, shape [requests, width + 1]."""
    lengths = lengths.long().clamp(0, width)
    first = torch.cumsum(lengths + 1, 0) - (lengths + 1)
    steps = torch.arange(width + 1, device=lengths.device)
    rows = first.unsqueeze(-1) + steps
    exists = (steps <= lengths.unsqueeze(-1)) & (rows < num_rows)
    return torch.where(exists, rows, 0), exists


def _verified(drafts: Tensor, lengths: Tensor) -> Tensor:
    """Drafts before the first negative one, shape [requests]."""
    return torch.minimum(lengths.long().clamp_min(0), ((drafts < 0).cumsum(1) == 0).sum(1))


def verify_coupled(
    target: Tensor,
    drafts: Tensor,
    lengths: Tensor,
    positions: Tensor,
    seeds: Tensor,
    temperature: Tensor | None,
    out: Tensor,
    num_accepted: Tensor,
) -> None:
    """Writes what the target itself draws, as far as the drafts are that, and one token more.

    Args:
        target: Flat logits, shape [rows, vocab].
        drafts: Shape [requests, drafts], int64.
        lengths: Shape [requests], integers.
        positions: Shape [requests], integers.
        seeds: Shape [requests], int64.
        temperature: Shape [requests], or None.
        out: Shape [requests, drafts + 1], int64.
        num_accepted: Shape [requests], int64.
    """
    requests, width = drafts.shape
    rows, exists = _rows(lengths, width, target.shape[0])
    steps = torch.arange(width + 1, device=target.device)
    request = torch.arange(requests, device=target.device).unsqueeze(-1).expand(rows.shape)[exists]
    where = (positions.long().unsqueeze(-1) + steps)[exists]
    drawn = torch.empty(len(where), dtype=torch.int64, device=target.device)
    warm = None if temperature is None else temperature[request]
    gumbel_sample(target[rows[exists]], warm, seeds[request], where, 0, drawn)
    own = torch.full(rows.shape, -1, dtype=torch.int64, device=target.device)
    own[exists] = drawn
    agrees = (own[:, :-1] == drafts) & (steps[:-1] < _verified(drafts, lengths).unsqueeze(-1))
    accepted = agrees.long().cumprod(1).sum(1)
    num_accepted.copy_(accepted)
    out.copy_(torch.where(steps <= accepted.unsqueeze(-1), own, -1))


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
) -> None:
    """Writes the verdict of the standard rule: a draft x stays with probability min(1, p(x) / q(x)).

    Args:
        target: Flat logits, shape [rows, vocab].
        drafts: Shape [requests, drafts], int64.
        lengths: Shape [requests], integers.
        positions: Shape [requests], integers.
        seeds: Shape [requests], int64.
        temperature: Shape [requests], or None.
        draft_logits: Shape [requests, drafts, vocab], or None for drafts that were chosen.
        out: Shape [requests, drafts + 1], int64.
        num_accepted: Shape [requests], int64.
    """
    requests, width = drafts.shape
    vocab = target.shape[1]
    rows, exists = _rows(lengths, width, target.shape[0])
    steps = torch.arange(width + 1, device=target.device)
    verified = _verified(drafts, lengths)
    warm = torch.ones(requests, dtype=torch.float64, device=target.device)
    if temperature is not None:
        warm = temperature.double()
    cold = (warm <= 0)[:, None, None]
    scale = torch.where(cold, 1.0, warm[:, None, None])
    logits = target[rows].double()
    good = logits.amax(-1).isfinite() & exists & ~warm.isnan().unsqueeze(-1)
    logits = torch.where(good.unsqueeze(-1), logits, 0.0)
    highest = (logits == logits.amax(-1, keepdim=True)).to(torch.int8).argmax(-1, keepdim=True)
    best = torch.zeros_like(logits).scatter_(-1, highest, 1.0)
    p = torch.where(cold, best, (logits / scale).softmax(-1))
    tokens = drafts.clamp(0, vocab - 1)
    q = torch.zeros((requests, width, vocab), dtype=torch.float64, device=target.device)
    if draft_logits is None:
        q.scatter_(-1, tokens.unsqueeze(-1), 1.0)
    elif width:
        q.copy_((draft_logits.double() / scale).softmax(-1))
    at = tokens.unsqueeze(-1)
    ratio = p[:, :width].gather(-1, at)[..., 0]
    given = q.gather(-1, at)[..., 0]
    where = (positions.long().unsqueeze(-1) + steps[:-1]).flatten()
    numbers = token_uniform(
        seeds.repeat_interleave(width), where, tokens.flatten().unsqueeze(-1), _ACCEPT
    ).view(requests, width)
    test = numbers * torch.where(given > 0, given, 1.0) < ratio
    is_known = drafts < vocab
    is_chosen = ~(given > 0) | ~is_known | ((ratio == 0) & (given <= _RARE))
    point = torch.zeros_like(q).scatter_(-1, at, is_known.unsqueeze(-1).to(q.dtype))
    q = torch.where(is_chosen.unsqueeze(-1), point, q)
    passes = torch.where(cold[..., 0], ratio > 0, test)
    passes &= (steps[:-1] < verified.unsqueeze(-1)) & good[:, :-1] & is_known
    accepted = passes.long().cumprod(1).sum(1)
    each = torch.arange(requests, device=target.device)
    row, is_bonus = p[each, accepted], accepted >= verified
    if width:
        behind = q[each, accepted.clamp(max=width - 1)]
        behind = torch.where(cold[..., 0], 0.0, behind)
        above = (row - behind).clamp_min(0.0)
        above = torch.where(above > 1e-6 * row, above, 0.0)
        nothing = (above.sum(-1) == 0).unsqueeze(-1)
        stays = torch.zeros_like(row).scatter_(
            -1, tokens.gather(1, accepted.clamp(max=width - 1).unsqueeze(-1)), 1.0
        )
        row = torch.where(is_bonus.unsqueeze(-1), row, torch.where(nothing, stays, above))
    ids = torch.arange(vocab, device=target.device).unsqueeze(0)
    place = positions.long() + accepted
    noise = torch.where(
        is_bonus.unsqueeze(-1),
        token_gumbel(seeds, place, ids, _BONUS),
        token_gumbel(seeds, place, ids, _RESIDUAL),
    )
    following = torch.where(cold[..., 0], row, row.log() + noise).argmax(-1)
    following = torch.where(good[each, accepted], following, -1)
    padded = torch.cat([drafts, drafts.new_zeros((requests, 1))], 1)
    verdict = torch.where(steps < accepted.unsqueeze(-1), padded, -1)
    out.copy_(torch.where(steps == accepted.unsqueeze(-1), following.unsqueeze(-1), verdict))
    num_accepted.copy_(accepted)


def ngram_propose(
    tokens: Tensor,
    lengths: Tensor,
    min_n: int,
    max_n: int,
    window: int,
    out: Tensor,
    matched: Tensor,
) -> None:
    """Writes what followed the longest end of each text at its latest earlier place.

    Args:
        tokens: Shape [rows, capacity], integers.
        lengths: Shape [rows], integers.
        min_n: Shortest end that counts.
        max_n: Longest end that counts.
        window: How many of the last tokens are searched.
        out: Shape [rows, drafts], int64, -1 where nothing matches.
        matched: Length of the matched end, shape [rows], int32.
    """
    out.fill_(-1)
    matched.fill_(0)
    for row, length in enumerate(lengths.clamp(0, tokens.shape[1]).tolist()):
        text = tokens[row, max(0, length - window) : length].tolist()
        count = len(text)
        best, longest = -1, 0
        for at in range(count - 2, -1, -1):
            n = 0
            while n < max_n and n <= at and text[at - n] == text[count - 1 - n]:
                n += 1
            if n >= min_n and n > longest:
                best, longest = at, n
        if best >= 0 and count > min_n:
            period = count - 1 - best
            found = [text[best + 1 + i % period] for i in range(out.shape[1])]
            out[row] = torch.tensor(found, dtype=torch.int64, device=out.device)
            matched[row] = longest
