"""How drafts fared, by their place in a block."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Iterable
from typing import NamedTuple

__all__ = ["BlockCounts", "PositionCounts"]


class PositionCounts(NamedTuple):
    """Drafts at one place of their blocks.

    Attributes:
        proposed: Drafts that were made. Where a drafter gives no confidences, only those that were verified are known.
        verified: Those that the model ran.
        accepted: Those that became output.
    """

    proposed: int
    verified: int
    accepted: int


class BlockCounts:
    """Counts blocks by their lengths, which is all that the counts by place need."""

    def __init__(self) -> None:
        self._lengths: tuple[Counter[int], Counter[int], Counter[int]] = (
            Counter(), Counter(), Counter()
        )  # fmt: skip

    def add(self, proposed: int, verified: int, accepted: int) -> None:
        """Counts one block.

        Args:
            proposed: Drafts made.
            verified: How many of them the model ran.
            accepted: How many of those became output.
        """
        for counter, length in zip(self._lengths, (proposed, verified, accepted), strict=True):
            counter[length] += 1

    def add_all(
        self, proposed: Iterable[int], verified: Iterable[int], accepted: Iterable[int]
    ) -> None:
        """Counts many blocks.

        Args:
            proposed: Drafts made of each.
            verified: How many of them the model ran.
            accepted: How many of those became output.
        """
        for counter, lengths in zip(self._lengths, (proposed, verified, accepted), strict=True):
            counter.update(lengths)

    def by_position(self) -> tuple[PositionCounts, ...]:
        """One entry a place, from the first."""
        longest = max((max(counter, default=0) for counter in self._lengths), default=0)
        columns = [
            list(itertools.accumulate(counter[at] for at in range(longest, 0, -1)))[::-1]
            for counter in self._lengths
        ]
        return tuple(itertools.starmap(PositionCounts, zip(*columns, strict=True)))
