"""Bytes that a grammar never tells apart, as classes."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
from numpy.typing import NDArray

__all__ = ["ByteClasses"]


class ByteClasses:
    """The coarsest partition of the 256 bytes that all sets and literals of a grammar respect.

    Args:
        masks: Byte sets as 256-bit masks.
        literals: Strings; each of their bytes is told apart from all others.

    Attributes:
        byte_class: Class of each byte, shape [256], uint8; classes are numbered by their first byte.
        num_classes: Number of classes, 1..256.
    """

    def __init__(self, masks: Iterable[int], literals: Iterable[bytes]) -> None:
        single = set(b"".join(literals))
        rows = b"".join([mask.to_bytes(32, "little") for mask in masks])
        bits = np.frombuffer(rows, np.uint8).reshape(-1, 32)
        member = np.unpackbits(bits, axis=1, bitorder="little")
        packed = np.ascontiguousarray(np.packbits(member, axis=0).T)
        width = packed.shape[1]
        flat = packed.tobytes()
        numbers: dict[object, int] = {}
        classes = []
        first: list[int] = []
        for byte in range(256):
            key: object = byte if byte in single else flat[byte * width : (byte + 1) * width]
            number = numbers.get(key)
            if number is None:
                number = numbers[key] = len(first)
                first.append(byte)
            classes.append(number)
        self.byte_class: NDArray[np.uint8] = np.array(classes, np.uint8)
        self.num_classes: int = len(first)
        self._first = np.array(first, np.intp)

    def index(self, masks: tuple[int, ...]) -> NDArray[np.intp]:
        """The set of each class among disjoint byte sets that are unions of classes.

        Args:
            masks: The sets.

        Returns:
            For each class the place of its set plus 1, 0 where it is in none; shape [num_classes].
        """
        packed = b"".join([mask.to_bytes(32, "little") for mask in masks])
        bits = np.unpackbits(
            np.frombuffer(packed, np.uint8).reshape(-1, 32), axis=1, bitorder="little"
        )
        places = np.arange(1, len(masks) + 1)
        return np.asarray(places @ bits[:, self._first], np.intp)
