"""Routing and the products of experts, in plain torch."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

__all__ = ["ExpertOrder", "expert_order", "grouped_linear", "topk_gate"]


@dataclass(frozen=True, slots=True)
class ExpertOrder:
    """The (token, choice) pairs of a batch in tiles of one expert each.

    Attributes:
        experts: Expert of each pair, shape [pairs], int64.
        pairs: Pair at each place, or the number of pairs where there is none, shape [tiles * tile_rows], int32; None
            in the reference, which needs no order.
        tile_experts: Expert of each tile, -1 for an unused one, shape [tiles], int32, or None.
        tile_rows: Places in a tile.
    """

    experts: Tensor
    pairs: Tensor | None = None
    tile_experts: Tensor | None = None
    tile_rows: int = 0


def topk_gate(scores: Tensor, bias: Tensor, topk: int, scaling: float) -> tuple[Tensor, Tensor]:
    """Chooses experts by the square root of softplus plus a bias, and weighs them without the bias.

    Args:
        scores: Router outputs, shape [tokens, experts], fp32.
        bias: Added for the choice only, shape [experts], fp32.
        topk: Experts of a token.
        scaling: What the weights of a token sum to.

    Returns:
        Weights, shape [tokens, topk], fp32, and expert ids, shape [tokens, topk], int64; the best first, of equal
        ones the lower.
    """
    scores = F.softplus(scores).sqrt()
    experts = (scores + bias).sort(dim=-1, descending=True, stable=True).indices[:, :topk]
    weights = scores.gather(-1, experts)
    return weights * (scaling / (weights.sum(-1, keepdim=True) + 1e-20)), experts


def expert_order(experts: Tensor, num_experts: int) -> ExpertOrder:
    """Orders pairs by expert.

    Args:
        experts: Shape [tokens, topk], int64.
        num_experts: Experts in all.

    Returns:
        The order.
    """
    return ExpertOrder(experts.reshape(-1))


def grouped_linear(x: Tensor, weight: Tensor, order: ExpertOrder, rows_per_input: int) -> Tensor:
    """Each pair's row times the matrix of the pair's expert.

    Args:
        x: Rows, shape [pairs / rows_per_input, in_channels].
        weight: Matrices, shape [experts, out_channels, in_channels].
        order: Of the pairs.
        rows_per_input: Consecutive pairs that share a row of `x`.

    Returns:
        Shape [pairs, out_channels], in the order of the pairs.
    """
    rows = x.repeat_interleave(rows_per_input, 0)
    return torch.bmm(weight[order.experts], rows.unsqueeze(-1)).squeeze(-1)
