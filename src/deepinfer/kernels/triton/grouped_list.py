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


@triton.jit(do_not_specialize=["num_rows"])
def ragged_tiles_kernel(layout, tiles, num_rows, BLOCK: tl.constexpr):
    """Tiles that are as wide as there are rows, in order, behind their number: first row, a multiple of 128, plus a kind.

    Kinds 0 to 3 have up to 64, 80, 96 and 128 rows; 4 and 5 have 128, and up to 16 or 32 of the same group behind them.
    """
    found = 0
    for first in range(0, tl.cdiv(num_rows, 128), BLOCK):
        row = (first + tl.arange(0, BLOCK)) * 128
        own = tl.load(layout + row, mask=row < num_rows, other=-1)
        before = tl.load(layout + row - 1, mask=(row > 0) & (row < num_rows), other=-1)
        over_32 = tl.load(layout + row + 32, mask=row + 32 < num_rows, other=-1)
        over_64 = tl.load(layout + row + 64, mask=row + 64 < num_rows, other=-1)
        over_80 = tl.load(layout + row + 80, mask=row + 80 < num_rows, other=-1)
        over_96 = tl.load(layout + row + 96, mask=row + 96 < num_rows, other=-1)
        last = tl.load(layout + row + 127, mask=row + 127 < num_rows, other=-1)
        after = tl.load(layout + row + 128, mask=row + 128 < num_rows, other=-1)
        over_144 = tl.load(layout + row + 144, mask=row + 144 < num_rows, other=-1)
        over_160 = tl.load(layout + row + 160, mask=row + 160 < num_rows, other=-1)
        # A few rows behind 128 others of their group belong to the tile of those.
        used = ((own >= 0) & ((over_32 >= 0) | (before != own))).to(tl.int32)
        kind = (
            (over_64 >= 0).to(tl.int32) + (over_80 >= 0).to(tl.int32) + (over_96 >= 0).to(tl.int32)
        )
        more = tl.where(over_144 == own, 5, 4)
        kind = tl.where((last == own) & (after == own) & (over_160 < 0), more, kind)
        place = found + tl.cumsum(used, 0) - used
        tl.store(tiles + 1 + place, row + kind, mask=used != 0)
        found += tl.sum(used, 0)
    tl.store(tiles, found)
