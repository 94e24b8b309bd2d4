"""Masks of many outputs at once; those in the same state are computed once."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from deepinfer.core.errors import ConfigError, ShapeError
from deepinfer.grammar.bitmask import array_of, row_of
from deepinfer.grammar.matcher import GrammarMatcher

__all__ = ["fill_batch"]


def fill_batch(
    matchers: Sequence[GrammarMatcher | None],
    bitmask: Any,
    rows: Sequence[int] | None = None,
    *,
    max_full_walks: int | None = None,
) -> list[int]:
    """Fills the rows of a batch.

    Args:
        matchers: One an output; None leaves its row as it is.
        bitmask: Shape [rows, words], int32, a NumPy array or a torch tensor on the CPU.
        rows: Row of each matcher; None for its place in `matchers`.
        max_full_walks: Once the new rows of this call took so many walks over most of the vocabulary, matchers whose row
            is not known yet are put off. None for no bound.

    Returns:
        Places in `matchers` of those put off, whose rows are not written: call again with them, for instance while the
        device runs. Empty without a bound.

    Raises:
        ShapeError: The bitmask does not fit.
        ConfigError: `rows` has another length.
    """
    places = range(len(matchers)) if rows is None else rows
    if len(places) != len(matchers):
        raise ConfigError(
            f"{len(places)} rows for {len(matchers)} matchers; give one a matcher",
            field="rows",
            value=len(places),
        )
    groups: dict[tuple[object, int], list[int]] = {}
    before: tuple[object, int] | None = None
    group: list[int] = []
    for place, matcher in enumerate(matchers):
        if matcher is not None:
            key = matcher.mask_key
            if key != before:
                before, group = key, groups.setdefault(key, [])
            group.append(place)
    array = array_of(bitmask)
    later: list[int] = []
    walked = 0
    for members in groups.values():
        matcher = matchers[members[0]]
        if matcher is None:
            continue
        state, compiled = matcher.state, matcher.compiled
        known = state <= 0 or compiled.has_row(state)
        if not known and max_full_walks is not None and walked >= max_full_walks:
            later += members
            continue
        num_before = 0 if known else compiled.num_full_walks
        out = row_of(array, places[members[0]], compiled.vocab.num_words)
        matcher.fill_bitmask(out)
        if not known:
            walked += compiled.num_full_walks - num_before
        if len(members) > 1:
            others = [places[member] for member in members[1:]]
            first, last = others[0], others[-1]
            in_one_piece = 0 <= first <= last < len(array) and (
                last - first + 1 == len(others)
                if rows is None
                else others == list(range(first, last + 1))
            )
            try:
                if in_one_piece:  # written faster
                    array[first : last + 1] = out
                else:
                    array[others] = out
            except (IndexError, ValueError):
                raise ShapeError(
                    f"rows {others[:8]} of a bitmask of shape {array.shape}; allocate one row a matcher",
                    argument="rows",
                    expected="existing rows",
                    found=others,
                ) from None
    return sorted(later)
