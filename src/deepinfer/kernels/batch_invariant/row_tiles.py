"""Matrix products on the CPU whose rows do not depend on how many rows there are.

A BLAS takes other roads for few rows than for many, and their sums differ in the last bits. It does take the same
road for the same shape, and for most shapes from some number of rows on. `tile_sizes` finds, for one shape of
weight, the row counts that give equal rows; products are then cut into such tiles, the last one padded with zeros.
"""

from __future__ import annotations

import functools

import torch
import torch.nn.functional as F
from torch import Tensor

from deepinfer.core.errors import UnsupportedHardware

__all__ = ["tile_sizes", "tiled_linear"]

_SIZES = (1, 2, 4, 8, 16, 32, 64, 128)
_BASE = 16
_MOST_TESTED_WEIGHTS = 2**23


@functools.lru_cache(maxsize=4096)
def tile_sizes(
    out_channels: int, in_channels: int, dtype: torch.dtype, num_threads: int
) -> tuple[int, ...]:
    """Row counts whose products with weights of one shape have equal rows, found by trying.

    Args:
        out_channels: Rows of the weight.
        in_channels: Columns of the weight.
        dtype: Dtype of both factors.
        num_threads: Threads that torch uses now; other counts may give other sizes, and other bits.

    Returns:
        Powers of two, ascending and without gaps; 16 is one of them.

    Raises:
        UnsupportedHardware: A row's bits depend on its place within a tile.
    """
    generator = torch.Generator().manual_seed(in_channels)
    sizes = _SIZES if out_channels * in_channels <= _MOST_TESTED_WEIGHTS else (_BASE,)
    with torch.inference_mode():
        x = torch.randn(sizes[-1], in_channels, generator=generator).to(dtype)
        weight = torch.randn(out_channels, in_channels, generator=generator).to(dtype)
        # Pairs that cancel: the products are nothing but rounding errors, and show every other order of the sums,
        # which the rounding of a bf16 result would hide most of the time.
        one, two = torch.randperm(in_channels, generator=generator)[: in_channels // 2 * 2].chunk(2)
        x[:, two], weight[:, two] = -x[:, one], weight[:, one]
        products = {s: _cut(x, weight, s) for s in sizes}
        shifted = _cut(x.roll(3, 0), weight, _BASE).roll(-3, 0)
    if not torch.equal(shifted, products[_BASE]):
        raise UnsupportedHardware(
            f"A product of 16 rows with a weight of shape ({out_channels}, {in_channels}), {dtype}, gives other "
            "bits when the rows change places. Deterministic arithmetic is not possible with this build of torch "
            "on this CPU; try another build, or another dtype.",
            needed="products whose rows do not depend on their place", found=str(dtype),
        )  # fmt: skip
    at = sizes.index(_BASE)
    equal = [torch.equal(products[s], products[_BASE]) for s in sizes]
    first, end = at, at + 1
    while first > 0 and equal[first - 1]:
        first -= 1
    while end < len(sizes) and equal[end]:
        end += 1
    return sizes[first:end]


def tiled_linear(x: Tensor, weight: Tensor) -> Tensor:
    """`x @ weight.T`, each row by itself.

    Args:
        x: Shape [rows, in_channels], on the CPU.
        weight: Shape [out_channels, in_channels], dtype of `x`.

    Returns:
        Shape [rows, out_channels], dtype of `x`.
    """
    rows = x.shape[0]
    if not rows:
        return x.new_empty(0, weight.shape[0])
    sizes = tile_sizes(*weight.shape, x.dtype, torch.get_num_threads())
    base = sizes[0]
    padded = -(-rows // base) * base
    if padded != rows:
        tile = x.new_zeros(padded, x.shape[1])
        tile[:rows] = x
        x = tile
    elif not x.is_contiguous():
        x = x.contiguous()
    if padded in sizes:
        return F.linear(x, weight)[:rows]
    parts = x.split(_cover(padded, sizes))
    return torch.cat([F.linear(part, weight) for part in parts])[:rows]


@functools.lru_cache(maxsize=4096)
def _cover(rows: int, sizes: tuple[int, ...]) -> list[int]:
    """Tiles, largest first, that make up `rows`, a multiple of the smallest."""
    found = []
    for size in reversed(sizes):
        count, rows = divmod(rows, size)
        found += [size] * count
    return found


def _cut(x: Tensor, weight: Tensor, size: int) -> Tensor:
    return torch.cat([F.linear(part, weight) for part in x.split(size)])
