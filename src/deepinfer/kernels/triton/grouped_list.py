"""The list of the tiles of rows that have work, made on the device."""

from __future__ import annotations

import triton
import triton.language as tl

__all__ = ["used_tiles_kernel"]


@triton.jit(do_not_specialize=["num_rows"])
def used_tiles_kernel(layout, tiles, num_rows, ROWS: tl.constexpr, BLOCK: tl.constexpr):
    """First rows of the tiles of ROWS rows whose first row belongs to a group, in order, behind their number.

    One program, since the places in the list are a running sum.
    """
    found = 0
    for first in range(0, tl.cdiv(num_rows, ROWS), BLOCK):
        row = (first + tl.arange(0, BLOCK)) * ROWS
        used = (tl.load(layout + row, mask=row < num_rows, other=-1) >= 0).to(tl.int32)
        place = found + tl.cumsum(used, 0) - used
        tl.store(tiles + 1 + place, row, mask=used != 0)
        found += tl.sum(used, 0)
    tl.store(tiles, found)
