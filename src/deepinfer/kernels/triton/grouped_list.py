"""Lists of the tiles of rows that have work, made on the device."""

from __future__ import annotations

import triton
import triton.language as tl

__all__ = ["ragged_tiles_kernel", "used_tiles_kernel"]


@triton.jit(do_not_specialize=["num_rows", "num_groups"])
def used_tiles_kernel(layout, tiles, num_rows, num_groups, ROWS: tl.constexpr, BLOCK: tl.constexpr):
    """First rows of the tiles of ROWS rows whose first row belongs to a group, in order, behind their number.

    One program, since the places in the list are a running sum.
    """
    found = 0
    for first in range(0, tl.cdiv(num_rows, ROWS), BLOCK):
        row = (first + tl.arange(0, BLOCK)) * ROWS
        group = tl.load(layout + row, mask=row < num_rows, other=-1)
        used = ((group >= 0) & (group < num_groups)).to(tl.int32)
        place = found + tl.cumsum(used, 0) - used
        tl.store(tiles + 1 + place, row, mask=used != 0)
        found += tl.sum(used, 0)
    tl.store(tiles, found)


@triton.jit(do_not_specialize=["num_rows", "num_groups"])
def ragged_tiles_kernel(layout, tiles, num_rows, num_groups, BLOCK: tl.constexpr):
    """Tiles of 128 rows, in order, behind their number: 256 times the block of 128 rows, plus the rows that are used.

    Up to 32 rows that follow 128 others of their group belong to the tile of those. The rows of a group stand together.
    """
    found = 0
    i = tl.arange(0, 16)[None, :]
    for first in range(0, tl.cdiv(num_rows, 128), BLOCK):
        block = first + tl.arange(0, BLOCK)
        row = block * 128
        own = tl.load(layout + row, mask=row < num_rows, other=-1)
        before = tl.load(layout + row - 1, mask=(row > 0) & (row < num_rows), other=-1)
        over_32 = tl.load(layout + row + 32, mask=row + 32 < num_rows, other=-1)
        known = (own >= 0) & (own < num_groups)
        used = (known & ((over_32 == own) | (before != own))).to(tl.int32)
        # Whole sixteens up to row 160, then the rows of the last one.
        at = row[:, None] + 16 * i + 15
        last = tl.load(layout + at, mask=(i < 10) & (at < num_rows), other=-1)
        whole = tl.sum((last == own[:, None]).to(tl.int32), axis=1)
        at = (row + 16 * whole)[:, None] + i
        rest = tl.load(layout + at, mask=(whole < 11)[:, None] & (at < num_rows), other=-1)
        count = 16 * whole + tl.sum((rest == own[:, None]).to(tl.int32), axis=1)
        count = tl.where(count > 160, 128, count)
        place = found + tl.cumsum(used, 0) - used
        tl.store(tiles + 1 + place, block * 256 + count, mask=used != 0)
        found += tl.sum(used, 0)
    tl.store(tiles, found)
