"""The weights of DeepSeek-V4.1 by their published names: shapes, storage kinds, and places in the module.

Everything is generated from the configuration. At the published configuration it gives the published checkpoint's
96,085 tensors. Source: the DeepSeek-V4.1-Flash release (tensor index and reference module tree).
"""

from __future__ import annotations

from collections.abc import Iterator

from deepinfer.models.deepseek_v41.config import DeepseekV41Config, VisionConfig
from deepinfer.models.formats import Layout, Storage, TensorSpec, Weight, stored_tensors

__all__ = ["expected_tensors", "logical_weights"]

_Named = tuple[str, tuple[int, ...], Storage]


def expected_tensors(
    config: DeepseekV41Config, layout: Layout = "published"
) -> dict[str, TensorSpec]:
    """The tensors of a checkpoint.

    Args:
        config: The model's configuration.
        layout: "published" (FP8, MXFP4 and their scales) or "plain" (floats under the same names, without scales).

    Returns:
        Name to shape and dtype as stored, in the order in which checkpoints are written. Allocates nothing.
    """
    tensors: dict[str, TensorSpec] = {}
    for name, weight in logical_weights(config).items():
        tensors |= stored_tensors(name, weight, layout)
    return tensors


def logical_weights(config: DeepseekV41Config) -> dict[str, Weight]:
    """The weights of a model, unpacked.

    Args:
        config: The model's configuration.

    Returns:
        Published name to weight. Routed experts lie stacked in the module: `w1` and `w3` of expert e in
        `experts.w13[e]`, one above the other, and `w2` in `experts.w2[e]`; the vision weights lie under `image_encoder`.
    """
    c = config
    weights: dict[str, Weight] = {}

    def add(items: Iterator[_Named]) -> None:
        weights.update((name, Weight(shape, storage)) for name, shape, storage in items)

    weights["embed.weight"] = Weight((c.vocab_size, c.hidden_size), "bf16")
    for layer in range(c.num_hidden_layers):
        prefix = f"layers.{layer}."
        add(_engram(prefix, c, layer))
        add(_attention(prefix, c, layer))
        weights |= _moe(prefix, c, c.n_routed_experts)
        add(_hyper_connections(prefix, c))
    weights["norm.weight"] = Weight((c.hidden_size,), "bf16")
    weights["head.weight"] = Weight((c.vocab_size, c.hidden_size), "bf16")
    for stage in range(c.num_nextn_predict_layers):
        prefix = f"mtp.{stage}."
        if stage == 0:
            add(_draft_entry(prefix, c))
        add(_attention(prefix, c, None))
        weights |= _moe(prefix, c, c.dspark_n_routed_experts)
        add(_hyper_connections(prefix, c))
        if stage == c.num_nextn_predict_layers - 1:
            add(_draft_heads(prefix, c))
    if c.vision is not None:
        for name, shape, storage in _vision(c.vision, c.hidden_size):
            weights[name] = Weight(shape, storage, f"image_encoder.{name}")
    return weights


def _attention(prefix: str, c: DeepseekV41Config, layer: int | None) -> Iterator[_Named]:
    """Norms and attention of one layer; `layer` is None for a draft stage."""
    hidden, head = c.hidden_size, c.head_dim
    group = c.num_attention_heads // c.o_groups * head
    inner = c.o_groups * c.o_lora_rank
    yield f"{prefix}attn_norm.weight", (hidden,), "bf16"
    yield f"{prefix}ffn_norm.weight", (hidden,), "bf16"
    attn = f"{prefix}attn."
    yield f"{attn}wq_a.weight", (c.q_lora_rank, hidden), "fp8_block"
    yield f"{attn}q_norm.weight", (c.q_lora_rank,), "bf16"
    yield f"{attn}wq_b.weight", (c.num_attention_heads * head, c.q_lora_rank), "fp8_block"
    yield f"{attn}wkv.weight", (head, hidden), "fp8_block"
    yield f"{attn}kv_norm.weight", (head,), "bf16"
    yield f"{attn}wo_a.weight", (inner, group), "fp8_block"
    yield f"{attn}wo_b.weight", (hidden, inner), "fp8_block"
    yield f"{attn}attn_sink", (c.num_attention_heads,), "fp32"
    if layer is None:
        return
    if layer in c.kv_source_layer_ids:
        yield f"{attn}compressor.wkv.weight", (head, hidden), "bf16"
        if c.compress_ratios[layer] > 1:
            yield f"{attn}compressor.wgate.weight", (head, hidden), "bf16"
        yield f"{attn}compressor.norm.weight", (head,), "bf16"
    if layer in c.index_source_layer_ids:
        queries = c.index_n_heads * c.index_head_dim
        yield f"{attn}indexer.wq_b.weight", (queries, c.q_lora_rank), "fp8_block"
        yield f"{attn}indexer.weights_proj.weight", (c.index_n_heads, hidden), "bf16"
    if layer in c.kv_source_layer_ids:
        yield f"{attn}indexer.wk.weight", (c.index_head_dim, head), "bf16"
        yield f"{attn}indexer.k_norm.weight", (c.index_head_dim,), "bf16"


