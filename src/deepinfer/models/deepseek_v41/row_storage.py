"""Window rows, pool rows and index keys in the dtype of the model: the readable form of the cache's tensors."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import numpy as np
import torch
from torch import Tensor

from deepinfer.models.deepseek_v41.attention import attend_rows
from deepinfer.models.deepseek_v41.batch import to_device
from deepinfer.models.deepseek_v41.config import DeepseekV41Config
from deepinfer.models.deepseek_v41.row_formats import RowFormats

__all__ = ["PlainRows", "select_blocks"]


class PlainRows:
    """Rows as they are computed with; all window rings and pools are views of `kv`, so that one gather serves both.

    Attributes:
        kv: Every window and pool row, then one row of zeros, shape [rows, head_dim].
        windows: Window rings, shape [layers + stages, slots, ring_size, head_dim]; draft stages come last.
        rings: The same by layer, each of shape [slots * ring_size, head_dim].
        pools: Pool rows by KV source layer, shape [blocks, block_rows, head_dim].
        pool_offsets: First row of each pool in `kv`.
        index_keys: Index keys by KV source layer, shape [blocks, block_rows, index_head_dim].
        null_row: Row of zeros in `kv`; what an index points at where there is nothing to read.
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
        rings = config.num_hidden_layers + config.num_nextn_predict_layers
        window_rows = rings * num_slots * ring_size
        dim = config.head_dim
        total = window_rows + num_blocks * sum(block_rows.values())
        self.kv = torch.zeros(total + 1, dim, device=device, dtype=dtype)
        self.null_row = total
        self.windows = self.kv[:window_rows].view(rings, num_slots, ring_size, dim)
        self._rings = self.windows.view(rings, -1, dim)
        self.rings = list(self._rings)
        self.pools: dict[int, Tensor] = {}
        self.pool_offsets: dict[int, int] = {}
        at = window_rows
        for source, rows in block_rows.items():
            end = at + num_blocks * rows
            self.pool_offsets[source] = at
            self.pools[source] = self.kv[at:end].view(num_blocks, rows, dim)
            at = end
        self.index_keys = {
            source: torch.zeros(num_blocks, rows, config.index_head_dim, device=device, dtype=dtype)
            for source, rows in block_rows.items()
        }

    def tensors(self) -> Iterator[Tensor]:
        """Everything that takes memory."""
        yield self.kv
        yield from self.index_keys.values()

    def write_windows(self, layer: int, index: Tensor, rows: Tensor) -> None:
        """Writes window rows, shape [rows, head_dim], at rows of a layer's rings, shape [rows]."""
        self.rings[layer].index_copy_(0, index, rows)

    def read_windows(self, layer: int, index: Tensor) -> Tensor:
        """Window rows of a layer, shape [*index.shape, head_dim]."""
        ring = self.rings[layer]
        return ring.index_select(0, index.reshape(-1)).view(*index.shape, -1)

    def write_pool(self, source: int, index: Tensor, rows: Tensor, keys: Tensor) -> None:
        """Writes pool rows, shape [rows, head_dim], and index keys at rows of a source's pool, shape [rows]."""
        pool, all_keys = self.pools[source], self.index_keys[source]
        pool.view(-1, pool.shape[-1]).index_copy_(0, index, rows)
        all_keys.view(-1, all_keys.shape[-1]).index_copy_(0, index, keys)

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
        """Attention of tokens to window rows of a layer and pool rows, see `sink_attention`.

        Args:
            layer: The layer.
            queries: Shape [tokens, heads, head_dim].
            windows: Rows of its rings, shape [tokens, window rows], int64.
            pool: Pool rows, counted from `pool_offsets` of their source, shape [tokens, pool rows], int64, or None.
            bias: Added to the logits, shape [tokens, 1, window rows + pool rows], fp32, or None.
            sink: Sink logit of each head, shape [heads], fp32.
            scale: Factor on q . k.
            deterministic: Whether a token's bits must be free of the other tokens.

        Returns:
            Shape [tokens, heads, head_dim].
        """
        index = windows + layer * self.rings[layer].shape[0]
        if pool is not None:
            index = torch.cat((index, pool), 1)
        return attend_rows(queries, self.kv, index, bias, sink, scale, deterministic=deterministic)

    def keys(self, source: int, blocks: np.ndarray) -> Tensor:
        """Index keys of blocks, shape [*blocks.shape[:-1], blocks.shape[-1] * block_rows, index_head_dim]."""
        return select_blocks(self.index_keys[source], blocks)

    def window_bytes(self, num_layers: int, index: Tensor) -> Tensor:
        """Packed window rows of the first layers at rows of their rings, shape [layers, rows, row_bytes], uint8."""
        return self._formats.window.pack(self._rings[:num_layers].index_select(1, index))

    def set_window_bytes(self, index: Tensor, data: Tensor) -> None:
        """Writes what `window_bytes` gave."""
        rows = self._formats.window.unpack(data, self.kv.dtype)
        self._rings[: len(data)].index_copy_(1, index, rows)

    def block_bytes(self, block: int) -> Tensor:
        """Packed rows of a block: pool rows, then index keys, source by source, shape [bytes], uint8."""
        parts = []
        for source, pool in self.pools.items():
            parts.append(self._formats.pool.pack(pool[block]).flatten())
            parts.append(self._formats.key.pack(self.index_keys[source][block]).flatten())
        return torch.cat(parts)

    def set_block_bytes(self, block: int, data: Tensor) -> None:
        """Writes what `block_bytes` gave."""
        at = 0
        for source, pool in self.pools.items():
            for rows, form in (
                (pool[block], self._formats.pool),
                (self.index_keys[source][block], self._formats.key),
            ):
                end = at + len(rows) * form.row_bytes
                rows.copy_(form.unpack(data[at:end].view(len(rows), -1), rows.dtype))
                at = end

    def clear_windows(self, slot: int, used: int) -> None:
        """Zeroes the first `used` rows of a slot's rings."""
        self.windows[:, slot, :used].zero_()

    def clear_block(self, block: int, rows: Mapping[int, int]) -> None:
        """Zeroes the first rows of a block, `rows[source]` of them in each pool."""
        for source, count in rows.items():
            self.pools[source][block, :count].zero_()
            self.index_keys[source][block, :count].zero_()


def select_blocks(data: Tensor, blocks: np.ndarray) -> Tensor:
    """Rows of blocks one after the other; a view where the blocks follow each other.

    Args:
        data: Shape [blocks, block_rows, channels].
        blocks: Block ids, shape [..., blocks], int64.

    Returns:
        Shape [..., blocks * block_rows, channels].
    """
    flat = blocks.reshape(-1)
    ids = flat.tolist()
    first, end = ids[0], ids[0] + len(ids)
    if ids[-1] == end - 1 and ids == list(range(first, end)):
        found = data[first:end]
    else:
        found = data[to_device(flat, data.device)]
    return found.reshape(*blocks.shape[:-1], -1, data.shape[-1])
