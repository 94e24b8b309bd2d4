"""Inputs of recorded steps as one piece of memory, so that one copy sends them."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from deepinfer.core.errors import InvariantBroken
from deepinfer.engine.layout import Layout
from deepinfer.models.deepseek_v41.decode_inputs import (
    COUNT,
    FIRST,
    FROM_FUTURE,
    FULL_FLOOR,
    NUM_COLUMNS,
    SLOT,
    WINDOW_FLOOR,
    DecodeInputs,
)

__all__ = ["fill_verify", "make_inputs"]

Ints = NDArray[np.int64]


def make_inputs(
    num_rows: int, tokens_per_row: int, device: torch.device | str = "cpu", *, pinned: bool = False
) -> tuple[DecodeInputs, Tensor]:
    """As `DecodeInputs.empty`, in one piece.

    Args:
        num_rows: Rows.
        tokens_per_row: Tokens of a row.
        device: Where they lie.
        pinned: Whether host memory is page-locked.

    Returns:
        The inputs, and their memory, shape [values], int64.
    """
    ids = num_rows * tokens_per_row
    flat = torch.zeros(
        ids + num_rows * NUM_COLUMNS, dtype=torch.int64, device=device, pin_memory=pinned
    )
    inputs = DecodeInputs(
        flat[:ids].view(num_rows, tokens_per_row), flat[ids:].view(num_rows, NUM_COLUMNS)
    )
    return inputs, flat


def fill_verify(inputs: DecodeInputs, ids: Ints, layout: Layout, columns: Sequence[Ints]) -> None:
    """Writes requests of several known tokens, each token as a row of its own, and empties the rest; on the host.

    Args:
        inputs: Inputs of one token a row.
        ids: Ids of all tokens, shape [tokens], int64.
        layout: Where they lie.
        columns: First position, slot, and the two lowest positions of `DecodeInputs.values`, shape [requests] each, int64.

    Raises:
        InvariantBroken: There are more tokens than rows.
    """
    total = layout.total
    if total > inputs.num_rows or inputs.tokens_per_row > 1:
        raise InvariantBroken(
            f"{total} tokens do not fit inputs of {inputs.num_rows} rows of {inputs.tokens_per_row}."
        )
    inputs.ids.numpy()[:total, 0] = ids
    values = inputs.values.numpy()
    for place, column in zip((FIRST, SLOT, WINDOW_FLOOR, FULL_FLOOR), columns, strict=True):
        values[:total, place] = column[layout.owner]
    values[:total, FIRST] += layout.step
    values[:total, COUNT] = 1
    values[:total, FROM_FUTURE] = 0
    values[total:] = 0
