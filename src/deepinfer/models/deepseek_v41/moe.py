"""The mixture of experts: sqrt-softplus router with a selection bias, clamped SwiGLU experts, one shared expert."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from deepinfer.kernels import batch_invariant
from deepinfer.models.deepseek_v41.config import DeepseekV41Config
from deepinfer.models.deepseek_v41.norm import Linear
from deepinfer.models.deepseek_v41.rounding import Rounding
from deepinfer.models.deepseek_v41.topk import topk_lowest_index
from deepinfer.models.packed import PackedWeight

__all__ = ["Gate", "MoE", "RoutedExperts", "SharedExpert", "clamped_swiglu"]


def clamped_swiglu(
    gate_up: Tensor, limit: float, weights: Tensor, *, deterministic: bool = False
) -> Tensor:
    """`silu(min(gate, limit)) * clamp(up, -limit, limit)`, times a weight a row, in fp32.

    Args:
        gate_up: Gate and up side by side, shape [rows, 2 * channels], any float dtype.
        limit: Clamp of both; the gate has no lower limit.
        weights: Weights of the leading rows, shape [weighted], fp32; the other rows weigh 1.
        deterministic: Whether a row's bits must be free of the other rows.

    Returns:
        Shape [rows, channels], fp32.
    """
    gate, up = gate_up.float().chunk(2, -1)
    silu = batch_invariant.silu if deterministic else F.silu
    out = silu(gate.clamp(max=limit)) * up.clamp(-limit, limit)
    rest = weights.new_ones(len(out) - len(weights))
    return out * torch.cat((weights, rest)).unsqueeze(-1)


class Gate(nn.Module):
    """The router.

    Attributes:
        weight: Shape [experts, hidden], fp32.
        bias: Added to the scores for the choice of text tokens only, shape [experts], fp32.
        bias_vl: The same for image tokens.
        deterministic: Whether a token's bits must be free of the other tokens.
        wide_parts: The weight as `wide_products.split_weight` gives it, or None.
    """

    deterministic = False
    wide_parts: Tensor | None = None

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
        fixed = self.deterministic
        linear = batch_invariant.linear if fixed else F.linear
        scores = linear(y.float(), self.weight)
        bias = self.bias
        if is_image is not None:
            bias = torch.where(is_image.unsqueeze(-1), self.bias_vl, bias)
        scores = (batch_invariant.softplus(scores) if fixed else F.softplus(scores)).sqrt()
        experts = topk_lowest_index(scores + bias, self.topk)
        weights = scores.gather(-1, experts)
        total = batch_invariant.ordered_sum(weights, -1) if fixed else weights.sum(-1)
        return weights * (self.scaling / (total.unsqueeze(-1) + 1e-20)), experts


class RoutedExperts(nn.Module):
    """All routed experts of a layer, stacked.

    Attributes:
        w13: Gate and up projections of each expert, one above the other, shape [experts, 2 * inter, hidden].
        w2: Down projections, shape [experts, hidden, inter].
        prepared: Both in the form of `packed_products.prepare_experts`, or None.
    """

    prepared: tuple[tuple[Tensor, Tensor], tuple[Tensor, Tensor]] | None = None

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
        joined: The bytes of `w1` and `w3` one above the other, see `packed_products.prepare_products`, or None.
    """

    joined: PackedWeight | None = None

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
    """Router, routed experts and shared expert of one layer.

    Attributes:
        deterministic: Whether a token's bits must be free of the other tokens.
    """

    deterministic = False

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
        x, shared = self.rounding.activation(y), self.shared_experts
        if self.deterministic:
            return self._deterministic(x, weights, experts).to(y.dtype)
        groups = _Groups.of(experts, self.experts.w2.shape[0])
        gate_up = groups.spread(x, self.experts.w13)
        gate_up.append(torch.cat((shared.w1(x), shared.w3(x)), -1))
        hidden = clamped_swiglu(torch.cat(gate_up), self.limit, groups.sort(weights))
        hidden = self.rounding.activation(hidden.to(y.dtype))
        routed = groups.apply(hidden[: experts.numel()], self.experts.w2).float()
        out = groups.sum(routed) + shared.w2(hidden[experts.numel() :]).float()
        return out.to(y.dtype)

    def _deterministic(self, x: Tensor, weights: Tensor, experts: Tensor) -> Tensor:
        """The same through batch-invariant kernels, for rounded input; shape [tokens, hidden], fp32."""
        shared, num_experts, topk = self.shared_experts, len(self.experts.w2), experts.shape[1]
        linear, pairs = batch_invariant.expert_linear, experts.flatten()
        order = pairs.argsort(stable=True)
        # Counted without a look at the values, which would wait for the device.
        counts = pairs.new_zeros(num_experts).scatter_add_(0, pairs, torch.ones_like(pairs))
        if counts.is_cpu:
            counts = counts.tolist()
        routed = linear(x[order // topk], self.experts.w13, counts)
        both = torch.cat((routed, torch.cat((shared.w1(x), shared.w3(x)), -1)))
        hidden = clamped_swiglu(both, self.limit, weights.flatten()[order], deterministic=True)
        hidden = self.rounding.activation(hidden.to(x.dtype))
        down = linear(hidden[: len(order)], self.experts.w2, counts).float()
        down = torch.empty_like(down).index_copy_(0, order, down).view(*experts.shape, -1)
        return batch_invariant.ordered_sum(down, 1) + shared.w2(hidden[len(order) :]).float()


@dataclass(frozen=True, slots=True)
class _Groups:
    """The (token, choice) pairs of a batch in the order of their experts.

    Attributes:
        chosen: Expert and number of pairs, for each expert that is used, ascending.
        order: Pair at each place of that order, shape [tokens * topk]; None for one token, whose experts ascend.
        topk: Choices of a token.
    """

    chosen: list[tuple[int, int]]
    order: Tensor | None
    topk: int

    @classmethod
    def of(cls, experts: Tensor, num_experts: int) -> _Groups:
        """Groups of expert ids, shape [tokens, topk]."""
        tokens, topk = experts.shape
        if tokens == 1:
            return cls([(expert, 1) for expert in experts.tolist()[0]], None, topk)
        flat = experts.flatten()
        counts = torch.bincount(flat, minlength=num_experts).tolist()
        chosen = [(expert, count) for expert, count in enumerate(counts) if count]
        return cls(chosen, flat.argsort(stable=True), topk)

    def sort(self, pairs: Tensor) -> Tensor:
        """One value a pair, shape [tokens, topk], in expert order, shape [tokens * topk]."""
        return pairs.view(-1) if self.order is None else pairs.view(-1)[self.order]

    def spread(self, x: Tensor, weights: Tensor) -> list[Tensor]:
        """Each expert's matrix times its tokens; `x` has shape [tokens, in_channels]."""
        if self.order is None:
            return [F.linear(x, weights[expert]) for expert, _ in self.chosen]
        return self._products(x[self.order // self.topk], weights)

    def apply(self, rows: Tensor, weights: Tensor) -> Tensor:
        """Each expert's matrix times its rows, shape [tokens * topk, in_channels] in expert order."""
        return torch.cat(self._products(rows, weights))

    def sum(self, rows: Tensor) -> Tensor:
        """Adds each token's rows, from expert order; in the order of its choices, whatever the batch."""
        if self.order is not None:
            rows = torch.empty_like(rows).index_copy_(0, self.order, rows)
        return rows.view(-1, self.topk, rows.shape[-1]).sum(1)

    def _products(self, rows: Tensor, weights: Tensor) -> list[Tensor]:
        parts = rows.split([count for _, count in self.chosen])
        pairs = zip(parts, self.chosen, strict=True)
        return [F.linear(part, weights[expert]) for part, (expert, _) in pairs]
