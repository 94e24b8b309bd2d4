"""The published byte formats of cache rows, and their sizes.

| what | bytes of a row | at 512 channels (128 for keys) |
| --- | --- | --- |
| window row | e4m3 a channel, e8m0 per 32 | 528 |
| pool row | e2m1 pairs, e4m3 per 16 | 288 |
| index key | e2m1 pairs, e8m0 per 32 | 68 |

Rows are packed after they were rounded to these formats, so packing loses nothing. A model that rounds nothing has rows
that no such format holds; its rows are moved as they are.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from deepinfer.kernels import cast_back, per_token_cast_to_fp4, per_token_cast_to_fp8
from deepinfer.models.deepseek_v41.config import DeepseekV41Config
from deepinfer.models.deepseek_v41.narrowing import narrowing_of, window_spare
from deepinfer.models.deepseek_v41.rounding import RoundingLevel

__all__ = [
    "RowFormat",
    "RowFormats",
    "block_bytes",
    "key_format",
    "pool_format",
    "raw_format",
    "saved_windows_bytes",
    "token_bytes",
    "window_format",
]

_FP4_MAX = 6.0
_FP4_GRID = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
# The smallest e4m3 scales are so far apart that a group may have its largest value at 4 steps of the second one.
_SECOND_SCALE = 2.0**-8


@dataclass(frozen=True, slots=True)
class RowFormat:
    """Bytes of one kind of row.

    Attributes:
        row_bytes: Bytes of a row.
        pack: Rows, shape [..., channels], to bytes, shape [..., row_bytes], uint8.
        unpack: Bytes back to rows of a dtype.
    """

    row_bytes: int
    pack: Callable[[Tensor], Tensor]
    unpack: Callable[[Tensor, torch.dtype], Tensor]


@dataclass(frozen=True, slots=True)
class RowFormats:
    """Formats of the three kinds of rows.

    Attributes:
        window: Of window rows.
        pool: Of pool rows.
        key: Of index keys.
    """

    window: RowFormat
    pool: RowFormat
    key: RowFormat

    @classmethod
    def of(
        cls, config: DeepseekV41Config, rounding: RoundingLevel, dtype: torch.dtype
    ) -> RowFormats:
        """The published formats, or those of rows that were not rounded.

        Args:
            config: The configuration.
            rounding: Rounding level of the model that makes the rows.
            dtype: Their dtype, which counts when they are not rounded.
        """
        if rounding == "none":
            raw = raw_format(config.head_dim, dtype)
            return cls(raw, raw, raw_format(config.index_head_dim, dtype))
        return cls(
            window_format(config.head_dim),
            pool_format(config.head_dim),
            key_format(config.index_head_dim),
        )


def window_format(channels: int) -> RowFormat:
    """FP8 with a power-of-two scale per 32 channels."""

    def pack(rows: Tensor) -> Tensor:
        return _join(*per_token_cast_to_fp8(rows))

    def unpack(data: Tensor, dtype: torch.dtype) -> Tensor:
        codes, scales = data[..., :channels], data[..., channels:]
        return cast_back(codes.view(torch.float8_e4m3fn), scales, dtype=dtype)

    return RowFormat(channels + channels // 32, pack, unpack)


def pool_format(channels: int) -> RowFormat:
    """FP4 with an e4m3 scale per 16 channels."""
    half = channels // 2

    def pack(rows: Tensor) -> Tensor:
        codes, scales = per_token_cast_to_fp4(rows, 16)
        groups = rows.float().unflatten(-1, (-1, 16))
        clipped = groups.abs().amax(-1) > _FP4_MAX * scales.float()
        if clipped.any():
            scales = torch.where(clipped, _SECOND_SCALE, scales.float()).to(torch.float8_e4m3fn)
            fixed = _fp4_codes((groups / _SECOND_SCALE).flatten(-2))
            codes = torch.where(clipped.repeat_interleave(8, -1), fixed, codes)
        return _join(codes, scales)

    def unpack(data: Tensor, dtype: torch.dtype) -> Tensor:
        scales = data[..., half:].view(torch.float8_e4m3fn)
        return cast_back(data[..., :half], scales, block=(1, 16), dtype=dtype)

    return RowFormat(half + channels // 16, pack, unpack)


def key_format(channels: int) -> RowFormat:
    """FP4 with a power-of-two scale per 32 channels."""
    half = channels // 2

    def pack(rows: Tensor) -> Tensor:
        return _join(*per_token_cast_to_fp4(rows, 32))

    def unpack(data: Tensor, dtype: torch.dtype) -> Tensor:
        return cast_back(data[..., :half], data[..., half:], dtype=dtype)

    return RowFormat(half + channels // 32, pack, unpack)


def raw_format(channels: int, dtype: torch.dtype) -> RowFormat:
    """Rows as they are."""

    def pack(rows: Tensor) -> Tensor:
        return rows.contiguous().view(torch.uint8)

    def unpack(data: Tensor, wanted: torch.dtype) -> Tensor:
        return data.contiguous().view(dtype).to(wanted)

    return RowFormat(channels * dtype.itemsize, pack, unpack)


def token_bytes(config: DeepseekV41Config) -> float:
    """Bytes that one more token adds to the published pools, on average: 890 for V4.1-Flash."""
    return block_bytes(config, 2) / 2


def block_bytes(
    config: DeepseekV41Config, block_size: int, formats: RowFormats | None = None
) -> int:
    """Bytes of one block of all pools.

    Args:
        config: The configuration.
        block_size: Tokens in a block, a multiple of every ratio.
        formats: Formats of the rows; None for the published ones.
    """
    formats = formats or RowFormats.of(config, "full", torch.float32)
    rows = sum(block_size // config.compress_ratios[s] for s in config.kv_source_layer_ids)
    return rows * (formats.pool.row_bytes + formats.key.row_bytes)


def saved_windows_bytes(
    config: DeepseekV41Config, num_layers: int | None = None, formats: RowFormats | None = None
) -> int:
    """Bytes of the saved window rows of one request: 1,415,040 for V4.1-Flash.

    Args:
        config: The configuration.
        num_layers: Layers whose rows are saved; None for those that a narrowed prompt needs.
        formats: Formats of the rows; None for the published ones.
    """
    formats = formats or RowFormats.of(config, "full", torch.float32)
    layers = narrowing_of(config).window_layers if num_layers is None else num_layers
    return layers * (config.sliding_window + window_spare(config)) * formats.window.row_bytes


def _fp4_codes(values: Tensor) -> Tensor:
    """Packed e2m1 codes of values on the grid, shape [..., channels] to [..., channels / 2]."""
    grid = torch.tensor(_FP4_GRID, dtype=torch.float32, device=values.device)
    codes = torch.bucketize(values.abs(), grid).to(torch.uint8).clamp_max_(7)
    codes |= torch.signbit(values).to(torch.uint8) << 3
    return codes[..., 0::2] | (codes[..., 1::2] << 4)


def _join(codes: Tensor, scales: Tensor) -> Tensor:
    return torch.cat((codes.view(torch.uint8), scales.view(torch.uint8)), -1)
