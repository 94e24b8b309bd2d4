"""Matrix products of quantised operands in plain torch: every operand is dequantised, and the product is made in fp32.

D = A B^T in all of them. Scales are fp32, or powers of two as e8m0 (float8_e8m0fnu, or uint8 with the same bytes); the
blocks that share one are read off the shapes: 32 or 128 channels, and 1, 32 or 128 rows.
"""

from __future__ import annotations

import torch
from torch import Tensor

from deepinfer.core.errors import ShapeError
from deepinfer.kernels.reference.cast import cast_back
from deepinfer.kernels.reference.folded import unfold_mxfp4_weights

__all__ = ["contiguous", "dense", "dequantise", "masked"]


def dequantise(name: str, q: Tensor, scale: Tensor | None) -> Tensor:
    """Values of an operand.

    Args:
        name: Name of the operand, for messages.
        q: Shape [..., rows, K] of e4m3, bf16, fp16 or fp32, or [..., rows, K / 2] of packed e2m1 as uint8, or
            what `prepare_mxfp4_weights` returns.
        scale: Shape [..., ceil(rows / 1, 32 or 128), ceil(K / 32 or 128)], or None.

    Returns:
        Shape [..., rows, K], fp32.

    Raises:
        ShapeError: The shape of the scales fits no block.
    """
    if scale is None:
        return q.float()
    if q.dtype == torch.int32:
        return unfold_mxfp4_weights(q, scale)
    rows, k = q.shape[-2], q.shape[-1] * (2 if q.dtype == torch.uint8 else 1)
    for height in (1, 32, 128):
        for width in (32, 128):
            if scale.shape[-2:] == (-(-rows // height), -(-k // width)):
                return cast_back(q, scale, block=(height, width))
    raise ShapeError(
        f"the scales of {name} have shape {tuple(scale.shape)}; {rows} rows of {k} channels have one scale for 1, 32 "
        "or 128 rows and 32 or 128 channels.",
        argument=name, expected=(rows, -(-k // 128)), found=tuple(scale.shape),
    )  # fmt: skip


def dense(
    a: Tensor, a_scale: Tensor | None, b: Tensor, b_scale: Tensor | None, out: Tensor
) -> None:
    """Writes A B^T.

    Args:
        a: Shape [M, K].
        a_scale: Its scales, a shape as `dequantise` takes it, or None.
        b: Shape [N, K].
        b_scale: Its scales, a shape as `dequantise` takes it, or None.
        out: Shape [M, N].
    """
    out.copy_(dequantise("a", a, a_scale) @ dequantise("b", b, b_scale).T)


def contiguous(
    a: Tensor,
    a_scale: Tensor | None,
    b: Tensor,
    b_scale: Tensor | None,
    out: Tensor,
    layout: Tensor,
) -> None:
    """Writes each row's product with the weights of its group; rows of a group that is not there are left alone.

    Args:
        a: Shape [M, K].
        a_scale: Its scales, a shape as `dequantise` takes it, or None.
        b: Shape [groups, N, K].
        b_scale: Its scales, a shape as `dequantise` takes it, or None.
        out: Shape [M, N].
        layout: Group of each row, shape [M], integers; -1 and what is not below `groups` stand for none.
    """
    for group in range(b.shape[0]):
        rows = (layout == group).nonzero().flatten()
        if rows.numel():
            x = dequantise("a", a[rows], None if a_scale is None else a_scale[rows])
            w = dequantise("b", b[group], None if b_scale is None else b_scale[group])
            out[rows] = (x @ w.T).to(out.dtype)


def masked(
    a: Tensor,
    a_scale: Tensor | None,
    b: Tensor,
    b_scale: Tensor | None,
    out: Tensor,
    counts: Tensor,
) -> None:
    """Writes the products of the first rows of each group; the rows behind them are left alone.

    Args:
        a: Shape [groups, max_m, K].
        a_scale: Its scales, a shape as `dequantise` takes it, or None.
        b: Shape [groups, N, K].
        b_scale: Its scales, a shape as `dequantise` takes it, or None.
        out: Shape [groups, max_m, N].
        counts: Rows of each group, shape [groups], integers.
    """
    for group, count in enumerate(counts.tolist()):
        if count > 0:
            x = dequantise(
                "a", a[group, :count], None if a_scale is None else a_scale[group, :count]
            )
            w = dequantise("b", b[group], None if b_scale is None else b_scale[group])
            out[group, :count] = (x @ w.T).to(out.dtype)
