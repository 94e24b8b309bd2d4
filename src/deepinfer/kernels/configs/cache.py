"""Rows and warps of a program of the cache kernels."""

from __future__ import annotations

__all__ = ["lookup", "lookup_compress"]


def lookup(rows: int, channels: int) -> tuple[int, int]:
    """For inserts and gathers.

    Args:
        rows: Rows of the call.
        channels: Channels of a row.

    Returns:
        In the order of the tuning's fields.
    """
    if rows <= 512:
        return (1, 1) if channels > 128 else (4, 1)
    return (4, 4) if channels > 128 else (16, 4)


def lookup_compress(rows: int) -> tuple[int, int]:
    """For the compressor.

    Args:
        rows: Latents of the call.

    Returns:
        In the order of the tuning's fields.
    """
    return 1, 2
