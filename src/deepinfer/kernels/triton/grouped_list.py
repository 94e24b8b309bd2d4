"""The list of the tiles of rows that have work, made on the device."""

from __future__ import annotations

import triton
import triton.language as tl

__all__ = ["used_tiles_kernel"]


@triton.jit
def _later(a, b):
    return tl.maximum(a, b)


@triton.jit(do_not_specialize=["num_rows"])
def used_tiles_kernel(
    layout, tiles, num_rows, ROWS: tl.constexpr, ALIGNMENT: tl.constexpr, BLOCK: tl.constexpr
):
    """First rows of the tiles of ROWS rows that have work, in order, behind their number.

    A tile has work when its first row belongs to a group. Groups begin at multiples of ALIGNMENT, and so do larger tiles,
    which are counted from the beginning of their group. One program, since the places in the list are a running sum.
    """
    UNIT: tl.constexpr = min(ROWS, ALIGNMENT)
    EACH: tl.constexpr = ROWS // UNIT
    found = 0
    begin = 0
    for first in range(0, tl.cdiv(num_rows, UNIT), BLOCK):
        i = first + tl.arange(0, BLOCK)
        row = i * UNIT
        group = tl.load(layout + row, mask=row < num_rows, other=-1)
        used = (group >= 0).to(tl.int32)
        if EACH > 1:
            inside = (row >= UNIT) & (row < num_rows)
            before = tl.load(layout + row - UNIT, mask=inside, other=-2)
            since = tl.associative_scan(tl.where(group != before, i, begin), 0, _later)
            used = tl.where((i - since) % EACH == 0, used, 0)
            begin = tl.max(since, 0)
        place = found + tl.cumsum(used, 0) - used
        tl.store(tiles + 1 + place, row, mask=used != 0)
        found += tl.sum(used, 0)
    tl.store(tiles, found)
