"""Arithmetic of a prefill, counted from the configuration."""

from __future__ import annotations

from deepinfer.models.deepseek_v41.config import DeepseekV41Config
from deepinfer.models.deepseek_v41.narrowing import narrowing_of

__all__ = ["prefill_flops"]


def prefill_flops(config: DeepseekV41Config, num_tokens: int, *, narrowed: bool = False) -> float:
    """Floating-point operations of the matrix products of one cold prompt.

    Counted are projections, experts that a token uses, stream mixing, Engram projections, attention to the window and
    to selected pool rows, index scores of visible rows, and the head for the last token; not counted are norms,
    softmax, Sinkhorn, rotations and the draft. A multiplication and an addition are two operations.

    Args:
        config: The configuration.
        num_tokens: Tokens of the prompt.
        narrowed: Whether rows before the last window stop behind the last KV source.

    Returns:
        Operations.
    """
    first = narrowing_of(config).first_layer if narrowed else None
    kept_from = 0 if first is None else max(0, num_tokens - config.sliding_window)
    total = 2.0 * config.vocab_size * config.hidden_size
    for layer in range(config.num_hidden_layers):
        total += num_tokens * _pool_flops(config, layer)
        if layer in config.engram_layer_ids:
            width = (config.hc_mult + 1) * config.hidden_size
            total += num_tokens * 2.0 * config.engram_width * width
        start = kept_from if first is not None and layer >= first else 0
        total += (num_tokens - start) * _row_flops(config, layer)
        total += _attention_flops(config, layer, start, num_tokens)
    return total


def _pool_flops(config: DeepseekV41Config, layer: int) -> float:
    """What a token costs in the pool of a KV source: value, gate and index key."""
    if layer not in config.kv_source_layer_ids:
        return 0.0
    ratio = config.compress_ratios[layer]
    projections = config.hidden_size * config.head_dim * (2 if ratio > 1 else 1)
    return 2.0 * (projections + config.head_dim * config.index_head_dim / ratio)


def _row_flops(config: DeepseekV41Config, layer: int) -> float:
    """What a token costs in the weights of a layer, its pool and its Engram left out."""
    c = config
    heads = c.num_attention_heads * c.head_dim
    weights = c.hidden_size * (c.q_lora_rank + c.head_dim + c.o_groups * c.o_lora_rank)
    weights += heads * (c.q_lora_rank + c.o_lora_rank)
    if layer in c.index_source_layer_ids:
        weights += c.q_lora_rank * c.index_n_heads * c.index_head_dim
        weights += c.hidden_size * c.index_n_heads
    weights += 3 * c.hidden_size * c.moe_intermediate_size * (c.num_experts_per_tok + 1)
    weights += c.hidden_size * c.n_routed_experts
    mixing = c.hc_mult * (c.hc_mult + 2) * c.hc_mult * c.hidden_size
    return 2.0 * (weights + 2 * mixing)


def _attention_flops(config: DeepseekV41Config, layer: int, start: int, end: int) -> float:
    """What the rows [start, end) cost in attention and index scores."""
    ratio = config.compress_ratios[layer]
    rows = _sum_of_visible(start, end, 1, config.sliding_window)
    scored = 0.0
    if ratio:
        rows += _sum_of_visible(start, end, ratio, config.index_topk)
        if layer in config.index_source_layer_ids:
            scored = _sum_of_visible(start, end, ratio, None)
    per_row = 4.0 * config.num_attention_heads * config.head_dim
    return rows * per_row + scored * 2.0 * config.index_n_heads * config.index_head_dim


def _sum_of_visible(start: int, end: int, ratio: int, most: int | None) -> float:
    """Sum of min((t + 1) // ratio, most) over t in [start, end), up to the rounding of a pair."""
    low, high = start / ratio, end / ratio
    if most is None or high <= most:
        return ratio * (high * high - low * low) / 2
    bend = max(low, min(high, float(most)))
    return ratio * ((bend * bend - low * low) / 2 + (high - bend) * most)
