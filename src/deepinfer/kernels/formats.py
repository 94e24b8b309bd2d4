"""Byte formats of cached keys and values, as paged caches hold them.

A cache is a tensor of bytes, shape [pages, page_bytes(page_size)]; pages may lie apart. A page holds the rows of
`page_size` consecutive slots, and slot s is row s % page_size of page s // page_size. Rows come first and their scales
behind them (all but V32_FP8, whose rows hold their scales):

```
V4_FP8       page: row 0 | row 1 | ... | row P-1 | scales 0 | ... | scales P-1 | padding to a multiple of 576
             row:    448 e4m3 (no rotation) | 64 bf16 (rotated)        576 bytes
             scales: 7 e8m0, one for 64 channels | 1 byte 0              8 bytes
V41_MXFP8    row:    512 e4m3                                          512 bytes
             scales: 16 e8m0, one for 32 channels                       16 bytes
V41_NVFP4    row:    512 e2m1, even channel in the low four bits       256 bytes
             scales: 32 e4m3, one for 16 channels                       32 bytes
INDEXER_FP8  row:    128 e4m3                                          128 bytes
             scales: 1 fp32, a power of two                              4 bytes
INDEXER_MXFP4 row:   128 e2m1, even channel in the low four bits        64 bytes
             scales: 4 e8m0, one for 32 channels                         4 bytes
V32_FP8      page: row 0 | row 1 | ... | row P-1
             row:    512 e4m3 | 4 fp32, powers of two, one for 128 channels | 64 bf16 (rotated)      656 bytes
```

Sources: FlashMLA's description of its caches, and the tables of the DeepSeek-V4.1 report.
"""

from __future__ import annotations

from enum import Enum

from deepinfer.core.errors import ConfigError

__all__ = ["KVCacheFormat"]


class KVCacheFormat(Enum):
    """A byte format of cached rows.

    Attributes:
        coded_channels: Channels stored as codes.
        code_bits: Bits of a code: 8 (e4m3) or 4 (e2m1).
        group: Channels that share a scale.
        scale_type: "e8m0", "e4m3" or "fp32".
        scale_bytes: Bytes of a row's scales, with their padding.
        tail_channels: Channels behind the coded ones, stored as bf16.
        segregated: Whether a page's scales lie behind all of its rows.
        page_multiple: A page is padded to a multiple of this many bytes.
    """

    V32_FP8 = (512, 8, 128, "fp32", 16, 64, False, 1)
    V4_FP8 = (448, 8, 64, "e8m0", 8, 64, True, 576)
    V41_MXFP8 = (512, 8, 32, "e8m0", 16, 0, True, 1)
    V41_NVFP4 = (512, 4, 16, "e4m3", 32, 0, True, 1)
    INDEXER_FP8 = (128, 8, 128, "fp32", 4, 0, True, 1)
    INDEXER_MXFP4 = (128, 4, 32, "e8m0", 4, 0, True, 1)

    def __init__(
        self,
        coded_channels: int,
        code_bits: int,
        group: int,
        scale_type: str,
        scale_bytes: int,
        tail_channels: int,
        segregated: bool,
        page_multiple: int,
    ) -> None:
        self.coded_channels = coded_channels
        self.code_bits = code_bits
        self.group = group
        self.scale_type = scale_type
        self.scale_bytes = scale_bytes
        self.tail_channels = tail_channels
        self.segregated = segregated
        self.page_multiple = page_multiple

    @property
    def channels(self) -> int:
        """Channels of a row."""
        return self.coded_channels + self.tail_channels

    @property
    def num_scales(self) -> int:
        """Scales of a row."""
        return self.coded_channels // self.group

    @property
    def code_bytes(self) -> int:
        """Bytes of a row's codes."""
        return self.coded_channels * self.code_bits // 8

    @property
    def bytes_per_token(self) -> int:
        """Bytes of a row with its scales."""
        return self.code_bytes + 2 * self.tail_channels + self.scale_bytes

    @property
    def row_stride(self) -> int:
        """Bytes from the codes of one row to those of the next."""
        return self.bytes_per_token - (self.scale_bytes if self.segregated else 0)

    @property
    def scale_stride(self) -> int:
        """Bytes from the scales of one row to those of the next."""
        return self.scale_bytes if self.segregated else self.bytes_per_token

    @property
    def tail_offset(self) -> int:
        """Bytes from the codes of a row to its bf16 channels."""
        return self.code_bytes + (0 if self.segregated else self.scale_bytes)

    def page_bytes(self, page_size: int) -> int:
        """Bytes of a page.

        Args:
            page_size: Rows of a page, at least 1.

        Raises:
            ConfigError: `page_size` is below 1.
        """
        self._check(page_size)
        size = page_size * self.bytes_per_token
        return -(-size // self.page_multiple) * self.page_multiple

    def scales_offset(self, page_size: int) -> int:
        """Bytes from the begin of a page to the scales of its first row.

        Args:
            page_size: Rows of a page, at least 1.

        Raises:
            ConfigError: `page_size` is below 1.
        """
        self._check(page_size)
        return page_size * self.row_stride if self.segregated else self.code_bytes

    def row_offset(self, slot: int, page_size: int) -> tuple[int, int]:
        """Page of a slot, and bytes from its begin to the slot's codes.

        Args:
            slot: Slot, not negative.
            page_size: Rows of a page, at least 1.

        Raises:
            ConfigError: `page_size` is below 1.
        """
        self._check(page_size)
        return slot // page_size, slot % page_size * self.row_stride

    def scale_offset(self, slot: int, page_size: int) -> tuple[int, int]:
        """Page of a slot, and bytes from its begin to the slot's scales.

        Args:
            slot: Slot, not negative.
            page_size: Rows of a page, at least 1.

        Raises:
            ConfigError: `page_size` is below 1.
        """
        first = self.scales_offset(page_size)
        return slot // page_size, first + slot % page_size * self.scale_stride

    def _check(self, page_size: int) -> None:
        if page_size < 1:
            raise ConfigError(
                f"page_size is {page_size}; a page has at least 1 row.",
                field="page_size", value=page_size, limit="1",
            )  # fmt: skip
