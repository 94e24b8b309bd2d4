"""Sizes for the kernels whose programs take whole rows or some groups of them.

They follow from the width alone, so that a row is computed in one order whatever its neighbours; the number of rows says
only how many of them a program takes one after the other.
"""

from __future__ import annotations

__all__ = [
    "blocks",
    "cast_back",
    "coefficients",
    "engram_gate",
    "engram_lookup",
    "groups",
    "norm",
    "norm_rope_cast",
    "norm_rope_pairs",
    "pairs",
    "pieces",
    "project",
    "project_bulk",
    "project_bulk_apart",
    "rope",
    "stream_block",
    "swiglu",
]


_MANY = 4096


def _power_above(n: int) -> int:
    return 1 << max(0, n - 1).bit_length()


def pieces(channels: int) -> tuple[int, int]:
    """A row as a power of two and a rest that fits another one: 5120 is 4096 and 1024.

    Args:
        channels: Channels of a row.

    Returns:
        Channels of the first piece, and a bound of those of the second, 0 for none.
    """
    main = 1 << (channels.bit_length() - 1)
    rest = channels - main
    return main, _power_above(rest) if rest else 0


def norm(channels: int, add: bool = False) -> tuple[int, int]:
    """Rows and warps of the RMS norm, behind an addition or not."""
    main, rest = pieces(channels)
    if not add and main == 4096 and rest <= 1024:
        return 1, 2
    return max(1, 2048 // main), max(2 if main <= 512 else 4, main // 1024)


def norm_rope_cast(channels: int) -> tuple[int, int]:
    """Rows and warps of the norm before rotation and cast."""
    return max(1, 4096 // _power_above(channels)), max(4, _power_above(channels) // 1024)


def norm_rope_pairs(channels: int, bits: int) -> tuple[int, int, int, bool, bool]:
    """Sizes of the norm before rotation and cast two values at a time.

    Args:
        channels: Channels of a row.
        bits: Of a code.

    Returns:
        Rows and warps, pairs of a thread side by side, whether turned channels are spread over a warp, and whether rows come by
        way of shared memory.
    """
    return max(1, 2048 // _power_above(channels)), 1, 8, True, bits == 8 and channels >= 256


def groups(group: int) -> tuple[int, int]:
    """Groups and warps of a cast."""
    return max(1, 2048 // group), 4


def pairs(group: int) -> tuple[int, int, int]:
    """Groups and warps of a cast to e2m1 two values at a time, and pairs of a thread side by side."""
    return max(1, 1024 // group), 1, 16


def swiglu(group: int, bits: int) -> tuple[int, int, int, int]:
    """Groups and warps of SwiGLU with a cast to codes of some bits, how exact its steps are, and pairs of a thread.

    With no pairs values go one at a time.
    """
    if bits == 4:
        return max(1, 512 // group), 1, 1, 8
    return max(1, 2048 // group), 4, 1, 0


def cast_back(group: int) -> tuple[int, int]:
    """Groups and warps of a cast back."""
    return max(1, 2048 // group), 4


def blocks(rows: int, columns: int) -> tuple[int, int]:
    """Blocks side by side, and warps of a cast of blocks."""
    size = rows * columns
    side = 4 if size <= 1024 else 1
    return side, max(1, min(16, side * size // (1024 if side > 1 else 2048)))


def rope(channels: int, in_place: bool) -> tuple[int, int]:
    """Rows and warps of the rotation."""
    return (16, 4) if in_place else (max(1, 2048 // _power_above(channels)), 4)


def stream_block(channels: int) -> tuple[int, int]:
    """Channels and warps of a program that takes a piece of a token's streams."""
    return min(1024, _power_above(channels)), 4


def project(channels: int, narrow: bool = True) -> tuple[int, int, int, int, int]:
    """Tokens, channels at once, how often, warps and stages of the projection of bf16 (narrow) or other streams."""
    block = min(64 if narrow else 32, max(16, _power_above(channels)))
    times = -(-channels // ((8 if narrow else 16) * block))
    return (64, block, times, 4, 2) if narrow else (16, block, times, 4, 3)


def project_bulk(channels: int) -> tuple[int, int]:
    """How often 64 channels make a part, and slots of the ring of bulk copies.

    The coefficients of a part stay in shared memory, 32 KB for 64 channels, and the ring beside them.
    """
    blocks = channels // 64
    most = next(n for n in range(5, 0, -1) if blocks % n == 0)
    return most, 4


def project_bulk_apart(tokens: int) -> bool:
    """Whether every piece of the channels is a program of its own, because there are few tokens."""
    return tokens <= 512


def coefficients(tokens: int) -> tuple[int, int]:
    """Tokens and warps of the programs that make coefficients of sums."""
    return (16, 1) if tokens >= 1024 else (4, 1) if tokens > 128 else (2, 1)


def engram_gate(channels: int, tokens: int) -> tuple[int, int]:
    """Tokens one after the other, and warps of the gate."""
    return 4 if tokens >= _MANY else 1, max(4, pieces(channels)[0] // 1024)


def engram_lookup(channels: int) -> tuple[int, int, int, bool]:
    """Rows at once, warps, times of a program of the gather, and whether to tell the caches that nothing is used twice."""
    return max(1, 4096 // channels), 4, 1, False
