"""Where a model can be narrowed: the layers that only the last rows of a prompt need to run.

Above the last layer that owns a pool, a layer leaves nothing behind but its window, so a prompt token that no later
token sees through a window need not run there (the report's encoder and decoder). `Segment.full_start` says from which
position on rows run every layer; it stands on positions alone, so that chunks, batches and preemption change nothing.
"""

from __future__ import annotations

from dataclasses import dataclass

from deepinfer.models.deepseek_v41.config import DeepseekV41Config

__all__ = ["Narrowing", "narrowing_of", "window_spare"]


@dataclass(frozen=True, slots=True)
class Narrowing:
    """How a configuration can be narrowed.

    Attributes:
        first_layer: The layer in which rows drop out: the last KV source. It makes its pool rows and index keys for
            all rows, and the rest of it and of the layers above for the kept rows only. None when the layout does
            not allow it.
        reason: Why not, or "".
        window_layers: Layers, from 0 on, whose windows a prefix hit has to bring back before suffix rows are exact:
            those below `first_layer`, or all.
    """

    first_layer: int | None
    reason: str
    window_layers: int

    def exact_replay(self, window: int) -> int:
        """Tokens to run again before the first row that must equal a full run, for windows of `window` tokens."""
        return self.window_layers * (window - 1) + 1


def narrowing_of(config: DeepseekV41Config) -> Narrowing:
    """Checks the layout: from the last KV source on, no Engram behind it and no ratio other than 1.

    Args:
        config: The configuration.

    Returns:
        The layer, or the reason why there is none.
    """
    layers = config.num_hidden_layers
    if not config.kv_source_layer_ids:
        return Narrowing(None, "no layer owns a pool", layers)
    first = max(config.kv_source_layer_ids)
    engrams = [layer for layer in config.engram_layer_ids if layer > first]
    if engrams:
        reason = f"layer {engrams[0]} has an Engram above the last KV source, layer {first}"
        return Narrowing(None, reason, layers)
    for layer in range(first, layers):
        ratio = config.compress_ratios[layer]
        if ratio != 1:
            reason = f"layer {layer} has ratio {ratio} where the last KV source, layer {first}, "
            return Narrowing(None, reason + "and all layers above it need ratio 1", layers)
    return Narrowing(first, "", first)


def window_spare(config: DeepseekV41Config) -> int:
    """Rows beyond the window that a saved window holds: as many as one verify step writes."""
    return 1 + (config.dspark_block_size if config.num_nextn_predict_layers else 0)
