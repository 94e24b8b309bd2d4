"""One decode or verify step of fixed shape: nothing depends on values that the host would have to know.

`DecodePass` gives what `StepPass` gives, for rows of equal length whose positions, slots and ids are read from device
tensors. What a row must not see is masked, and what padding computes is written nowhere, so that one recording of the
step on a GPU serves every batch that fits its shape.
"""

from __future__ import annotations

from types import ModuleType

import torch
from torch import Tensor

from deepinfer.core.errors import InvariantBroken
from deepinfer.kernels import batch_invariant
from deepinfer.models.deepseek_v41.attention import Attention
from deepinfer.models.deepseek_v41.block_table import flat_index
from deepinfer.models.deepseek_v41.cache import SlotCache
from deepinfer.models.deepseek_v41.compressor import Compressor
from deepinfer.models.deepseek_v41.decode_inputs import (
    COUNT,
    FIRST,
    FROM_FUTURE,
    FULL_FLOOR,
    SLOT,
    WINDOW_FLOOR,
    DecodeInputs,
)
from deepinfer.models.deepseek_v41.decode_selection import DecodeSelection
from deepinfer.models.deepseek_v41.indexer import Indexer
from deepinfer.models.deepseek_v41.packed_products import linear
from deepinfer.models.deepseek_v41.rope import Rotation, apply_rope_, rope_phases
from deepinfer.models.deepseek_v41.row_storage import PlainRows

__all__ = ["DecodePass", "window_index"]


def window_index(
    positions: Tensor, slots: Tensor, lowest: Tensor, width: int, ring_size: int
) -> Tensor:
    """Ring rows of the `width` positions up to each token's own, oldest first.

    Args:
        positions: Newest position of each window, shape [tokens], int64.
        slots: Shape [tokens], int64.
        lowest: Lowest position that each may see, shape [tokens], int64.
        width: Positions of a window.
        ring_size: Rows of a slot's ring.

    Returns:
        Rows of a layer's rings, -1 below `lowest` or 0, shape [tokens, width], int64.
    """
    wanted = positions.unsqueeze(1) - torch.arange(width - 1, -1, -1, device=positions.device)
    index = slots.unsqueeze(1) * ring_size + wanted % ring_size
    return index.masked_fill_(wanted < lowest.clamp_min(0).unsqueeze(1), -1)


