"""One step of fixed shape over a cache in the published byte formats, through the kernels that read and write them."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from deepinfer.core.errors import InvariantBroken
from deepinfer.kernels import (
    KVCacheFormat,
    compress_norm,
    flash_mla_with_kvcache,
    gather_and_dequantize_k_cache,
    rope_quant_insert,
)
from deepinfer.models.deepseek_v41.attention import Attention
from deepinfer.models.deepseek_v41.cache import SlotCache
from deepinfer.models.deepseek_v41.compressor import Compressor
from deepinfer.models.deepseek_v41.decode_pass import DecodePass
from deepinfer.models.deepseek_v41.decode_selection import DecodeSelection
from deepinfer.models.deepseek_v41.indexer import Indexer
from deepinfer.models.deepseek_v41.packed_rows import PackedRows

__all__ = ["PackedDecodePass", "why_no_packed_steps"]

_WINDOW, _POOL, _KEY = (
    KVCacheFormat.V41_MXFP8,
    KVCacheFormat.V41_NVFP4,
    KVCacheFormat.INDEXER_MXFP4,
)


def why_no_packed_steps(model: nn.Module, cache: SlotCache) -> str:
    """Why a model cannot run steps of fixed shape over a cache of packed rows, or "".

    Args:
        model: The model.
        cache: The cache.
    """
    config = cache.config
    if getattr(model, "deterministic", False):
        return "the cache holds packed rows, and deterministic mode needs plain ones"
    for name, found, form in (
        ("head_dim", config.head_dim, _WINDOW),
        ("index_head_dim", config.index_head_dim, _KEY),
    ):
        if found != form.channels:
            return f"{name} is {found}, and the kernels of packed rows take {form.channels}"
    return ""


class PackedSelection(DecodeSelection):
    """`DecodeSelection` over packed index keys."""

    def _keys(self, source: int, count: int) -> Tensor:
        """Index keys of each row's slot, unpacked, shape [rows, count, index_head_dim]."""
        data = super()._keys(source, count)
        slots = torch.arange(data.shape[0] * count, device=data.device).view(-1, count)
        return gather_and_dequantize_k_cache(data.reshape(-1, data.shape[-1]), slots, _KEY, 1)


class PackedDecodePass(DecodePass):
    """`DecodePass` over packed rows; a row of a cache is a page of its own."""

    _SELECTION = PackedSelection

    def _adopt(self, cache: SlotCache) -> None:
        """Takes the rows of the cache."""
        if not isinstance(cache.rows, PackedRows):
            raise InvariantBroken("This pass reads packed rows; the cache holds others.")
        self._rows = cache.rows
        self._lists: dict[int, Tensor] = {}

    def extend_pool(
        self, attention: Attention, compressor: Compressor, indexer: Indexer, y: Tensor
    ) -> None:
        """Writes the pool rows and index keys that the tokens complete; `y` has shape [tokens, hidden]."""
        source, ratio = attention.layer_id, compressor.ratio
        if indexer.wk is None or indexer.k_norm is None:
            raise InvariantBroken(f"Layer {source} owns a pool and makes no index keys.")
        index, phases = self.pool_index(ratio), self.phases(True, ratio - 1)
        projected = compressor.project(y)
        pairs: dict[str, Any] = {}
        if ratio == 1:
            values, gates = projected, None
        else:
            values, gates = projected[:, 0], projected[:, 1]
            pairs = {
                "state": self.cache.tails[source],
                "requests": self._masked(self._flat_slots),
                "positions": self.flat_positions,
            }
        latents = compress_norm(
            values, gates, compressor.norm.weight, compressor.norm.eps, phases,
            self._rows.pools[source].flatten(0, 1), index, _POOL, 1, dtype=y.dtype, **pairs,
        )  # fmt: skip
        rope_quant_insert(
            indexer.wk(latents), phases, self._rows.index_keys[source].flatten(0, 1), index, _KEY, 1,
            weight=indexer.k_norm.weight, eps=indexer.k_norm.eps,
        )  # fmt: skip

    def write_windows(
        self,
        attention: Attention,
        kv: Tensor,
        weight: Tensor,
        eps: float,
        phases: Tensor,
        rounding: str,
    ) -> None:
        """Norms, rotates, packs and writes window rows from the projection `kv`, shape [tokens, 1, head_dim]."""
        rope_quant_insert(
            kv.squeeze(1), phases, self._rows.window_data[attention.layer_id], self.ring_index, _WINDOW, 1,
            weight=weight, eps=eps,
        )  # fmt: skip

    def attend_cached(self, attention: Attention, queries: Tensor) -> Tensor:
        """Attends to rows that are all written; shape [tokens, heads, head_dim]."""
        layer, extra = attention.layer_id, self._selection.index if attention.ratio else None
        windows = self.window_rows(layer)
        key = id(windows)
        if key not in self._lists:
            self._lists[key] = windows.to(torch.int32).unsqueeze(1)
        pool: dict[str, Any] = {}
        if extra is not None:
            pool = {
                "extra_k_cache": self._rows.pool_data,
                "extra_indices_in_kvcache": extra.to(torch.int32).unsqueeze(1),
                "extra_format": _POOL,
            }
        out, _ = flash_mla_with_kvcache(
            queries.unsqueeze(1), self._rows.window_data[layer], self._lists[key], page_size=1, format=_WINDOW,
            softmax_scale=attention.softmax_scale, attn_sink=attention.attn_sink, **pool,
        )  # fmt: skip
        return out.squeeze(1)
