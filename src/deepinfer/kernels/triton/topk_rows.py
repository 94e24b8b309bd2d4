"""The best entries of each row in one launch: a bitwise search for the border value, then the picks in order."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from deepinfer.kernels.reference.topk_rows import topk_rows as topk_rows_reference

__all__ = ["topk_rows"]

_BLOCK = 4096
_MOST_COLUMNS = 16_384


@triton.jit
def _keys(row, c, columns):
    """Unsigned keys in the order of the values, 0 outside."""
    x = tl.load(row + c, mask=c < columns, other=0.0) + 0.0
    bits = x.to(tl.int32, bitcast=True)
    ordered = bits ^ ((bits >> 31) & 0x7FFFFFFF)
    key = (ordered ^ -2147483648).to(tl.uint32, bitcast=True)
    return tl.where(c < columns, key, 0)


@triton.jit
def _topk(scores, picked, columns, row_stride, K: tl.constexpr, BLOCK: tl.constexpr, ONCE: tl.constexpr):  # fmt: skip
    at = tl.program_id(0).to(tl.int64)
    row, out = scores + at * row_stride, picked + at * K
    c = tl.arange(0, BLOCK)
    border = tl.full((), 0, tl.uint32)
    bit = tl.full((), 0x80000000, tl.uint32)
    if ONCE:
        held = _keys(row, c, columns)
    for _ in range(32):
        tried = border | bit
        bit = bit >> 1
        if ONCE:
            count = tl.sum((held >= tried).to(tl.int32), axis=0)
        else:
            counts = tl.zeros([BLOCK], tl.int32)
            for start in range(0, columns, BLOCK):
                counts += (_keys(row, start + c, columns) >= tried).to(tl.int32)
            count = tl.sum(counts, axis=0)
        border = tl.where(count >= K, tried, border)
    # What is above the border is in; of what lies on it, the lowest indices that are still wanted.
    if ONCE:
        wanted = K - tl.sum((held > border).to(tl.int32), axis=0)
        on = (held == border).to(tl.int32)
        taken = (held > border) | ((on > 0) & (tl.cumsum(on, axis=0) <= wanted))
        place = tl.cumsum(taken.to(tl.int32), axis=0) - 1
        tl.store(out + place, c.to(tl.int64), mask=taken)
    else:
        above = tl.zeros([BLOCK], tl.int32)
        for start in range(0, columns, BLOCK):
            above += (_keys(row, start + c, columns) > border).to(tl.int32)
        wanted = K - tl.sum(above, axis=0)
        seen, first = 0, 0
        for start in range(0, columns, BLOCK):
            key = _keys(row, start + c, columns)
            on = (key == border).to(tl.int32)
            taken = (key > border) | ((on > 0) & (tl.cumsum(on, axis=0) + seen <= wanted))
            place = first + tl.cumsum(taken.to(tl.int32), axis=0) - 1
            tl.store(out + place, (start + c).to(tl.int64), mask=taken)
            seen += tl.sum(on, axis=0)
            first += tl.sum(taken.to(tl.int32), axis=0)


def topk_rows(scores: Tensor, k: int) -> Tensor:
    """Indices of the largest scores; see `deepinfer.kernels.reference.topk_rows.topk_rows`.

    Wide rows are sorted by the reference: a row is read 34 times here.
    """
    columns = scores.shape[-1]
    if columns > _MOST_COLUMNS or scores.dtype is not torch.float32:
        return topk_rows_reference(scores, k)
    rows = scores.detach().reshape(-1, columns)
    rows = rows if rows.stride(1) == 1 else rows.contiguous()
    picked = torch.empty(len(rows), k, dtype=torch.int64, device=scores.device)
    if len(rows):
        block = min(_BLOCK, max(32, triton.next_power_of_2(columns)))
        _topk[(len(rows),)](
            rows, picked, columns, rows.stride(0), K=k, BLOCK=block, ONCE=columns <= block,
            num_warps=1 if block <= 128 else 4 if block <= 1024 else 8,
        )  # fmt: skip
    return picked.view(*scores.shape[:-1], k)
