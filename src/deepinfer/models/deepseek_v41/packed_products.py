"""Products with weights that stay as their published bytes: codes and scales go to the kernels as they are.

The input of such a product was rounded to FP8 per 32 channels by the step before it, so casting it to codes loses
nothing: the product is that of the dequantised weight, up to the order of its sums.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from deepinfer.core.errors import InvariantBroken
from deepinfer.kernels import (
    fp8_gemm_nt,
    fused_experts,
    per_token_cast_to_fp8,
    prepare_mhc_projection,
    prepare_mxfp4_weights,
)
from deepinfer.models.deepseek_v41.aligned_products import align_weight, fits
from deepinfer.models.deepseek_v41.attention import Attention
from deepinfer.models.deepseek_v41.compressor import Compressor
from deepinfer.models.deepseek_v41.layer import Layer
from deepinfer.models.deepseek_v41.moe import Gate, MoE, RoutedExperts, SharedExpert
from deepinfer.models.deepseek_v41.wide_products import split_weight
from deepinfer.models.packed import PackedWeight

__all__ = [
    "align_products",
    "experts",
    "linear",
    "linears",
    "prepare_experts",
    "prepare_products",
    "takes_codes",
]

_BLOCK = 32

Pair = tuple[Tensor, Tensor]


def takes_codes(moe: MoE) -> bool:
    """Whether a layer's routed experts run from codes: MXFP4 weights, inputs rounded to FP8, no deterministic mode."""
    return (
        moe.rounding.level == "full"
        and not moe.deterministic
        and isinstance(moe.experts.w13, PackedWeight)
        and moe.experts.w13.kind == "mxfp4"
    )


def prepare_experts(model: nn.Module) -> None:
    """Puts packed experts into the form that products on Hopper read fastest; once, when a model is loaded.

    The prepared form takes as much memory again; other devices and widths need none and are left alone.

    Args:
        model: A model, or a part of one.
    """
    for module in model.modules():
        if isinstance(module, RoutedExperts) and isinstance(module.w13, PackedWeight):
            w13, w2 = (_codes(w) for w in (module.w13, module.w2))
            if w13[0].is_cuda and not any(2 * w[0].shape[-1] % 128 for w in (w13, w2)):
                module.prepared = prepare_mxfp4_weights(*w13), prepare_mxfp4_weights(*w2)


def prepare_products(model: nn.Module) -> None:
    """Brings packed weights into the forms that the kernels read fastest; once, when a model is loaded.

    Weights of one input come to lie one above the other in memory, so that one product serves them, and fp32 weights get
    three bf16 parts for the tensor cores (6 bytes more a coefficient), those of the stream mixing two; then `align_products` and `prepare_experts`. Values do not change.

    Args:
        model: A model, or a part of one.
    """
    for module in model.modules():
        if isinstance(module, Attention):
            module.joined = _join(module.wq_a, module.wkv)
        elif isinstance(module, SharedExpert):
            module.joined = _join(module.w1, module.w3)
        elif isinstance(module, Compressor):
            module.wide_whole = whole = _join_wide(module.wkv, module.wgate)
            module.wide_parts = split_weight(module.wkv.weight if whole is None else whole)
        elif isinstance(module, Gate):
            module.wide_parts = split_weight(module.weight)
        elif isinstance(module, Layer):
            fns = {"attn": module.hc_attn_fn, "ffn": module.hc_ffn_fn}
            module.mix_parts = {half: prepare_mhc_projection(fn) for half, fn in fns.items()}
    align_products(model)
    prepare_experts(model)


def align_products(model: nn.Module) -> None:
    """Puts beside FP8 weights what products on Hopper read fastest, see `aligned_products`; takes as much memory again.

    Args:
        model: A model, or a part of one, whose weights of one input were joined.
    """
    for module in model.modules():
        weights: list[object] = []
        if isinstance(module, Attention):
            weights = [module.joined, module.wq_b.weight, module.wo_b.weight]
            weights += [] if module.indexer is None else [module.indexer.wq_b.weight]
        elif isinstance(module, SharedExpert):
            weights = [module.joined, module.w2.weight]
        for weight in weights:
            if isinstance(weight, PackedWeight) and fits(weight) and _is_hopper(weight.device):
                weight.aligned = align_weight(weight)


