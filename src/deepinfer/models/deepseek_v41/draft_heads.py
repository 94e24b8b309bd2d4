"""The heads of the DSpark draft, and how they chain a block of tokens."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from deepinfer.models.deepseek_v41.config import DeepseekV41Config
from deepinfer.models.deepseek_v41.norm import Linear
from deepinfer.sampling import CoupledDraw

__all__ = ["ConfidenceHead", "MarkovHead", "chain_block"]


class MarkovHead(nn.Module):
    """Low-rank correction of the draft logits by the token before.

    Attributes:
        embed: Features of the previous token, weight [vocab, rank].
        head: Bias of every next token, weight [vocab, rank].
    """

    def __init__(
        self,
        config: DeepseekV41Config,
        *,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        rank, vocab = config.dspark_markov_rank, config.vocab_size
        self.embed = Linear(rank, vocab, device=device, dtype=dtype)
        self.head = Linear(rank, vocab, device=device, dtype=dtype)

    def bias(self, prev_ids: Tensor) -> Tensor:
        """Bias of every next token after the tokens `prev_ids`, shape [rows]; shape [rows, vocab], fp32."""
        return self.head(F.embedding(prev_ids, self.embed.weight)).float()


class ConfidenceHead(nn.Module):
    """Probability that a draft survives, given that those before it did.

    Attributes:
        proj: Weight [1, hidden + rank], fp32.
    """

    def __init__(
        self, config: DeepseekV41Config, *, device: torch.device | str | None = None
    ) -> None:
        super().__init__()
        width = config.hidden_size + config.dspark_markov_rank
        self.proj = Linear(width, 1, device=device, dtype=torch.float32)


def chain_block(
    base_logits: Tensor,
    anchor_ids: Tensor,
    markov: MarkovHead,
    draw: CoupledDraw | None,
    positions: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Chooses the tokens of blocks one after the other, each by its logits and a bias from the token before.

    Args:
        base_logits: Shape [requests, block, vocab], fp32.
        anchor_ids: Token before each block, shape [requests], int64.
        markov: Makes the bias.
        draw: Draws tokens; None takes the likeliest, ties to the lowest id.
        positions: Positions of the anchors, shape [requests], int64; needed to draw.

    Returns:
        The tokens, and the token before each, both shape [requests, block], int64; and the gap between the two highest
        scores of each, shape [requests, block], fp32.
    """
    prev, tokens, before, gaps = anchor_ids, [], [], []
    for index, logits in enumerate(base_logits.unbind(1), 1):
        before.append(prev)
        scores = logits + markov.bias(prev)
        best = scores.argmax(-1)
        prev = best if draw is None or positions is None else draw(scores, positions + index)
        tokens.append(prev)
        place = best.unsqueeze(1)
        highest = scores.gather(1, place).squeeze(1)
        gaps.append(highest - scores.scatter_(1, place, -torch.inf).amax(1))
    return torch.stack(tokens, 1), torch.stack(before, 1), torch.stack(gaps, 1)
