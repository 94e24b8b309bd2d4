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
    fp8_fp4_paged_mqa_logits,
    gather_and_dequantize_k_cache,
    get_paged_mqa_logits_metadata,
    rope_quant_insert,
    topk,
    topk_to_physical_indices,
)
from deepinfer.models.deepseek_v41.attention import Attention
from deepinfer.models.deepseek_v41.block_table import flat_index
from deepinfer.models.deepseek_v41.cache import SlotCache
from deepinfer.models.deepseek_v41.compressor import Compressor
from deepinfer.models.deepseek_v41.decode_pass import DecodePass
from deepinfer.models.deepseek_v41.decode_selection import DecodeSelection
from deepinfer.models.deepseek_v41.indexer import (
    PAGED_HEADS,
    Indexer,
    IndexQueries,
    candidate_mask,
    query_codes,
)
from deepinfer.models.deepseek_v41.packed_rows import PackedRows

__all__ = [
    "PackedDecodePass",
    "attend_packed",
    "takes_kernels",
    "why_no_packed_steps",
    "write_packed_pool",
    "write_packed_windows",
]

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


def takes_kernels(rows: PackedRows) -> bool:
    """Whether the kernels read and write these rows."""
    window, pool = rows.window_data.shape[-1], rows.pool_data.shape[-1]
    return (window, pool) == (_WINDOW.bytes_per_token, _POOL.bytes_per_token)


def write_packed_windows(
    window: Tensor, kv: Tensor, weight: Tensor, eps: float, phases: Tensor, index: Tensor
) -> None:
    """Norms, rotates, packs and writes window rows.

    Args:
        window: Rows of a layer, shape [rows, row_bytes], uint8, written.
        kv: Projections, shape [tokens, 1, head_dim].
        weight: Gains of the norm, shape [head_dim].
        eps: Added to the mean square.
        phases: Cosines and sines, shape [tokens, rope_dim / 2, 2], fp32.
        index: Rows to write, -1 for none, shape [tokens].
    """
    rope_quant_insert(
        kv.squeeze(1), phases, window, index, _WINDOW, 1, weight=weight, eps=eps
    )  # fmt: skip


def write_packed_pool(
    rows: PackedRows,
    source: int,
    compressor: Compressor,
    indexer: Indexer,
    y: Tensor,
    phases: Tensor,
    index: Tensor,
    **pairs: Any,
) -> None:
    """Writes pool rows and index keys of a KV source.

    Args:
        rows: The rows, written.
        source: The source.
        compressor: Its compressor.
        indexer: Its indexer.
        y: Normed attention input, shape [tokens, hidden].
        phases: Rotations of the latents, shape [latents, rope_dim / 2, 2], fp32.
        index: Pool row of each latent, -1 for none, shape [latents].
        **pairs: Further arguments of `compress_norm`.
    """
    if indexer.wk is None or indexer.k_norm is None:
        raise InvariantBroken(f"Layer {source} owns a pool and makes no index keys.")
    values, *gates = compressor.project_parts(y)
    latents = compress_norm(
        values, gates[0] if gates else None, compressor.norm.weight, compressor.norm.eps, phases,
        rows.pools[source].flatten(0, 1), index, _POOL, 1, dtype=y.dtype, **pairs,
    )  # fmt: skip
    if len(index):
        rope_quant_insert(
            indexer.wk(latents), phases, rows.index_keys[source], index, _KEY, rows.block_rows[source],
            weight=indexer.k_norm.weight, eps=indexer.k_norm.eps,
        )  # fmt: skip