def _moe(prefix: str, c: DeepseekV41Config, experts: int) -> dict[str, Weight]:
    """Router, routed experts and shared expert of one layer."""
    hidden, inter, ffn = c.hidden_size, c.moe_intermediate_size, f"{prefix}ffn."
    weights = {
        f"{ffn}gate.weight": Weight((experts, hidden), "bf16"),
        f"{ffn}gate.bias": Weight((experts,), "fp32"),
        f"{ffn}gate.bias_vl": Weight((experts,), "fp32"),
    }
    w13, w2 = f"{ffn}experts.w13", f"{ffn}experts.w2"
    for e in range(experts):
        expert = f"{ffn}experts.{e}."
        up, low, high = (inter, hidden), slice(0, inter), slice(inter, 2 * inter)
        weights[f"{expert}w1.weight"] = Weight(up, "mxfp4", w13, (e, low))
        weights[f"{expert}w2.weight"] = Weight((hidden, inter), "mxfp4", w2, (e,))
        weights[f"{expert}w3.weight"] = Weight(up, "mxfp4", w13, (e, high))
    shared = f"{ffn}shared_experts."
    weights[f"{shared}w1.weight"] = Weight((inter, hidden), "fp8_block")
    weights[f"{shared}w2.weight"] = Weight((hidden, inter), "fp8_block")
    weights[f"{shared}w3.weight"] = Weight((inter, hidden), "fp8_block")
    return weights


def _hyper_connections(prefix: str, c: DeepseekV41Config) -> Iterator[_Named]:
    streams = c.hc_mult
    mixes = streams * (streams + 2)
    for sublayer in ("attn", "ffn"):
        yield f"{prefix}hc_{sublayer}_fn", (mixes, streams * c.hidden_size), "fp32"
        yield f"{prefix}hc_{sublayer}_base", (mixes,), "fp32"
        yield f"{prefix}hc_{sublayer}_scale", (3,), "fp32"


def _engram(prefix: str, c: DeepseekV41Config, layer: int) -> Iterator[_Named]:
    if layer not in c.engram_layer_ids:
        return
    rows = c.engram_num_embeddings[c.engram_layer_ids.index(layer)]
    streams, engram = c.hc_mult, f"{prefix}engram."
    yield f"{engram}embed.weight", (rows, c.engram_head_dim), "fp8_group"
    yield f"{engram}wkv.weight", ((streams + 1) * c.hidden_size, c.engram_width), "fp8_block"
    yield f"{engram}q_weight", (streams, c.hidden_size), "fp32"
    yield f"{engram}k_weight", (streams, c.hidden_size), "fp32"


def _draft_entry(prefix: str, c: DeepseekV41Config) -> Iterator[_Named]:
    features = len(c.dspark_target_layer_ids) * c.hidden_size
    yield f"{prefix}main_proj.weight", (c.hidden_size, features), "fp8_block"
    yield f"{prefix}main_norm.weight", (c.hidden_size,), "bf16"


def _draft_heads(prefix: str, c: DeepseekV41Config) -> Iterator[_Named]:
    rank = c.dspark_markov_rank
    yield f"{prefix}norm.weight", (c.hidden_size,), "bf16"
    yield f"{prefix}markov_head.embed.weight", (c.vocab_size, rank), "bf16"
    yield f"{prefix}markov_head.head.weight", (c.vocab_size, rank), "bf16"
    yield f"{prefix}confidence_head.proj.weight", (1, c.hidden_size + rank), "bf16"


def _vision(v: VisionConfig, text_hidden: int) -> Iterator[_Named]:
    hidden, inter, ratio = v.hidden_size, v.intermediate_size, v.downsample_ratio
    yield "vision.patch_embed.proj.weight", (hidden, 3 * v.patch_size**2), "bf16"
    yield "vision.patch_embed.proj.bias", (hidden,), "bf16"
    for i in range(v.num_hidden_layers):
        block = f"vision.blocks.{i}."
        yield f"{block}norm1.weight", (hidden,), "bf16"
        yield f"{block}attn.wqkv.weight", (3 * hidden, hidden), "bf16"
        yield f"{block}attn.wqkv.bias", (3 * hidden,), "bf16"
        yield f"{block}attn.wo.weight", (hidden, hidden), "bf16"
        yield f"{block}attn.wo.bias", (hidden,), "bf16"
        yield f"{block}norm2.weight", (hidden,), "bf16"
        yield f"{block}mlp.w1.weight", (2 * inter, hidden), "bf16"
        yield f"{block}mlp.w2.weight", (hidden, inter), "bf16"
    yield "vision.norm.weight", (hidden,), "bf16"
    yield "aligner.w1.weight", (text_hidden, hidden * ratio**2), "bf16"
    yield "aligner.w1.bias", (text_hidden,), "bf16"
    yield "aligner.w2.weight", (text_hidden, text_hidden), "bf16"
    yield "aligner.w2.bias", (text_hidden,), "bf16"
    for name in ("image_start", "image_newline", "image_end"):
        yield name, (text_hidden,), "bf16"