def _is_hopper(device: torch.device) -> bool:
    return device.type == "cuda" and torch.cuda.get_device_capability(device)[0] == 9


def _join(*modules: nn.Module) -> PackedWeight | None:
    """Moves the bytes of weights of as many channels together and leaves views; None where they are not packed."""
    weights = [m.weight for m in modules]
    blocks = [w for w in weights if isinstance(w, PackedWeight) and w.kind == "fp8_block"]
    if len(blocks) < len(weights) or any(w.shape[0] % _BLOCK for w in blocks):
        return None
    codes, scale = torch.cat([w.codes for w in blocks]), torch.cat([w.scale for w in blocks])
    first = 0
    for module, weight in zip(modules, blocks, strict=True):
        rows, end = slice(first, first + len(weight.codes)), first + len(weight.codes)
        scales = slice(first // _BLOCK, end // _BLOCK)
        part = PackedWeight(codes[rows], scale[scales], "fp8_block", weight.dtype)
        module.weight = nn.Parameter(part, requires_grad=False)
        first = end
    return PackedWeight(codes, scale, "fp8_block", blocks[0].dtype)


def _join_wide(first: nn.Module, second: nn.Module | None) -> Tensor | None:
    """Moves two plain weights together and leaves views of the memory; None where there is one."""
    if second is None:
        return None
    whole = torch.cat([first.weight.detach(), second.weight.detach()])
    for module, rows in zip((first, second), whole.split(len(first.weight)), strict=True):
        module.weight = nn.Parameter(rows, requires_grad=False)
    return whole


def experts(
    moe: MoE,
    x: Tensor,
    weights: Tensor,
    ids: Tensor,
    shared: Tensor,
) -> Tensor:
    """The routed experts of a layer from codes, and the output of the shared one added.

    Args:
        moe: The layer; `takes_codes`.
        x: Input rounded to FP8 per 32 channels, shape [tokens, hidden].
        weights: Routing weights, shape [tokens, topk], fp32.
        ids: Expert ids, shape [tokens, topk], int64.
        shared: Output of the shared expert, shape [tokens, hidden].

    Returns:
        Shape [tokens, hidden], in the dtype of `x`.
    """
    routed = moe.experts
    w13, w2 = routed.prepared or (_codes(routed.w13), _codes(routed.w2))
    out = torch.empty_like(x, memory_format=torch.contiguous_format)
    return fused_experts(
        x,
        w13,
        w2,
        weights.contiguous(),
        ids.contiguous(),
        limit=moe.limit,
        added=shared,
        scale_group=32,
        out=out,
    )


def _codes(weight: Tensor) -> Pair:
    if not isinstance(weight, PackedWeight):
        raise InvariantBroken("Experts are not packed; multiply with their values.")
    return weight.codes, weight.scale


def linears(modules: Sequence[nn.Module], x: Tensor, *, rounded: bool) -> list[Tensor]:
    """Linear layers without bias of one input, from codes where a weight is held as such; the input is cast once.

    Args:
        modules: Each has `weight`, shape [out_channels, in_channels].
        x: Shape [tokens, in_channels].
        rounded: Whether `x` was rounded to FP8 per 32 channels.

    Returns:
        One tensor a module, shape [tokens, out_channels], in the dtype of `x`.
    """
    codes: Pair | None = None
    found: list[Tensor] = []
    for module in modules:
        weight = module.weight
        packed = isinstance(weight, PackedWeight) and weight.kind == "fp8_block"
        if not (rounded and packed) or module.deterministic:
            found.append(module(x))
            continue
        codes = codes or per_token_cast_to_fp8(x)
        direct = x.dtype in (torch.bfloat16, torch.float32)
        out = x.new_empty(len(x), weight.shape[0]) if direct else None
        values = weight.codes.view(torch.float8_e4m3fn), weight.scale
        found.append(fp8_gemm_nt(codes, values, out).to(x.dtype))
    return found


def linear(module: nn.Module, x: Tensor, *, rounded: bool) -> Tensor:
    """One of `linears`."""
    return linears((module,), x, rounded=rounded)[0]
