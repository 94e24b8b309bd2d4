"""One layer: Engram where there is one, attention, experts, each behind its own stream mixing."""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor, nn

from deepinfer.models.deepseek_v41.attention import Attention, AttentionPass
from deepinfer.models.deepseek_v41.config import DeepseekV41Config
from deepinfer.models.deepseek_v41.engram import Engram
from deepinfer.models.deepseek_v41.hyper_connection import StreamMix, collapse, expand, stream_mix
from deepinfer.models.deepseek_v41.moe import MoE
from deepinfer.models.deepseek_v41.norm import RMSNorm
from deepinfer.models.deepseek_v41.rounding import Rounding

__all__ = ["Layer", "LayerPass"]


class LayerPass(AttentionPass, Protocol):
    """What a layer asks of the pass it runs in.

    Attributes:
        is_image: True for image tokens, shape [tokens], or None.
        engram_rows: Table rows by layer id, each of shape [tokens, columns].
        features: Where target layers of the draft put their mean input streams, or None.
    """

    is_image: Tensor | None
    engram_rows: dict[int, Tensor]
    features: list[Tensor] | None


class Layer(nn.Module):
    """A layer of the target model, or the body of a draft stage.

    Attributes:
        layer_id: Number of the layer; draft stages count on after the last layer.
        attn_norm, ffn_norm: Norms of the sublayer inputs.
        attn: Attention.
        ffn: Experts.
        engram: Engram, or None.
        hc_attn_fn, hc_ffn_fn: Stream mixing projections, shape [streams * (streams + 2), streams * hidden], fp32.
        hc_attn_base, hc_ffn_base: Their biases, shape [streams * (streams + 2)], fp32.
        hc_attn_scale, hc_ffn_scale: Their factors, shape [3], fp32.
    """

    def __init__(
        self,
        config: DeepseekV41Config,
        layer_id: int,
        rounding: Rounding,
        *,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        factory = {"device": device, "dtype": dtype}
        is_draft = layer_id >= config.num_hidden_layers
        self.layer_id = layer_id
        self.feeds_draft = not is_draft and layer_id in config.dspark_target_layer_ids
        self.mix_options = {
            "iterations": config.hc_sinkhorn_iters, "norm_eps": config.rms_norm_eps, "eps": config.hc_eps
        }  # fmt: skip
        self.attn_norm = RMSNorm(config.hidden_size, config.rms_norm_eps, **factory)
        self.attn = Attention(config, layer_id, rounding, **factory)
        self.ffn_norm = RMSNorm(config.hidden_size, config.rms_norm_eps, **factory)
        self.ffn = MoE(
            config,
            rounding,
            num_experts=config.dspark_n_routed_experts if is_draft else config.n_routed_experts,
            topk=config.dspark_num_experts_per_tok if is_draft else config.num_experts_per_tok,
            **factory,
        )
        self.engram: Engram | None = None
        if layer_id in config.engram_layer_ids:
            rows = config.engram_num_embeddings[config.engram_layer_ids.index(layer_id)]
            self.engram = Engram(config, rounding, rows, **factory)
        streams = config.hc_mult
        width = streams * (streams + 2)
        for part in ("attn", "ffn"):
            for name, shape in (
                ("fn", (width, streams * config.hidden_size)),
                ("base", (width,)),
                ("scale", (3,)),
            ):
                parameter = nn.Parameter(torch.empty(shape, device=device, dtype=torch.float32))
                self.register_parameter(f"hc_{part}_{name}", parameter)

    def forward(self, streams: Tensor, pre: Tensor, run: LayerPass) -> tuple[Tensor, Tensor]:
        """Runs the layer.

        Args:
            streams: Residual streams, shape [tokens, streams, hidden].
            pre: Weights by which attention sums the streams, from the sublayer before, shape [tokens, streams].
            run: The pass.

        Returns:
            The streams behind the layer, and the weights for the next sublayer.
        """
        if self.engram is not None:
            streams = self.engram(streams, run.engram_rows[self.layer_id], run.is_image)
        if self.feeds_draft and run.features is not None:
            run.features.append(streams.float().mean(1).to(streams.dtype))
        mixes = self.mix(streams, "attn")
        streams = expand(streams, self.attn(self.attn_norm(collapse(streams, pre)), run), mixes)
        pre = mixes.pre
        mixes = self.mix(streams, "ffn")
        streams = expand(
            streams, self.ffn(self.ffn_norm(collapse(streams, pre)), run.is_image), mixes
        )
        return streams, mixes.pre

    def mix(self, streams: Tensor, part: str) -> StreamMix:
        """Mixing coefficients of one sublayer, "attn" or "ffn", from the streams before it."""
        fn, base, scale = (getattr(self, f"hc_{part}_{name}") for name in ("fn", "base", "scale"))
        return stream_mix(streams, fn, base, scale, **self.mix_options)
