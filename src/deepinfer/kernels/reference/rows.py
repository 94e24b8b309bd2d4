"""Row-wise steps between the matrix products of a layer, in plain torch."""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

from deepinfer.kernels.reference.quant import round_fp8, round_mxfp4, round_nvfp4

__all__ = ["RoundingFormat", "norm_rope_round", "scatter_rows", "sparse_attention", "swiglu_round"]

RoundingFormat = Literal["none", "fp8", "mxfp4", "nvfp4"]

_ROUND = {"none": lambda x: x, "fp8": round_fp8, "mxfp4": round_mxfp4, "nvfp4": round_nvfp4}


def scatter_rows(table: Tensor, index: Tensor, rows: Tensor) -> None:
    """Writes rows of a table in place.

    Args:
        table: Shape [table rows, ...], contiguous.
        index: Where each row goes, each place at most once; negative rows are written nowhere; shape [rows], int64.
        rows: Shape [rows, ...], cast to the table's dtype.
    """
    kept = index >= 0
    table[index[kept]] = rows[kept].to(table.dtype)


def norm_rope_round(
    x: Tensor,
    weight: Tensor | None = None,
    eps: float = 0.0,
    phases: Tensor | None = None,
    *,
    inverse: bool = False,
    rounding: RoundingFormat = "none",
    out: Tensor | None = None,
    index: Tensor | None = None,
) -> Tensor:
    """RMS norm, rotation of the trailing channels and rounding, in this order, each where it is asked for.

    Values pass through the dtype of `x` between the steps.

    Args:
        x: Shape [tokens, heads, channels], any float dtype.
        weight: Gains of the norm, shape [channels], or None for no norm.
        eps: Added to the mean square.
        phases: Cosine and sine of each rotated pair, shape [tokens, rope_dim / 2, 2], fp32, or None for no rotation.
        inverse: Rotate back.
        rounding: Format in which values are rounded in groups, see `round_fp8`, `round_mxfp4` and `round_nvfp4`.
        out: Where the result goes: the shape of `x` (it may be `x`), or with `index` a table of shape [table rows,
            channels]; None for a new tensor.
        index: Row of the table for each token, negative for none, shape [tokens], int64; needs one head.

    Returns:
        The result, shape [tokens, heads, channels]; with `index`, the table.
    """
    result = x
    if weight is not None:
        wide = x.float()
        scale = torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
        result = (wide * scale * weight.float()).to(x.dtype)
    if phases is not None:
        width = 2 * phases.shape[1]
        tail = result[..., -width:].float().unflatten(-1, (-1, 2))
        cos, sin = phases[:, None, :, 0], phases[:, None, :, 1]
        sin = -sin if inverse else sin
        even, odd = tail.unbind(-1)
        turned = torch.stack((even * cos - odd * sin, even * sin + odd * cos), -1).flatten(-2)
        result = torch.cat((result[..., :-width], turned.to(x.dtype)), -1)
    result = _ROUND[rounding](result)
    if out is None:
        return result
    if index is None:
        return out.copy_(result)
    scatter_rows(out, index, result[:, 0])
    return out


def sparse_attention(
    queries: Tensor,
    table: Tensor,
    index: Tensor,
    extra: Tensor | None,
    sink: Tensor,
    scale: float,
    *,
    offset: int = 0,
) -> Tensor:
    """Attention of tokens to rows picked by index, keys and values at once, with one sink logit a head.

    Args:
        queries: Shape [tokens, heads, head_dim].
        table: All rows, shape [rows, head_dim].
        index: Rows of each token less `offset`, negative for none, shape [tokens, width], int64.
        extra: Further rows, without the offset, negative for none, shape [tokens, more], int64, or None.
        sink: Shape [heads], fp32, finite.
        scale: Factor on q . k.
        offset: Added to the rows of `index`.

    Returns:
        Shape [tokens, heads, head_dim], in the dtype of `queries`; zeros for a token without rows.
    """
    rows = torch.where(index >= 0, index + offset, -1)
    if extra is not None:
        rows = torch.cat((rows, extra), 1)
    kept = rows >= 0
    keys = table[rows.clamp_min(0)].float() * kept.unsqueeze(-1)
    logits = torch.bmm(queries.float(), keys.transpose(1, 2)) * scale
    logits = logits.masked_fill(~kept.unsqueeze(1), -torch.inf)
    column = sink.float().view(1, -1, 1).expand(len(queries), -1, 1)
    shares = torch.softmax(torch.cat((logits, column), -1), -1)[..., :-1]
    return torch.bmm(shares, keys).to(queries.dtype)


def swiglu_round(
    gate: Tensor, up: Tensor, weights: Tensor | None, limit: float, *, rounding: RoundingFormat
) -> Tensor:
    """`silu(min(gate, limit)) * clamp(up, -limit, limit)` in fp32, times a weight a row, then rounded.

    Args:
        gate: Shape [rows, channels], any float dtype.
        up: Of the same shape and dtype.
        weights: Shape [rows], fp32, or None.
        limit: Clamp of both; the gate has no lower limit.
        rounding: Format in which values are rounded, once they are in the dtype of `gate`.

    Returns:
        Shape [rows, channels], contiguous, in the dtype of `gate`.
    """
    wide = torch.nn.functional.silu(gate.float().clamp(max=limit)) * up.float().clamp(-limit, limit)
    if weights is not None:
        wide = wide * weights.unsqueeze(-1)
    return _ROUND[rounding](wide.to(gate.dtype))
