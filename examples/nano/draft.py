"""The DSpark draft's differentiable twin, and its training on the frozen trunk."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from . import rounding as R
from .trunk import (
    TrainLayer,
    Trunk,
    after_attention,
    attention_inputs,
    collapse,
    ones,
    random_weight,
    rms_norm,
    rotate,
)


@dataclass
class DraftOutput:
    """hidden [blocks, block, D] before the last norm, base logits [blocks, block, V], loads."""

    hidden: Tensor
    base_logits: Tensor
    loads: list[Tensor]


class TrainDraft(nn.Module):
    """Draft stages over a frozen trunk's features, embedding and head."""

    def __init__(self, trunk: Trunk) -> None:
        super().__init__()
        c = trunk.c
        self.c = c
        D, V, rank = c.hidden_size, c.vocab_size, c.dspark_markov_rank
        first = c.num_hidden_layers
        self.stages = nn.ModuleList(
            [
                TrainLayer(
                    first + i,
                    c,
                    c.dspark_n_routed_experts,
                    c.dspark_num_experts_per_tok,
                    draft=True,
                )
                for i in range(c.num_nextn_predict_layers)
            ]
        )
        self.main_proj, self.main_norm = (
            random_weight(D, len(c.dspark_target_layer_ids) * D),
            ones(D),
        )
        self.norm = nn.Parameter(trunk.norm.detach().clone())
        self.markov_embed, self.markov_head = (
            random_weight(V, rank, std=0.1),
            random_weight(V, rank, std=0.02),
        )
        self.confidence = random_weight(1, D + rank, std=0.01)
        self.register_buffer("blend", torch.ones(()))

    def forward(
        self, trunk: Trunk, features: Tensor, anchors: Tensor, anchor_ids: Tensor
    ) -> DraftOutput:
        """Drafts a block after each anchor.

        Args:
            trunk: Gives embedding, head and RoPE tables.
            features: Target features, shape [B, T, targets * D].
            anchors: Positions of the anchor tokens, shape [B, A], at least the window.
            anchor_ids: Their token ids, shape [B, A].
        """
        c = self.c
        B, A = anchors.shape
        W, size = c.sliding_window, c.dspark_block_size
        dev, dtype = features.device, features.dtype
        main = rms_norm(
            F.linear(R.cache_fp8(features), R.weight_fp8(self.main_proj, self.blend)),
            self.main_norm,
        )
        cos, sin = trunk.rope(0, features.shape[1] + size)
        positions = (anchors[..., None] + torch.arange(size, device=dev)).view(-1, size)
        context = (anchors[..., None] - W + torch.arange(W, device=dev)).flatten(1)
        noise = torch.full((B * A, size - 1), c.dspark_noise_token_id, device=dev)
        X = trunk.embed[torch.cat([anchor_ids.reshape(-1, 1), noise], 1)].to(dtype)
        X = X.unsqueeze(2).repeat(1, 1, c.hc_mult, 1)
        pre = torch.zeros(B * A, size, c.hc_mult, device=dev)
        pre[..., 0] = 1
        block_cos, block_sin = cos[positions], sin[positions]
        keep = torch.ones(2, 1, 1, 1, device=dev, dtype=dtype)
        loads = []
        for stage in self.stages:
            rows = F.linear(R.cache_fp8(main), R.weight_fp8(stage.wkv, self.blend))
            rows = R.cache_fp8(
                rotate(
                    rms_norm(rows, stage.kv_norm),
                    cos[: features.shape[1]],
                    sin[: features.shape[1]],
                )
            )
            rows = rows.gather(1, context[..., None].expand(-1, -1, c.head_dim)).view(B * A, W, -1)
            y, qr, q, kv, next_pre, post, K = attention_inputs(
                X, pre, *stage.input_weights(), block_cos, block_sin, self.blend, c
            )
            keys = torch.cat([rows, kv], 1)
            logits = (
                (q.reshape(B * A, -1, c.head_dim) @ keys.mT)
                .view(B * A, size, c.num_attention_heads, -1)
                .float()
            )
            sink = stage.attn_sink[None, None, :, None].expand(B * A, size, -1, 1)
            p = torch.cat([logits * c.head_dim**-0.5, sink], -1).softmax(-1)[..., :-1]
            o = (p.to(dtype).view(B * A, -1, W + size) @ keys).view(
                B * A, size, c.num_attention_heads, -1
            )
            X, pre, load = after_attention(
                X,
                o,
                block_cos,
                block_sin,
                stage.wo_a,
                stage.wo_b,
                next_pre,
                post,
                K,
                *stage.ffn_weights(),
                self.blend,
                keep,
                stage.top_k,
                c,
            )
            loads.append(load.detach())
        hidden = collapse(X, pre)
        return DraftOutput(hidden, trunk.logits(rms_norm(hidden, self.norm)), loads)

    def markov_bias(self, previous: Tensor) -> Tensor:
        return F.linear(self.markov_embed[previous], self.markov_head).float()

    def confidence_logits(self, hidden: Tensor, previous: Tensor) -> Tensor:
        joined = torch.cat([hidden.float(), self.markov_embed[previous].float()], -1)
        return F.linear(joined, self.confidence).squeeze(-1).float()


@dataclass
class DraftLoss:
    """total and its readable parts; `greedy` is the share of equal argmaxes by position [block]."""

    total: Tensor
    l1: Tensor
    confidence: Tensor
    greedy: Tensor


def draft_loss(
    draft: TrainDraft, out: DraftOutput, target_logits: Tensor, previous: Tensor
) -> DraftLoss:
    """Cross-entropy and L1 against the target's law, and BCE of the confidence head.

    Args:
        draft: The draft.
        out: Its output for the blocks.
        target_logits: The trunk's logits at the block's positions, [blocks, block, V].
        previous: True token before each position, [blocks, block].
    """
    p = target_logits.softmax(-1)
    logits = out.base_logits + draft.markov_bias(previous)
    log_q = logits.log_softmax(-1)
    l1 = (log_q.exp() - p).abs().sum(-1)
    kept = (1 - 0.5 * l1.detach()).clamp(0, 1)
    bce = F.binary_cross_entropy_with_logits(draft.confidence_logits(out.hidden, previous), kept)
    ce = -(p * log_q).sum(-1).mean()
    greedy = (logits.argmax(-1) == target_logits.argmax(-1)).float().mean(0)
    return DraftLoss(0.5 * ce + l1.mean() + bce, l1.mean(), bce, greedy)
