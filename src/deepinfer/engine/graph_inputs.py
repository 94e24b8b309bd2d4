"""Inputs of recorded steps as one piece of memory, so that one copy sends them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

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

__all__ = ["StepInputs", "fill_verify", "make_inputs"]

Ints = NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class StepInputs:
    """Inputs in one piece of memory.

    Attributes:
        inputs: The inputs.
        flat: Their memory, shape [values], int64.
        ids: `inputs.ids` as an array, where it lies on the host; else without rows.
        values: `inputs.values` as an array, where it lies on the host; else without rows.
    """

    inputs: DecodeInputs
    flat: Tensor
    ids: Ints
    values: Ints


def make_inputs(
    num_rows: int, tokens_per_row: int, device: torch.device | str = "cpu", *, pinned: bool = False
) -> StepInputs:
    """As `DecodeInputs.empty`, in one piece.

    Args:
        num_rows: Rows.
        tokens_per_row: Tokens of a row.
        device: Where they lie.
        pinned: Whether host memory is page-locked.
    """
    ids = num_rows * tokens_per_row
    flat = torch.zeros(
        ids + num_rows * NUM_COLUMNS, dtype=torch.int64, device=device, pin_memory=pinned
    )
    inputs = DecodeInputs(
        flat[:ids].view(num_rows, tokens_per_row), flat[ids:].view(num_rows, NUM_COLUMNS)
    )
    nothing = np.zeros((0, NUM_COLUMNS), np.int64)
    is_here = flat.device.type == "cpu"
    return StepInputs(
        inputs,
        flat,
        inputs.ids.numpy() if is_here else nothing,
        inputs.values.numpy() if is_here else nothing,
    )


def fill_verify(host: StepInputs, ids: Ints, layout: Layout, columns: Sequence[Ints]) -> None:
    """Writes requests of several known tokens, each token as a row of its own, and empties the rest; on the host.

    Args:
        host: Inputs of one token a row.
        ids: Ids of all tokens, shape [tokens], int64.
        layout: Where they lie.
        columns: First position, slot, and the two lowest positions of `DecodeInputs.values`, shape [requests] each, int64.

    Raises:
        InvariantBroken: There are more tokens than rows.
    """
    total, (rows, tokens), values = layout.total, host.ids.shape, host.values
    if total > rows or tokens > 1:
        raise InvariantBroken(f"{total} tokens do not fit inputs of {rows} rows of {tokens}.")
    host.ids[:total, 0] = ids
    for place, column in zip((FIRST, SLOT, WINDOW_FLOOR, FULL_FLOOR), columns, strict=True):
        values[:total, place] = column[layout.owner]
    values[:total, FIRST] += layout.step
    values[:total, COUNT] = 1
    values[:total, FROM_FUTURE] = 0
    values[total:] = 0
