"""Philox4x32-10: random words that are a pure function of a counter and a key.

Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", 2011. The sampler and the drafters take their numbers from it,
each through its own library, so a draft can be drawn with the very noise that the target is drawn with.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

__all__ = ["WORD_MASK", "philox4x32"]

WORD_MASK = 0xFFFFFFFF
"""The bits of one word."""

_M0 = 0xD2511F53
_M1 = 0xCD9E8D57
_W0 = 0x9E3779B9
_W1 = 0xBB67AE85
_ROUNDS = 10


def philox4x32(counter: Sequence[Any], key: Sequence[Any]) -> tuple[Any, Any, Any, Any]:
    """Four random words for each counter.

    Tensors (or NumPy arrays) of different shapes broadcast, and a word that is the same for all counters may stay a Python
    integer or a tensor of size 1, which makes the first rounds nearly free.

    Args:
        counter: Four words from 0 to 2**32 - 1: integers, or int64 tensors or arrays.
        key: Two words from 0 to 2**32 - 1: integers, or int64 tensors or arrays.

    Returns:
        Four words from 0 to 2**32 - 1, int64, of the broadcast shape (integers when all inputs are).

    Examples:
        >>> [hex(word) for word in philox4x32((0, 0, 0, 0), (0, 0))]
        ['0x6627e8d5', '0xe169c58d', '0xbc57ac4c', '0x9b00dbd8']
    """
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for index in range(_ROUNDS):
        if index:
            k0 = (k0 + _W0) & WORD_MASK
            k1 = (k1 + _W1) & WORD_MASK
        # The product wraps at 64 bits and the shift is arithmetic; the mask after the xor removes both the sign
        # bits and the high half of c1 and c3, which are kept unmasked on purpose.
        p0 = c0 * _M0
        p1 = c2 * _M1
        c0 = ((p1 >> 32) ^ c1 ^ k0) & WORD_MASK
        c2 = ((p0 >> 32) ^ c3 ^ k1) & WORD_MASK
        c1 = p1
        c3 = p0
    return c0, c1 & WORD_MASK, c2, c3 & WORD_MASK
