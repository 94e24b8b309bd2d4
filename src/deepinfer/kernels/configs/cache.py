"""Rows and warps of a program of the cache kernels."""

from __future__ import annotations

__all__ = ["lookup_compress", "lookup_gather", "lookup_insert", "lookup_pairs"]


def lookup_insert(rows: int, channels: int, plain: bool) -> tuple[int, int]:
    """For inserts.

    Args:
        rows: Rows of the call.
        channels: Channels of a row.
        plain: Whether rows are quantised only; a norm sums a row, which one warp does alone.

    Returns:
        In the order of the tuning's fields.
    """
    if channels <= 128:
        return (4, 1) if rows <= 512 or not plain else (16, 4)
    return (1, 1) if rows <= 512 or not plain else (4, 4)


def lookup_pairs(rows: int, channels: int, pools: bool) -> tuple[int, int, int, bool]:
    """For inserts and the compressor two values at a time; a row is summed in one order whatever these are.

    Args:
        rows: Rows of the call.
        channels: Channels of a row.
        pools: Whether it is the compressor.

    Returns:
        Rows and warps of a program, pairs of a thread side by side, and whether turned channels are spread over a warp.
    """
    if channels <= 128:
        return 4, 1, 8, False
    if rows <= 512:
        return 1, 1, 8, True
    return (4, 4, 8, True) if pools else (2, 2, 8, True)


def lookup_gather(rows: int, channels: int) -> tuple[int, int]:
    """For gathers.

    Args:
        rows: Rows of the call.
        channels: Channels of a row.

    Returns:
        In the order of the tuning's fields.
    """
    if channels <= 128:
        return (4, 1) if rows <= 512 else (16, 4)
    return (1, 1) if rows <= 512 else (8, 4)


def lookup_compress(rows: int) -> tuple[int, int]:
    """For the compressor.

    Args:
        rows: Latents of the call.

    Returns:
        In the order of the tuning's fields.
    """
    return 1, 2
