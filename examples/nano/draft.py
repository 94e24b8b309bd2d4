"""The DSpark draft's differentiable twin: many blocks at once behind anchors in every window of a row.

Shapes: G rows of L tokens, n = L / W - 1 windows with anchors (all but the first), k anchors a window,
S block size, blocks = G * n * k, M streams, D hidden, H heads, d head dim, W window, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from deepinfer.models.deepseek_v41.config import DeepseekV41Config

from . import rounding as R
from .attention import (
    NEVER,
    AttentionInputs,
    Setting,
    attention_inputs,
    sink_softmax,
    window_keys,
    window_rows,
)
from .layer import LayerOutput, LayerWeights, TrainLayer, finish_layer, ones, random_weight
from .rope import Rope
from .streams import collapse, initial_pre, rms_norm
from .trunk import Trunk


class Anchors(NamedTuple):
    """Where blocks start.

    Attributes:
        at: Positions in the row, window by window, shape [G, n, k]; window j holds W * (j + 1) and on.
        ids: Token ids there, same shape.
        reach: Tokens before the anchor that are seen, 1 to W, same shape.
    """

    at: Tensor
    ids: Tensor
    reach: Tensor


class HeadWeights(NamedTuple):
    """Norm and heads behind the last stage; names as in the checkpoint."""

    norm: Tensor
    markov_embed: Tensor
    markov_head: Tensor
    confidence: Tensor


class DraftLoss(NamedTuple):
    """The loss and its readable parts.

    Attributes:
        total: What is minimised.
        l1: Mean distance of the laws, 0 to 2.
        confidence: Cross-entropy of the confidence head.
        greedy: Share of equal argmaxes by position, shape [S].
    """

    total: Tensor
    l1: Tensor
    confidence: Tensor
    greedy: Tensor


def project_features(
    features: Tensor, main_proj: Tensor, main_norm: Tensor, blend: Tensor
) -> Tensor:
    """Context of all stages, rounded as a linear's input: [G, L, targets * D] to [G, L, D]."""
    main = F.linear(R.cache_fp8(features), R.weight_fp8(main_proj, blend))
    return R.cache_fp8(rms_norm(main, main_norm))


def attend_block(
    inputs: AttentionInputs, context: Tensor, mask: Tensor, sink: Tensor, window: int
) -> Tensor:
    """Attention of each block over its context and all of itself.

    Args:
        inputs: Queries [blocks, S, H, d] and keys [blocks, S, d] of the blocks.
        context: Window rows, shape [G, L, d].
        mask: Keys that a block sees in the window before and its own, shape [G, n, k, 2 W].
        sink: Sink logits, shape [H].
        window: W.

    Returns:
        Shape [blocks, S, H, d].
    """
    q, own = inputs.queries, inputs.kv
    blocks, S, H, d = q.shape
    G, n, k = mask.shape[:3]
    keys = window_keys(context, window)[:, 1:]
    near = (q.reshape(G, n, k * S * H, d) @ keys.mT).view(G, n, k, S * H, -1).float() * d**-0.5
    near = near.masked_fill(~mask[:, :, :, None], NEVER).view(blocks, S, H, -1)
    inner = (q.reshape(blocks, S * H, d) @ own.mT).view(blocks, S, H, S).float() * d**-0.5
    (near, inner), total = sink_softmax([near, inner], sink)
    o = (near.to(q.dtype).view(G, n, k * S * H, -1) @ keys).view(q.shape).float()
    o = o + (inner.to(q.dtype).view(blocks, S * H, S) @ own).view(q.shape).float()
    return (o / total).to(q.dtype)


def draft_stage(
    streams: Tensor,
    pre: Tensor,
    main: Tensor,
    w: LayerWeights,
    row_rope: Rope,
    setting: Setting,
    c: DeepseekV41Config,
) -> LayerOutput:
    """One stage.

    Args:
        streams: Streams of the blocks, shape [blocks, S, M, D].
        pre: How they are summed first, shape [blocks, S, M].
        main: Projected features, shape [G, L, D].
        w: The stage's weights.
        row_rope: Rotations of a row's positions, shape [L, rope_dim / 2].
        setting: Rotations of the blocks' positions, [blocks, S, rope_dim / 2], mask of the context
            [G, n, k, 2 W], and blend.
        c: The configuration.
    """
    context = window_rows(main, w.input, row_rope, setting.blend)
    inputs = attention_inputs(streams, pre, w.input, setting, c)
    o = attend_block(inputs, context, setting.window_mask, w.output.sink, c.sliding_window)
    return finish_layer(streams, inputs, o, w, setting, None, c)


