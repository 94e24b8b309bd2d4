"""Attention of a few tokens to cached rows on the CPU: what the layers of a step share is made once a step."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from deepinfer.models.deepseek_v41.attention import Attention
from deepinfer.models.deepseek_v41.row_storage import PlainRows

__all__ = ["FewRows"]

_MOST_TOKENS = 32


class FewRows:
    """Twin of `PlainRows.write_windows` and `PlainRows.attend` for the tokens of one step.

    Of the list of rows only the window rows' first row differs from layer to layer, and the sink logits have a place
    behind the logits, so that nothing is joined.
    """

    def __init__(self, table: PlainRows, ring_index: np.ndarray, window_index: np.ndarray) -> None:
        """Takes what depends on positions alone.

        Args:
            table: The rows; see `fits`.
            ring_index: Where each token's window row lies in a layer's rings, shape [tokens], int64.
            window_index: Rows of each token's window within a layer's rings, shape [tokens, window], int64.
        """
        self._kv, self._rows = table.kv, table.kv.numpy()
        self._ring_rows = table.rings[0].shape[0]
        self._ring_index, self._windows = ring_index, window_index
        self._lists: dict[bool, _List] = {}
        self._pool: Tensor | None = None

    @staticmethod
    def fits(table: PlainRows, tokens: int) -> bool:
        """Whether these arrays can do a step of so many tokens."""
        kv = table.kv
        return tokens <= _MOST_TOKENS and kv.is_cpu and kv.dtype is torch.float32

    def attend(
        self,
        attention: Attention,
        queries: Tensor,
        kv: Tensor,
        pool: Tensor | None,
        bias: Tensor | None,
    ) -> Tensor:
        """Writes the window rows `kv`, shape [tokens, head_dim], then attends; see `PlainRows.attend`."""
        first = attention.layer_id * self._ring_rows
        self._rows[self._ring_index + first] = kv.numpy()
        rows = self._list(pool, attention.num_heads)
        np.add(self._windows, first, rows.window_part)
        keys = self._kv.index_select(0, rows.flat).view(rows.shape)
        start, beta = (attention.attn_sink.view(1, -1, 1), 0) if bias is None else (bias, 1)
        torch.baddbmm(
            start, queries, keys.transpose(1, 2), beta=beta, alpha=attention.softmax_scale,
            out=rows.logits,
        )  # fmt: skip
        rows.sink_part[:] = attention.attn_sink.numpy()
        return torch.bmm(torch.softmax(rows.all_logits, -1)[..., :-1], keys)

    def _list(self, pool: Tensor | None, heads: int) -> _List:
        if pool is not self._pool and pool is not None:
            self._pool = pool
            self._lists.pop(True, None)
        found = self._lists.get(pool is not None)
        if found is None:
            found = _List(self._windows, pool, heads, self._rows.shape[1])
            self._lists[pool is not None] = found
        return found


class _List:
    """A list of rows, and room for its logits.

    Attributes:
        window_part: The window rows in it, shape [tokens, window], to be set for each layer.
        flat: The list, shape [tokens * rows], int64.
        shape: [tokens, rows, head_dim].
        all_logits: Shape [tokens, heads, rows + 1], fp32; the sink comes last.
        logits: All but the sink's.
        sink_part: The sink's, shape [tokens, heads].
    """

    def __init__(self, windows: np.ndarray, pool: Tensor | None, heads: int, dim: int) -> None:
        tokens, width = windows.shape
        rows = width + (0 if pool is None else pool.shape[1])
        index = np.empty((tokens, rows), np.int64)
        if pool is not None:
            index[:, width:] = pool.numpy()
        self.window_part = index[:, :width]
        self.flat = torch.from_numpy(index.reshape(-1))
        self.shape = tokens, rows, dim
        logits = np.empty((tokens, heads, rows + 1), np.float32)
        self.sink_part = logits[..., -1]
        self.all_logits = torch.from_numpy(logits)
        self.logits = self.all_logits[..., :-1]
