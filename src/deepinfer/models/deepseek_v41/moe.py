"""The mixture of experts: sqrt-softplus router with a selection bias, clamped SwiGLU experts, one shared expert."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from deepinfer.models.deepseek_v41.config import DeepseekV41Config
from deepinfer.models.deepseek_v41.norm import Linear
from deepinfer.models.deepseek_v41.rounding import Rounding
from deepinfer.models.deepseek_v41.topk import topk_lowest_index

__all__ = ["Gate", "MoE", "RoutedExperts", "SharedExpert", "clamped_swiglu"]


def clamped_swiglu(gate: Tensor, up: Tensor, limit: float) -> Tensor:
    """`silu(min(gate, limit)) * clamp(up, -limit, limit)`; shapes [..., channels], fp32."""
    return F.silu(gate.clamp(max=limit)) * up.clamp(-limit, limit)


class Gate(nn.Module):
    """The router.

    Attributes:
        weight: Shape [experts, hidden], fp32.
        bias: Added to the scores for the choice of text tokens only, shape [experts], fp32.
        bias_vl: The same for image tokens.
    """

    def __init__(
        self,
        hidden_size: int,
        num_experts: int,
        topk: int,
        scaling: float,
        *,
        device: torch.device | str | None = None,
    ) -> None:
        super().__init__()
        factory = {"device": device, "dtype": torch.float32}
        self.topk = topk
        self.scaling = scaling
        self.weight = nn.Parameter(torch.empty(num_experts, hidden_size, **factory))
        self.bias = nn.Parameter(torch.zeros(num_experts, **factory))
        self.bias_vl = nn.Parameter(torch.zeros(num_experts, **factory))

    def forward(self, y: Tensor, is_image: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Chooses experts.

        Args:
            y: Normed input, shape [tokens, hidden].
            is_image: True for image tokens, shape [tokens]; None when there is none.

        Returns:
            Weights, shape [tokens, topk], fp32, which sum to the scaling factor, and expert ids, shape
            [tokens, topk], int64, ascending. Equal scores: the lower expert wins.
        """
        scores = F.softplus(F.linear(y.float(), self.weight)).sqrt()
        bias = self.bias
        if is_image is not None:
            bias = torch.where(is_image.unsqueeze(-1), self.bias_vl, bias)
        experts = topk_lowest_index(scores + bias, self.topk)
        weights = scores.gather(-1, experts)
        return weights * (self.scaling / (weights.sum(-1, keepdim=True) + 1e-20)), experts


class RoutedExperts(nn.Module):
    """All routed experts of a layer, stacked.

    Attributes:
        w13: Gate and up projections of each expert, one above the other, shape [experts, 2 * inter, hidden].
        w2: Down projections, shape [experts, hidden, inter].
    """

    def __init__(
        self,
        num_experts: int,
        hidden_size: int,
        inter_size: int,
        *,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        factory = {"device": device, "dtype": dtype}
        self.w13 = nn.Parameter(torch.empty(num_experts, 2 * inter_size, hidden_size, **factory))
        self.w2 = nn.Parameter(torch.empty(num_experts, hidden_size, inter_size, **factory))


class SharedExpert(nn.Module):
    """The expert that every token uses.

    Attributes:
        w1: Gate projection, weight [inter, hidden].
        w2: Down projection, weight [hidden, inter].
        w3: Up projection, weight [inter, hidden].
    """

    def __init__(
        self,
        hidden_size: int,
        inter_size: int,
        *,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        factory = {"device": device, "dtype": dtype}
        self.w1 = Linear(hidden_size, inter_size, **factory)
        self.w2 = Linear(inter_size, hidden_size, **factory)
        self.w3 = Linear(hidden_size, inter_size, **factory)


class MoE(nn.Module):
    """Router, routed experts and shared expert of one layer."""

    def __init__(
        self,
        config: DeepseekV41Config,
        rounding: Rounding,
        *,
        num_experts: int,
        topk: int,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        hidden, inter = config.hidden_size, config.moe_intermediate_size
        self.limit = config.swiglu_limit
        self.rounding = rounding
        self.gate = Gate(hidden, num_experts, topk, config.routed_scaling_factor, device=device)
        self.experts = RoutedExperts(num_experts, hidden, inter, device=device, dtype=dtype)
        self.shared_experts = SharedExpert(hidden, inter, device=device, dtype=dtype)

    def forward(self, y: Tensor, is_image: Tensor | None = None) -> Tensor:
        """Runs the layer.

        Args:
            y: Normed input, shape [tokens, hidden].
            is_image: True for image tokens, shape [tokens]; None when there is none.

        Returns:
            Output, shape [tokens, hidden], in the dtype of `y`; experts are summed in fp32.
        """
        weights, experts = self.gate(y, is_image)
        x = self.rounding.activation(y)
        shared = self.shared_experts
        hidden = clamped_swiglu(shared.w1(x).float(), shared.w3(x).float(), self.limit).to(y.dtype)
        out = shared.w2(self.rounding.activation(hidden)).float()
        for expert in experts.unique().tolist():
            token, choice = (experts == expert).nonzero(as_tuple=True)
            gate, up = F.linear(x[token], self.experts.w13[expert]).float().chunk(2, -1)
            hidden = clamped_swiglu(gate, up, self.limit) * weights[token, choice].unsqueeze(-1)
            hidden = self.rounding.activation(hidden.to(y.dtype))
            out.index_add_(0, token, F.linear(hidden, self.experts.w2[expert]).float())
        return out.to(y.dtype)
