"""The least time of each part of a layer, from bytes and operations at the limits that an H200 reaches."""

from __future__ import annotations

from deepinfer.models.deepseek_v41 import DeepseekV41Config

__all__ = ["least_ms"]

COPY_TB_S, BF16_TFLOP_S, FP8_TFLOP_S = 4.26, 700.0, 1150.0


def least_ms(
    config: DeepseekV41Config, rows: int, context: int, source: bool, prompt: bool = False
) -> dict[str, float]:
    """The least time of each part of a layer in ms, from bytes and operations."""
    c, hidden, heads, dim = config, config.hidden_size, config.num_attention_heads, config.head_dim

    def floor(size_bytes: float, flops: float = 0.0, rate: float = BF16_TFLOP_S) -> float:
        return max(size_bytes / COPY_TB_S / 1e9, flops / rate / 1e9)

    def product(n: int, k: int, element: float, rate: float) -> float:
        return floor(n * k * element + rows * (k + 2 * n), 2 * rows * n * k, rate)

    fp8 = 1 + 1 / 1024
    pairs = rows * c.num_experts_per_tok
    active = c.n_routed_experts * (1 - (1 - c.num_experts_per_tok / c.n_routed_experts) ** rows)
    expert = 3 * hidden * c.moe_intermediate_size
    keys = min(context // 2, c.index_topk)
    parts = {
        "streams": floor(4 * rows * hidden * 2 * 4 + 2 * 24 * 4 * hidden * 4),
        "query and window": product(c.q_lora_rank + dim, hidden, fp8, FP8_TFLOP_S)
        + product(heads * dim, c.q_lora_rank, fp8, FP8_TFLOP_S),
        "attention": floor(
            rows * (c.sliding_window * 528 + keys * 288 + 4 * heads * dim),
            4 * rows * heads * (c.sliding_window + keys) * dim,
        ),
        "output": floor(heads * dim * c.o_lora_rank * 2 + rows * heads * dim * 2, 2 * rows * heads * dim * c.o_lora_rank)
        + product(hidden, c.o_groups * c.o_lora_rank, fp8, FP8_TFLOP_S),
        "router": product(c.n_routed_experts, hidden, 4, BF16_TFLOP_S),
        "shared expert": product(3 * c.moe_intermediate_size, hidden, fp8, FP8_TFLOP_S),
        "experts": floor(
            active * expert * (0.5 + 1 / 32) + pairs * (2 * hidden + 6 * c.moe_intermediate_size),
            2 * pairs * expert, FP8_TFLOP_S,
        ),
    }  # fmt: skip
    if source:
        # A prompt's tokens see half of its rows on average, and share the keys.
        scored = context / 4 if prompt else context / 2
        read = context / 2 * 68 if prompt else rows * scored * 68
        parts["index"] = floor(
            read + 4 * rows * scored * 2,
            2 * rows * scored * c.index_n_heads * c.index_head_dim, FP8_TFLOP_S,
        ) + product(c.index_n_heads * c.index_head_dim, c.q_lora_rank, fp8, FP8_TFLOP_S)  # fmt: skip
        parts["pool"] = product(2 * dim, hidden, 4, BF16_TFLOP_S)
    return parts
