"""A layer whose weights and caches stay bytes: products of codes, and between them steps that make codes.

Twin of `Layer.forward` and of `decode_stack`, for packed weights over packed rows. What enters a product is cast once, from
the values before rounding: the codes are those of the rounded values.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from deepinfer.kernels import (
    apply_rope,
    fp8_gemm_nt,
    mhc_post,
    mhc_pre,
    per_token_cast_to_fp8,
    per_token_cast_to_fp8_aligned,
    rms_norm,
    rms_norm_rope_quant,
    silu_and_mul_quant,
)
from deepinfer.models.deepseek_v41 import packed_products
from deepinfer.models.deepseek_v41.attention import Attention
from deepinfer.models.deepseek_v41.indexer import IndexQueries
from deepinfer.models.deepseek_v41.layer import Layer
from deepinfer.models.deepseek_v41.moe import MoE
from deepinfer.models.deepseek_v41.wide_products import wide_linear
from deepinfer.models.packed import PackedWeight

__all__ = ["enter", "leave", "run_packed_layer", "takes_packed"]

# From here on the two launches over all channels of `mhc_pre` win over one program for each piece of a token.
_MANY_TOKENS = 96
# Whether weights that were brought to scales for 128 channels are multiplied so.
_ALIGNED = True
_FP8 = torch.float8_e4m3fn

Pair = tuple[Tensor, Tensor]


def takes_packed(layer: Layer) -> bool:
    """Whether all weights of a layer that stay bytes in the published checkpoint do so here.

    Args:
        layer: The layer.
    """
    attention, moe = layer.attn, layer.ffn
    shared = moe.shared_experts
    modules: list[nn.Module] = [
        attention.wq_a, attention.wq_b, attention.wkv, attention.wo_b, shared.w1, shared.w2, shared.w3,
    ]  # fmt: skip
    if attention.indexer is not None:
        modules.append(attention.indexer.wq_b)
    return packed_products.takes_codes(moe) and all(_is_block(m.weight) for m in modules)


def _is_block(weight: object) -> bool:
    return isinstance(weight, PackedWeight) and weight.kind == "fp8_block"


def enter(
    layer: Layer, streams: Tensor, pre: Tensor, run: Any, half: str
) -> tuple[Tensor, Any, Tensor]:
    """What a sublayer reads.

    Args:
        layer: The layer.
        streams: Residual streams, shape [tokens, streams, hidden].
        pre: Weights of the input sum, shape [tokens, streams], fp32.
        run: The pass.
        half: "attn" or "ffn".

    Returns:
        The normed input, shape [tokens, hidden]; what `leave` needs; weights of the next sublayer's sum, shape
        [tokens, streams].
    """
    fn, base, scale = (getattr(layer, f"hc_{half}_{name}") for name in ("fn", "base", "scale"))
    gains = (layer.attn_norm if half == "attn" else layer.ffn_norm).weight
    if len(streams) >= _MANY_TOKENS:
        parts = layer.mix_parts
        if parts is not None and streams.dtype == parts[half].dtype:
            fn = parts[half]
        y, post, mix, following = mhc_pre(
            streams, pre, fn, base, scale, norm_weight=gains, **layer.mix_options
        )
        return y, (post, mix), following
    following, coefficients, y, _ = run.kernels.enter_streams(
        streams, pre, fn, base, scale, gains, round_input=False, **layer.mix_options
    )
    return y, coefficients, following


def leave(streams: Tensor, output: Tensor, back: Any, run: Any) -> Tensor:
    """Streams behind a sublayer, same shape and dtype as `streams`; `back` is what `enter` gave."""
    if isinstance(back, tuple):
        return mhc_post(streams, output, *back)
    left: Tensor = run.kernels.leave_streams(streams, output, back)
    return left


def run_packed_layer(layer: Layer, streams: Tensor, pre: Tensor, run: Any) -> tuple[Tensor, Tensor]:
    """Runs attention and experts of a layer for which `takes_packed`.

    Args:
        layer: The layer.
        streams: Residual streams, shape [tokens, streams, hidden].
        pre: Weights of the input sum, shape [tokens, streams], fp32.
        run: A pass over packed rows.

    Returns:
        The streams behind the layer, and the weights for the next sublayer.
    """
    y, back, pre = enter(layer, streams, pre, run, "attn")
    streams = leave(streams, _attention(layer.attn, y, run), back, run)
    y, back, pre = enter(layer, streams, pre, run, "ffn")
    weights, experts = _choices(layer.ffn, y, run)
    output = packed_products.experts(layer.ffn, y, weights, experts, _shared(layer.ffn, y, run))
    return leave(streams, output, back, run), pre


def product(weight: PackedWeight, codes: Pair, like: Tensor) -> Tensor:
    """A weight's codes times the codes of an input, shape [tokens, out_channels], in the dtype of `like`."""
    out = like.new_empty(len(codes[0]), weight.shape[0])
    if codes[1].dtype == torch.float32 and weight.aligned is not None:
        return fp8_gemm_nt(codes, weight.aligned, out)
    return fp8_gemm_nt(codes, (weight.codes.view(_FP8), weight.scale), out)


