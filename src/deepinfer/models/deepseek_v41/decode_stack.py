"""The layers as few calls: matrix products, and between them one fused step each.

Twin of `Layer.forward` for a `DecodePass`, whose kernels it uses; the layers are the reference and own the parameters.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from deepinfer.core.errors import InvariantBroken
from deepinfer.kernels import batch_invariant
from deepinfer.models.deepseek_v41 import packed_products
from deepinfer.models.deepseek_v41.attention import Attention
from deepinfer.models.deepseek_v41.engram import Engram
from deepinfer.models.deepseek_v41.layer import Layer
from deepinfer.models.deepseek_v41.moe import MoE
from deepinfer.models.deepseek_v41.packed_products import linear, linears
from deepinfer.models.deepseek_v41.packed_stack import enter, run_packed_layer, takes_packed
from deepinfer.models.packed import PackedWeight

__all__ = ["run_layers", "why_not_fused"]

_GROUP = 32


def why_not_fused(model: nn.Module) -> str:
    """Why the layers of a model cannot run here, or "".

    Args:
        model: The model.
    """
    fixed = getattr(model, "deterministic", False)
    packed_inputs = getattr(model, "rounding", "none") == "full"
    for name, parameter in model.named_parameters():
        if isinstance(parameter, PackedWeight):
            # A table is read by rows; products with codes need inputs that are rounded as codes are.
            if parameter.kind != "fp8_group" and not (packed_inputs and not fixed):
                return f"{name} is packed"
            continue
        if parameter.dtype not in (torch.float32, torch.bfloat16):
            return f"{name} is {parameter.dtype}"
    return ""


def run_layers(
    layers: Iterable[nn.Module], streams: Tensor, pre: Tensor, run: Any
) -> tuple[Tensor, Tensor]:
    """Runs layers one after the other.

    Args:
        layers: `Layer` modules.
        streams: Residual streams, shape [tokens, streams, hidden].
        pre: Weights by which the first sublayer sums them, shape [tokens, streams], fp32.
        run: A `DecodePass`, a `StepPass` with kernels, or a pass of the draft with the same methods.

    Returns:
        The streams behind the last layer, and the weights that collapse them.
    """
    for layer in layers:
        if isinstance(layer, Layer):
            streams, pre = _run_layer(layer, streams, pre, run)
            if not len(streams):
                break
    return streams, pre


def _run_layer(layer: Layer, streams: Tensor, pre: Tensor, run: Any) -> tuple[Tensor, Tensor]:
    kernels, options = run.kernels, layer.mix_options
    rounds = layer.attn.rounding.level == "full"
    if layer.engram is not None:
        streams = _engram(layer.engram, streams, run.engram_rows[layer.layer_id], run)
    if layer.feeds_draft and run.features is not None:
        run.features.append(layer.mean_stream(streams))
    packed = run.packed and takes_packed(layer)
    if run.narrow_layer == layer.layer_id:
        streams, pre = _narrow(layer, streams, pre, run)
        if not len(streams):
            return streams, pre
    if packed:
        return run_packed_layer(layer, streams, pre, run)
    pre, coefficients, y, x = kernels.enter_streams(
        streams, pre, layer.hc_attn_fn, layer.hc_attn_base, layer.hc_attn_scale,
        layer.attn_norm.weight, round_input=rounds, **options,
    )  # fmt: skip
    output = _attention(layer.attn, y, x, run)
    streams = kernels.leave_streams(streams, output, coefficients)
    pre, coefficients, y, x = kernels.enter_streams(
        streams, pre, layer.hc_ffn_fn, layer.hc_ffn_base, layer.hc_ffn_scale,
        layer.ffn_norm.weight, round_input=rounds, **options,
    )  # fmt: skip
    shared, routed = _experts(layer.ffn, y, x, run)
    return kernels.leave_streams(streams, shared, coefficients, routed), pre


def _engram(engram: Engram, streams: Tensor, rows: Tensor, run: Any) -> Tensor:
    """Twin of `Engram.forward`."""
    found = F.embedding(rows, engram.embed.weight).flatten(-2).to(streams.dtype)
    if engram.rounding.level == "full":
        found = run.kernels.norm_rope_round(found.unsqueeze(1), rounding="fp8").squeeze(1)
    return run.kernels.add_engram(
        streams,
        linear(engram.wkv, found, rounded=engram.rounding.level == "full"),
        engram.q_weight,
        engram.k_weight,
        engram.eps,
        run.is_image,
    )


def _narrow(layer: Layer, streams: Tensor, pre: Tensor, run: Any) -> tuple[Tensor, Tensor]:
    """Extends the pool by all rows, then keeps those that run the rest of the layers."""
    attention = layer.attn
    if attention.compressor is None or attention.indexer is None:
        raise InvariantBroken(f"Layer {layer.layer_id} owns no pool; rows cannot drop out here.")
    y, *_ = enter(layer, streams, pre, run, "attn")
    run.extend_pool(attention, attention.compressor, attention.indexer, y)
    kept = run.narrow()
    return (streams, pre) if kept is None else (streams[kept], pre[kept])


def _attention(attention: Attention, y: Tensor, x: Tensor, run: Any) -> Tensor:
    """Attention of the normed input `y`, rounded as `x`, each of shape [tokens, hidden]."""
    kernels, level = run.kernels, attention.rounding.level
    inputs = "fp8" if level == "full" else "none"
    phases = run.phases(attention.ratio > 0)
    norm = attention.q_norm
    rounded = level == "full"
    narrow_q, kv = linears((attention.wq_a, attention.wkv), x, rounded=rounded)
    bottleneck = narrow_q.unsqueeze(1)
    bottleneck = kernels.norm_rope_round(
        bottleneck, norm.weight, norm.eps, rounding=inputs, out=bottleneck
    ).squeeze(1)
    queries = linear(attention.wq_b, bottleneck, rounded=rounded)
    queries = queries.view(len(y), attention.num_heads, -1)
    kernels.norm_rope_round(queries, phases=phases, out=queries)
    norm = attention.kv_norm
    run.write_windows(
        attention, kv.unsqueeze(1), norm.weight, norm.eps, phases,
        "fp8" if level != "none" else "none",
    )  # fmt: skip
    if attention.indexer is not None:
        if attention.compressor is not None:
            run.extend_pool(attention, attention.compressor, attention.indexer, y)
        run.select(attention, attention.indexer, bottleneck, y)
    attended = run.attend_cached(attention, queries)
    kernels.norm_rope_round(attended, phases=phases, inverse=True, out=attended)
    narrow = attention.group_outputs(attended.view(len(y), attention.num_groups, -1))
    if narrow.shape[-1] % _GROUP:
        narrow = narrow.reshape(len(y), 1, -1)
    narrow = kernels.norm_rope_round(narrow, rounding=inputs)
    return linear(attention.wo_b, narrow.reshape(len(y), -1), rounded=rounded)


def _experts(moe: MoE, y: Tensor, x: Tensor, run: Any) -> tuple[Tensor, Tensor | None]:
    """Output of the shared expert, shape [tokens, hidden], and of the chosen ones, [tokens, topk, hidden].

    The second is None where the first holds both.
    """
    kernels, gate, shared = run.kernels, moe.gate, moe.shared_experts
    inputs = "fp8" if moe.rounding.level == "full" else "none"
    fixed = moe.deterministic
    scores = (batch_invariant.linear if fixed else F.linear)(y.float(), gate.weight)
    weights, experts = kernels.topk_gate(scores, gate.bias, gate.topk, gate.scaling)
    if run.is_image is not None:
        others = kernels.topk_gate(scores, gate.bias_vl, gate.topk, gate.scaling)
        is_image = run.is_image.unsqueeze(-1)
        weights = torch.where(is_image, others[0], weights)
        experts = torch.where(is_image, others[1], experts)
    rounded = inputs == "fp8"
    left, right = linears((shared.w1, shared.w3), x, rounded=rounded)
    hidden = kernels.swiglu_round(left, right, None, moe.limit, rounding=inputs)
    common = linear(shared.w2, hidden, rounded=rounded)
    if packed_products.takes_codes(moe):
        return packed_products.experts(moe, x, weights, experts, common), None
    grouped_linear = batch_invariant.pair_linear if fixed else kernels.grouped_linear
    order = kernels.expert_order(experts, moe.experts.w2.shape[0])
    gate_up = grouped_linear(x, moe.experts.w13, order, gate.topk)
    left, right = gate_up.chunk(2, -1)
    hidden = kernels.swiglu_round(left, right, weights.view(-1), moe.limit, rounding=inputs)
    routed = grouped_linear(hidden, moe.experts.w2, order, 1)
    return common, routed.view(len(y), gate.topk, -1)
