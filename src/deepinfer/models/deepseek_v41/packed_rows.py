"""Window rows, pool rows and index keys in the published byte formats: written packed, unpacked when read."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import numpy as np
import torch
from torch import Tensor

from deepinfer.models.deepseek_v41.attention import sink_attention
from deepinfer.models.deepseek_v41.config import DeepseekV41Config
from deepinfer.models.deepseek_v41.row_formats import RowFormats
from deepinfer.models.deepseek_v41.row_storage import select_blocks

__all__ = ["PackedRows"]


class PackedRows:
    """Twin of `PlainRows` in bytes; the values that are read are the same bits.

    Attributes:
        window_data: Window rows, shape [layers + stages, slots * ring_size, row_bytes], uint8.
        pool_data: Pool rows of all sources, then one row of zeros, shape [rows, row_bytes], uint8.
        pools: Views of it by KV source layer, shape [blocks, block_rows, row_bytes].
        pool_offsets: First row of each pool in `pool_data`.
        index_keys: Index keys by KV source layer, shape [blocks, block_rows * row_bytes], uint8: a block is a page, with
            the codes of its rows first and their scales behind them.
        null_row: Row of zeros in `pool_data`.
        block_rows: Rows of a block, by KV source layer.
    """

    def __init__(
        self,
        config: DeepseekV41Config,
        num_slots: int,
        ring_size: int,
        num_blocks: int,
        block_rows: Mapping[int, int],
        device: torch.device,
        dtype: torch.dtype,
        formats: RowFormats,
    ) -> None:
        self._formats = formats
        self._dtype = dtype
        self._ring_size = ring_size
        rings = config.num_hidden_layers + config.num_nextn_predict_layers

        def memory(*shape: int) -> Tensor:
            return torch.zeros(shape, device=device, dtype=torch.uint8)

        self.window_data = memory(rings, num_slots * ring_size, formats.window.row_bytes)
        total = num_blocks * sum(block_rows.values())
        self.pool_data = memory(total + 1, formats.pool.row_bytes)
        self.null_row = total
        self.pools: dict[int, Tensor] = {}
        self.pool_offsets: dict[int, int] = {}
        at = 0
        for source, rows in block_rows.items():
            end = at + num_blocks * rows
            self.pool_offsets[source] = at
            self.pools[source] = self.pool_data[at:end].view(num_blocks, rows, -1)
            at = end
        self.block_rows = dict(block_rows)
        self._code_bytes = config.index_head_dim // 2
        self.index_keys = {
            source: memory(num_blocks, rows * formats.key.row_bytes)
            for source, rows in block_rows.items()
        }

    def tensors(self) -> Iterator[Tensor]:
        """Everything that takes memory."""
        yield self.window_data
        yield self.pool_data
        yield from self.index_keys.values()

    def write_windows(self, layer: int, index: Tensor, rows: Tensor) -> None:
        """See `PlainRows.write_windows`."""
        self.window_data[layer].index_copy_(0, index, self._formats.window.pack(rows))

    def read_windows(self, layer: int, index: Tensor) -> Tensor:
        """See `PlainRows.read_windows`."""
        data = self.window_data[layer].index_select(0, index.reshape(-1))
        return self._formats.window.unpack(data, self._dtype).view(*index.shape, -1)

    def write_pool(self, source: int, index: Tensor, rows: Tensor, keys: Tensor) -> None:
        """See `PlainRows.write_pool`."""
        self.pools[source].flatten(0, 1).index_copy_(0, index, self._formats.pool.pack(rows))
        self._put_keys(source, index, self._formats.key.pack(keys))

    def attend(
        self,
        layer: int,
        queries: Tensor,
        windows: Tensor,
        pool: Tensor | None,
        bias: Tensor | None,
        sink: Tensor,
        scale: float,
        *,
        deterministic: bool = False,
    ) -> Tensor:
        """See `PlainRows.attend`."""
        keys = self.read_windows(layer, windows)
        if pool is not None:
            data = self.pool_data.index_select(0, pool.reshape(-1))
            rows = self._formats.pool.unpack(data, self._dtype)
            keys = torch.cat((keys, rows.view(*pool.shape, -1)), 1)
        return sink_attention(queries, keys, bias, sink, scale, deterministic=deterministic)

    def keys(self, source: int, blocks: np.ndarray) -> Tensor:
        """See `PlainRows.keys`."""
        parts = [select_blocks(part, blocks) for part in self.key_parts(source)]
        return self._formats.key.unpack(torch.cat(parts, -1), self._dtype)

    def key_parts(self, source: int) -> tuple[Tensor, Tensor]:
        """Views of the codes and the scales of a source's index keys, shapes [blocks, block_rows, bytes], uint8."""
        data, rows, half = self.index_keys[source], self.block_rows[source], self._code_bytes
        codes, scales = data[:, : rows * half], data[:, rows * half :]
        return codes.unflatten(1, (rows, half)), scales.unflatten(1, (rows, -1))

    def _put_keys(self, source: int, index: Tensor, data: Tensor) -> None:
        """Writes packed keys, shape [rows, row_bytes], at rows of a source's pool, shape [rows]."""
        at = index // self.block_rows[source], index % self.block_rows[source]
        codes, scales = self.key_parts(source)
        codes[at], scales[at] = data[:, : self._code_bytes], data[:, self._code_bytes :]

    def window_bytes(self, num_layers: int, index: Tensor) -> Tensor:
        """See `PlainRows.window_bytes`."""
        return self.window_data[:num_layers].index_select(1, index)

    def set_window_bytes(self, index: Tensor, data: Tensor) -> None:
        """See `PlainRows.set_window_bytes`."""
        self.window_data[: len(data)].index_copy_(1, index, data)

    def block_bytes(self, block: int) -> Tensor:
        """See `PlainRows.block_bytes`."""
        parts = []
        for source, pool in self.pools.items():
            keys = torch.cat([part[block] for part in self.key_parts(source)], -1)
            parts += [pool[block].flatten(), keys.flatten()]
        return torch.cat(parts)

    def set_block_bytes(self, block: int, data: Tensor) -> None:
        """See `PlainRows.set_block_bytes`."""
        at = 0
        for source in self.pools:
            codes, scales = (part[block] for part in self.key_parts(source))
            parts = (self.pools[source][block],), (codes, scales)
            for pieces in parts:
                widths = [piece.shape[-1] for piece in pieces]
                end = at + len(codes) * sum(widths)
                rows = data[at:end].view(len(codes), -1).split(widths, -1)
                for piece, values in zip(pieces, rows, strict=True):
                    piece.copy_(values)
                at = end

    def clear_windows(self, slot: int, used: int) -> None:
        """See `PlainRows.clear_windows`."""
        first = slot * self._ring_size
        self.window_data[:, first : first + min(used, self._ring_size)].zero_()

    def clear_block(self, block: int, rows: Mapping[int, int]) -> None:
        """See `PlainRows.clear_block`."""
        for source, count in rows.items():
            self.pools[source][block, :count].zero_()
            for part in self.key_parts(source):
                part[block, :count].zero_()
