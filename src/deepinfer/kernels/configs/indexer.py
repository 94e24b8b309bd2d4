"""Sizes of the index scores."""

from __future__ import annotations

from functools import lru_cache

import torch

__all__ = ["PROGRAMS", "SPLIT", "lookup", "lookup_paged", "lookup_pages", "num_sms"]

SPLIT = 256
"""Keys of a split of the paged work, which programs share."""

PROGRAMS = 4
"""Programs a processor that share it."""


_SCORES = {
    8: (16, 15, 8192, 3, 1),
    16: (8, 15, 8192, 3, 1),
    32: (8, 8, 16384, 2, 1),
    64: (2, 15, 8192, 3, 1),
}


def lookup(heads: int) -> tuple[int, int, int, int, int]:
    """Sizes of the scores of many queries.

    Args:
        heads: Heads: 8, 16, 32 or 64.

    Returns:
        In the order of the tuning's fields.
    """
    return _SCORES[heads]


def lookup_paged(columns: int, packed: bool) -> tuple[int, int, int]:
    """Sizes over paged keys.

    Args:
        columns: Queries of a request times heads.
        packed: Whether the keys are MXFP4.

    Returns:
        In the order of the tuning's fields: keys at once, stages, warps.
    """
    return 64, 4 if not packed else 3, 4 if columns <= 64 else 8


def lookup_pages(next_n: int, heads: int, packed: bool) -> tuple[int, int, int, bool, bool]:
    """Sizes over pages of whole tiles, on Hopper.

    Args:
        next_n: Queries of a request; times heads at most 256.
        heads: Heads, 128 at most, or 64 for MXFP4 keys.
        packed: Whether the keys are MXFP4.

    Returns:
        In the order of the tuning's fields.
    """
    widest = 64 if packed else 128
    # Five and six queries are three pairs rather than two fours.
    most = 2 if next_n in (5, 6) else 4
    queries = 1
    while queries < min(next_n, most) and 2 * queries * heads <= widest:
        queries *= 2
    columns = queries * heads
    if not packed:
        return queries, 8, 2, columns <= 64, False
    # One form for all, so that a score is the same bits for any number of queries.
    if queries < next_n:
        return queries, 14, 2, False, True
    return queries, 15, 3, columns <= 32 and queries == 1, True


def num_sms(device: torch.device) -> int:
    """Processors of a device."""
    return _processors(device.index) if device.type == "cuda" else 1


@lru_cache(maxsize=16)
def _processors(index: int | None) -> int:
    return torch.cuda.get_device_properties(index or 0).multi_processor_count
