"""How blocks fared, put together until there are enough to look at."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

__all__ = ["BlockOutcomes", "HeldOutcomes", "block_rows", "block_widths", "known_blocks"]

_Floats = npt.NDArray[np.float32]
_Ints = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class BlockOutcomes:
    """How blocks fared.

    Attributes:
        confidences: Shape [blocks, drafts], float32; 0 behind the end of a shorter block.
        margins: Shape [blocks, drafts], float32, or None.
        verified: Drafts of each block that were verified, shape [blocks], int64.
        accepted: Those of them that were accepted, shape [blocks], int64.
        last: Blocks of the step that was added last; they come last.
    """

    confidences: _Floats
    margins: _Floats | None
    verified: _Ints
    accepted: _Ints
    last: int


class HeldOutcomes:
    """Keeps the outcomes of steps with few blocks, since a look at one block takes as long as one at many.

    Args:
        least: Blocks that are enough.
    """

    def __init__(self, least: int) -> None:
        self._least = least
        self._steps: list[tuple[Any, Any, Any, Any]] = []
        self._count = 0

    def add(
        self,
        confidences: Sequence[Sequence[float]],
        verified: Sequence[int],
        accepted: Sequence[int],
        margins: Sequence[Sequence[float]],
    ) -> BlockOutcomes | None:
        """Takes the outcomes of a step.

        Args:
            confidences: Of each block, at least one block.
            verified: Drafts of each block that were verified.
            accepted: Those of them that were accepted.
            margins: Of each block; or empty.

        Returns:
            Everything that was kept, once it is enough; nothing is kept then.
        """
        self._steps.append((confidences, verified, accepted, margins))
        self._count += len(verified)
        if self._count < self._least:
            return None
        steps, self._steps, self._count = self._steps, [], 0
        width = max(int(block_widths(step[0]).max()) for step in steps)
        known = [block_rows(step[0], width) for step in steps]
        gaps = None
        if all(len(step[3]) for step in steps):
            gaps = np.concatenate([block_rows(step[3], width) for step in steps])
        return BlockOutcomes(
            np.concatenate(known),
            gaps,
            np.concatenate([np.asarray(step[1], np.int64) for step in steps]),
            np.concatenate([np.asarray(step[2], np.int64) for step in steps]),
            len(verified),
        )


def block_widths(values: Sequence[Sequence[float]]) -> _Ints:
    """Length of each row.

    Args:
        values: The rows, or an array.

    Returns:
        Shape [rows], int64.
    """
    if isinstance(values, np.ndarray):
        return np.full(len(values), values.shape[1])
    return np.fromiter(map(len, values), np.int64, len(values))


def known_blocks(values: Sequence[Sequence[float]], counts: _Ints) -> tuple[_Ints | None, int]:
    """Blocks that something is known of.

    Args:
        values: Confidences of each block, or an array.
        counts: Drafts of each that can be verified, shape [blocks], int64.

    Returns:
        Blocks with confidences and drafts, shape [known], int64, or None for all; and the longest of them, 0 when there
        is none.
    """
    if isinstance(values, np.ndarray) and values.shape[1] and int(counts.min()) > 0:
        return None, values.shape[1]
    widths = block_widths(values)
    known = np.flatnonzero((widths > 0) & (counts > 0))
    width = int(widths[known].max(initial=0))
    return None if len(known) == len(counts) else known, width


def block_rows(values: Sequence[Sequence[float]], width: int, chosen: Any = None) -> _Floats:
    """Rows side by side.

    Args:
        values: The rows, or an array.
        width: Columns; what lies behind them is left out.
        chosen: Which rows, shape [chosen], int64; None takes all.

    Returns:
        Shape [rows, width], float32; 0 behind the end of a shorter row.
    """
    if isinstance(values, np.ndarray) and values.shape[1] >= width:
        found: _Floats = (values if chosen is None else values[chosen])[:, :width].astype(
            np.float32
        )
        return found
    rows = list(values) if chosen is None else [values[at] for at in chosen.tolist()]
    if min(map(len, rows)) == width == max(map(len, rows)):
        return np.array(rows, np.float32)
    found = np.zeros((len(rows), width), np.float32)
    for place, row in enumerate(rows):
        known = row[:width]
        found[place, : len(known)] = known
    return found
