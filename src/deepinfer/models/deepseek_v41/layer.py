"""One layer: Engram where there is one, attention, experts, each behind its own stream mixing."""

from __future__ import annotations

from typing import Protocol, TypedDict

import torch
from torch import Tensor, nn

from deepinfer.core.errors import InvariantBroken
from deepinfer.kernels import batch_invariant
from deepinfer.models.deepseek_v41.attention import Attention, AttentionPass
from deepinfer.models.deepseek_v41.config import DeepseekV41Config
from deepinfer.models.deepseek_v41.engram import Engram
from deepinfer.models.deepseek_v41.hyper_connection import (
    collapse,
    enter_sublayer,
    leave_sublayer,
)
from deepinfer.models.deepseek_v41.moe import MoE
from deepinfer.models.deepseek_v41.norm import RMSNorm
from deepinfer.models.deepseek_v41.rounding import Rounding

__all__ = ["Layer", "LayerPass", "MixOptions"]


class LayerPass(AttentionPass, Protocol):
    """What a layer asks of the pass it runs in."""

    @property
    def is_image(self) -> Tensor | None:
        """True for image tokens, shape [tokens], or None."""

    @property
    def engram_rows(self) -> dict[int, Tensor]:
        """Table rows by layer id, each of shape [tokens, columns]."""

    @property
    def features(self) -> list[Tensor] | None:
        """Where target layers of the draft put their mean input streams, or None."""

    @property
    def narrow_layer(self) -> int | None:
        """The layer behind whose pool rows drop out, or None."""

    def narrow(self) -> Tensor | None:
        """Drops rows; returns those that are left, shape [kept], int64, or None for all."""


class MixOptions(TypedDict):
    """Options of the stream mixing, see `enter_sublayer`."""

    iterations: int
    norm_eps: float
    eps: float


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
        deterministic: Whether a token's bits must be free of the other tokens.
        mix_parts: What `prepare_mhc_projection` makes of the two projections, by "attn" and "ffn", or None.
    """

    deterministic = False
    mix_parts: dict[str, Tensor] | None = None

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
        self.mix_options = MixOptions(
            iterations=config.hc_sinkhorn_iters, norm_eps=config.rms_norm_eps, eps=config.hc_eps
        )
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

        def parameter(*shape: int) -> nn.Parameter:
            return nn.Parameter(torch.empty(shape, device=device, dtype=torch.float32))

        self.hc_attn_fn = parameter(width, streams * config.hidden_size)
        self.hc_attn_base = parameter(width)
        self.hc_attn_scale = parameter(3)
        self.hc_ffn_fn = parameter(width, streams * config.hidden_size)
        self.hc_ffn_base = parameter(width)
        self.hc_ffn_scale = parameter(3)

    def forward(self, streams: Tensor, pre: Tensor, run: LayerPass) -> tuple[Tensor, Tensor]:
        """Runs the layer.

        Args:
            streams: Residual streams, shape [tokens, streams, hidden].
            pre: Weights by which attention sums the streams, from the sublayer before, shape [tokens, streams].
            run: The pass.

        Returns:
            The streams behind the layer, and the weights for the next sublayer.
        """
        fixed = self.deterministic
        if self.engram is not None:
            streams = self.engram(streams, run.engram_rows[self.layer_id], run.is_image)
        if self.feeds_draft and run.features is not None:
            run.features.append(self.mean_stream(streams))
        if run.narrow_layer == self.layer_id:
            streams, pre = self._narrow(streams, pre, run)
            if not len(streams):
                return streams, pre
        mixes, y = enter_sublayer(
            streams, pre, self.hc_attn_fn, self.hc_attn_base, self.hc_attn_scale,
            self.attn_norm.weight, deterministic=fixed, **self.mix_options,
        )  # fmt: skip
        streams = leave_sublayer(streams, self.attn(y, run), mixes, deterministic=fixed)
        ffn_mixes, y = enter_sublayer(
            streams, mixes.pre, self.hc_ffn_fn, self.hc_ffn_base, self.hc_ffn_scale,
            self.ffn_norm.weight, deterministic=fixed, **self.mix_options,
        )  # fmt: skip
        output = self.ffn(y, run.is_image)
        streams = leave_sublayer(streams, output, ffn_mixes, deterministic=fixed)
        return streams, ffn_mixes.pre

    def mean_stream(self, streams: Tensor) -> Tensor:
        """Mean of the streams, shape [tokens, hidden], which the draft is fed with."""
        wide = streams.float()
        if self.deterministic:
            return (batch_invariant.ordered_sum(wide, 1) / wide.shape[1]).to(streams.dtype)
        return wide.mean(1).to(streams.dtype)

    def _narrow(self, streams: Tensor, pre: Tensor, run: LayerPass) -> tuple[Tensor, Tensor]:
        """Extends the pool by all rows, then keeps those that run the rest of the layers."""
        attention = self.attn
        if attention.compressor is None or attention.indexer is None:
            raise InvariantBroken(f"Layer {self.layer_id} owns no pool; rows cannot drop out here.")
        y = self.attn_norm(collapse(streams, pre, deterministic=self.deterministic))
        run.extend_pool(attention, attention.compressor, attention.indexer, y)
        kept = run.narrow()
        return (streams, pre) if kept is None else (streams[kept], pre[kept])
