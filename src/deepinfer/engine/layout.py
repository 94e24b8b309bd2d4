"""Where the tokens of several rows lie in a step that runs them one behind the other."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

__all__ = ["Layout"]

Ints = NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Layout:
    """Where the tokens of rows lie, one row behind the other.

    Attributes:
        counts: Tokens of each row, shape [rows], int64.
        total: Their sum.
        owner: Row of each token, shape [tokens], int64.
        step: Place of each token in its row, shape [tokens], int64.
        offsets: Place of each row's first token, shape [rows], int64.
        is_even: Whether all rows have as many.
    """

    counts: Ints
    total: int
    owner: Ints
    step: Ints
    offsets: Ints
    is_even: bool

    @classmethod
    def of(cls, counts: Ints) -> Layout:
        """The layout of rows.

        Args:
            counts: Tokens of each, at least 1, shape [rows], int64.
        """
        ends = counts.cumsum()
        total, offsets = int(ends[-1]), ends - counts
        owner = np.repeat(np.arange(len(counts)), counts)
        step = np.arange(total) - offsets[owner]
        return cls(counts, total, owner, step, offsets, int(counts.min()) == int(counts.max()))
