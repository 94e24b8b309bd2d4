"""What a DSpark draft is trained on."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from deepinfer.core import _checks as checks
from deepinfer.core.errors import ConfigError
from deepinfer.speculative._arrays import shape_error

__all__ = ["LossTerms", "dspark_loss"]


@dataclass(frozen=True, slots=True)
class LossTerms:
    """A loss and what it is made of; every term is a scalar tensor.

    Attributes:
        total: The weighted sum; differentiate this.
        cross_entropy: Against the tokens that came.
        distance: L1 distance of draft and target law, from 0 to 2.
        confidence: Binary cross entropy of the confidences, or 0 without them.
        accepted_length: Expected accepted drafts plus one, for logging; detached.
    """

    total: Tensor
    cross_entropy: Tensor
    distance: Tensor
    confidence: Tensor
    accepted_length: Tensor


def dspark_loss(
    draft_logits: Tensor,
    target_logits: Tensor,
    labels: Tensor,
    mask: Tensor,
    confidence_logits: Tensor | None = None,
    *,
    decay: float = 4.0,
    ce: float = 0.1,
    l1: float = 0.9,
    conf: float = 1.0,
) -> LossTerms:
    """The loss of the DSpark paper: cross entropy, distance of the laws, and confidence against what would survive.

    A draft survives with probability `1 - distance / 2`, whatever the target's law is: that is what the confidence
    learns, and why the distance itself is trained. Position k weighs `exp(-(k - 1) / decay)`. Each term is a mean over
    the weights.

    Args:
        draft_logits: Logits of the draft with true tokens before each position, shape [blocks, drafts, vocab].
        target_logits: Logits of the target at the same positions, shape [blocks, drafts, vocab]; not differentiated.
        labels: Tokens that came, shape [blocks, drafts], int64; anything where the mask is 0.
        mask: Whether each position counts, shape [blocks, drafts]; behind the first 0 of a block nothing does.
        confidence_logits: Logits of survival, shape [blocks, drafts]; None without a confidence head.
        decay: How fast the weight of a position falls; 4 as in the published code.
        ce: Weight of the cross entropy.
        l1: Weight of the distance.
        conf: Weight of the confidence.

    Returns:
        The terms; zeros when nothing counts.

    Raises:
        ConfigError: `decay` is not above 0.
        ShapeError: Shapes do not fit.
    """
    checks.check_float("decay", decay, 0.0, 1e9, ConfigError, open_low=True)
    if draft_logits.ndim != 3 or draft_logits.shape != target_logits.shape:
        found = (tuple(draft_logits.shape), tuple(target_logits.shape))
        raise shape_error("draft_logits and target_logits", found, "[blocks, drafts, vocab]")
    for name, value in (
        ("labels", labels),
        ("mask", mask),
        ("confidence_logits", confidence_logits),
    ):
        if value is not None and value.shape != draft_logits.shape[:2]:
            raise shape_error(name, tuple(value.shape), f"{tuple(draft_logits.shape[:2])}")
    counted = mask.to(torch.float32).ne(0).cumprod(1).to(torch.float32)
    steps = torch.arange(counted.shape[1], device=counted.device, dtype=torch.float32)
    weights = counted * torch.exp(-steps / decay)
    total_weight = weights.sum().clamp_min(torch.finfo(torch.float32).tiny)

    def mean(values: Tensor) -> Tensor:
        return torch.where(counted > 0, values * weights, 0.0).sum() / total_weight

    log_q = torch.log_softmax(draft_logits.float(), -1)
    p = torch.softmax(target_logits.detach().float(), -1)
    known = torch.where(counted > 0, labels, 0)
    cross_entropy = mean(-log_q.gather(-1, known[..., None])[..., 0])
    gap = (log_q.exp() - p).abs().sum(-1)
    distance = mean(gap)
    survives = (1.0 - 0.5 * gap.detach()).clamp(0.0, 1.0)
    confidence = torch.zeros((), device=draft_logits.device)
    if confidence_logits is not None:
        confidence = mean(
            torch.nn.functional.binary_cross_entropy_with_logits(
                confidence_logits.float(), survives, reduction="none"
            )
        )
    blocks = (counted[:, :1].sum() if counted.shape[1] else counted.sum()).clamp_min(1.0)
    accepted = 1.0 + (survives * counted).cumprod(1).sum() / blocks
    total = ce * cross_entropy + l1 * distance + conf * confidence
    return LossTerms(total, cross_entropy, distance, confidence, accepted.detach())
