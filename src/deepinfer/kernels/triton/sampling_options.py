"""What launches over rows of logits are given: filters, and what a draw needs."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

__all__ = ["Draw", "Filters", "empty"]


class Filters(NamedTuple):
    """Options of rows; None where a filter is off in all of them.

    Attributes:
        temperature: Shape [rows].
        top_k: Shape [rows], integers.
        top_p: Shape [rows].
        min_p: Shape [rows].
        widest: The largest top-k of a row, from 1, if the host knows it and every row has one; else 0.
    """

    temperature: Tensor | None
    top_k: Tensor | None
    top_p: Tensor | None
    min_p: Tensor | None
    widest: int

    def given(self, other: Tensor) -> list[Tensor]:
        """Temperature, top-k, top-p and min-p as a kernel takes them, with another tensor for those that are off."""
        return [t if t is not None else other for t in self[:4]]

    def flags(self, *names: str) -> dict[str, bool]:
        """Which of the filters are on, by the names of constants: "WARM", "TOP_K", "TOP_P" and "MIN_P"."""
        order = ("WARM", "TOP_K", "TOP_P", "MIN_P")
        return {name: self[order.index(name)] is not None for name in names}


class Draw(NamedTuple):
    """What draws the tokens of rows, and where they go.

    Attributes:
        seeds: Shape [rows], int64.
        positions: Shape [rows], integers.
        stream: Purpose of the noise.
        out: Tokens, shape [rows], int64.
    """

    seeds: Tensor
    positions: Tensor
    stream: int
    out: Tensor


def empty(x: Tensor, *shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    """A tensor with any content, where `x` is."""
    return torch.empty(shape, dtype=dtype, device=x.device)
