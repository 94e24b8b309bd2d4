"""Blocks of an engine, written down to fit calibrations from."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from deepinfer.core import _checks as checks
from deepinfer.core.errors import ConfigError
from deepinfer.speculative._arrays import shape_error

__all__ = ["BlockRecorder"]

_EDGE = 1e-7


class BlockRecorder:
    """A verify policy that verifies everything, and keeps what the drafts said of themselves and how they fared.

    Blocks that could not be drafted whole, such as the last of an answer, are kept with what was verified of them.

    Args:
        num_drafts: Drafts of a block.

    Raises:
        ConfigError: `num_drafts` is out of range.

    Examples:
        >>> recorder = BlockRecorder(2)
        >>> recorder.trim([[0.9, 0.5]], [2])
        [2]
        >>> recorder.learn([[0.9, 0.5]], [2], [1])
        >>> recorder.accepted.tolist(), recorder.logits.round(2).tolist()
        ([1], [[2.2, 0.0]])
    """

    def __init__(self, num_drafts: int) -> None:
        self.num_drafts = checks.check_int("num_drafts", num_drafts, 1, 256, ConfigError)
        self._blocks: list[tuple[list[float], list[float], int, int]] = []

    def __len__(self) -> int:
        return len(self._blocks)

    @property
    def logits(self) -> npt.NDArray[np.float64]:
        """Confidence logits, shape [blocks, drafts]; NaN where there was no draft."""
        values = np.clip([block[0] for block in self._blocks], _EDGE, 1.0 - _EDGE)
        found: npt.NDArray[np.float64] = np.log(values / (1.0 - values)).reshape(
            -1, self.num_drafts
        )
        return found

    @property
    def margins(self) -> npt.NDArray[np.float64]:
        """Margins, shape [blocks, drafts]; NaN where none was told."""
        return np.array([block[1] for block in self._blocks], float).reshape(-1, self.num_drafts)

    @property
    def verified(self) -> npt.NDArray[np.int64]:
        """Drafts of each block that were verified, shape [blocks]."""
        return np.array([block[2] for block in self._blocks], np.int64)

    @property
    def accepted(self) -> npt.NDArray[np.int64]:
        """Drafts of each block that were accepted, shape [blocks]."""
        return np.array([block[3] for block in self._blocks], np.int64)

    def choose(self, confidences: Sequence[Sequence[float]], num_running: int) -> list[int]:
        """Every draft.

        Args:
            confidences: Of each row, those of the block before.
            num_running: Requests that run.

        Returns:
            One number a row.
        """
        return [self.num_drafts] * len(confidences)

    def trim(
        self,
        confidences: Sequence[Sequence[float]],
        counts: Sequence[int],
        other_rows: int = 0,
        *,
        margins: Sequence[Sequence[float]] = (),
    ) -> list[int]:
        """Every draft.

        Args:
            confidences: Of each row, those of the block at hand.
            counts: Drafts of each row.
            other_rows: Other rows of the step.
            margins: Margins of each row.

        Returns:
            `counts`.
        """
        return list(counts)

    def learn(
        self,
        confidences: Sequence[Sequence[float]],
        verified: Sequence[int],
        accepted: Sequence[int],
        *,
        margins: Sequence[Sequence[float]] = (),
    ) -> None:
        """Keeps the blocks of a step.

        Args:
            confidences: Of each block.
            verified: Drafts of each block that were verified.
            accepted: Those of them that were accepted.
            margins: Margins of each block; or empty.

        Raises:
            ShapeError: There is not one row and one number a block.
        """
        counts = {len(confidences), len(verified), len(accepted), len(margins) or len(verified)}
        if len(counts) > 1:
            found = (len(confidences), len(verified), len(accepted), len(margins))
            raise shape_error(
                "confidences, verified, accepted and margins",
                found,
                "[blocks] each, margins or none",
            )
        told = margins if len(margins) else [()] * len(confidences)
        for row, gaps, seen, kept in zip(confidences, told, verified, accepted, strict=True):
            self._blocks.append((self._whole(row), self._whole(gaps), int(seen), int(kept)))

    def _whole(self, values: Sequence[float]) -> list[float]:
        known = [float(value) for value in values[: self.num_drafts]]
        return known + [float("nan")] * (self.num_drafts - len(known))
