"""Descriptors of bulk copies, made for every launch: without the checks that the callers have made, and with names made once.

Triton names a layout by its `repr` in each launch, and writes it anew each time; here it is kept.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache

from torch import Tensor
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

__all__ = ["list_layout", "listed", "matrix", "tensor_map", "tile_layout"]


class _NamedLayout(gl.NVMMASharedLayout):  # type: ignore[misc]
    """A layout that knows its name."""

    def __repr__(self) -> str:
        name: str = self.__dict__["_name"]
        return name


def _named(layout: gl.NVMMASharedLayout) -> gl.NVMMASharedLayout:
    named = object.__new__(_NamedLayout)
    named.__dict__.update(vars(layout), _name=repr(layout))
    return named


@lru_cache(maxsize=256)
def tile_layout(bytes_a_row: int, bits: int) -> gl.NVMMASharedLayout:
    """A tile in shared memory as bulk copies write and tensor cores read it."""
    swizzle = min(bytes_a_row, 128)
    return _named(gl.NVMMASharedLayout(swizzle_byte_width=swizzle, element_bitwidth=bits))


@lru_cache(maxsize=1)
def list_layout() -> gl.NVMMASharedLayout:
    """A list of 32-bit values in shared memory as bulk copies write it."""
    return _named(gl.NVMMASharedLayout(swizzle_byte_width=0, element_bitwidth=32, rank=1))


def tensor_map(
    x: Tensor, shape: Sequence[int], strides: Sequence[int], box: list[int], layout: gl.NVMMASharedLayout
) -> TensorDescriptor:  # fmt: skip
    """A descriptor of boxes of a tensor.

    Args:
        x: The tensor, of any shape; begins at a multiple of 16 bytes.
        shape: Its sizes, all above 0.
        strides: Its strides in elements, the last 1, the others multiples of 16 bytes.
        box: Sizes of a box, powers of two.
        layout: How a box lies in shared memory.

    Returns:
        The descriptor; nothing is checked.
    """
    found: TensorDescriptor = object.__new__(TensorDescriptor)
    found.base, found.shape, found.strides = x, list(shape), list(strides)
    found.block_shape, found.layout = box, layout
    return found


def matrix(x: Tensor, rows: int, columns: int) -> TensorDescriptor:
    """A descriptor of [rows, columns] boxes of a matrix [any, any]."""
    size = x.itemsize
    layout = tile_layout(columns * size, 8 * size)
    return tensor_map(x, x.shape, x.stride(), [rows, columns], layout)


def listed(x: Tensor, size: int) -> TensorDescriptor:
    """A descriptor of lists of `size` 32-bit values that lie anywhere in a contiguous tensor."""
    return tensor_map(x.view(-1), (x.numel(),), (1,), [size], list_layout())
