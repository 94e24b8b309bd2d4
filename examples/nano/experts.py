"""The mixture of experts, computed densely: unselected experts weigh 0."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from deepinfer.models.deepseek_v41.config import DeepseekV41Config

from . import rounding as R
from .streams import MixWeights


class ExpertWeights(NamedTuple):
    """Mixing, norm, router and experts of one layer.

    Attributes:
        mix: Mixing of the sublayer.
        norm: Gains of the input norm, shape [D].
        gate: Router, shape [E, D].
        bias: Added to the scores for the choice alone, shape [E].
        w1: Gate projections of the E routed experts and of the shared one behind them, shape [E + 1, I, D].
        w3: Up projections, same shape.
        w2: Down projections, shape [E + 1, D, I].
        top_k: Routed experts a token uses.
    """

    mix: MixWeights
    norm: Tensor
    gate: Tensor
    bias: Tensor
    w1: Tensor
    w3: Tensor
    w2: Tensor
    top_k: int


def mixture(
    x: Tensor, w: ExpertWeights, blend: Tensor, c: DeepseekV41Config
) -> tuple[Tensor, Tensor]:
    """Runs all experts on normed inputs.

    Args:
        x: Shape [B, T, D].
        w: Router and experts.
        blend: 0 keeps the weights, 1 rounds them.
        c: The configuration.

    Returns:
        The output, shape [B, T, D], and the tokens of each routed expert, shape [E], fp32.
    """
    num_experts = w.gate.shape[0]
    s = F.softplus(F.linear(x, w.gate).float()).sqrt()
    picked = (s.detach() + w.bias).topk(w.top_k, -1)[1]
    on = (picked[..., None] == torch.arange(num_experts, device=x.device)).any(-2).float()
    share = s * on
    share = share / (share.sum(-1, True) + 1e-20) * c.routed_scaling_factor
    share = torch.cat([share, torch.ones_like(share[..., :1])], -1)

    def stored(v: Tensor) -> Tensor:
        return torch.cat([R.weight_mxfp4(v[:-1], blend), R.weight_fp8(v[-1:], blend)])

    x = R.cache_fp8(x)
    limit = c.swiglu_limit
    gate = F.linear(x, stored(w.w1).flatten(0, 1)).float().clamp(max=limit)
    up = F.linear(x, stored(w.w3).flatten(0, 1)).float().clamp(-limit, limit)
    a = (F.silu(gate) * up).unflatten(-1, (num_experts + 1, -1)) * share[..., None]
    y = F.linear(R.cache_fp8(a.to(x.dtype)).flatten(-2), stored(w.w2).permute(1, 0, 2).flatten(1))
    return y, on.flatten(0, -2).sum(0)
