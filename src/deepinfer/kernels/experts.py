"""The routed experts of a layer, from tokens to their sums."""

from __future__ import annotations

import math
from typing import TypeAlias

import torch
from torch import Tensor

from deepinfer.core.errors import ShapeError
from deepinfer.kernels import contract, gemm
from deepinfer.kernels import gemm_operands as operands
from deepinfer.kernels.aligned import per_token_cast_to_fp8_aligned
from deepinfer.kernels.configs import moe as configs
from deepinfer.kernels.gemm_backends import channels
from deepinfer.kernels.host import is_readable
from deepinfer.kernels.moe import (
    FusedMapping,
    expand_to_fused,
    expand_to_fused_with_sf,
    get_fused_mapping,
    reduce_fused,
)
from deepinfer.kernels.moe_backends import SWIGLU
from deepinfer.kernels.quant import per_token_cast_to_fp8

__all__ = ["fused_experts"]

Weights: TypeAlias = Tensor | tuple[Tensor, Tensor]
_LAYOUTS = ("auto", "masked", "contiguous")
_RESULTS = (torch.bfloat16, torch.float32, torch.float16)
_FP8 = (torch.float8_e4m3fn,)
_FP4 = (torch.uint8, torch.int32)


def fused_experts(
    x: Tensor,
    w13: Weights,
    w2: Weights,
    topk_weights: Tensor,
    topk_ids: Tensor,
    *,
    limit: float | None = None,
    scale_group: int = 128,
    added: Tensor | None = None,
    layout: str = "auto",
    out: Tensor | None = None,
    backend: str | None = None,
) -> Tensor:
    """Sum over the chosen experts e of a token of `w2_e (weight * silu(min(g, limit)) * clamp(u, -limit, limit))`.

    Gate g and value u are the halves of `w13_e x`. With weights that have scales, tokens and hidden values are cast to
    e4m3 with one power-of-two scale for `scale_group` channels; the routing weight is part of what is cast. Nothing waits
    for the host, so graphs can hold it.

    Args:
        x: Shape [tokens, hidden], bf16, or fp32 with weights that have scales; rows may lie apart.
        w13: Gates above values, shape [experts, 2 * inter, hidden]: bf16, or values and scales as the grouped products
            of `deepinfer.kernels.gemm` take them (FP8, MXFP4, prepared MXFP4).
        w2: Shape [experts, hidden, inter], of the same kind.
        topk_weights: Shape [tokens, topk], fp32; copied if it is not contiguous.
        topk_ids: Shape [tokens, topk], int64 or int32, contiguous; one that is no expert here is skipped, so a rank gives
            the ids of its own experts and -1 for others. A token names an expert once, but for layout "contiguous": the rooms
            of the masked one are full otherwise and pairs of other tokens are lost, which a CPU refuses and a GPU does not
            look for.
        limit: Of the clamp, at least 0; None for none.
        scale_group: 128 (fp32 scales) or 32 (e8m0 scales, as V4.1 casts); both are exact powers of two. With prepared
            weights, four groups of 32 are brought to the largest of their powers afterwards, whatever the number of
            tokens: values below 2^-6 of it are rounded to steps of 2^-9 of it, to nearest, ties to even.
        added: Added last, as the output of shared experts, shape [tokens, hidden], bf16, fp32 or fp16.
        layout: "masked" gives each expert room for all tokens, "contiguous" packs them; "auto" takes the first for few
            rows an expert, while the rooms take less than 4 GiB. The result does not hang on it beyond what the products say.
        out: Shape [tokens, hidden], bf16, fp32 or fp16, written and returned; a new tensor of the dtype of `x` when None.
        backend: "torch" or "triton" for all parts; None for the best that serves each.

    Returns:
        Shape [tokens, hidden]; a token without an expert gets `added`, or zeros.

    Raises:
        ShapeError: A shape, dtype or stride is not as above.
        UnsupportedHardware: The backend asked for cannot serve a part.
    """
    contract.check_dtype("x", x, torch.bfloat16, torch.float32)
    contract.check_shape("x", x, (None, None), "tokens, hidden")
    contract.check_last_stride("x", x)
    contract.check_limit(limit)
    tokens = x.shape[0]
    contract.check_shape("topk_ids", topk_ids, (tokens, None), "tokens, topk")
    contract.check_dtype("topk_weights", topk_weights, torch.float32)
    contract.check_shape("topk_weights", topk_weights, tuple(topk_ids.shape), "tokens, topk")
    topk_weights = topk_weights.contiguous()  # kernels step through them by pairs
    if layout not in _LAYOUTS:
        raise ShapeError(
            f"layout is {layout!r}; it must be one of {', '.join(_LAYOUTS)}.",
            argument="layout", expected=_LAYOUTS, found=layout,
        )  # fmt: skip
    if scale_group not in (32, 128):
        raise ShapeError(
            f"scale_group is {scale_group}; it must be 32 or 128.",
            argument="scale_group", expected=(32, 128), found=scale_group,
        )  # fmt: skip
    cast = isinstance(w13, tuple)
    if not cast:
        contract.check_dtype("x", x, torch.bfloat16)
    k = _check_weights("w13", w13)
    if k != x.shape[1]:
        raise ShapeError(
            f"x has {x.shape[1]} channels and w13 {k}; both need the same number.",
            argument="x", expected=k, found=x.shape[1],
        )  # fmt: skip
    num_experts, width = _values(w13).shape[:2]
    inter = width // 2
    if cast and inter % scale_group:
        raise ShapeError(
            f"w13 has {inter} gates; weights with scales need a multiple of {scale_group}.",
            argument="w13", expected=f"multiple of {scale_group}", found=inter,
        )  # fmt: skip
    contract.check_shape(
        "w2", _values(w2), (num_experts, x.shape[1], None), "experts, hidden, inter"
    )
    if width % 2:
        raise ShapeError(
            f"w13 has {width} rows; it must hold gates and as many values.",
            argument="w13", expected="[experts, 2 * inter, hidden]", found=width,
        )  # fmt: skip
    if isinstance(w2, tuple) != cast:
        raise _mixed()
    if _check_weights("w2", w2) != inter:
        raise ShapeError(
            f"w2 has {channels(_values(w2))} channels; it must have the {inter} of the gates.",
            argument="w2", expected=inter, found=channels(_values(w2)),
        )  # fmt: skip
    for name, other in (("out", out), ("added", added)):
        if other is not None:
            contract.check_dtype(name, other, *_RESULTS)
            contract.check_shape(name, other, (tokens, x.shape[1]), "tokens, hidden")
    # The most that is held at once: tokens and both halves, or hidden values and outputs.
    hidden_bytes = x.shape[1] * (1 if cast else 2)
    room = num_experts * tokens * max(hidden_bytes + 2 * width, inter + 2 * x.shape[1])
    has_room = room <= configs.ROOM_BYTES
    has_few = topk_ids.numel() <= configs.ROWS_OF_ROOM * num_experts
    masked = layout == "masked" or (layout == "auto" and has_room and has_few)
    if not tokens:
        shape = (0, _values(w2).shape[1])
        return out if out is not None else x.new_empty(shape)
    if masked and is_readable(topk_ids):
        _check_once(topk_ids, num_experts)
    mapping = get_fused_mapping(
        topk_ids,
        num_experts,
        alignment=gemm.CONTIGUOUS_ALIGNMENT,
        max_m=tokens if masked else None,
        backend=backend,
    )
    expected = -(-topk_ids.numel() // num_experts)
    # Prepared weights are multiplied 128 channels at a time.
    aligned = scale_group == 32 and _values(w13).dtype == torch.int32
    scale_dtype = torch.float32 if scale_group == 128 or aligned else torch.float8_e8m0fnu
    rows: Weights
    if aligned:
        codes = per_token_cast_to_fp8_aligned(x, backend=backend)
        rows, _ = expand_to_fused_with_sf(codes, mapping, backend=backend)
    elif cast:
        codes = per_token_cast_to_fp8(x, scale_group, scale_dtype=scale_dtype, backend=backend)
        rows, _ = expand_to_fused_with_sf(codes, mapping, backend=backend)
    else:
        rows, _ = expand_to_fused(x, mapping, backend=backend)
    gate_up = x.new_empty((mapping.num_places, width))
    _product(rows, w13, gate_up, mapping, num_experts, expected, backend)
    del rows
    hidden = x.new_empty(
        (mapping.num_places, inter), dtype=torch.float8_e4m3fn if cast else x.dtype
    )
    scale = None
    if cast:
        width_of = 128 if aligned else scale_group
        scale = x.new_empty((mapping.num_places, inter // width_of), dtype=scale_dtype)
    most = math.inf if limit is None else limit
    group = scale_group if cast else min(128, inter & -inter)
    SWIGLU(
        backend, gate_up, topk_weights, mapping.token_topk_to_pos, most, group, hidden, scale
    )  # fmt: skip
    del gate_up
    down = x.new_empty((mapping.num_places, _values(w2).shape[1]))
    product = hidden if scale is None else (hidden, scale)
    _product(product, w2, down, mapping, num_experts, expected, backend)
    return reduce_fused(down, mapping, added=added, out=out, backend=backend)


def _check_once(topk_ids: Tensor, num_experts: int) -> None:
    """Refuses a token that names an expert twice: the rooms of the masked layout have one place for it."""
    ids = topk_ids.sort(-1).values
    twice = (ids[:, 1:] == ids[:, :-1]) & (ids[:, 1:] >= 0) & (ids[:, 1:] < num_experts)
    if bool(twice.any()):
        token, place = (int(i) for i in twice.nonzero()[0])
        raise ShapeError(
            f"token {token} names expert {int(ids[token, place])} twice; the masked layout has one place for each token of "
            "an expert, and others would be lost. Name each expert once, or give layout='contiguous'.",
            argument="topk_ids", expected="an expert once a token", found=int(ids[token, place]),
        )  # fmt: skip


def _check_weights(name: str, weights: Weights) -> int:
    """Checks weights as the products will, by the caller's name; returns their channels."""
    if isinstance(weights, Tensor):
        return operands.operand(name, weights, (torch.bfloat16,), 3)
    values, scale = weights
    dtypes = _FP8 if values.dtype in _FP8 else _FP4
    k = operands.operand(name, values, dtypes, 3)
    operands.scales(name, values, scale, k, weights=True)
    return k


def _values(weights: Weights) -> Tensor:
    return weights[0] if isinstance(weights, tuple) else weights


def _product(
    rows: Weights,
    weights: Weights,
    out: Tensor,
    mapping: FusedMapping,
    num_experts: int,
    expected: int,
    backend: str | None,
) -> None:
    """The grouped product for a kind of weights and a layout."""
    if mapping.max_m is None:
        layout = mapping.pos_to_expert
        if isinstance(rows, Tensor) and isinstance(weights, Tensor):
            gemm.m_grouped_bf16_gemm_nt_contiguous(
                rows, weights, out, layout, expected, backend=backend
            )
        elif isinstance(rows, Tensor) or isinstance(weights, Tensor):
            raise _mixed()
        elif weights[0].dtype == torch.float8_e4m3fn:
            gemm.m_grouped_fp8_gemm_nt_contiguous(
                rows, weights, out, layout, expected, backend=backend
            )
        else:
            gemm.m_grouped_fp8_fp4_gemm_nt_contiguous(
                rows, weights, out, layout, expected, backend=backend
            )
        return
    split = (num_experts, mapping.max_m)
    d, counts = out.unflatten(0, split), mapping.expert_end
    if isinstance(rows, Tensor) and isinstance(weights, Tensor):
        x = rows.unflatten(0, split)
        gemm.m_grouped_bf16_gemm_nt_masked(x, weights, d, counts, expected, backend=backend)
        return
    if isinstance(rows, Tensor) or isinstance(weights, Tensor):
        raise _mixed()
    pair = (rows[0].unflatten(0, split), rows[1].unflatten(0, split))
    if weights[0].dtype == torch.float8_e4m3fn:
        gemm.m_grouped_fp8_gemm_nt_masked(pair, weights, d, counts, expected, backend=backend)
    else:
        gemm.m_grouped_fp8_fp4_gemm_nt_masked(pair, weights, d, counts, expected, backend=backend)


def _mixed() -> ShapeError:
    return ShapeError(
        "one of w13 and w2 has scales and the other has none; give both in the same form.",
        argument="w2", expected="the form of w13", found="another",
    )  # fmt: skip