def attend_packed(
    attention: Attention,
    rows: PackedRows,
    queries: Tensor,
    windows: Tensor,
    pool: Tensor | None,
    phases: Tensor | None = None,
) -> Tensor:
    """Attention to packed window and pool rows.

    Args:
        attention: The layer's attention.
        rows: The rows.
        queries: Rotated queries, shape [tokens, heads, head_dim].
        windows: Window rows of the layer, -1 for none, shape [tokens, window].
        pool: Pool rows, -1 for none, shape [tokens, selected], or None.
        phases: Rotations of the tokens, by which outputs are turned back, shape [tokens, rope_dim / 2, 2], fp32; None
            to leave them.

    Returns:
        Shape [tokens, heads, head_dim].
    """
    extra: dict[str, Any] = {}
    if pool is not None:
        extra = {
            "extra_k_cache": rows.pool_data,
            "extra_indices_in_kvcache": pool.to(torch.int32).unsqueeze(1),
            "extra_format": _POOL,
        }
    out, _ = flash_mla_with_kvcache(
        queries.unsqueeze(1), rows.window_data[attention.layer_id], windows.to(torch.int32).unsqueeze(1),
        page_size=1, format=_WINDOW, softmax_scale=attention.softmax_scale, attn_sink=attention.attn_sink,
        phases=phases, **extra,
    )  # fmt: skip
    return out.squeeze(1)


class PackedSelection(DecodeSelection):
    """`DecodeSelection` over packed index keys."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        """See `DecodeSelection`."""
        super().__init__(*args, **kwargs)
        self._shared: dict[int, tuple[Tensor, Tensor, Tensor]] = {}
        self._tables: dict[int, Tensor] = {}

    def _set(self, index: Tensor) -> None:
        """Keeps the rows in the dtype that attention of every layer takes."""
        super()._set(index.to(torch.int32))

    def pick(self, layer: int, source: int, queries: Tensor, weights: Tensor) -> None:
        """See `DecodeSelection.pick`; keys are scored where they lie when the kernel takes such pages."""
        if self._in_pages(source, queries):
            self._pick_codes(layer, source, *query_codes(queries, weights))
        else:
            super().pick(layer, source, queries, weights)

    def pick_projected(self, layer: int, source: int, queries: IndexQueries) -> None:
        """As `pick`, for queries that are not yet rotated and rounded."""
        if self._in_pages(source, queries.projected):
            self._pick_codes(layer, source, *queries.codes())
        else:
            super().pick(layer, source, *queries.values())

    def _in_pages(self, source: int, queries: Tensor) -> bool:
        return self._cache.block_rows[source] % 4 == 0 and queries.shape[1] in PAGED_HEADS

    def _pick_codes(self, layer: int, source: int, codes: Tensor, weights: Tensor) -> None:
        page, config = self._cache.block_rows[source], self._cache.config
        self._taken_all_of = None
        ratio, count = config.compress_ratios[source], self.num_rows(source)
        if ratio not in self._shared:
            lengths = self._visible(source).to(torch.int32)
            programs = get_paged_mqa_logits_metadata(lengths, page, _num_sms(lengths.device))
            table = self._cache.table.device[self._slots, : -(-count // page)].to(torch.int32)
            self._shared[ratio] = lengths, programs, table
        lengths, programs, table = self._shared[ratio]
        makes_candidates = layer == config.candidate_source_layer_id
        blocks, size = config.candidate_topk_blocks, config.candidate_block_size
        makes_candidates = makes_candidates and count > blocks * size
        scores = fp8_fp4_paged_mqa_logits(
            codes.view(*lengths.shape, *codes.shape[1:]), self._cache.index_keys[source], weights, lengths, table,
            programs, count, page_size=page, clean_logits=makes_candidates or self._candidates is not None,
        )  # fmt: skip
        ends = lengths.flatten()
        cut = None
        if makes_candidates:
            self._candidates = candidate_mask(scores, ends.long(), blocks, size)
        elif self._candidates is not None:
            cut = scores.masked_fill_(~self._candidates, -torch.inf)
        _, rows = topk(scores, min(config.index_topk, count), end=ends, return_value=False)
        if cut is not None:
            rows.masked_fill_(cut.gather(1, rows.clamp_min(0).long()) == -torch.inf, -1)
        tokens = lengths.shape[1]
        requests = None
        if tokens > 1:
            requests = torch.arange(len(ends), device=ends.device) // tokens
        offset = self._cache.rows.pool_offsets[source]
        whole = offset % page == 0
        if whole and offset and source not in self._tables:
            self._tables[source] = table + offset // page  # pages counted over all pools
        table = self._tables.get(source, table)
        index = topk_to_physical_indices(rows, table, page, requests=requests)
        self._set(index if whole else torch.where(index >= 0, index + offset, index))

    def _keys(self, source: int, count: int) -> Tensor:
        """Index keys of each row's slot, unpacked, shape [rows, count, index_head_dim]."""
        cache, page = self._cache, self._cache.block_rows[source]
        rows = torch.arange(count, device=self._slots.device)
        slots = flat_index(cache.table.device, self._slots.unsqueeze(1), rows.unsqueeze(0), page)
        return gather_and_dequantize_k_cache(cache.index_keys[source], slots, _KEY, page)


