"""Sizes for routing, places and rows of experts."""

from __future__ import annotations

__all__ = [
    "COUNT_DIRECTLY",
    "PADDED_EXPERTS",
    "ROOM_BYTES",
    "ROWS_OF_ROOM",
    "aligned_sizes",
    "expand_block",
    "map_sizes",
    "reduce_block",
    "swiglu_sizes",
]

COUNT_DIRECTLY = 2048
"""Up to so many pairs every program counts all of them; more are counted by blocks in a launch of their own."""

PADDED_EXPERTS = 8
"""Experts whose padding one program marks."""

ROWS_OF_ROOM = 32
"""Up to so many rows an expert, on average, each expert has room for all tokens."""

ROOM_BYTES = 4 << 30
"""That room may take so many bytes in all."""


def map_sizes(pairs: int) -> tuple[int, int, int]:
    """Pairs counted at once, pairs or places of a program, and warps.

    Args:
        pairs: Pairs of token and expert.
    """
    block = 128
    while block < min(pairs, 512):
        block *= 2
    return block, 128, 4


def expand_block(words: int) -> tuple[int, int]:
    """Words of a row that one program copies, and warps.

    Args:
        words: Words of a row, of 4 bytes where the row has whole ones.
    """
    return _divisor(words, 1024), 4


def reduce_block(channels: int) -> tuple[int, int]:
    """Channels that one program sums, and warps.

    Args:
        channels: Channels of a row.
    """
    return _divisor(channels, 1024), 4


def aligned_sizes() -> tuple[int, int]:
    """Groups of 32 of a program, and warps."""
    return 32, 4


def swiglu_sizes(group: int) -> tuple[int, int, int]:
    """Groups of a program, warps, and how exact the exponential is.

    Args:
        group: Channels of a group.
    """
    return max(1, 1024 // group), 4, 1


def _divisor(count: int, most: int) -> int:
    """The largest power of two up to `most` that wastes least of `count`."""
    best, least = 128, -(-count // 128) * 128
    size = 256
    while size <= most:
        padded = -(-count // size) * size
        if padded <= least:
            best, least = size, padded
        size *= 2
    return best
