"""Sizes for the selection of the k largest: block, groups, capacity, warps."""

from __future__ import annotations

_PROCESSORS = 132

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


def lookup_wide(rows: int, n: int, k: int) -> tuple[int, int, int, int]:
    """Groups, capacity, warps and registers where registers are set by hand.

    Args:
        rows: Rows.
        n: Elements of a row.
        k: How many are selected.

    Returns:
        In the order of the tuning's fields.
    """
    few = rows <= 2 * _PROCESSORS
    if n <= (max(2048, min(4 * k, 8192)) if few else 2048):
        # A row is held whole, 8 or 16 elements a thread.
        held = max(256, _power(n))
        return held, held, held // (256 if held <= (1024 if few else 512) else 512), 0
    groups = max(1024, _power(2 * k))
    if few:
        warps = 8 if n <= 8192 or (rows > _PROCESSORS and n <= 65536) else 16
    else:
        warps = 4 if n <= 16384 else 8 if n <= 65536 else 16
    warps = max(warps, groups // 256)
    # Programs share a processor: 8 of 4 warps, 2 of 16.
    shared = not few or (rows > _PROCESSORS and warps == 16)
    return groups, groups, warps, 64 if shared and warps < 32 else 0


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
) -> tuple[int, int, int, int, int, int, int, bool, int] | None:
    """Sizes where the maxima of small groups are made first and registers are set by hand.

    The second program reads n / group maxima, and about 1.1 * k * group elements: a group of sqrt(n / (1.1 * k)) makes
    the sum least.

    Args:
        rows: Rows.
        n: Elements of a row.
        k: How many are selected.
        item_bytes: Bytes of an element.

    Returns:
        In the order of the tuning's fields; None where a program a row does better.
    """
    few = rows <= _PROCESSORS
    if not 32768 <= n <= 1 << 20 or (rows > 2 * _PROCESSORS and n * item_bytes < 65536):
        return None
    if not few and k > 1024 and n <= 32768:
        return None
    group = 4
    while group < 64 and 2.2 * k * group * group < n:
        group *= 2
    # Many rows write and read their maxima.
    most = 16384 if few else max(4096, 4 * k)
    while group < 64 and n // group > most:
        group *= 2
    coarse = max(2048, min(4096, _power(4 * k)) if few else 0, _power(2 * k))
    warps = 8 if few else 4
    if k > 512:
        warps = 16 if few or k > 2048 else 8
    # With fewer registers a thread holds 32 maxima, else 64.
    while warps < 16 and 256 * warps * (8 if few else 4) < _power(-(-n // group)):
        warps *= 2
    coarse = max(coarse, 256 * warps)
    block, block_warps = (16384, 8) if n > 262144 else (4096, 4)
    capacity = max(1024, _power(2 * k))
    tiles = 1 if group > 8 else 2
    if few and warps == 8:
        tiles = 3
    elif few and group <= 8 and item_bytes == 2:
        tiles = 3 if k <= 1024 else 4
    registers = 0 if few else 112 if warps == 4 else 80 if group > 8 and n // group <= 4096 else 128
    return group, block, block_warps, coarse, capacity, tiles, warps, True, registers


def _power(n: int) -> int:
    """The power of two that is not below n."""
    found = 1
    while found < n:
        found *= 2
    return found
