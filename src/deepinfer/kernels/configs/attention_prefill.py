"""Forms of the attention of many rows, measured beforehand."""

from __future__ import annotations

__all__ = ["few", "paired", "portable"]


def paired() -> tuple[int, int, int]:
    """Form of the kernel for 64 heads a program.

    Returns:
        Keys copied at once, registers of the warps that copy, and of those that multiply: `PairedTuning`.
    """
    return 64, 64, 224


def few(heads: int) -> tuple[int, int, int, int, int, int]:
    """Form of the kernel for at most 32 heads.

    Args:
        heads: Query heads.

    Returns:
        Heads of a program, pieces of a tile, tiles of the ring, keys copied at once, copying warps, their registers: `FewTuning`.
    """
    if heads <= 16:
        return 8 if heads <= 8 else 16, 1, 3, 64, 4, 96
    return 32, 1, 2, 64, 4, 96


def portable(
    heads: int, bytes_each: int, tail: bool = False, shared_bytes: int = 0
) -> tuple[int, int, int, int]:
    """Sizes of the portable kernel; the tiles of keys, and so the order of sums, hang on `bytes_each` alone.

    Args:
        heads: Query heads.
        bytes_each: Bytes of a channel.
        tail: Whether keys have channels that are no values.
        shared_bytes: Shared memory that a program may have on the device.

    Returns:
        Heads, keys, warps and stages: `PortableTuning`.
    """
    if bytes_each == 4:
        return 16, 16, 4, 1
    wide = heads > 32 and not tail and shared_bytes >= 166_912
    return (64, 32, 8, 2) if wide else (16, 32, 4, 2)
