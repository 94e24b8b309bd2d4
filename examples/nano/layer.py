"""Parameters of one trainable layer, and what happens in it behind the attention."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor, nn

from deepinfer.models.deepseek_v41.config import DeepseekV41Config

from .attention import (
    AttentionInputs,
    InputWeights,
    OutputWeights,
    Pool,
    Setting,
    attend,
    project_output,
)
from .engram import EngramWeights
from .experts import ExpertWeights, mixture
from .indexing import CompressorWeights, IndexWeights
from .streams import MixWeights, collapse, rms_norm, spread, stream_mixes


class LayerWeights(NamedTuple):
    """Weights of every layer; sources and Engram layers have more."""

    input: InputWeights
    output: OutputWeights
    experts: ExpertWeights


class LayerOutput(NamedTuple):
    """What a layer hands on.

    Attributes:
        streams: New streams, shape [B, T, M, D].
        pre: How the next layer sums them, shape [B, T, M].
        load: Tokens of each routed expert, shape [E].
    """

    streams: Tensor
    pre: Tensor
    load: Tensor


def finish_layer(
    streams: Tensor,
    inputs: AttentionInputs,
    o: Tensor,
    w: LayerWeights,
    setting: Setting,
    keep: Tensor | None,
    c: DeepseekV41Config,
) -> LayerOutput:
    """Output projection, then the mixture of experts.

    Args:
        streams: Streams that entered the layer, shape [B, T, M, D].
        inputs: What `attention_inputs` made of them.
        o: What the attention made of those, shape [B, T, H, d].
        w: The layer's weights.
        setting: Rotations and blend.
        keep: Dropout factors of the two sublayers' outputs, shape [2, B, T, D], or None.
        c: The configuration.
    """
    y = project_output(o, w.output, setting, c)
    streams = spread(streams, y if keep is None else y * keep[0], inputs.mixes)
    mixes = stream_mixes(streams, w.experts.mix, c)
    x = rms_norm(collapse(streams, inputs.mixes.pre), w.experts.norm)
    y, load = mixture(x, w.experts, setting.blend, c)
    streams = spread(streams, y if keep is None else y * keep[1], mixes)
    return LayerOutput(streams, mixes.pre, load.detach())


def attend_and_finish(
    streams: Tensor,
    inputs: AttentionInputs,
    pool: Pool | None,
    w: LayerWeights,
    setting: Setting,
    keep: Tensor | None,
    c: DeepseekV41Config,
) -> LayerOutput:
    """Attention over window and pool, and everything behind it; arguments as in `finish_layer`."""
    o = attend(inputs, pool, setting.window_mask, w.output.sink, c.sliding_window)
    return finish_layer(streams, inputs, o, w, setting, keep, c)


def random_weight(*shape: int, std: float | None = None) -> nn.Parameter:
    """Normal values; the standard deviation is 1 / sqrt(input channels) unless given."""
    return nn.Parameter(torch.randn(*shape) * (shape[-1] ** -0.5 if std is None else std))


def ones(*shape: int) -> nn.Parameter:
    """Gains."""
    return nn.Parameter(torch.ones(*shape))


class TrainLayer(nn.Module):
    """Parameters of one layer, fp32; names are the checkpoint's with underscores for dots.

    Args:
        index: Layer number; draft stages count on behind the layers.
        c: The configuration.
    """

    def __init__(self, index: int, c: DeepseekV41Config) -> None:
        super().__init__()
        self.index, self.ratio = index, c.compress_ratios[index]
        self.is_source = index in c.kv_source_layer_ids
        self.is_index_source = index in c.index_source_layer_ids
        self.has_engram = index in c.engram_layer_ids
        is_draft = index >= c.num_hidden_layers
        self.top_k = c.dspark_num_experts_per_tok if is_draft else c.num_experts_per_tok
        self._add_attention(c)
        self._add_sources(c)
        self._add_mixing(c)
        self._add_experts(c, c.dspark_n_routed_experts if is_draft else c.n_routed_experts)
        self._add_engram(c)

    def _add_attention(self, c: DeepseekV41Config) -> None:
        D, d, inner = c.hidden_size, c.head_dim, c.o_groups * c.o_lora_rank
        heads = c.num_attention_heads
        self.attn_norm, self.ffn_norm = ones(D), ones(D)
        self.q_norm, self.kv_norm = ones(c.q_lora_rank), ones(d)
        self.wq_a = random_weight(c.q_lora_rank, D)
        self.wq_b = random_weight(heads * d, c.q_lora_rank)
        self.wkv = random_weight(d, D)
        self.attn_sink = nn.Parameter(torch.zeros(heads))
        self.wo_a = random_weight(inner, heads * d // c.o_groups)
        self.wo_b = random_weight(D, inner, std=0.0)

    def _add_sources(self, c: DeepseekV41Config) -> None:
        D, d, dim = c.hidden_size, c.head_dim, c.index_head_dim
        if self.is_source:
            self.compressor_wkv, self.compressor_norm = random_weight(d, D), ones(d)
            self.compressor_wgate = random_weight(d, D) if self.ratio > 1 else None
            self.indexer_wk, self.indexer_k_norm = random_weight(dim, d), ones(dim)
        if self.is_index_source:
            self.indexer_wq_b = random_weight(c.index_n_heads * dim, c.q_lora_rank)
            self.indexer_weights_proj = random_weight(c.index_n_heads, D)

    def _add_mixing(self, c: DeepseekV41Config) -> None:
        """Sublayers start out reading one stream each, in turn, and leaving the streams nearly alone."""
        m = c.hc_mult
        for number, name in enumerate(("attn", "ffn")):
            base = torch.randn((2 + m) * m) * 0.3
            base[:m] -= 1.1
            base[(2 * self.index + number) % m] += 1.5
            base[2 * m :] += 4 * torch.eye(m).flatten()
            self.register_parameter(f"hc_{name}_fn", random_weight((2 + m) * m, m * c.hidden_size))
            self.register_parameter(f"hc_{name}_base", nn.Parameter(base))
            self.register_parameter(f"hc_{name}_scale", nn.Parameter(torch.full((3,), 0.1)))

    def _add_experts(self, c: DeepseekV41Config, num_experts: int) -> None:
        D, inner = c.hidden_size, c.moe_intermediate_size
        self.gate = random_weight(num_experts, D)
        self.register_buffer("gate_bias", torch.zeros(num_experts))
        self.w1 = random_weight(num_experts + 1, inner, D)
        self.w3 = random_weight(num_experts + 1, inner, D)
        self.w2 = random_weight(num_experts + 1, D, inner, std=0.0)

    def _add_engram(self, c: DeepseekV41Config) -> None:
        if self.has_engram:
            streams, D = c.hc_mult, c.hidden_size
            self.engram_wkv = random_weight((streams + 1) * D, c.engram_width, std=0.02)
            self.engram_q_weight, self.engram_k_weight = ones(streams, D), ones(streams, D)
            rows = c.engram_num_embeddings[c.engram_layer_ids.index(self.index)]
            self.engram_embed = random_weight(rows, c.engram_head_dim, std=0.5)

    def weights(self) -> LayerWeights:
        """The weights every layer has."""
        mix = (
            MixWeights(*(getattr(self, f"hc_{name}_{part}") for part in ("fn", "base", "scale")))
            for name in ("attn", "ffn")
        )
        return LayerWeights(
            InputWeights(
                next(mix), self.attn_norm, self.wq_a, self.q_norm, self.wq_b, self.wkv, self.kv_norm
            ),
            OutputWeights(self.attn_sink, self.wo_a, self.wo_b),
            ExpertWeights(
                next(mix), self.ffn_norm, self.gate, self.gate_bias,
                self.w1, self.w3, self.w2, self.top_k,
            ),
        )  # fmt: skip

    def compressor_weights(self) -> CompressorWeights:
        """What makes the pool; KV sources only."""
        return CompressorWeights(
            self.compressor_wkv,
            self.compressor_wgate,
            self.compressor_norm,
            self.indexer_wk,
            self.indexer_k_norm,
        )

    def index_weights(self) -> IndexWeights:
        """What scores the pool; index sources only."""
        return IndexWeights(self.indexer_wq_b, self.indexer_weights_proj)

    def engram_weights(self) -> EngramWeights:
        """Projection and gains of the Engram; Engram layers only."""
        return EngramWeights(self.engram_wkv, self.engram_q_weight, self.engram_k_weight)
