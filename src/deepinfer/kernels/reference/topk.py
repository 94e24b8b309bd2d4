"""Selection of the k largest in plain torch."""

from __future__ import annotations

import torch
from torch import Tensor

__all__ = ["block_max", "order_keys", "physical_slots", "topk_indices"]


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


def physical_slots(
    indices: Tensor, table: Tensor, requests: Tensor | None, out: Tensor, page_size: int
) -> None:
    """Writes slots of positions; see `deepinfer.kernels.topk.topk_to_physical_indices`.

    Args:
        indices: Shape [rows, k], integers.
        table: Shape [requests, most pages], int32.
        requests: Shape [rows], integers, or None.
        out: Shape [rows, k], integers.
        page_size: Positions of a page.
    """
    rows, most = indices.shape[0], table.shape[1]
    if most == 0 or table.shape[0] == 0:
        out.fill_(-1)
        return
    if requests is None:
        requests = torch.arange(rows, device=indices.device)
    at = indices.long()
    known = (requests >= 0) & (requests < len(table))
    good = (at >= 0) & (at < most * page_size) & known[:, None]
    at = at.where(good, 0)
    page = table[requests.where(known, 0).long()[:, None], at // page_size].long()
    out.copy_((page * page_size + at % page_size).where(good & (page >= 0), -1))


def block_max(scores: Tensor, lengths: Tensor, out: Tensor, block_size: int) -> None:
    """Writes the best score of each block; see `deepinfer.kernels.topk.candidate_block_max`.

    Args:
        scores: Shape [rows, keys].
        lengths: Shape [rows], integers.
        out: Shape [rows, ceil(keys / block_size)], fp32.
        block_size: Keys of a block.
    """
    keys, blocks = scores.shape[1], out.shape[1]
    at = torch.arange(keys, device=scores.device)
    seen = (at < lengths[:, None]) & ~scores.isnan()
    x = scores.float().masked_fill(~seen, -torch.inf)
    x = torch.nn.functional.pad(x, (0, blocks * block_size - keys), value=-torch.inf)
    best = x.unflatten(1, (blocks, block_size)).amax(2)
    newest = (lengths.clamp_max(keys) - 1).clamp_min(0)[:, None] // block_size
    forced = (torch.arange(blocks, device=scores.device) == newest) & (best > -torch.inf)
    out.copy_(best.masked_fill(forced, torch.inf))
