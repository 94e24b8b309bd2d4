"""Mixture of experts: choice of experts, places of tokens in expert order, rows there and back, and the whole.

A pair is a token with one of its chosen experts; pair p of [tokens, topk] is choice p % topk of token p // topk. Places
are rows of what the grouped products read. In the contiguous layout the places of an expert begin at a multiple of the
alignment, expert behind expert; in the masked layout expert e has the places from `e * max_m` on. Inside an expert the
places follow the order of the pairs, so they are a function of the choices alone. An expert id that is not in
[0, num_experts) is skipped everywhere: its pair has place -1, and it adds nothing to its token.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from deepinfer.core.errors import ShapeError
from deepinfer.kernels import contract
from deepinfer.kernels.moe_backends import EXPAND, GATE, MAPPING, OPERATIONS, REDUCE

__all__ = [
    "OPERATIONS",
    "FusedMapping",
    "expand_to_fused",
    "expand_to_fused_with_sf",
    "get_fused_mapping",
    "reduce_fused",
    "topk_gate",
]

_FLOATS = (torch.float32, torch.bfloat16, torch.float16)
_INTS = (torch.int64, torch.int32)
_SCORES = ("sqrtsoftplus", "sigmoid", "softmax")


class FusedMapping(NamedTuple):
    """Places of pairs in expert order, all int32.

    Attributes:
        token_topk_to_pos: Place of each pair, -1 for a skipped one, shape [tokens, topk].
        pos_to_token_topk: Pair at each place, -1 for padding, shape [places]; empty where it was not asked for.
        pos_to_expert: Expert of each place, -1 for padding, shape [places]: the `grouped_layout` of the products; empty
            where it was not asked for.
        expert_start: First place of each expert, shape [experts].
        expert_end: Place behind the last of each expert, shape [experts]; in the masked layout the number of its pairs,
            the `masked_m` of the products.
        num_places: Places in all, used or not.
        max_m: Places of each expert in the masked layout; None in the contiguous one.
    """

    token_topk_to_pos: Tensor
    pos_to_token_topk: Tensor
    pos_to_expert: Tensor
    expert_start: Tensor
    expert_end: Tensor
    num_places: int
    max_m: int | None


def topk_gate(
    logits: Tensor,
    bias: Tensor | None,
    topk: int,
    *,
    score: str = "sqrtsoftplus",
    scale: float = 1.0,
    renormalise: bool = True,
    bias_vl: Tensor | None = None,
    is_image: Tensor | None = None,
    groups: int = 1,
    topk_groups: int = 1,
    num_tokens: Tensor | None = None,
    backend: str | None = None,
) -> tuple[Tensor, Tensor]:
    """Chooses the experts of each token.

    Args:
        logits: Router outputs, shape [tokens, experts], fp32, bf16 or fp16; rows may lie apart.
        bias: Added to the scores for the choice only, shape [experts], fp32; None for none.
        topk: Experts of a token, from 1 to the experts that may be chosen.
        score: Function of the logits: "sqrtsoftplus" (DeepSeek-V4 and V4.1), "sigmoid" (V3) or "softmax" (V2).
        scale: What the weights of a token sum to; without `renormalise` a factor of each.
        renormalise: Divide the weights of a token by their sum (plus 1e-20).
        bias_vl: The bias of image tokens, shape [experts], fp32; needs `bias` and `is_image`.
        is_image: Shape [tokens], bool; with `bias_vl`.
        groups: Groups of neighbouring experts; a token chooses from the `topk_groups` best of them. A group is worth
            its highest choice, or the sum of its two highest when there is a bias.
        topk_groups: Groups that a token may choose from.
        num_tokens: How many tokens count, shape [1], int32 or int64, on the device: those behind are padding and get
            weights 0 and experts -1.
        backend: "torch" or "triton"; None for the best that serves the call.

    Returns:
        Weights, shape [tokens, topk], fp32, without bias, and experts, shape [tokens, topk], int64: the best first, of
        equal ones the lower id. NaN is chosen last, and a token that has chosen it has weights of NaN.

    Raises:
        ShapeError: A shape, dtype or stride is not as above, or a number is out of range.
        UnsupportedHardware: The backend asked for cannot serve the call.
    """
    contract.check_dtype("logits", logits, *_FLOATS)
    contract.check_shape("logits", logits, (None, None), "tokens, experts")
    contract.check_last_stride("logits", logits)
    tokens, count = logits.shape
    for name, value in (("bias", bias), ("bias_vl", bias_vl)):
        if value is not None:
            contract.check_dtype(name, value, torch.float32)
            contract.check_shape(name, value, (count,), "experts")
            contract.check_last_stride(name, value)
    if is_image is not None:
        contract.check_dtype("is_image", is_image, torch.bool)
        contract.check_shape("is_image", is_image, (tokens,), "tokens")
        contract.check_last_stride("is_image", is_image)
    if (bias_vl is None) != (is_image is None) or (bias is None and bias_vl is not None):
        raise ShapeError(
            "bias_vl needs bias and is_image, and is_image needs bias_vl; give all three, or bias alone.",
            argument="bias_vl" if bias_vl is not None else "is_image",
            expected="bias, bias_vl and is_image", found=(bias is not None, bias_vl is not None, is_image is not None),
        )  # fmt: skip
    if num_tokens is not None:
        contract.check_dtype("num_tokens", num_tokens, *_INTS)
        contract.check_shape("num_tokens", num_tokens, (1,), "1")
    if score not in _SCORES:
        raise ShapeError(
            f"score is {score!r}; it must be one of {', '.join(_SCORES)}.",
            argument="score", expected=_SCORES, found=score,
        )  # fmt: skip
    if groups < 1 or count % groups or not 1 <= topk_groups <= groups:
        raise ShapeError(
            f"there are {groups} groups of {count} experts, and topk_groups is {topk_groups}; groups must divide the "
            "experts, and topk_groups lie in [1, groups].",
            argument="groups", expected="a divisor of the experts", found=(groups, topk_groups),
        )  # fmt: skip
    most = count // groups * topk_groups
    if not 1 <= topk <= most:
        raise ShapeError(
            f"topk is {topk} of {topk_groups} of {groups} groups of {count} experts; topk must lie in [1, {most}].",
            argument="topk", expected=f"[1, {most}]", found=topk,
        )  # fmt: skip
    weights = torch.empty((tokens, topk), dtype=torch.float32, device=logits.device)
    experts = torch.empty((tokens, topk), dtype=torch.int64, device=logits.device)
    if tokens:
        GATE(
            backend, logits, bias, bias_vl, is_image, num_tokens, score, renormalise, scale, groups,
            topk_groups, weights, experts,
        )  # fmt: skip
    return weights, experts


def get_fused_mapping(
    topk_ids: Tensor,
    num_experts: int,
    *,
    alignment: int = 128,
    max_m: int | None = None,
    with_places: bool | None = None,
    backend: str | None = None,
) -> FusedMapping:
    """Places of pairs in expert order; counted without an atomic operation, and nothing waits for the host.

    Args:
        topk_ids: Experts of each token, shape [tokens, topk], int64 or int32; others than [0, num_experts) are skipped.
        num_experts: Experts, up to 2,047.
        alignment: In the contiguous layout each expert begins at a multiple of it.
        max_m: Places of each expert, for the masked layout; None for the contiguous one. A pair that finds its expert
            full is skipped: with as many places as tokens none does, if no token chooses an expert twice.
        with_places: Whether to fill `pos_to_token_topk` and `pos_to_expert`; None for the contiguous layout only.
        backend: "torch" or "triton"; None for the best that serves the call.

    Returns:
        The mapping.

    Raises:
        ShapeError: A shape, dtype or stride is not as above, or a number is out of range.
        UnsupportedHardware: The backend asked for cannot serve the call.
    """
    contract.check_dtype("topk_ids", topk_ids, *_INTS)
    contract.check_shape("topk_ids", topk_ids, (None, None), "tokens, topk")
    if not topk_ids.is_contiguous():
        raise ShapeError(
            f"topk_ids has strides {tuple(topk_ids.stride())}; it must be contiguous. Call .contiguous() on it.",
            argument="topk_ids", expected="contiguous", found=tuple(topk_ids.stride()),
        )  # fmt: skip
    if not 1 <= num_experts <= 2047 or alignment < 1 or (max_m is not None and max_m < 1):
        raise ShapeError(
            f"num_experts is {num_experts}, alignment {alignment} and max_m {max_m}; num_experts must lie in [1, 2047], "
            "and the others be at least 1.",
            argument="num_experts", expected="[1, 2047]", found=num_experts,
        )  # fmt: skip
    pairs = topk_ids.numel()
    if max_m is None:
        places = pairs + min(pairs, num_experts) * (alignment - 1)
        places = -(-places // alignment) * alignment
    else:
        places = num_experts * max_m
    if places >= 2**31:
        raise ShapeError(
            f"num_experts {num_experts}, alignment {alignment} and max_m {max_m} make {places} places; they must be fewer "
            "than 2^31. Give fewer tokens at a time.",
            argument="max_m", expected="fewer than 2^31 places", found=places,
        )  # fmt: skip
    listed = max_m is None if with_places is None else with_places
    shapes = (tuple(topk_ids.shape), (places * listed,), (places * listed,), (num_experts,), (num_experts,))  # fmt: skip
    parts = [torch.empty(s, dtype=torch.int32, device=topk_ids.device) for s in shapes]
    if pairs:
        MAPPING(backend, topk_ids, num_experts, alignment, max_m, *parts)
    else:
        for part in parts[1:]:
            part.zero_()
        parts[1].fill_(-1)
        parts[2].fill_(-1)
    return FusedMapping(parts[0], parts[1], parts[2], parts[3], parts[4], places, max_m)


def expand_to_fused(
    x: Tensor,
    mapping: FusedMapping,
    topk_weights: Tensor | None = None,
    *,
    backend: str | None = None,
) -> tuple[Tensor, Tensor | None]:
    """Copies the row of each token to the places of its pairs.

    Args:
        x: Shape [tokens, channels], any dtype; rows may lie apart.
        mapping: The places.
        topk_weights: Shape [tokens, topk], fp32, contiguous, brought to the places too; None for none.
        backend: "torch" or "triton"; None for the best that serves the call.

    Returns:
        Rows, shape [places, channels], and weights, shape [places], or None. Places without a pair are not written.

    Raises:
        ShapeError: A shape, dtype or stride is not as above.
        UnsupportedHardware: The backend asked for cannot serve the call.
    """
    out, _, weights = _expand(x, None, mapping, topk_weights, backend)
    return out, weights


def expand_to_fused_with_sf(
    x: tuple[Tensor, Tensor],
    mapping: FusedMapping,
    topk_weights: Tensor | None = None,
    *,
    backend: str | None = None,
) -> tuple[tuple[Tensor, Tensor], Tensor | None]:
    """As `expand_to_fused`, for rows with scales.

    Args:
        x: Values, shape [tokens, channels], and their scales, shape [tokens, scales], any dtypes; rows may lie apart.
        mapping: The places.
        topk_weights: Shape [tokens, topk], fp32, contiguous, or None.
        backend: "torch" or "triton"; None for the best that serves the call.

    Returns:
        Values, shape [places, channels], and scales, shape [places, scales]; and weights, shape [places], or None.

    Raises:
        ShapeError: A shape, dtype or stride is not as above.
        UnsupportedHardware: The backend asked for cannot serve the call.
    """
    out, scale, weights = _expand(x[0], x[1], mapping, topk_weights, backend)
    if scale is None:
        scale = x[1].new_empty((mapping.num_places, x[1].shape[1]))
    return (out, scale), weights


def _expand(
    x: Tensor,
    scale: Tensor | None,
    mapping: FusedMapping,
    topk_weights: Tensor | None,
    backend: str | None,
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    places = mapping.token_topk_to_pos
    _check_places(places)
    tokens = places.shape[0]
    contract.check_shape("x", x, (tokens, None), "tokens, channels")
    contract.check_last_stride("x", x)
    out = torch.empty((mapping.num_places, x.shape[1]), dtype=x.dtype, device=x.device)
    out_scale = weights = None
    if scale is not None:
        contract.check_shape("scales of x", scale, (tokens, None), "tokens, scales")
        contract.check_last_stride("scales of x", scale)
        out_scale = torch.empty((len(out), scale.shape[1]), dtype=scale.dtype, device=x.device)
    if topk_weights is not None:
        _check_weights(topk_weights, places)
        weights = torch.empty((len(out),), dtype=torch.float32, device=x.device)
    if places.numel() and x.shape[1]:
        EXPAND(backend, x, scale, topk_weights, places, out, out_scale, weights)
    return out, out_scale, weights


def reduce_fused(
    y: Tensor,
    mapping: FusedMapping,
    topk_weights: Tensor | None = None,
    *,
    added: Tensor | None = None,
    out: Tensor | None = None,
    backend: str | None = None,
) -> Tensor:
    """Sums the rows of each token in the order of its choices, in fp32.

    Args:
        y: Shape [places, channels], fp32, bf16 or fp16; rows may lie apart.
        mapping: The places.
        topk_weights: Factors, shape [tokens, topk], fp32, contiguous; None when the rows are weighted already.
        added: Added last, as the output of shared experts, shape [tokens, channels], fp32, bf16 or fp16; rows may lie
            apart.
        out: Shape [tokens, channels], fp32, bf16 or fp16, last stride 1, written and returned; a new tensor of the
            dtype of `y` when None.
        backend: "torch" or "triton"; None for the best that serves the call.

    Returns:
        Sums, shape [tokens, channels]; 0 plus `added` for a token without a place, whatever lies at other places.

    Raises:
        ShapeError: A shape, dtype or stride is not as above.
        UnsupportedHardware: The backend asked for cannot serve the call.
    """
    places = mapping.token_topk_to_pos
    _check_places(places)
    tokens = places.shape[0]
    contract.check_dtype("y", y, *_FLOATS)
    contract.check_shape("y", y, (mapping.num_places, None), "places, channels")
    contract.check_last_stride("y", y)
    if topk_weights is not None:
        _check_weights(topk_weights, places)
    shape = (tokens, y.shape[1])
    if added is not None:
        contract.check_dtype("added", added, *_FLOATS)
        contract.check_shape("added", added, shape, "tokens, channels")
        contract.check_last_stride("added", added)
    if out is None:
        out = torch.empty(shape, dtype=y.dtype, device=y.device)
    contract.check_dtype("out", out, *_FLOATS)
    contract.check_shape("out", out, shape, "tokens, channels")
    contract.check_last_stride("out", out)
    if out.numel():
        REDUCE(backend, y, topk_weights, places, added, out)
    return out


def _check_places(places: Tensor) -> None:
    if places.dtype != torch.int32 or places.dim() != 2 or not places.is_contiguous():
        raise ShapeError(
            f"mapping.token_topk_to_pos is {str(places.dtype).removeprefix('torch.')} of shape {tuple(places.shape)} and "
            f"strides {tuple(places.stride())}; it must be int32, [tokens, topk] and contiguous, as get_fused_mapping "
            "makes it.",
            argument="mapping", expected="int32, contiguous", found=(places.dtype, tuple(places.stride())),
        )  # fmt: skip


def _check_weights(topk_weights: Tensor, places: Tensor) -> None:
    contract.check_dtype("topk_weights", topk_weights, torch.float32)
    contract.check_shape("topk_weights", topk_weights, tuple(places.shape), "tokens, topk")
    if not topk_weights.is_contiguous():
        raise ShapeError(
            f"topk_weights has strides {tuple(topk_weights.stride())}; it must be contiguous. Call .contiguous() on it.",
            argument="topk_weights", expected="contiguous", found=tuple(topk_weights.stride()),
        )  # fmt: skip
