"""Sizes for the selection of the k largest: block, groups, capacity, warps."""

from __future__ import annotations

__all__ = ["lookup", "lookup_wide"]


def lookup(rows: int, n: int, k: int) -> tuple[int, int, int, int]:
    """Sizes for a shape.

    Args:
        rows: Rows.
        n: Elements of a row.
        k: How many are selected.

    Returns:
        In the order of the tuning's fields.
    """
    capacity = 1024
    while capacity < 2 * k:
        capacity *= 2
    if k > 1024:
        return max(4096, capacity), capacity, capacity, 32
    if n >= 65536:
        return 8192, 2048, max(capacity, 2048), 32
    return max(4096, capacity), capacity, capacity, 16


def lookup_wide(n: int, k: int) -> tuple[int, int, int]:
    """Groups, capacity and warps where registers are set by hand.

    Args:
        n: Elements of a row.
        k: How many are selected.

    Returns:
        In the order of the tuning's fields.
    """
    groups = 1024
    while groups < 2 * k:
        groups *= 2
    warps = 4 if n <= 16384 else 8 if n <= 65536 else 16
    return groups, groups, max(warps, groups // 256)