class DecodePass:
    """State of one step of fixed shape.

    Attributes:
        ids: Token ids, shape [tokens], int64, tokens of a row side by side.
        valid: False for padding, shape [rows, tokens per row].
        flat_positions: Position of each token, shape [tokens], int64.
        ring_index: Where each token's window rows go in a layer's rings, -1 for padding, shape [tokens], int64.
        engram_rows: Table rows by layer id, each of shape [tokens, columns].
        features: Mean streams that entered the draft's target layers, or None without a draft.
        kernels: Where the row-wise steps come from, see `deepinfer.kernels.fused`.
        cache: The cache.
        packed: Whether rows are bytes that kernels read and write, so that `packed_stack` may run the layers.
    """

    is_image = None
    narrow_layer = None
    packed = False
    _SELECTION: type[DecodeSelection] = DecodeSelection

    def __init__(
        self,
        inputs: DecodeInputs,
        cache: SlotCache,
        frequencies: tuple[Tensor, Tensor],
        context: int,
        kernels: ModuleType,
        future: Tensor | None = None,
        *,
        deterministic: bool = False,
        own_steps: bool = True,
        with_features: bool = True,
    ) -> None:
        """Prepares the step and writes the token history.

        Args:
            inputs: Rows.
            cache: The cache; its `begin` has accepted the rows.
            frequencies: Radians per position of layers without and with a pool, each of shape [rope_dim / 2].
            context: Tokens that any row holds at most, this step included.
            kernels: Row-wise steps.
            future: Token sampled last for each slot, shape [slots], int64, for rows whose id the host does not know.
            deterministic: Whether to compute what `StepPass` computes bit for bit, with fixed widths.
            own_steps: Whether the general pass of that mode runs the layers' own steps instead of these kernels.
            with_features: Whether what the draft learns of the tokens is kept.
        """
        self.cache, self.kernels = cache, kernels
        self._adopt(cache)
        self._own_steps = deterministic and own_steps
        self.engram_rows: dict[int, Tensor] = {}
        has_draft = with_features and cache.config.num_nextn_predict_layers > 0
        self.features: list[Tensor] | None = [] if has_draft else None
        values = inputs.values
        self.slots = slots = values[:, SLOT]
        step = torch.arange(inputs.tokens_per_row, device=values.device)
        self.valid = step < values[:, COUNT, None]
        self.positions = positions = values[:, FIRST, None] + step
        ids = inputs.ids
        if future is not None:
            known = (values[:, FROM_FUTURE, None] == 0) | (step > 0)
            ids = torch.where(known, ids, future[slots].unsqueeze(1))
        self.ids = ids.flatten()
        self.flat_positions = flat = positions.flatten()
        self._flat_slots = slots.repeat_interleave(inputs.tokens_per_row)
        self._frequencies = frequencies
        self._phases: dict[tuple[bool, int], Tensor] = {}
        self._rotations: dict[bool, Rotation] = {}
        self._selection = self._SELECTION(
            cache, slots, positions, self.valid, context, deterministic=deterministic
        )
        window, ring = cache.config.sliding_window, cache.ring_size
        first = torch.where(self.valid.flatten(), flat - window + 1, flat + 1)
        self._windows = []
        for column in (WINDOW_FLOOR, FULL_FLOOR):
            floor = values[:, column].repeat_interleave(inputs.tokens_per_row)
            lowest = torch.maximum(first, floor)
            self._windows.append(window_index(flat, self._flat_slots, lowest, window, ring))
        self.ring_index = self._masked(self._flat_slots * ring + flat % ring)
        self._pool_index: dict[int, Tensor] = {}
        history = self._masked(self._flat_slots * cache.max_tokens + flat)
        kernels.scatter_rows(cache.tokens.view(-1), history, self.ids)

    def _adopt(self, cache: SlotCache) -> None:
        """Takes the rows of the cache."""
        if not isinstance(cache.rows, PlainRows):
            raise InvariantBroken("This pass reads plain rows; the cache holds others.")
        self._rings = cache.rows.rings

    def history(self, ngram: int) -> Tensor:
        """Id of each token and of those before it, newest first, shape [tokens, ngram], int64.

        Negative before the start, and on images.
        """
        cache = self.cache
        wanted = self.flat_positions.unsqueeze(1) - torch.arange(ngram, device=self.ids.device)
        at = (
            wanted.clamp(0, cache.max_tokens - 1) + self._flat_slots.unsqueeze(1) * cache.max_tokens
        )
        found = cache.tokens.view(-1)[at]
        outside = wanted < 0
        if cache.config.image_token_id is not None:
            outside = outside | (found == cache.config.image_token_id)
        return found.masked_fill(outside, -1)

    def phases(self, compressed: bool, back: int = 0) -> Tensor:
        """Cosines and sines of the positions less `back`, shape [tokens, rope_dim / 2, 2], fp32."""
        key = (compressed, back)
        if key not in self._phases:
            turned = rope_phases(self._frequencies[compressed], self.flat_positions - back)
            self._phases[key] = torch.view_as_real(turned)
        return self._phases[key]

    def rotation(self, compressed: bool) -> Rotation:
        """Rotations of the tokens' positions."""
        if compressed not in self._rotations:
            turned = torch.view_as_complex(self.phases(compressed))
            inverse = turned.conj().resolve_conj()
            self._rotations[compressed] = Rotation(
                turned, turned.unsqueeze(1), inverse.unsqueeze(1)
            )
        return self._rotations[compressed]

    def narrow(self) -> Tensor | None:
        """Keeps all rows."""
        return None

    def extend_pool(
        self, attention: Attention, compressor: Compressor, indexer: Indexer, y: Tensor
    ) -> None:
        """Writes the pool rows and index keys that the tokens complete; `y` has shape [tokens, hidden]."""
        cache, kernels, source = self.cache, self.kernels, attention.layer_id
        ratio = compressor.ratio
        if indexer.wk is None or indexer.k_norm is None:
            raise InvariantBroken(f"Layer {source} owns a pool and makes no index keys.")
        projected = compressor.project(y)
        if ratio == 1:
            latents = self._latents(compressor, projected, None, y.dtype)
        else:
            latents = self._pair_latents(source, compressor, projected, y.dtype)
        phases = self.phases(True, ratio - 1)
        index = self.pool_index(ratio)
        rounds = attention.rounding.level != "none"
        pool, keys = cache.pools[source], cache.index_keys[source]
        if self._own_steps:
            turned = torch.view_as_complex(phases)
            kernels.scatter_rows(
                keys.view(-1, keys.shape[-1]), index, indexer.keys(latents, turned)
            )
            rows = attention.rounding.pool(apply_rope_(latents, turned))
            kernels.scatter_rows(pool.view(-1, pool.shape[-1]), index, rows)
            return
        kernels.norm_rope_round(
            indexer.wk(latents).unsqueeze(1), indexer.k_norm.weight, indexer.k_norm.eps, phases,
            rounding="mxfp4" if rounds else "none", out=keys.view(-1, keys.shape[-1]), index=index,
        )  # fmt: skip
        kernels.norm_rope_round(
            latents.unsqueeze(1), None, 0.0, phases, rounding="nvfp4" if rounds else "none",
            out=pool.view(-1, pool.shape[-1]), index=index,
        )  # fmt: skip

    def select(self, attention: Attention, indexer: Indexer, bottleneck: Tensor, y: Tensor) -> None:
        """Chooses the pool rows that this layer and the layers that reuse it attend to."""
        layer = attention.layer_id
        source = max(s for s in self.cache.config.kv_source_layer_ids if s <= layer)
        if self._own_steps:
            phases = self.rotation(True).per_head
            self._selection.select(layer, indexer, bottleneck, y, phases)
            return
        if not self._selection.needs_scores(layer, source):
            self._selection.take_all(source)
            return
        rounds = attention.rounding.level != "none"
        queries = linear(indexer.wq_b, bottleneck, rounded=attention.rounding.level == "full")
        queries = queries.view(len(y), indexer.num_heads, -1)
        queries = self.kernels.norm_rope_round(
            queries, None, 0.0, self.phases(True), rounding="mxfp4" if rounds else "none"
        )
        weights = indexer.weights_proj(y).float() * indexer.scale
        self._selection.pick(layer, source, queries, weights)

    def attend(self, attention: Attention, queries: Tensor, kv: Tensor) -> Tensor:
        """Writes the window rows, then attends to window and pool rows; shape [tokens, heads, head_dim]."""
        self.kernels.scatter_rows(self.ring(attention.layer_id), self.ring_index, kv)
        return self.attend_cached(attention, queries)

    def write_windows(
        self,
        attention: Attention,
        kv: Tensor,
        weight: Tensor,
        eps: float,
        phases: Tensor,
        rounding: str,
    ) -> None:
        """Norms, rotates, rounds and writes window rows from the projection `kv`, shape [tokens, 1, head_dim]."""
        self.kernels.norm_rope_round(
            kv, weight, eps, phases, rounding=rounding, out=self.ring(attention.layer_id),
            index=self.ring_index,
        )  # fmt: skip

    def attend_cached(self, attention: Attention, queries: Tensor) -> Tensor:
        """Attends to rows that are all written; shape [tokens, heads, head_dim]."""
        layer, cache = attention.layer_id, self.cache
        windows = self.window_rows(layer)
        extra = self._selection.index if attention.ratio else None
        if self._own_steps:
            rows = windows + layer * len(self.ring(layer))
            rows = rows if extra is None else torch.cat((rows, extra), 1)
            valid = windows >= 0 if extra is None else torch.cat((windows, extra), 1) >= 0
            return batch_invariant.sparse_attention(
                queries, cache.kv, rows.where(valid, 0), valid, attention.attn_sink,
                attention.softmax_scale,
            )  # fmt: skip
        return self.kernels.sparse_attention(
            queries, cache.kv, windows, extra, attention.attn_sink, attention.softmax_scale,
            offset=layer * len(self.ring(layer)),
        )  # fmt: skip

    def window_rows(self, layer: int) -> Tensor:
        """Rows of a layer's rings that each token sees, -1 for none, shape [tokens, window], int64."""
        first_full = self.cache.narrowing.first_layer
        return self._windows[first_full is not None and layer >= first_full]

    def ring(self, layer: int) -> Tensor:
        """Window rows of a layer, shape [slots * ring_size, head_dim]."""
        return self._rings[layer]

    def pool_index(self, ratio: int) -> Tensor:
        """Where the row that each token completes lies in a pool of a ratio, -1 for none, shape [tokens]."""
        if ratio not in self._pool_index:
            cache, at = self.cache, self.flat_positions
            row = at.clamp_max(cache.max_tokens - 1) // ratio
            block_rows = cache.block_size // ratio
            index = flat_index(cache.table.device, self._flat_slots, row, block_rows)
            if ratio > 1:
                index = index.masked_fill(at % ratio != ratio - 1, -1)
            self._pool_index[ratio] = self._masked(index)
        return self._pool_index[ratio]

    def _pair_latents(
        self, source: int, compressor: Compressor, projected: Tensor, dtype: torch.dtype
    ) -> Tensor:
        """Latents of each token and the one before it; only those of completed pairs mean anything."""
        cache = self.cache
        tail, size = cache.tails[source], cache.tail_size
        rows = tail.view(-1, *tail.shape[2:])
        index = self._masked(self._flat_slots * size + self.flat_positions % size)
        kept = self.slots * size + (self.positions[:, 0] - 1) % size
        if self.positions.shape[1] == 1:  # the row before may be another row of this step
            self.kernels.scatter_rows(rows, index, projected)
            return self._latents(compressor, rows[kept], projected, dtype)
        by_row = projected.view(*self.positions.shape, *projected.shape[1:])
        before = torch.cat((rows[kept].unsqueeze(1), by_row[:, :-1]), 1).flatten(0, 1)
        latents = self._latents(compressor, before, projected, dtype)
        self.kernels.scatter_rows(rows, index, projected)
        return latents

    def _latents(
        self, compressor: Compressor, first: Tensor, second: Tensor | None, dtype: torch.dtype
    ) -> Tensor:
        if self._own_steps:
            return compressor.latents(first, second, dtype)
        return compressor.fused_latents(first, second, dtype, self.kernels)

    def _masked(self, index: Tensor) -> Tensor:
        return index.masked_fill(~self.valid.flatten(), -1)
