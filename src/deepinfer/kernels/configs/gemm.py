"""Sizes of the tiles of matrix products.

An entry holds for a device whose name begins with its first field; the last one, for every device, closes each table.
"""

from __future__ import annotations

__all__ = [
    "CONTIGUOUS_FP8",
    "CONTIGUOUS_MXFP4",
    "CONTIGUOUS_MXFP4_32",
    "DENSE_FP8",
    "DENSE_FP8_32",
    "FEW_FP8_32",
    "FEW_WEIGHTS",
    "FOLDED_MXFP4",
    "FOLDED_MXFP4_32",
    "MASKED_FP8",
    "MASKED_FP8_32",
    "PORTABLE",
    "SPLIT_FP8",
    "TALL_BF16",
    "TALL_FP8",
    "TALL_FP8_32",
    "TALL_NARROW",
    "TALL_SPLIT",
    "dense_split",
    "lookup",
    "takes_narrow_tiles",
]

Row = tuple[str, int, int, int, tuple[int, ...]]

# (device, N or 0, K or 0, most rows of a group, sizes): SwappedTuning
MASKED_FP8: tuple[Row, ...] = (
    ("", 0, 0, 16, (16, 2, 6, 1, 2)),
    ("", 0, 0, 32, (32, 2, 5, 1, 2)),
    ("", 0, 0, 0, (64, 2, 4, 1, 2)),
)
# The same with scales for 32 channels
MASKED_FP8_32: tuple[Row, ...] = (
    ("", 0, 0, 16, (16, 2, 5, 1, 2)),
    ("", 0, 0, 32, (32, 2, 5, 1, 2)),
    ("", 0, 0, 0, (64, 2, 8, 1, 1)),
)
# Prepared MXFP4 weights: SwappedTuning, or DecodedTuning where the first size is below 8
FOLDED_MXFP4: tuple[Row, ...] = (
    ("", 0, 0, 16, (16, 1, 4, 2, 4)),
    ("", 0, 0, 32, (32, 1, 3, 2, 4)),
    ("", 0, 0, 64, (64, 1, 4, 2, 2)),
    ("", 0, 0, 0, (128, 2, 8, 1, 1)),
)
# The same for groups that stand one behind the other; tiles of up to 64 rows are listed on the device. 0: RaggedTuning
CONTIGUOUS_MXFP4: tuple[Row, ...] = (
    ("", 0, 0, 16, (16, 1, 5, 2, 3)),
    ("", 0, 0, 32, (32, 1, 3, 2, 3)),
    ("", 0, 0, 64, (64, 1, 4, 2, 2)),
    ("", 0, 0, 640, (0, 7)),
    ("", 0, 0, 0, (2, 1, 6)),
)
# The same with a scale for 32 channels of a token
FOLDED_MXFP4_32: tuple[Row, ...] = (
    ("", 0, 0, 8, (8, 2, 11, 1, 2)),
    ("", 0, 0, 16, (16, 1, 4, 2, 4)),
    ("", 0, 0, 32, (32, 1, 3, 2, 3)),
    ("", 0, 0, 64, (1, 2, 5)),
    ("", 0, 0, 0, (2, 1, 6)),
)
CONTIGUOUS_MXFP4_32: tuple[Row, ...] = (
    ("", 0, 0, 16, (16, 1, 5, 2, 3)),
    ("", 0, 0, 32, (32, 1, 3, 2, 3)),
    ("", 0, 0, 64, (64, 1, 8, 1, 2)),
    ("", 0, 0, 0, (2, 1, 6)),
)
DENSE_FP8: tuple[Row, ...] = (
    ("", 0, 0, 16, (16, 2, 5, 1, 2)),
    ("", 0, 0, 32, (32, 1, 10, 1, 1, 1, 1)),
    ("", 0, 0, 0, (64, 1, 10, 1, 1, 1, 1)),
)
# The same for products whose even and odd steps are added up apart: `dense_split`
SPLIT_FP8 = (16, 2, 16, 1, 1, 2)
# The same with scales for 32 channels; TallTuning where the first size is 1
DENSE_FP8_32: tuple[Row, ...] = (
    ("", 0, 0, 16, (16, 2, 5, 1, 2)),
    ("", 0, 0, 32, (32, 1, 8, 1, 2)),
    ("", 0, 0, 0, (1, 64, 12, 8)),
)
# The same for at most `FEW_WEIGHTS` rows of weights: small tiles, so that there are enough of them
FEW_FP8_32 = (16, 1, 12)
FEW_WEIGHTS = 2048
# (device, N or 0, K or 0, most rows, sizes): TallTuning
TALL_FP8: tuple[Row, ...] = (("", 0, 0, 0, (2, 256, 4, 16, 1, 0, 2)),)
# (device, N or 0, K or 0, most rows of a group on average, sizes): two warpgroups, whose 128 rows lie in one group
CONTIGUOUS_FP8: tuple[Row, ...] = (("", 0, 0, 0, (2, 256, 4, 2, 1, 0, 2)),)
TALL_SPLIT = (2, 128, 6, 8, 2)
TALL_FP8_32: tuple[Row, ...] = (
    ("", 0, 0, 1024, (2, 128, 6, 8)),
    ("", 0, 0, 0, (2, 128, 6, 8, 1, 1)),
)
TALL_BF16: tuple[Row, ...] = (("", 0, 0, 0, (2, 256, 4, 8)),)
# Where 256 columns leave much of the chip idle: `takes_narrow_tiles`
TALL_NARROW = (2, 128, 6, 8)
# (device, N or 0, K or 0, most rows, (tokens, weight rows, warps, stages)): the portable kernel
PORTABLE: tuple[Row, ...] = (
    ("", 0, 0, 16, (16, 64, 4, 3)),
    ("", 0, 0, 0, (64, 64, 4, 3)),
)


def dense_split(n: int, k: int) -> int:
    """In how many parts the channels of a dense FP8 product are added up, whatever the number of tokens.

    Few rows of weights give few tiles; two warpgroups then share the channels of one. The order of the sum must be the same
    for one token and for a thousand, so that the shape of the weights alone decides.

    Args:
        n: Rows of weights.
        k: Channels.

    Returns:
        1 or 2.
    """
    return 2 if n <= FEW_WEIGHTS and k >= 2048 and k % 256 == 0 else 1


def takes_narrow_tiles(rows: int, n: int, num_sms: int) -> bool:
    """Whether tiles of 128 columns are done sooner than tiles of 256; they do a quarter less in the same time.

    Args:
        rows: Rows of tokens.
        n: Rows of weights.
        num_sms: Multiprocessors, each with one tile at a time.
    """
    narrow, wide = (-(-rows // 128) * -(-n // columns) for columns in (128, 256))
    return -(-narrow // num_sms) * 2 < -(-wide // num_sms) * 3


def lookup(table: tuple[Row, ...], device: str, n: int, k: int, rows: int) -> tuple[int, ...]:
    """The first entry that holds.

    Args:
        table: One of the tables above.
        device: The device's name.
        n: Rows of weights.
        k: Channels.
        rows: Rows of tokens, or of a group.

    Returns:
        Sizes, in the order of the tuning's fields.
    """
    for name, its_n, its_k, most, sizes in table:
        if (
            device.startswith(name)
            and its_n in (0, n)
            and its_k in (0, k)
            and (most == 0 or rows <= most)
        ):
            return sizes
    return table[-1][4]
