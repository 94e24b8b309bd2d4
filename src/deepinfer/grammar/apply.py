"""Masks on logits: the reference in torch."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from deepinfer.core.errors import ShapeError
from deepinfer.core.lazy import optional_import

__all__ = ["apply_bitmask_"]


def apply_bitmask_(
    logits: Any, bitmask: Any, rows: Sequence[int] | None = None, vocab_size: int | None = None
) -> Any:
    """Sets the logits of tokens that are not allowed to minus infinity, in place.

    Columns from `vocab_size` on, which models pad their vocabulary with, are never allowed.

    Args:
        logits: Shape [rows, columns] or [columns], any floating dtype, with any strides.
        bitmask: Shape [mask rows, words] or [words], int32, with any strides, on the device of the logits.
        rows: Row of the logits for each row of the bitmask; other rows stay as they are. None when row k belongs to row k.
        vocab_size: Columns that the bitmask speaks of; None for as many as there are, but not more than its bits.

    Returns:
        `logits`.

    Raises:
        ShapeError: Shapes or dtypes do not fit, or a row does not exist.
    """
    torch = optional_import("torch")
    table = logits.unsqueeze(0) if logits.dim() == 1 else logits
    mask = bitmask.unsqueeze(0) if bitmask.dim() == 1 else bitmask
    if table.dim() != 2 or mask.dim() != 2 or mask.dtype != torch.int32:
        raise ShapeError(
            f"logits {tuple(logits.shape)} and a bitmask {tuple(bitmask.shape)} of {bitmask.dtype}; the bitmask must "
            "be int32, and both have one or two axes",
            argument="bitmask",
            expected="int32 [rows, words]",
            found=tuple(bitmask.shape),
        )
    if not table.is_floating_point():
        raise ShapeError(
            f"logits are {table.dtype}; minus infinity needs a floating dtype",
            argument="logits",
            expected="floating",
            found=table.dtype,
        )
    columns = table.shape[1]
    width = min(columns, mask.shape[1] * 32) if vocab_size is None else vocab_size
    if not 0 <= width <= min(columns, mask.shape[1] * 32):
        raise ShapeError(
            f"vocab_size is {width}, with {columns} columns of logits and {mask.shape[1] * 32} bits a row; it can be "
            "at most the smaller one",
            argument="vocab_size",
            expected=f"0..{min(columns, mask.shape[1] * 32)}",
            found=width,
        )
    wanted = list(range(mask.shape[0])) if rows is None else [int(row) for row in rows]
    wrong = [row for row in wanted if not 0 <= row < table.shape[0]]
    if len(wanted) != mask.shape[0] or len(set(wanted)) != len(wanted) or wrong:
        raise ShapeError(
            f"{mask.shape[0]} mask rows for the rows {wanted[:8]} of {table.shape[0]} rows of logits; give one "
            "existing row a mask row, none twice",
            argument="rows",
            expected=f"{mask.shape[0]} of 0..{table.shape[0] - 1}",
            found=wanted,
        )
    at = torch.arange(width, device=mask.device)
    allowed = ((mask[:, at >> 5] >> (at & 31).to(torch.int32)) & 1).to(torch.bool)
    for row, bits in zip(wanted, allowed, strict=True):
        table[row, :width].masked_fill_(~bits, float("-inf"))
        table[row, width:] = float("-inf")
    return logits
