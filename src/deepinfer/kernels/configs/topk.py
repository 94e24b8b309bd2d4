"""Sizes for the selection of the k largest: block, groups, capacity, warps."""

from __future__ import annotations

__all__ = ["lookup", "lookup_by_groups", "lookup_grouped", "lookup_wide"]


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


def lookup_grouped(n: int, k: int) -> tuple[int, int, int, int, int, int, int] | None:
    """Sizes where the maxima of small groups are made first.

    Args:
        n: Elements of a row.
        k: How many are selected.

    Returns:
        In the order of the tuning's fields; None where a row is too short for it.
    """
    groups = 1024
    while groups < 2 * k:
        groups *= 2
    group = 4
    while n // group > 8 * groups and group < 64:
        group *= 2
    if k > 1024 or n < 4 * groups * group:
        return None
    capacity = max(1024, 2 * groups if k > 512 else groups)
    return group, 4096, 4, groups, capacity, max(64, min(512, 8192 // group)), 16


def lookup_by_groups(
    rows: int, n: int, k: int, item_bytes: int
) -> tuple[int, int, int, int, int, int, int, int, bool] | None:
    """Sizes where the maxima of small groups are made first and registers are set by hand.

    Args:
        rows: Rows.
        n: Elements of a row.
        k: How many are selected.
        item_bytes: Bytes of an element.

    Returns:
        In the order of the tuning's fields; None where a program a row does better.
    """
    if k > 2048 or not 32768 <= n <= 1 << 20 or (rows > 256 and n * item_bytes < 65536):
        return None
    if k > 512:
        return (16 if n <= 262144 else 64), 4096, 4, 2 * _power(k), 2, 16, 0, 8, False
    if n <= 32768:
        return 16, 4096, 4, 1024, 2, 4, 96, 8, False
    if n <= 262144:
        return 16, 4096, 4, 1024, 4, 8, 0, 8, False
    return (
        (32, 16384, 8, 1024, 1, 16, 0, 8, False)
        if item_bytes == 2
        else (64, 16384, 8, 1024, 1, 8, 0, 8, False)
    )


def _power(k: int) -> int:
    """The power of two that is not below k, 512 at least."""
    found = 512
    while found < k:
        found *= 2
    return found