def draft_loss(
    hidden: Tensor, target_hidden: Tensor, previous: Tensor, head: Tensor, w: HeadWeights
) -> DraftLoss:
    """Cross-entropy and L1 against the target's law, and the confidence head's cross-entropy.

    Args:
        hidden: Draft rows before the last norm, shape [blocks, S, D].
        target_hidden: The trunk's normed rows at the same positions, shape [blocks, S, D].
        previous: True token before each position, shape [blocks, S].
        head: The trunk's head, shape [V, D].
        w: Norm and heads.
    """
    target = F.linear(target_hidden, head).float()
    p = target.softmax(-1)
    logits = base_logits(hidden, head, w) + markov_bias(previous, w)
    log_q = logits.log_softmax(-1)
    l1 = (log_q.exp() - p).abs().sum(-1)
    kept = (1 - 0.5 * l1.detach()).clamp(0, 1)
    confidence = confidence_logits(hidden, previous, w)
    bce = F.binary_cross_entropy_with_logits(confidence, kept)
    ce = -(p * log_q).sum(-1).mean()
    greedy = (logits.detach().argmax(-1) == target.argmax(-1)).float().mean(0)
    mean_l1 = l1.mean()
    return DraftLoss(0.5 * ce + mean_l1 + bce, mean_l1.detach(), bce.detach(), greedy)


def base_logits(hidden: Tensor, head: Tensor, w: HeadWeights) -> Tensor:
    """Logits [..., V], fp32, without the Markov bias."""
    return F.linear(rms_norm(hidden, w.norm), head).float()


def markov_bias(previous: Tensor, w: HeadWeights) -> Tensor:
    """Bias [..., V], fp32, by the token before [...]."""
    return F.linear(w.markov_embed[previous], w.markov_head).float()


def confidence_logits(hidden: Tensor, previous: Tensor, w: HeadWeights) -> Tensor:
    """Logits of a draft's survival, shape [...], from rows [..., D] and the token before [...]."""
    joined = torch.cat([hidden.float(), w.markov_embed[previous].float()], -1)
    return F.linear(joined, w.confidence).squeeze(-1).float()


@dataclass(frozen=True)
class DraftParts:
    """The costly parts of a draft step."""

    features: Callable[..., Any] = project_features
    stage: Callable[..., Any] = draft_stage
    loss: Callable[..., Any] = draft_loss


class TrainDraft(nn.Module):
    """Draft stages over a frozen trunk's features, embedding and head.

    Args:
        trunk: Gives embedding, head and rotations; its norm is the draft's first norm.

    Attributes:
        blend: Scalar: 1 rounds the weights to their stored formats.
        parts: The costly functions, eager or compiled.
    """

    def __init__(self, trunk: Trunk) -> None:
        super().__init__()
        c = trunk.c
        self.c = c
        self._trunk = (trunk,)  # a tuple, so that its parameters are not the draft's
        D, V, rank = c.hidden_size, c.vocab_size, c.dspark_markov_rank
        first = c.num_hidden_layers
        stages = c.num_nextn_predict_layers
        self.stages = nn.ModuleList(TrainLayer(first + i, c) for i in range(stages))
        self.main_proj = random_weight(D, len(c.dspark_target_layer_ids) * D)
        self.main_norm = ones(D)
        self.norm = nn.Parameter(trunk.norm.detach().clone())
        self.markov_embed = random_weight(V, rank, std=0.1)
        self.markov_head = random_weight(V, rank, std=0.02)
        self.confidence = random_weight(1, D + rank, std=0.01)
        self.register_buffer("blend", torch.ones(()))
        self.parts = DraftParts()

    def head_weights(self) -> HeadWeights:
        """Norm and heads behind the last stage."""
        return HeadWeights(self.norm, self.markov_embed, self.markov_head, self.confidence)

    def trunk_head(self) -> Tensor:
        """The trunk's head, without gradient, shape [V, D]."""
        return self._trunk[0].head.detach()

    def forward(self, features: Tensor, anchors: Anchors) -> tuple[Tensor, list[Tensor]]:
        """Drafts a block behind each anchor.

        Args:
            features: Target features, shape [G, L, targets * D]; L is a multiple of the window.
            anchors: Where the blocks start.

        Returns:
            Rows before the last norm, shape [blocks, S, D], and the expert loads of each stage.
        """
        c, trunk = self.c, self._trunk[0]
        L, S, device = features.shape[1], c.dspark_block_size, features.device
        main = self.parts.features(features, self.main_proj, self.main_norm, self.blend)
        at = anchors.at.flatten()
        positions = at[:, None] + torch.arange(S, device=device)
        ids = torch.full(positions.shape, c.dspark_noise_token_id, device=device)
        ids[:, 0] = anchors.ids.flatten()
        streams = trunk.embed.detach()[ids].to(features.dtype)
        streams = streams.unsqueeze(2).repeat(1, 1, c.hc_mult, 1)
        pre = initial_pre(tuple(ids.shape), c, device)
        block_rope = trunk.rope(0, slice(L + S)).at(positions)
        setting = Setting(block_rope, self._context_mask(anchors), self.blend)
        loads = []
        for stage in self.stages:
            streams, pre, load = self.parts.stage(
                streams, pre, main, stage.weights(), trunk.rope(0, slice(L)), setting, c
            )
            loads.append(load)
        return collapse(streams, pre), loads

    def _context_mask(self, anchors: Anchors) -> Tensor:
        """Keys each block sees in the window before its own and in its own, shape [G, n, k, 2 W]."""
        W, device = self.c.sliding_window, anchors.at.device
        n = anchors.at.shape[1]
        key = torch.arange(n, device=device)[:, None] * W + torch.arange(2 * W, device=device)
        key, at = key[:, None], anchors.at[..., None]
        return (key < at) & (key >= at - anchors.reach[..., None])
