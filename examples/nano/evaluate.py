"""Quick figures of the twin during training; the card's figures come from the inference model."""

from __future__ import annotations

import math
from collections.abc import Iterator

import torch
from torch import Tensor
from torch.nn import functional as F

from .draft import Anchors, TrainDraft, base_logits, markov_bias
from .trunk import Clamp, Trunk

EAGER_BATCH = 8


def autocast(device: torch.device) -> torch.autocast:
    """bf16 matrix products on a GPU, nothing elsewhere."""
    return torch.autocast(device.type, dtype=torch.bfloat16, enabled=device.type == "cuda")


def batched(trunk: Trunk, rows: Tensor, width: int) -> Iterator[tuple[Tensor, int]]:
    """Parts of rows with their true sizes; padded to the compiled batch where that width is compiled."""
    shape = trunk.compiled_shape
    size = shape[0] if shape is not None and shape[1] == width else EAGER_BATCH
    for part in rows.split(size):
        count = len(part)
        if count < size and size != EAGER_BATCH:
            part = torch.cat([part, part[-1:].expand(size - count, -1)])
        yield part, count


@torch.no_grad()
def token_losses(trunk: Trunk, rows: Tensor, clamp: Clamp | None = None) -> Tensor:
    """Negative log-likelihoods in nats, shape [B, T], of rows [B, T + 1]; one forward."""
    with autocast(rows.device):
        if clamp is None:
            hidden = trunk.frozen(rows[:, :-1]).hidden
        else:
            hidden = trunk(rows[:, :-1], clamp=clamp).hidden
        logits = trunk.logits(hidden)
    nats = F.cross_entropy(logits.flatten(0, 1), rows[:, 1:].flatten(), reduction="none")
    return nats.view(len(rows), -1)


def windows(stream: Tensor, context: int, stride: int, limit: int | None = None) -> Tensor:
    """Rows [n, context + 1] of a stream, `stride` apart; at most `limit` of them, spread evenly."""
    starts = torch.arange(0, max(1, len(stream) - context - 1), stride, device=stream.device)
    if limit is not None and len(starts) > limit:
        starts = starts[torch.linspace(0, len(starts) - 1, limit).long().to(stream.device)]
    return stream[starts[:, None] + torch.arange(context + 1, device=stream.device)].long()


def bits_per_byte(trunk: Trunk, rows: Tensor, bytes_of: Tensor, first: int = 0) -> float:
    """Bits a byte over the targets of rows [n, T + 1] from column `first` on; ids of 0 bytes don't count."""
    nats = num_bytes = 0.0
    for part, count in batched(trunk, rows, rows.shape[1] - 1):
        sizes = bytes_of[part[:count, 1:]]
        losses = token_losses(trunk, part)[:count] * (sizes > 0)
        nats += losses[:, first:].sum().item()
        num_bytes += sizes[:, first:].sum().item()
    return nats / num_bytes / math.log(2)


@torch.no_grad()
def recall(
    trunk: Trunk, rows: Tensor, distance: int, low: int, span: int = 24, cue: int = 8
) -> float:
    """Share of right greedy tokens in a copied random span after its first `cue` tokens.

    Args:
        trunk: The trunk.
        rows: Text around the spans, shape [n, T + 1].
        distance: Tokens from the original to the copy.
        low: Lowest id of a random token.
        span: Tokens of a span.
        cue: Tokens of the copy that are given.
    """
    x = rows.clone()
    B, width = x.shape
    first = (width - 1 - span - distance) // 2
    generator = torch.Generator(device=x.device).manual_seed(5)
    random = torch.randint(low, trunk.c.vocab_size, (B, span), generator=generator, device=x.device)
    x[:, first : first + span] = random
    second = first + distance
    x[:, second : second + span] = random
    asked = slice(second + cue, second + span)
    right = []
    for part, count in batched(trunk, x, width - 1):
        with autocast(x.device):
            hidden = trunk.frozen(part[:, :-1]).hidden[:count, asked.start - 1 : asked.stop - 1]
            found = trunk.logits(hidden).argmax(-1)
        right.append((found == part[:count, asked]).float())
    return torch.cat(right).mean().item()


@torch.no_grad()
def greedy_drafts(draft: TrainDraft, features: Tensor, anchors: Anchors) -> Tensor:
    """Greedily chained drafts, shape [G, n, k, S]; equal logits: the lowest id."""
    w = draft.head_weights()
    hidden = draft(features, anchors)[0]
    logits = base_logits(hidden, draft.trunk_head(), w)
    previous, drafts = anchors.ids.flatten(), []
    for i in range(logits.shape[1]):
        previous = (logits[:, i] + markov_bias(previous, w)).argmax(-1)
        drafts.append(previous)
    return torch.stack(drafts, -1).view(*anchors.at.shape, -1)


def accepted(drafts: Tensor, target: Tensor) -> tuple[list[float], float]:
    """(P(the first i drafts are accepted), tokens a step) of drafts and targets [..., S]."""
    runs = (drafts == target).flatten(0, -2).float().cumprod(-1)
    return runs.mean(0).tolist(), runs.sum(-1).mean().item() + 1


@torch.no_grad()
def acceptance_on_own(
    trunk: Trunk, draft: TrainDraft, rows: Tensor, first: int
) -> tuple[list[float], float]:
    """Greedy acceptance on rows [n, L] that the trunk continued greedily from position `first` on."""
    W, S = trunk.c.sliding_window, trunk.c.dspark_block_size
    judged = slice(max(0, first // W - 1), None)
    drafts, targets = [], []
    for part in rows.long().split(EAGER_BATCH):
        with autocast(part.device):
            features = trunk.frozen(part, features=True).features
            anchors = middle_anchors(part, W)
            drafts.append(greedy_drafts(draft, features, anchors)[:, judged, 0])
        at = anchors.at[:, judged, 0, None] + torch.arange(1, S + 1, device=part.device)
        targets.append(part.gather(1, at.flatten(1)).view(at.shape))
    return accepted(torch.cat(drafts), torch.cat(targets))


@torch.no_grad()
def acceptance_on_text(
    trunk: Trunk, draft: TrainDraft, rows: Tensor, num_anchors: int = 4
) -> tuple[list[float], float]:
    """Greedy acceptance behind prefixes of text rows [n, T]; each block is verified by a forward."""
    c = trunk.c
    W, S, T = c.sliding_window, c.dspark_block_size, rows.shape[1]
    drafts, targets = [], []
    chosen = torch.linspace(0, T // W - 2, num_anchors).long().tolist()
    for part in rows.split(EAGER_BATCH):
        with autocast(part.device):
            features = trunk.frozen(part, features=True).features
            anchors = middle_anchors(part, W)
            found = greedy_drafts(draft, features, anchors)[:, :, 0]
            for j in chosen:
                at = W * (j + 1) + W // 2
                y = part[:, : W * (j + 2)].clone()
                y[:, at + 1 : at + 1 + S] = found[:, j]
                targets.append(trunk.logits(trunk.frozen(y).hidden[:, at : at + S]).argmax(-1))
                drafts.append(found[:, j])
    return accepted(torch.cat(drafts), torch.cat(targets))


def middle_anchors(rows: Tensor, window: int) -> Anchors:
    """One anchor in the middle of every window but the first, with its whole context."""
    G, L = rows.shape
    at = torch.arange(window + window // 2, L, window, device=rows.device)
    at = at[None, :, None].expand(G, -1, -1)
    ids = rows.gather(1, at.flatten(1)).view(at.shape)
    return Anchors(at, ids, torch.full_like(at, window))
