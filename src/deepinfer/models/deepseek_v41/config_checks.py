"""What a DeepSeek-V4.1 configuration must satisfy."""

from __future__ import annotations

from typing import TYPE_CHECKING

from deepinfer.core.errors import ConfigError

if TYPE_CHECKING:
    from deepinfer.models.deepseek_v41.config import DeepseekV41Config

__all__ = ["check_config"]


def check_config(c: DeepseekV41Config) -> None:
    """Refuses a configuration that no model can be built from.

    Args:
        c: The configuration.

    Raises:
        ConfigError: A field is out of range or does not fit another one.
    """

    def need(ok: bool, name: str, limit: str) -> None:
        if not ok:
            value = getattr(c, name)
            raise ConfigError(
                f"{name} is {value!r}; it must be {limit}. Correct config.json.",
                field=name,
                value=value,
                limit=limit,
            )

    positive = (
        "vocab_size", "hidden_size", "num_hidden_layers", "moe_intermediate_size", "num_attention_heads", "head_dim",
        "q_lora_rank", "o_lora_rank", "o_groups", "n_routed_experts", "num_experts_per_tok", "sliding_window",
        "index_n_heads", "index_head_dim", "index_topk", "candidate_topk_blocks", "candidate_block_size", "hc_mult",
        "hc_sinkhorn_iters", "max_position_embeddings",
    )  # fmt: skip
    for name in positive:
        value = getattr(c, name)
        need(
            isinstance(value, int) and not isinstance(value, bool) and value > 0,
            name,
            "a positive integer",
        )
    r = c.qk_rope_head_dim
    need(
        r % 2 == 0 and 0 < r <= min(c.head_dim, c.index_head_dim),
        "qk_rope_head_dim",
        "even, within both head sizes",
    )
    need(c.num_attention_heads % c.o_groups == 0, "o_groups", "a divisor of num_attention_heads")
    need(
        c.num_experts_per_tok <= c.n_routed_experts,
        "num_experts_per_tok",
        "at most n_routed_experts",
    )
    layers, stages = c.num_hidden_layers, c.num_nextn_predict_layers
    need(
        len(c.compress_ratios) == layers + stages,
        "compress_ratios",
        f"of {layers} + {stages} entries",
    )
    need(set(c.compress_ratios) <= {0, 1, 2}, "compress_ratios", "made of 0, 1 and 2")
    need(not any(c.compress_ratios[layers:]), "compress_ratios", "0 for every draft stage")
    for name in (
        "kv_source_layer_ids",
        "index_source_layer_ids",
        "engram_layer_ids",
        "dspark_target_layer_ids",
    ):
        ids = getattr(c, name)
        need(
            list(ids) == sorted(set(ids)) and all(0 <= i < layers for i in ids),
            name,
            "rising layer ids",
        )
    for source in (*c.kv_source_layer_ids, *c.index_source_layer_ids):
        need(c.compress_ratios[source] > 0, "compress_ratios", f"positive at source layer {source}")
    for layer in range(layers):
        ratio = c.compress_ratios[layer]
        if ratio:
            kv, index = c.kv_source(layer), c.index_source(layer)
            found = kv is not None and index is not None and index >= kv
            need(
                found, "index_source_layer_ids", f"sources of pool and selection for layer {layer}"
            )
            same = c.compress_ratios[kv or 0] == ratio
            need(same, "compress_ratios", f"equal at layer {layer} and its KV source {kv}")
    sources = set(c.kv_source_layer_ids) - set(c.index_source_layer_ids)
    need(not sources, "index_source_layer_ids", "a superset of kv_source_layer_ids")
    if c.candidate_source_layer_id is not None:
        need(
            c.candidate_source_layer_id in c.index_source_layer_ids,
            "candidate_source_layer_id",
            "an index source",
        )
        last = max(c.kv_source_layer_ids)
        need(
            c.candidate_source_layer_id >= last,
            "candidate_source_layer_id",
            f"the last KV source {last} or above",
        )
    need(
        len(c.engram_num_embeddings) == len(c.engram_layer_ids),
        "engram_num_embeddings",
        "one a layer with Engram",
    )
    if c.engram_layer_ids:
        need(c.engram_max_ngram_size >= 2, "engram_max_ngram_size", "at least 2")
        need(
            0 < c.engram_compressed_vocab_size <= c.vocab_size,
            "engram_compressed_vocab_size",
            "within vocab_size",
        )
    if stages:
        need(
            len(c.dspark_target_layer_ids) > 0,
            "dspark_target_layer_ids",
            "not empty when there is a draft",
        )
        for name in (
            "dspark_block_size",
            "dspark_markov_rank",
            "dspark_n_routed_experts",
            "dspark_num_experts_per_tok",
        ):
            need(getattr(c, name) > 0, name, "positive when there is a draft")
        limit = c.dspark_n_routed_experts
        need(
            c.dspark_num_experts_per_tok <= limit,
            "dspark_num_experts_per_tok",
            "at most dspark_n_routed_experts",
        )
