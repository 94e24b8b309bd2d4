"""Keys of a step with many tokens, side by side in the activations' dtype, as the kernels of many rows read them.

Packed rows are dequantised once: the windows of a layer when it attends, a pool once for all layers that share it. Both
lie in the order of the segments, so a window is a band of consecutive keys and a pool row keeps its number in its slot.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from deepinfer.kernels import KVCacheFormat, gather_and_dequantize_k_cache, swa_attention
from deepinfer.models.deepseek_v41.attention import Attention
from deepinfer.models.deepseek_v41.batch import Segment, positions_of, repeat_over, to_device
from deepinfer.models.deepseek_v41.block_table import flat_index
from deepinfer.models.deepseek_v41.cache import SlotCache
from deepinfer.models.deepseek_v41.packed_rows import PackedRows

__all__ = ["SHORT", "PromptKeys", "pays"]

_MIN_TOKENS = 256
_MAX_PROMPTS = 16
# Segments of up to so many tokens, as of requests that decode, are scored together.
SHORT = 8
_ROWS_PER_TOKEN = 128
_MAX_ROWS = 1 << 21


def pays(segments: Sequence[Segment]) -> bool:
    """Whether dequantising the keys of a step's requests first is less work than doing so for each row.

    Args:
        segments: The segments of the step.
    """
    tokens = sum(s.num_tokens for s in segments)
    rows = sum({s.slot: s.end for s in segments}.values())
    few_keys = rows <= min(_ROWS_PER_TOKEN * tokens, _MAX_ROWS)
    prompts = sum(s.num_tokens > SHORT for s in segments)
    return tokens >= _MIN_TOKENS and prompts <= _MAX_PROMPTS and few_keys


class PromptKeys:
    """Keys of one step, and which of them each token sees in its window.

    Attributes:
        bases: Where the pool rows of each segment's slot begin at a ratio, by ratio, shape [segments], on the host.
    """

    def __init__(
        self, segments: Sequence[Segment], floors: Sequence[int], cache: SlotCache, rows: PackedRows
    ) -> None:
        """Prepares the step.

        Args:
            segments: Its segments.
            floors: Lowest position whose window row each may read.
            cache: The cache.
            rows: Its rows.
        """
        self._cache, self._rows = cache, rows
        window, ring = cache.config.sliding_window, cache.ring_size
        self._window = window
        firsts = [max(s.start - window + 1, min(f, s.start), 0) for s, f in zip(segments, floors, strict=True)]  # fmt: skip
        counts = [s.end - first for s, first in zip(segments, firsts, strict=True)]
        begins = np.cumsum([0, *counts])[:-1]
        at = np.arange(sum(counts)) + np.repeat(np.array(firsts) - begins, counts)
        slots = np.repeat([s.slot for s in segments], counts)
        self._ring_rows = to_device(slots * ring + at % ring, cache.device)
        positions = positions_of(segments)
        lowest = np.maximum(positions - window + 1, repeat_over(segments, firsts))
        starts = lowest + repeat_over(segments, (begins - firsts).tolist())
        self._bands = tuple(
            to_device(a.astype(np.int32), cache.device) for a in (starts, positions - lowest + 1)
        )
        self._ends = {s.slot: s.end for s in segments}
        self._segments = segments
        self._pools: dict[int, Tensor] = {}
        self._pool_rows: dict[int, Tensor] = {}
        self.bases: dict[int, list[int]] = {}

    def bases_of(self, ratio: int) -> list[int]:
        """Where the pool rows of each segment's slot begin among those of `pool`."""
        if ratio not in self.bases:
            counts = {slot: end // ratio for slot, end in self._ends.items()}
            at = dict(zip(counts, np.cumsum([0, *counts.values()]).tolist(), strict=False))
            self.bases[ratio] = [at[s.slot] for s in self._segments]
        return self.bases[ratio]

    def pool(self, source: int, dtype: torch.dtype) -> Tensor:
        """Pool rows of all slots, slot after slot, shape [rows, 1, head_dim]; dequantised once a source."""
        if source not in self._pools:
            ratio = self._cache.config.compress_ratios[source]
            if ratio not in self._pool_rows:
                self._pool_rows[ratio] = self._rows_of(ratio)
            data = self._rows.pools[source].flatten(0, 1)
            values = gather_and_dequantize_k_cache(
                data, self._pool_rows[ratio], KVCacheFormat.V41_NVFP4, 1, dtype=dtype
            )
            self._pools[source] = values.unsqueeze(1)
        return self._pools[source]

    def _rows_of(self, ratio: int) -> Tensor:
        """Where the pool rows of all slots lie in a pool of a ratio, shape [rows], int64."""
        cache, device = self._cache, self._cache.device
        counts = np.array([end // ratio for end in self._ends.values()])
        begins = np.cumsum(counts) - counts
        owner = torch.repeat_interleave(
            to_device(counts, device), output_size=int(counts.sum())
        )  # number of the slot within the step
        slots, first = (to_device(np.array(a), device)[owner] for a in (list(self._ends), begins))
        rows = torch.arange(len(owner), device=device) - first
        return flat_index(cache.table.device, slots, rows, cache.block_size // ratio)

    def attend(
        self,
        attention: Attention,
        queries: Tensor,
        phases: Tensor | None,
        source: int | None,
        lists: Tensor | None,
        counts: Tensor | None,
    ) -> Tensor:
        """Attends to window rows that are all written and to selected pool rows.

        Args:
            attention: The layer's attention.
            queries: Rotated queries, shape [tokens, heads, head_dim].
            phases: Cosine and sine of the tokens' rotations, shape [tokens, rope_dim / 2, 2], fp32, by which
                outputs are turned back; None to leave them.
            source: KV source of the pool rows, or None.
            lists: Rows of `pool`, -1 for none, shape [tokens, rows], int32, or None.
            counts: Leading rows of each list that count, shape [tokens], int32; None with `lists`.

        Returns:
            Shape [tokens, heads, head_dim].
        """
        windows = gather_and_dequantize_k_cache(
            self._rows.window_data[attention.layer_id], self._ring_rows, KVCacheFormat.V41_MXFP8, 1,
            dtype=queries.dtype,
        )  # fmt: skip
        extra: dict[str, Tensor] = {}
        if lists is not None and counts is not None and source is not None:
            extra = {
                "extra_kv": self.pool(source, queries.dtype),
                "extra_indices": lists.unsqueeze(1),
                "extra_topk_length": counts,
            }
        starts, lengths = self._bands
        out, *_ = swa_attention(
            queries, windows.unsqueeze(1), (starts, lengths), self._window, attention.softmax_scale,
            queries.shape[2], attention.attn_sink, phases=phases, **extra,
        )  # fmt: skip
        return out