def _is_aligned(weight: Tensor, y: Tensor) -> bool:
    """Whether the product of a weight and an input takes scales for 128 channels."""
    pair = getattr(weight, "aligned", None)
    return (
        _ALIGNED and pair is not None and y.dtype == torch.bfloat16 and pair[0].device == y.device
    )


def _cast(weight: Tensor, y: Tensor) -> Pair:
    """Codes of an input as the product with a weight takes them."""
    return per_token_cast_to_fp8_aligned(y) if _is_aligned(weight, y) else per_token_cast_to_fp8(y)


def _side_by_side(joined: PackedWeight | None, modules: tuple[nn.Module, ...], y: Tensor) -> Tensor:
    """Products of weights with one input, side by side; one product where their bytes lie together."""
    if joined is not None and joined.device == y.device:
        return product(joined, _cast(joined, y), y)
    codes = per_token_cast_to_fp8(y)
    return torch.cat([product(m.weight, codes, y) for m in modules], 1)


def _attention(attention: Attention, y: Tensor, run: Any) -> Tensor:
    """Attention of the normed input, shape [tokens, hidden]."""
    phases = run.phases(attention.ratio > 0)
    both = _side_by_side(attention.joined, (attention.wq_a, attention.wkv), y)
    narrow, kv = both.split(
        [both.shape[1] - attention.wkv.weight.shape[0], attention.wkv.weight.shape[0]], 1
    )
    gains, eps = attention.q_norm.weight, attention.q_norm.eps
    if _is_aligned(attention.wq_b.weight, y):
        bottleneck = per_token_cast_to_fp8_aligned(rms_norm(narrow, gains, eps))
    else:
        bottleneck = rms_norm_rope_quant(narrow, gains, eps)
    queries = product(attention.wq_b.weight, bottleneck, y).view(len(y), attention.num_heads, -1)
    apply_rope(queries, phases, out=queries)
    norm = attention.kv_norm
    run.write_windows(attention, kv.unsqueeze(1), norm.weight, norm.eps, phases, "fp8")
    indexer = attention.indexer
    if indexer is not None and attention.compressor is not None:
        run.extend_pool(attention, attention.compressor, indexer, y)
    if indexer is not None and run.needs_scores(attention):
        found = product(indexer.wq_b.weight, bottleneck, y).view(len(y), indexer.num_heads, -1)
        weights = indexer.weights_proj(y)
        run.pick(attention, IndexQueries(found, phases, weights, indexer.scale, run.kernels))
    attended = run.attend_back(attention, queries, phases)
    hidden = group_outputs(attention, attended)
    return product(attention.wo_b.weight, _cast(attention.wo_b.weight, hidden), y)


def group_outputs(attention: Attention, attended: Tensor) -> Tensor:
    """The output bottleneck of each group of heads, side by side.

    Args:
        attention: The layer's attention.
        attended: Shape [tokens, heads, head_dim].

    Returns:
        Shape [tokens, groups * o_lora].
    """
    tokens, count = len(attended), attention.num_groups
    groups = attended.view(tokens, count, -1)
    weight = attention.wo_a.weight.view(count, -1, groups.shape[-1])
    hidden = attended.new_empty(tokens, attention.wo_a.weight.shape[0])
    # Each group writes its columns, so that the cast finds whole rows.
    to = hidden.view(tokens, count, -1).transpose(0, 1)
    torch.bmm(groups.transpose(0, 1), weight.transpose(1, 2), out=to)
    return hidden


def _choices(moe: MoE, y: Tensor, run: Any) -> tuple[Tensor, Tensor]:
    """Routing weights and experts of the normed input, each of shape [tokens, topk]."""
    kernels, gate = run.kernels, moe.gate
    scores = wide_linear(gate, (gate.weight,), y)[0]
    weights, experts = kernels.topk_gate(scores, gate.bias, gate.topk, gate.scaling)
    if run.is_image is not None:
        others = kernels.topk_gate(scores, gate.bias_vl, gate.topk, gate.scaling)
        is_image = run.is_image.unsqueeze(-1)
        weights = torch.where(is_image, others[0], weights)
        experts = torch.where(is_image, others[1], experts)
    return weights, experts


def _shared(moe: MoE, y: Tensor, run: Any) -> Tensor:
    """Output of the shared expert, shape [tokens, hidden]."""
    shared = moe.shared_experts
    gate_up = _side_by_side(shared.joined, (shared.w1, shared.w3), y)
    weight = shared.w2.weight
    if not _is_aligned(weight, y):
        return product(weight, silu_and_mul_quant(gate_up, limit=moe.limit), y)
    hidden = run.kernels.swiglu_round(*gate_up.chunk(2, -1), None, moe.limit, rounding="none")
    return product(weight, per_token_cast_to_fp8_aligned(hidden), y)
