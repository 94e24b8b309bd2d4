"""Routing to experts in plain torch: choice, places in expert order, rows there and back."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor

from deepinfer.kernels.reference.aligned import align_groups
from deepinfer.kernels.reference.cast import decode_ue8m0, per_token_cast_to_fp8
from deepinfer.kernels.reference.topk import order_keys

__all__ = [
    "expand_to_fused",
    "get_fused_mapping",
    "reduce_fused",
    "scores_of",
    "silu_and_mul_quant_fused",
    "swiglu_rows",
    "topk_gate",
]


def scores_of(logits: Tensor, score: str) -> Tensor:
    """Scores of experts.

    Args:
        logits: Shape [tokens, experts].
        score: "sqrtsoftplus", "sigmoid" or "softmax".

    Returns:
        Shape [tokens, experts], fp32.
    """
    x = logits.float()
    if score == "sqrtsoftplus":
        return F.softplus(x).sqrt()
    return x.sigmoid() if score == "sigmoid" else x.softmax(-1)


def topk_gate(
    logits: Tensor,
    bias: Tensor | None,
    bias_vl: Tensor | None,
    is_image: Tensor | None,
    num_tokens: Tensor | None,
    score: str,
    renormalise: bool,
    scale: float,
    groups: int,
    topk_groups: int,
    weights: Tensor,
    experts: Tensor,
) -> None:
    """Writes the experts of each token and their weights; see `deepinfer.kernels.topk_gate`.

    Args:
        logits: Shape [tokens, experts].
        bias: Shape [experts], or None.
        bias_vl: Shape [experts], or None.
        is_image: Shape [tokens], bool, or None.
        num_tokens: Shape [1], integers, or None.
        score: Name of the score function.
        renormalise: Whether the weights of a token are divided by their sum.
        scale: Factor of the weights.
        groups: Groups of neighbouring experts.
        topk_groups: Groups that a token may choose from.
        weights: Shape [tokens, topk], fp32.
        experts: Shape [tokens, topk], integers.
    """
    tokens, count = logits.shape
    topk = weights.shape[1]
    shares = scores_of(logits, score)
    choice = shares
    if bias is not None:
        added = bias.float().expand(tokens, -1)
        if is_image is not None and bias_vl is not None:
            added = torch.where(is_image.bool().unsqueeze(-1), bias_vl.float(), added)
        choice = shares + added
    keys = order_keys(choice)
    if groups > 1:
        each = choice.unflatten(-1, (groups, count // groups))
        best = order_keys(each).sort(dim=-1, descending=True, stable=True).indices
        worth = each.gather(-1, best[..., : 1 if bias is None else 2]).sum(-1)
        chosen = (
            order_keys(worth).sort(dim=-1, descending=True, stable=True).indices[:, :topk_groups]
        )
        allowed = torch.zeros_like(worth, dtype=torch.bool).scatter(-1, chosen, True)
        allowed = allowed.repeat_interleave(count // groups, -1)
        keys = torch.where(allowed, keys, torch.iinfo(torch.int64).min)
    picked = keys.sort(dim=-1, descending=True, stable=True).indices[:, :topk]
    found = shares.gather(-1, picked)
    factor = scale / (found.sum(-1, keepdim=True) + 1e-20) if renormalise else scale
    weights.copy_(found * factor)
    experts.copy_(picked)
    if num_tokens is not None:
        dead = torch.arange(tokens, device=logits.device) >= num_tokens
        weights.masked_fill_(dead.unsqueeze(-1), 0.0)
        experts.masked_fill_(dead.unsqueeze(-1), -1)


def get_fused_mapping(
    topk_ids: Tensor,
    num_experts: int,
    alignment: int,
    max_m: int | None,
    token_topk_to_pos: Tensor,
    pos_to_token_topk: Tensor,
    pos_to_expert: Tensor,
    expert_start: Tensor,
    expert_end: Tensor,
) -> None:
    """Writes places of pairs in expert order; see `deepinfer.kernels.get_fused_mapping`.

    Args:
        topk_ids: Shape [tokens, topk], integers.
        num_experts: Experts.
        alignment: Each expert's places begin at a multiple of it.
        max_m: Places of each expert in the masked layout; None for the contiguous one.
        token_topk_to_pos: Shape [tokens, topk], int32.
        pos_to_token_topk: Shape [places], int32, or [0].
        pos_to_expert: Shape [places], int32, or [0].
        expert_start: Shape [experts], int32.
        expert_end: Shape [experts], int32.
    """
    flat = topk_ids.flatten().long()
    good = (flat >= 0) & (flat < num_experts)
    experts = torch.where(good, flat, num_experts)
    counts = torch.bincount(experts, minlength=num_experts + 1)[:num_experts]
    order = experts.argsort(stable=True)
    sorted_experts = experts[order]
    first = counts.cumsum(0) - counts
    rank = torch.arange(len(order), device=flat.device) - F.pad(first, (0, 1))[sorted_experts]
    if max_m is None:
        padded = (counts + alignment - 1) // alignment * alignment
        start = padded.cumsum(0) - padded
        end = start + counts
        fits = sorted_experts < num_experts
    else:
        start = torch.arange(num_experts, device=flat.device) * max_m
        end = counts
        fits = (sorted_experts < num_experts) & (rank < max_m)
    place = F.pad(start, (0, 1))[sorted_experts] + rank
    token_topk_to_pos.view(-1)[order] = torch.where(fits, place, -1).int()
    expert_start.copy_(start)
    expert_end.copy_(end)
    if pos_to_token_topk.numel():
        pos_to_token_topk.fill_(-1)
        pos_to_token_topk[place[fits]] = order[fits].int()
        pos_to_expert.fill_(-1)
        pos_to_expert[place[fits]] = sorted_experts[fits].int()


def expand_to_fused(
    x: Tensor,
    scale: Tensor | None,
    topk_weights: Tensor | None,
    places: Tensor,
    out: Tensor,
    out_scale: Tensor | None,
    out_weights: Tensor | None,
) -> None:
    """Copies the row of each token to its places; what no pair has is left alone.

    Args:
        x: Shape [tokens, channels].
        scale: Shape [tokens, scales], or None.
        topk_weights: Shape [tokens, topk], or None.
        places: Shape [tokens, topk], int32; what is no row of `out`, as -1, stands for none.
        out: Shape [places, channels].
        out_scale: Shape [places, scales], or None.
        out_weights: Shape [places], or None.
    """
    token, choice = ((places >= 0) & (places < len(out))).nonzero(as_tuple=True)
    to = places[token, choice].long()
    _bytes(out)[to] = _bytes(x)[token]
    if scale is not None and out_scale is not None:
        _bytes(out_scale)[to] = _bytes(scale)[token]
    if topk_weights is not None and out_weights is not None:
        out_weights[to] = topk_weights[token, choice]


def reduce_fused(
    y: Tensor, topk_weights: Tensor | None, places: Tensor, added: Tensor | None, out: Tensor
) -> None:
    """Sums the rows of each token in the order of its choices, in fp32, then what is added.

    Args:
        y: Shape [places, channels].
        topk_weights: Shape [tokens, topk], fp32, or None for 1.
        places: Shape [tokens, topk], int32; what is no row of `y`, as -1, stands for none.
        added: Shape [tokens, channels], or None.
        out: Shape [tokens, channels].
    """
    total = torch.zeros(out.shape, dtype=torch.float32, device=out.device)
    for k in range(places.shape[1]):
        at = places[:, k].long()
        there = (at >= 0) & (at < len(y))
        if len(y):
            row = y[torch.where(there, at, 0)].float()
            if topk_weights is not None:
                row = row * topk_weights[:, k].unsqueeze(-1)
            total += torch.where(there.unsqueeze(-1), row, 0.0)
    out.copy_(total if added is None else total + added.float())


def _bytes(x: Tensor) -> Tensor:
    """The same rows as bytes where torch cannot index the dtype."""
    return x.view(torch.uint8) if x.itemsize == 1 else x


def swiglu_rows(gate_up: Tensor, limit: float, weights: Tensor | None) -> Tensor:
    """`silu(min(gate, limit)) * clamp(up, -limit, limit)`, times a weight a row, in fp32.

    Args:
        gate_up: Shape [rows, 2 * channels], gate first.
        limit: Clamp; infinity for none.
        weights: Shape [rows], or None.

    Returns:
        Shape [rows, channels], fp32.
    """
    gate, up = gate_up.float().chunk(2, -1)
    if not math.isinf(limit):
        gate, up = gate.clamp(max=limit), up.clamp(-limit, limit)
    out = F.silu(gate) * up
    return out if weights is None else out * weights.unsqueeze(-1)


def silu_and_mul_quant_fused(
    x: Tensor,
    topk_weights: Tensor,
    places: Tensor,
    limit: float,
    group: int,
    q: Tensor,
    scale: Tensor | None,
) -> None:
    """Writes the weighted SwiGLU of the rows of all pairs, rounded to the dtype of `x`, and cast to e4m3 if asked.

    Args:
        x: Shape [places, 2 * channels], gate first.
        topk_weights: Shape [tokens, topk], fp32.
        places: Shape [tokens, topk], int32, -1 for none.
        limit: Clamp; infinity for none.
        group: Channels that share a scale.
        q: Shape [places, channels], float8_e4m3fn, or the dtype of `x` without a cast.
        scale: Shape [places, channels / group], fp32 or float8_e8m0fnu; or [places, channels / 128], fp32, for groups of
            32 as `align_groups` casts them; or None.
    """
    at = places[places >= 0].long()
    rows = swiglu_rows(x[at], limit, topk_weights[places >= 0]).to(x.dtype)
    if scale is None:
        q[at] = rows
    elif scale.shape[1] * group * 4 == q.shape[1]:
        codes, powers = q.new_empty(rows.shape), scale.new_empty((len(rows), scale.shape[1]))
        align_groups(rows, codes, powers)
        _bytes(q)[at], scale[at] = _bytes(codes), powers
    else:
        codes, factors = per_token_cast_to_fp8(rows, group)
        _bytes(q)[at] = _bytes(codes)
        if scale.dtype == torch.float32:
            scale[at] = decode_ue8m0(factors)
        else:
            _bytes(scale)[at] = _bytes(factors)
