"""Slow oracles: the exact law of what speculation emits, by trying everything.

For small vocabularies and short blocks only. They judge any pair of rule and schedule, legal or not: a schedule is any
function of the drafts, so one that looks at what it decides about is written down as easily as one that does not.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable

import torch
from torch import Tensor

from deepinfer.core import _checks as checks
from deepinfer.core.errors import ConfigError
from deepinfer.speculative.laws import block_acceptance, residual_law, standard_acceptance

__all__ = ["Law", "Schedule", "emitted_law", "plain_law"]

Law = Callable[[tuple[int, ...]], Tensor]
"""The law of the next token behind a prefix, shape [vocab], fp64."""

Schedule = Callable[[tuple[int, ...]], int]
"""How many of the drafts are verified; it is given all of them, and a legal one looks only at those before."""


def plain_law(target: Law, num_tokens: int) -> dict[tuple[int, ...], float]:
    """Law of the next tokens without speculation.

    Args:
        target: The target.
        num_tokens: How many tokens.

    Returns:
        Probability of every sequence.
    """
    return dict(_continued(target, (), 1.0, num_tokens))


def emitted_law(
    target: Law, draft: Law, num_drafts: int, schedule: Schedule, *, rule: str = "standard"
) -> dict[tuple[int, ...], float]:
    """Law of the next `num_drafts + 1` tokens with one round of speculation, the rest drawn plainly.

    Args:
        target: The target.
        draft: The draft.
        num_drafts: Drafts of the block.
        schedule: How many are verified.
        rule: "standard" or "block".

    Returns:
        Probability of every sequence.

    Raises:
        ConfigError: The rule has no law to enumerate.
    """
    checks.check_choice("rule", rule, ("standard", "block"), ConfigError)
    total: dict[tuple[int, ...], float] = {}
    vocab = target(()).numel()
    for drafts in itertools.product(range(vocab), repeat=num_drafts):
        chance = 1.0
        for at, token in enumerate(drafts):
            chance *= float(draft(drafts[:at])[token])
        if not chance:
            continue
        length = schedule(drafts)
        for kept, share, law in _outcomes(target, draft, drafts[:length], rule):
            for token in range(vocab):
                weight = chance * share * float(law[token])
                if weight:
                    prefix = (*drafts[:kept], token)
                    for tokens, p in _continued(target, prefix, weight, num_drafts + 1):
                        total[tokens] = total.get(tokens, 0.0) + p
    return total


def _outcomes(
    target: Law, draft: Law, drafts: tuple[int, ...], rule: str
) -> list[tuple[int, float, Tensor]]:
    """Kept drafts, their probability, and the law of the token behind them."""
    length = len(drafts)
    p = torch.stack([target(drafts[:at]) for at in range(length + 1)])
    if not length:
        return [(0, 1.0, p[0])]
    q = torch.stack([draft(drafts[:at]) for at in range(length)])
    tokens = torch.tensor(drafts)
    if rule == "block":
        thresholds, weights = block_acceptance(
            p[None], q[None], tokens[None], torch.tensor([length])
        )
        chances = []
        none_longer = 1.0
        for kept in range(length, 0, -1):
            chances.append((kept, none_longer * float(thresholds[0, kept - 1])))
            none_longer *= 1.0 - float(thresholds[0, kept - 1])
        chances.append((0, none_longer))
        weight = weights[0]
    else:
        passes = standard_acceptance(p[:length], q, tokens)
        chances = []
        so_far = 1.0
        for kept in range(length):
            chances.append((kept, so_far * (1.0 - float(passes[kept]))))
            so_far *= float(passes[kept])
        chances.append((length, so_far))
        weight = torch.ones(length + 1, dtype=p.dtype)
    return [
        (
            kept,
            chance,
            p[kept] if kept == length else residual_law(p[kept], q[kept], weight[kept]),
        )
        for kept, chance in chances
    ]


def _continued(
    target: Law, prefix: tuple[int, ...], weight: float, num_tokens: int
) -> list[tuple[tuple[int, ...], float]]:
    if len(prefix) >= num_tokens:
        return [(prefix[:num_tokens], weight)]
    law = target(prefix)
    return [
        item
        for token in range(law.numel())
        if float(law[token])
        for item in _continued(target, (*prefix, token), weight * float(law[token]), num_tokens)
    ]
