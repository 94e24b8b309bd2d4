"""Sizes for the kernels over rows of logits: tokens and warps of a chunk. They hang on the vocabulary alone."""

from __future__ import annotations

__all__ = [
    "EXPECTED",
    "FEW_TOP_K",
    "LISTED_GROUPS",
    "MOST_LISTED",
    "MOST_SORTED",
    "MOST_TOP_K",
    "PENALTY_BLOCK",
    "PROCESSORS",
    "PROGRAMS",
    "SAMPLE",
    "chunk_of",
    "lookup",
]

MOST_TOP_K = 4096
"""Tokens are drawn from the selected ones when every row has a top-k up to this; judged by ranks behind it.

Ranks are faster at 4,096 where much is kept (0.099 ms instead of 0.157), and slower where little is (0.51 instead of 0.16).
"""

FEW_TOP_K = 256
"""Up to this the highest tokens are looked for in the groups with the highest maxima."""

MOST_LISTED = 8192
"""Tokens of the longest list of a row."""

SAMPLE = 8192
"""Tokens of a row that the bounds of its cut are taken from: so many that the list between them nearly never is too long."""

PROGRAMS = 2112
"""Programs of a pass that open rows share."""

MOST_SORTED = 64
"""Up to so many likeliest tokens are put in order by the kernel of log probabilities."""

EXPECTED = 14
"""Tokens of a row that a draw looks at: none of them is above their bound once in exp(14) draws."""

LISTED_GROUPS = 32
"""Groups of 16 tokens that they may be in."""

PROCESSORS = 132
"""Processors of the GPU that the sizes are for."""

PENALTY_BLOCK = 256
"""Places of a row's tokens that a program looks at."""

# (tokens of a chunk, warps)
_SIZES = {
    "argmax": (4096, 4),
    "scores": (2048, 4),
    "maxima": (8192, 8),
    "gather": (2048, 4),
    "weigh": (1024, 4),
    "settle": (8192, 16),
    "logprobs": (4096, 8),
    "bitmask": (4096, 4),
    "edit": (8192, 8),
    "verify": (4096, 8),
}


def chunk_of(vocab: int, most: int) -> int:
    """Tokens of a chunk.

    Args:
        vocab: Tokens of a row.
        most: Tokens of a chunk of a large vocabulary.

    Returns:
        A power of two, at least 256.
    """
    size = 256
    while size < min(vocab, most):
        size *= 2
    return size


def lookup(kernel: str, vocab: int) -> tuple[int, int]:
    """Sizes of a kernel.

    Args:
        kernel: Which.
        vocab: Tokens of a row.

    Returns:
        Tokens of a chunk, and warps.
    """
    block, warps = _SIZES[kernel]
    size = chunk_of(vocab, block)
    return size, max(1, min(warps, size // 256))