def _num_sms(device: torch.device) -> int:
    """Processors that share the work of scores."""
    if device.type != "cuda":
        return 1
    return torch.cuda.get_device_properties(device).multi_processor_count


class PackedDecodePass(DecodePass):
    """`DecodePass` over packed rows; a row of a cache is a page of its own."""

    _SELECTION = PackedSelection
    packed = True

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        """See `DecodePass`; lists of rows take the dtype that attention takes once, for all layers."""
        super().__init__(*args, **kwargs)
        self._windows = [rows.to(torch.int32) for rows in self._windows]

    def _adopt(self, cache: SlotCache) -> None:
        """Takes the rows of the cache."""
        if not isinstance(cache.rows, PackedRows):
            raise InvariantBroken("This pass reads packed rows; the cache holds others.")
        self._rows = cache.rows

    def extend_pool(
        self, attention: Attention, compressor: Compressor, indexer: Indexer, y: Tensor
    ) -> None:
        """Writes the pool rows and index keys that the tokens complete; `y` has shape [tokens, hidden]."""
        source, ratio = attention.layer_id, compressor.ratio
        index, phases = self.pool_index(ratio), self.phases(True, ratio - 1)
        pairs: dict[str, Any] = {}
        if ratio > 1:
            pairs = {
                "state": self.cache.tails[source],
                "requests": self._masked(self._flat_slots),
                "positions": self.flat_positions,
            }
        write_packed_pool(self._rows, source, compressor, indexer, y, phases, index, **pairs)

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
        window = self._rows.window_data[attention.layer_id]
        write_packed_windows(window, kv, weight, eps, phases, self.ring_index)

    def attend_cached(self, attention: Attention, queries: Tensor) -> Tensor:
        """Attends to rows that are all written; shape [tokens, heads, head_dim]."""
        layer, pool = attention.layer_id, self._selection.index if attention.ratio else None
        return attend_packed(attention, self._rows, queries, self.window_rows(layer), pool)

    def attend_back(self, attention: Attention, queries: Tensor, phases: Tensor) -> Tensor:
        """As `attend_cached`, and turns the outputs back by the tokens' rotations."""
        layer, pool = attention.layer_id, self._selection.index if attention.ratio else None
        windows = self.window_rows(layer)
        return attend_packed(attention, self._rows, queries, windows, pool, phases)

    def needs_scores(self, attention: Attention) -> bool:
        """Whether an index source has to score rows; where it has not, it selects all of them."""
        source = self._source(attention)
        if self._selection.needs_scores(attention.layer_id, source):
            return True
        self._selection.take_all(source)
        return False

    def pick(self, attention: Attention, queries: IndexQueries) -> None:
        """Selects rows by index queries."""
        if not isinstance(self._selection, PackedSelection):
            raise InvariantBroken("This pass selects from packed keys; its selection reads others.")
        self._selection.pick_projected(attention.layer_id, self._source(attention), queries)

    def _source(self, attention: Attention) -> int:
        sources = self.cache.config.kv_source_layer_ids
        return max(s for s in sources if s <= attention.layer_id)
