"""Selection of the k largest in plain torch."""

from __future__ import annotations

import torch
from torch import Tensor

__all__ = ["order_keys", "topk_indices"]


def order_keys(x: Tensor) -> Tensor:
    """Integers in the order of the values: NaN lowest, then -inf; the two zeros are equal.

    Args:
        x: Any shape, bf16, fp16 or fp32.

    Returns:
        Same shape, int64.
    """
    bits = x.float().view(torch.int32).long()
    bits = torch.where(x == 0, 0, bits)
    keys = torch.where(bits >= 0, bits, -(bits & 0x7FFFFFFF))
    return torch.where(x.isnan(), torch.iinfo(torch.int64).min, keys)


def topk_indices(x: Tensor, k: int, lengths: Tensor | None, out: Tensor, fill: int) -> None:
    """Writes the indices of the k largest elements of each row, ascending; ties go to the lowest index.

    Args:
        x: Shape [rows, n], bf16, fp16 or fp32.
        k: How many.
        lengths: How many elements of each row count, shape [rows], integers, or None for all.
        out: Shape [rows, k], integers.
        fill: Written behind the last index of a row with fewer than k elements.
    """
    keys = order_keys(x)
    at = torch.arange(x.shape[1], device=x.device)
    inside = torch.ones_like(keys, dtype=torch.bool)
    if lengths is not None:
        inside = at < lengths[:, None]
    # One order of validity, value and index: a stable sort of the values, then of what lies within the row.
    order = keys.argsort(dim=1, descending=True, stable=True)
    valid = inside.gather(1, order).to(torch.int8).argsort(dim=1, descending=True, stable=True)
    best = order.gather(1, valid)[:, :k]
    behind = x.shape[1]
    best = torch.where(inside.gather(1, best), best, behind).sort(dim=1).values
    out.fill_(fill)
    out[:, : best.shape[1]] = torch.where(best == behind, fill, best).to(out.dtype)
