"""Token masks as packed bits: allocation, and single rows in compact form.

Bit `t & 31` of the int32 word `t >> 5` is 1 where token t is allowed, which is the layout of the other grammar engines.
"""

from __future__ import annotations

from collections.abc import Iterable
from numbers import Integral
from typing import Any

import numpy as np
from numpy.typing import NDArray

from deepinfer.core.errors import ShapeError
from deepinfer.core.lazy import optional_import

__all__ = ["MaskRow", "allocate_bitmask", "pack_ids", "row_of"]

Int32Array = NDArray[np.int32]
IndexArray = NDArray[np.intp]  # with indices of another type NumPy writes ten times slower

COMPACT_WORDS = 1000
"""A row that differs from an empty or full one in fewer words than this is kept as the differing words."""


def allocate_bitmask(
    batch: int, vocab_size: int, *, pin: bool = False, backend: str = "numpy"
) -> Any:
    """Makes a bitmask that allows everything.

    Args:
        batch: Rows.
        vocab_size: Columns of the logits.
        pin: Whether the memory is page-locked, so that it can be copied to a GPU while the CPU goes on; torch only.
        backend: "numpy" or "torch".

    Returns:
        Shape [batch, ceil(vocab_size / 32)], int32, every bit 1.

    Raises:
        ShapeError: A size is negative, or the backend is unknown.
    """
    whole = isinstance(batch, Integral) and isinstance(vocab_size, Integral)
    if not whole or batch < 0 or vocab_size < 0 or backend not in ("numpy", "torch"):
        raise ShapeError(
            f"batch {batch!r}, vocab_size {vocab_size!r}, backend {backend!r}: sizes must be integers of at least 0 and "
            'the backend "numpy" or "torch"',
            argument="batch",
            expected="[batch, words]",
            found=(batch, vocab_size),
        )
    shape = (batch, -(-vocab_size // 32))
    if backend == "torch":
        torch = optional_import("torch")
        return torch.full(shape, -1, dtype=torch.int32, pin_memory=pin)
    return np.full(shape, -1, dtype=np.int32)


def array_of(bitmask: Any) -> NDArray[Any]:
    """A bitmask as a NumPy array over the same memory.

    Args:
        bitmask: A NumPy array or a torch tensor on the CPU.

    Returns:
        The array, of any shape and dtype.

    Raises:
        ShapeError: It is neither.
    """
    if isinstance(bitmask, np.ndarray):
        return bitmask
    try:
        out: NDArray[Any] = bitmask.numpy()
    except (AttributeError, TypeError, RuntimeError) as error:
        raise ShapeError(
            f"a bitmask must be a NumPy array or a torch tensor on the CPU, found {type(bitmask).__name__}: "
            f"{error}",
            argument="bitmask",
            expected="int32 [rows, words]",
            found=type(bitmask).__name__,
        ) from error
    return out


def row_of(bitmask: Any, row: int, num_words: int) -> Int32Array:
    """One row of a bitmask as an array that writes into it.

    Args:
        bitmask: Shape [rows, words] or [words], int32, a NumPy array or a torch tensor on the CPU.
        row: Which row; from the end when negative. 0 for a single one.
        num_words: Words that it must hold at least.

    Returns:
        The row, shape [words], int32.

    Raises:
        ShapeError: It is no such array, too narrow or read-only, or has no such row.
    """
    bitmask = array_of(bitmask)
    if bitmask.dtype != np.int32 or bitmask.ndim not in (1, 2) or bitmask.shape[-1] < num_words:
        raise ShapeError(
            f"the bitmask has shape {bitmask.shape} and dtype {bitmask.dtype}; it must be int32 with at least "
            f"{num_words} words a row (allocate_bitmask makes one)",
            argument="bitmask",
            expected=f"int32 [rows, {num_words}]",
            found=f"{bitmask.dtype} {bitmask.shape}",
        )
    if not bitmask.flags.writeable:
        raise ShapeError(
            "the bitmask is read-only; give one that can be written (allocate_bitmask makes one)",
            argument="bitmask",
            expected="writable",
            found="read-only",
        )
    table: Int32Array = bitmask[None] if bitmask.ndim == 1 else bitmask
    if not isinstance(row, Integral) or not -len(table) <= row < len(table):
        raise ShapeError(
            f"row {row!r} of a bitmask with {len(table)} rows; allocate one row a position",
            argument="row",
            expected=f"0..{len(table) - 1}",
            found=row,
        )
    out: Int32Array = table[row]
    return out


def pack_ids(ids: Int32Array) -> tuple[IndexArray, Int32Array]:
    """Packs ids into the words that hold their bits.

    Args:
        ids: Token ids, distinct, in any order, shape [n], int32.

    Returns:
        Indices of words, ascending, intp, and their values, int32; each shape [words touched].
    """
    ids = np.sort(ids)
    word = (ids >> 5).astype(np.intp)
    bits = np.left_shift(np.uint32(1), (ids & 31).astype(np.uint32))
    start = np.flatnonzero(run_starts(word))
    if not len(start):
        return word, bits.view(np.int32)
    return word[start], np.bitwise_or.reduceat(bits, start).view(np.int32)


def run_starts(values: NDArray[np.integer]) -> NDArray[np.bool_]:
    """Where runs of equal values begin, shape [n], bool.

    Args:
        values: Shape [n], any integer dtype.

    Returns:
        True at the first value and at each that differs from the one before.
    """
    out = np.ones(len(values), dtype=bool)
    np.not_equal(values[1:], values[:-1], out=out[1:])
    return out


def pack_few(ids: Iterable[int]) -> tuple[IndexArray, Int32Array]:
    """As `pack_ids`, for a few ids in a Python sequence; the indices come in no order."""
    words: dict[int, int] = {}
    for index in ids:
        word = index >> 5
        words[word] = words.get(word, 0) | 1 << (index & 31)
    index_array = np.fromiter(words, dtype=np.intp, count=len(words))
    values = np.fromiter(words.values(), dtype=np.uint32, count=len(words))
    return index_array, values.view(np.int32)


def clear_ids(out: Int32Array, ids: Iterable[int]) -> None:
    """Clears the bits of some ids in a row."""
    for index in ids:
        out[index >> 5] &= np.uint32(0xFFFFFFFF ^ (1 << (index & 31))).view(np.int32)


def clear_from(out: Int32Array, count: int) -> None:
    """Clears the bits of the ids from `count` on in a row."""
    out[-(-count // 32) :] = 0
    if count & 31:
        out[count >> 5] &= (1 << (count & 31)) - 1


class MaskRow:
    """One row of a mask: a base row, and the words in which it differs.

    Args:
        base: Shape [words], int32; may be shared between rows and is never written.
        index: Words that differ, intp, or None.
        values: Their values, int32, or None.
        owns_base: Whether the base belongs to this row alone, for its size.
    """

    __slots__ = ("base", "index", "size_bytes", "uses", "values")

    def __init__(
        self,
        base: Int32Array,
        index: IndexArray | None = None,
        values: Int32Array | None = None,
        *,
        owns_base: bool = False,
    ) -> None:
        self.base = base
        self.index = index
        self.values = values
        self.uses = 0  # since it was made in compact form; a row in much use is made whole, which is written faster
        self.size_bytes = 128 + (base.nbytes if owns_base else 0)
        if index is not None and values is not None:
            self.size_bytes += index.nbytes + values.nbytes + 224

    @classmethod
    def compact(cls, words: Int32Array, empty: Int32Array, full: Int32Array) -> MaskRow:
        """Makes a row of its words, kept as differences from the empty or the full row where these are few.

        Args:
            words: Shape [words], int32.
            empty: Shared row without a bit.
            full: Shared row of every token that is text.

        Returns:
            The row.
        """
        for base in (empty, full):
            index = np.flatnonzero(words != base)
            if len(index) < COMPACT_WORDS:
                return cls(base, index, words[index])
        return cls(words, owns_base=True)

    def write(self, out: Int32Array) -> None:
        """Writes the row.

        Args:
            out: Shape [words], int32.
        """
        out[:] = self.base
        if self.index is not None and self.values is not None:
            out[self.index] = self.values

    def whole(self) -> MaskRow:
        """The same row in one piece."""
        return MaskRow(self.words(), owns_base=True)

    def words(self) -> Int32Array:
        """A copy of the whole row, shape [words], int32."""
        out = self.base.copy()
        if self.index is not None and self.values is not None:
            out[self.index] = self.values
        return out
