"""Forms of the attention of many rows, measured beforehand."""

from __future__ import annotations

__all__ = ["WIDE", "portable"]

WIDE: tuple[int, bool, bool, int, int] = (1, False, True, 4, 64)
"""Pieces of a tile, lazy rescaling, staged stores, copying warps and their registers: `WideTuning`."""


def portable(heads: int, bytes_each: int) -> tuple[int, int, int, int]:
    """Sizes of the portable kernel.

    Args:
        heads: Query heads.
        bytes_each: Bytes of a channel.

    Returns:
        Heads, keys, warps and stages: `PortableTuning`.
    """
    if bytes_each == 4:
        return 16, 16, 4, 1
    return (16, 32, 4, 1) if heads <= 16 else (32, 32, 8, 1)
