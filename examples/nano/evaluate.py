"""Quick figures of the twin during training; the card's figures come from the inference model."""

from __future__ import annotations

import math

import torch
from torch import Tensor
from torch.nn import functional as F

from .draft import TrainDraft
from .trunk import Clamp, Trunk


def autocast(device: torch.device) -> torch.autocast:
    return torch.autocast(device.type, dtype=torch.bfloat16, enabled=device.type == "cuda")


@torch.no_grad()
def token_losses(trunk: Trunk, rows: Tensor, clamp: Clamp | None = None) -> Tensor:
    """Negative log-likelihoods in nats, [B, T], of rows [B, T+1]."""
    training = trunk.training
    trunk.eval()
    with autocast(rows.device):
        logits = trunk.logits(trunk(rows[:, :-1], clamp=clamp).hidden)
    trunk.train(training)
    return F.cross_entropy(logits.flatten(0, 1), rows[:, 1:].flatten(), reduction="none").view(
        len(rows), -1
    )


def windows(stream: Tensor, context: int, stride: int, limit: int | None = None) -> Tensor:
    """Rows [n, context + 1] of a stream, `stride` apart."""
    starts = torch.arange(0, max(1, len(stream) - context - 1), stride, device=stream.device)
    if limit is not None and len(starts) > limit:
        starts = starts[torch.linspace(0, len(starts) - 1, limit).long().to(stream.device)]
    return stream[starts[:, None] + torch.arange(context + 1, device=stream.device)].long()


def bits_per_byte(
    trunk: Trunk,
    rows: Tensor,
    bytes_of: Tensor,
    first: int = 0,
    batch: int = 8,
    clamp: Clamp | None = None,
) -> float:
    """Bits a byte over the targets from column `first` on; ids of 0 bytes (specials) don't count."""
    nats = num_bytes = 0.0
    for part in rows.split(batch):
        targets = part[:, 1:]
        sizes = bytes_of[targets]
        losses = token_losses(trunk, part, clamp) * (sizes > 0)
        nats += losses[:, first:].sum().item()
        num_bytes += sizes[:, first:].sum().item()
    return nats / num_bytes / math.log(2)


@torch.no_grad()
def recall(
    trunk: Trunk, rows: Tensor, distance: int, low: int, span: int = 24, cue: int = 8
) -> float:
    """Share of right greedy tokens in a copied random span after its first `cue` tokens."""
    x = rows.clone()
    B, width = x.shape
    first = (width - 1 - span - distance) // 2
    generator = torch.Generator(device=x.device).manual_seed(5)
    random = torch.randint(low, trunk.c.vocab_size, (B, span), generator=generator, device=x.device)
    x[:, first : first + span] = random
    second = first + distance
    x[:, second : second + span] = random
    right = []
    trunk.eval()
    for part in x.split(8):
        with autocast(x.device):
            hidden = trunk(part[:, :-1]).hidden[:, second + cue - 1 : second + span - 1]
            right.append(
                (trunk.logits(hidden).argmax(-1) == part[:, second + cue : second + span]).float()
            )
    trunk.train()
    return torch.cat(right).mean().item()


@torch.no_grad()
def draft_acceptance(
    trunk: Trunk, draft: TrainDraft, rows: Tensor, num_anchors: int = 8
) -> tuple[list[float], float]:
    """Greedy acceptance on text prefixes: (P(first i drafts accepted), tokens a step)."""
    c = trunk.c
    size, T = c.dspark_block_size, rows.shape[1]
    accepted = []
    trunk.eval()
    for part in rows.split(8):
        with autocast(part.device):
            features = trunk(part, features=True).features
            for anchor in (
                torch.linspace(c.sliding_window + 16, T - size - 2, num_anchors).long().tolist()
            ):
                at = torch.full((len(part), 1), anchor, device=part.device)
                out = draft(trunk, features, at, part[:, anchor : anchor + 1])
                previous, drafts = part[:, anchor], []
                for i in range(size):
                    previous = (out.base_logits[:, i] + draft.markov_bias(previous)).argmax(-1)
                    drafts.append(previous)
                y = part.clone()
                y[:, anchor + 1 : anchor + 1 + size] = torch.stack(drafts, 1)
                end = min(T, -(-(anchor + size + 1) // c.sliding_window) * c.sliding_window)
                target = trunk.logits(trunk(y[:, :end]).hidden[:, anchor : anchor + size]).argmax(
                    -1
                )
                accepted.append(torch.stack(drafts, 1) == target)
    trunk.train()
    runs = torch.cat(accepted).float().cumprod(1)
    return runs.mean(0).tolist(), runs.sum(1).mean().item() + 1
