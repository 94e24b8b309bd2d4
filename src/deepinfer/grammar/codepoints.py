"""Sets of Unicode scalar values as sorted ranges.

Surrogates (U+D800 to U+DFFF) are in no set: no UTF-8 text can hold one.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable

__all__ = [
    "ALL",
    "MAX_CODE_POINT",
    "NONE",
    "CodePoints",
    "complement",
    "contains",
    "difference",
    "from_text",
    "intersection",
    "make",
    "overlaps",
    "union",
]

CodePoints = tuple[tuple[int, int], ...]
"""Ranges `(first, last)`, both inclusive, ascending, not touching, without surrogates."""

MAX_CODE_POINT = 0x10FFFF
_SURROGATES = (0xD800, 0xDFFF)

NONE: CodePoints = ()
ALL: CodePoints = ((0, 0xD7FF), (0xE000, MAX_CODE_POINT))


def make(ranges: Iterable[tuple[int, int]]) -> CodePoints:
    """Brings ranges into the normal form.

    Args:
        ranges: Ranges `(first, last)` in any order; they may overlap, and empty ones (first > last) count for nothing.

    Returns:
        The set.
    """
    parts: list[tuple[int, int]] = []
    for first, last in ranges:
        first, last = max(first, 0), min(last, MAX_CODE_POINT)
        if first <= last:
            if first < _SURROGATES[0] and last >= _SURROGATES[0]:
                parts.append((first, _SURROGATES[0] - 1))
                first = _SURROGATES[1] + 1
            elif _SURROGATES[0] <= first <= _SURROGATES[1]:
                first = _SURROGATES[1] + 1
            if first <= last:
                parts.append((first, last))
    if len(parts) < 2:
        return tuple(parts)
    parts.sort()
    merged = [parts[0]]
    for first, last in parts[1:]:
        before = merged[-1]
        # U+D7FF and U+E000 are not neighbours: a range across them would hold surrogates.
        if first <= before[1] + 1:
            if last > before[1]:
                merged[-1] = (before[0], last)
        else:
            merged.append((first, last))
    return tuple(merged)


def from_text(text: str) -> CodePoints:
    """The set of a text's characters.

    Args:
        text: The characters.

    Returns:
        The set.
    """
    return make((ord(character), ord(character)) for character in text)


def union(*sets: CodePoints) -> CodePoints:
    """What is in any of the sets.

    Args:
        *sets: The sets.

    Returns:
        Their union.
    """
    return make(part for points in sets for part in points)


def complement(points: CodePoints) -> CodePoints:
    """Every scalar value that is not in a set.

    Args:
        points: The set.

    Returns:
        The others.
    """
    gaps = []
    after = 0
    for first, last in points:
        gaps.append((after, first - 1))
        after = last + 1
    gaps.append((after, MAX_CODE_POINT))
    return make(gaps)


def intersection(left: CodePoints, right: CodePoints) -> CodePoints:
    """What is in both sets.

    Args:
        left: One set.
        right: The other.

    Returns:
        Their intersection.
    """
    found = []
    i = j = 0
    while i < len(left) and j < len(right):
        first = max(left[i][0], right[j][0])
        last = min(left[i][1], right[j][1])
        if first <= last:
            found.append((first, last))
        if left[i][1] < right[j][1]:
            i += 1
        else:
            j += 1
    return tuple(found)


def difference(left: CodePoints, right: CodePoints) -> CodePoints:
    """What is in the first set and not in the second.

    Args:
        left: The first set.
        right: The second.

    Returns:
        Their difference.
    """
    return intersection(left, complement(right))


def overlaps(left: CodePoints, right: CodePoints) -> bool:
    """Whether two sets share a member.

    Args:
        left: One set.
        right: The other.

    Returns:
        True when they do.
    """
    return bool(intersection(left, right))


def contains(points: CodePoints, code_point: int) -> bool:
    """Whether a set holds a code point.

    Args:
        points: The set.
        code_point: The code point.

    Returns:
        True when it does.
    """
    at = bisect_right(points, (code_point, MAX_CODE_POINT))
    return at > 0 and code_point <= points[at - 1][1]
