"""Partitions of the bytes, and how they combine.

A node's moves are a `Cut`, some disjoint byte sets, and one target for each set. Few cuts occur in a grammar, though
many nodes: how two cuts combine is worked out once and then only the targets are put together.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

from deepinfer.grammar._ir_nodes import ALL_BYTES

__all__ = ["Cells", "Cut", "CutStore"]

T = TypeVar("T")

Cells = tuple[tuple[tuple[int, int], ...], ...]
"""For each set of a combined cut, the (part, place) pairs whose targets meet there."""


class Cut:
    """Disjoint byte sets.

    Attributes:
        number: Number of the cut in its store.
        masks: The sets as 256-bit masks; none is 0.
        index: For each byte class, the place of its set in `masks` plus 1, or 0: shape [classes]. None until used.
    """

    __slots__ = ("index", "masks", "number")

    def __init__(self, number: int, masks: tuple[int, ...]) -> None:
        self.number = number
        self.masks = masks
        self.index: NDArray[np.intp] | None = None


class CutStore:
    """Keeps each cut once, and each way to combine cuts."""

    def __init__(self) -> None:
        self._cuts: dict[tuple[int, ...], Cut] = {}
        self._unions: dict[tuple[int, ...], tuple[Cut, Cells]] = {}
        self._products: dict[tuple[int, ...], tuple[Cut, Cells]] = {}
        self._groups: dict[tuple[int, tuple[int, ...]], Cut] = {}
        self._rests: dict[int, Cut] = {}
        self.nothing = self.cut(())
        self.everything = self.cut((ALL_BYTES,))

    def cut(self, masks: tuple[int, ...]) -> Cut:
        """The cut with these sets, in this order."""
        found = self._cuts.get(masks)
        if found is None:
            found = self._cuts[masks] = Cut(len(self._cuts), masks)
        return found

    def grouped(self, cut: Cut, targets: Sequence[T], nothing: T) -> tuple[Cut, tuple[T, ...]]:
        """Join the sets that have one target, and drop those that lead to `nothing`."""
        places: dict[T, int] = {}
        for target in targets:
            if target is not nothing and target not in places:
                places[target] = len(places)
        if len(places) == len(targets):
            return cut, tuple(targets)
        pattern = tuple([places.get(target, -1) for target in targets])
        key = (cut.number, pattern)
        found = self._groups.get(key)
        if found is None:
            joined = [0] * len(places)
            for mask, place in zip(cut.masks, pattern, strict=True):
                if place >= 0:
                    joined[place] |= mask
            found = self._groups[key] = self.cut(tuple(joined))
        return found, tuple(places)

    def rest(self, cut: Cut) -> Cut:
        """The cut with one more set at the end for the bytes that are in none; itself when there are none."""
        found = self._rests.get(cut.number)
        if found is None:
            rest = ALL_BYTES
            for mask in cut.masks:
                rest &= ~mask
            found = self._rests[cut.number] = self.cut((*cut.masks, rest)) if rest else cut
        return found

    def union(self, parts: Sequence[Cut]) -> tuple[Cut, Cells]:
        """Common refinement of cuts; bytes of any part are covered."""
        key = tuple([part.number for part in parts])
        found = self._unions.get(key)
        if found is None:
            found = self._unions[key] = self._refine(parts)
        return found

    def _refine(self, parts: Sequence[Cut]) -> tuple[Cut, Cells]:
        # Equal sets first: most overlaps are whole sets, as those of literals with one first byte.
        by_mask: dict[int, list[tuple[int, int]]] = {}
        for number, part in enumerate(parts):
            for place, mask in enumerate(part.masks):
                by_mask.setdefault(mask, []).append((number, place))
        cells: list[tuple[int, list[tuple[int, int]]]] = []
        for mask, sources in by_mask.items():
            rest = mask
            for place in range(len(cells)):
                cell, members = cells[place]
                common = cell & rest
                if not common:
                    continue
                if common != cell:
                    cells.append((cell & ~common, members))
                cells[place] = (common, members + sources)
                rest &= ~common
                if not rest:
                    break
            if rest:
                cells.append((rest, sources))
        return self.cut(tuple([mask for mask, _ in cells])), tuple([tuple(s) for _, s in cells])

    def product(self, parts: Sequence[Cut]) -> tuple[Cut, Cells]:
        """Intersections of one set of each cut, where not empty."""
        key = tuple([part.number for part in parts])
        found = self._products.get(key)
        if found is None:
            cells: list[tuple[int, tuple[tuple[int, int], ...]]] = [(ALL_BYTES, ())]
            for number, part in enumerate(parts):
                cells = [
                    (mask & other, (*sources, (number, place)))
                    for mask, sources in cells
                    for place, other in enumerate(part.masks)
                    if mask & other
                ]
            found = (self.cut(tuple([m for m, _ in cells])), tuple([s for _, s in cells]))
            self._products[key] = found
        return found
