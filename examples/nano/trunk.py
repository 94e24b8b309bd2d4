"""The differentiable twin of `deepinfer.models.deepseek_v41`: dense masks instead of gathers.

Shapes: B rows, T tokens, M streams, D hidden, H heads, d head dim, N pool rows, W window, E experts,
I expert width. Every weight is held in fp32 and rounded straight-through to the format it will be
stored in; the caches' rounding is simulated as well. The parts marked "compiled" hold the cost.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from . import rounding as R

GRADIENT_ITERATIONS = 4
"""Sinkhorn iterations the gradient passes through; the earlier ones count as fixed scalings."""
NEVER = -1e30


def rms_norm(x: Tensor, w: Tensor, eps: float = 1e-20) -> Tensor:
    y = x.float()
    return (y * torch.rsqrt(y.square().mean(-1, True) + eps) * w).to(x.dtype)


def rope_table(
    dim: int, theta: float, num_positions: int, yarn: Any = None
) -> tuple[Tensor, Tensor]:
    """cos and sin, shape [num_positions, dim / 2]."""
    f = theta ** -(torch.arange(0, dim, 2).double() / dim)
    if yarn is not None:

        def correction(rotations: float) -> float:
            return (
                dim
                * math.log(yarn.original_max_position_embeddings / (rotations * 2 * math.pi))
                / (2 * math.log(theta))
            )

        low = max(math.floor(correction(yarn.beta_fast)), 0)
        high = min(math.ceil(correction(yarn.beta_slow)), dim - 1)
        ramp = ((torch.arange(dim // 2).double() - low) / max(high - low, 1e-3)).clamp(0, 1)
        f = f * (1 - ramp) + f / yarn.factor * ramp
    angles = torch.arange(num_positions).double()[:, None] * f
    return angles.cos().float(), angles.sin().float()


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotates adjacent pairs of the last 2 * cos.shape[-1] channels."""
    r = 2 * cos.shape[-1]
    a, b = x[..., -r:].float().unflatten(-1, (r // 2, 2)).unbind(-1)
    turned = torch.stack([a * cos - b * sin, a * sin + b * cos], -1).flatten(-2)
    return torch.cat([x[..., :-r], turned.to(x.dtype)], -1)


def sinkhorn(k: Tensor, iterations: int, eps: float) -> Tensor:
    for _ in range(iterations):
        k = k / (k.sum(-1, True) + eps)
        k = k / (k.sum(-2, True) + eps)
    return k


def mixes(
    X: Tensor, fn: Tensor, base: Tensor, scale: Tensor, c: SimpleNamespace
) -> tuple[Tensor, Tensor, Tensor]:
    """mHC coefficients (pre [B,T,M], post [B,T,M], K [B,T,M,M]) of a stream X [B,T,M,D]."""
    m = c.hc_mult
    z = X.flatten(-2)
    v = F.linear(z, fn).float() * torch.rsqrt(z.float().square().mean(-1, True) + c.rms_norm_eps)
    pre = torch.sigmoid(v[..., :m] * scale[0] + base[:m]) + c.hc_eps
    post = 2 * torch.sigmoid(v[..., m : 2 * m] * scale[1] + base[m : 2 * m])
    k = (v[..., 2 * m :] * scale[2] + base[2 * m :]).unflatten(-1, (m, m)).softmax(-1) + c.hc_eps
    k = k / (k.sum(-2, True) + c.hc_eps)
    with torch.no_grad():
        fixed = k.detach()
        scaling = sinkhorn(fixed, c.hc_sinkhorn_iters - 1 - GRADIENT_ITERATIONS, c.hc_eps) / fixed
    return pre, post, sinkhorn(k * scaling, GRADIENT_ITERATIONS, c.hc_eps)


def collapse(X: Tensor, pre: Tensor) -> Tensor:
    return (pre[..., None] * X.float()).sum(-2).to(X.dtype)


def spread(X: Tensor, y: Tensor, post: Tensor, K: Tensor) -> Tensor:
    """post_j y + sum_i K[i, j] X_i."""
    mixed = (K[..., None] * X.float()[..., :, None, :]).sum(-3)
    return (post[..., None] * y.float()[..., None, :] + mixed).to(X.dtype)


def mixture(
    x: Tensor,
    gate: Tensor,
    bias: Tensor,
    w1: Tensor,
    w3: Tensor,
    w2: Tensor,
    blend: Tensor,
    top_k: int,
    c: SimpleNamespace,
) -> tuple[Tensor, Tensor]:
    """All experts at once, unselected ones weighted 0; returns (y, tokens per expert [E])."""
    num_experts = gate.shape[0]
    s = F.softplus(F.linear(x, gate).float()).sqrt()
    picked = (s.detach() + bias).topk(top_k, -1)[1]
    on = (picked[..., None] == torch.arange(num_experts, device=x.device)).any(-2).float()
    w = s * on
    w = w / (w.sum(-1, True) + 1e-20) * c.routed_scaling_factor
    w = torch.cat([w, torch.ones_like(w[..., :1])], -1)

    def stored(v: Tensor) -> Tensor:
        return torch.cat([R.weight_mxfp4(v[:-1], blend), R.weight_fp8(v[-1:], blend)])

    x = R.cache_fp8(x)
    g = F.linear(x, stored(w1).flatten(0, 1)).float().clamp(max=c.swiglu_limit)
    u = F.linear(x, stored(w3).flatten(0, 1)).float().clamp(-c.swiglu_limit, c.swiglu_limit)
    a = ((F.silu(g) * u).unflatten(-1, (num_experts + 1, -1)) * w[..., None]).to(x.dtype)
    y = F.linear(R.cache_fp8(a).flatten(-2), stored(w2).permute(1, 0, 2).flatten(1))
    return y, on.flatten(0, -2).sum(0)


def attention_inputs(
    X: Tensor,
    pre: Tensor,
    fn: Tensor,
    base: Tensor,
    scale: Tensor,
    norm: Tensor,
    wq_a: Tensor,
    q_norm: Tensor,
    wq_b: Tensor,
    wkv: Tensor,
    kv_norm: Tensor,
    cos: Tensor,
    sin: Tensor,
    blend: Tensor,
    c: SimpleNamespace,
) -> tuple[Tensor, ...]:
    """Compiled. (y, rounded qr, q [B,T,H,d], kv [B,T,d], next pre, post, K)."""
    next_pre, post, K = mixes(X, fn, base, scale, c)
    y = rms_norm(collapse(X, pre), norm)
    y8 = R.cache_fp8(y)
    qr = R.cache_fp8(rms_norm(F.linear(y8, R.weight_fp8(wq_a, blend)), q_norm).to(X.dtype))
    q = F.linear(qr, R.weight_fp8(wq_b, blend)).unflatten(-1, (c.num_attention_heads, c.head_dim))
    q = rotate(q, cos[..., None, :], sin[..., None, :])
    kv = R.cache_fp8(rotate(rms_norm(F.linear(y8, R.weight_fp8(wkv, blend)), kv_norm), cos, sin))
    return y, qr, q, kv, next_pre, post, K


def window_keys(kv: Tensor, window: int) -> Tensor:
    """[B,T,d] -> [B,T/W,2W,d]: the previous and the own chunk of each chunk of queries."""
    k = kv.unflatten(1, (-1, window))
    return torch.cat([F.pad(k, (0, 0, 0, 0, 1, 0))[:, :-1], k], 2)


def attend(
    q: Tensor,
    kv: Tensor,
    pool: Tensor | None,
    selected: Tensor | None,
    window_mask: Tensor,
    sink: Tensor,
    c: SimpleNamespace,
) -> Tensor:
    """Joint softmax over window rows, selected pool rows and a sink; o [B,T,H,d]."""
    B, T, H, d = q.shape
    W = c.sliding_window
    n = T // W
    keys = window_keys(kv, W)
    lw = (q.reshape(B, n, W * H, d) @ keys.mT).view(B, n, W, H, 2 * W).float() * d**-0.5
    lw = lw.masked_fill(~window_mask[:, :, :, None], NEVER).view(B, T, H, 2 * W)
    top = torch.maximum(lw.amax(-1), sink)
    if pool is not None:
        lp = (q.reshape(B, -1, d) @ pool.mT).view(B, T, H, -1).float() * d**-0.5
        lp = lp.masked_fill(~selected[:, :, None], NEVER)
        top = torch.maximum(top, lp.amax(-1))
    top = top.detach()[..., None]
    ew = (lw - top).exp()
    total = ew.sum(-1, True) + (sink[:, None] - top).exp()
    o = (ew.to(q.dtype).view(B, n, W * H, 2 * W) @ keys).view(B, T, H, d).float()
    if pool is not None:
        ep = (lp - top).exp()
        total = total + ep.sum(-1, True)
        o = o + (ep.to(q.dtype).view(B, T * H, -1) @ pool).view(B, T, H, d).float()
    return (o / total).to(q.dtype)


def after_attention(
    X: Tensor,
    o: Tensor,
    cos: Tensor,
    sin: Tensor,
    wo_a: Tensor,
    wo_b: Tensor,
    pre: Tensor,
    post: Tensor,
    K: Tensor,
    fn: Tensor,
    base: Tensor,
    scale: Tensor,
    norm: Tensor,
    gate: Tensor,
    bias: Tensor,
    w1: Tensor,
    w3: Tensor,
    w2: Tensor,
    blend: Tensor,
    keep: Tensor,
    top_k: int,
    c: SimpleNamespace,
) -> tuple[Tensor, Tensor, Tensor]:
    """Inverse RoPE, grouped output projection, then the mixture of experts; (X, next pre, load)."""
    o = rotate(o, cos[..., None, :], -sin[..., None, :]).flatten(-2).unflatten(-1, (c.o_groups, -1))
    wo_a = R.weight_fp8(wo_a, blend).unflatten(0, (c.o_groups, -1))
    t = torch.einsum("btgd,grd->btgr", o, wo_a).flatten(2)
    y = F.linear(R.cache_fp8(t), R.weight_fp8(wo_b, blend))
    X = spread(X, y * keep[0], post, K)
    next_pre, post, K = mixes(X, fn, base, scale, c)
    y, load = mixture(rms_norm(collapse(X, pre), norm), gate, bias, w1, w3, w2, blend, top_k, c)
    return spread(X, y * keep[1], post, K), next_pre, load


def attention_and_ffn(
    X: Tensor,
    q: Tensor,
    kv: Tensor,
    pool: Tensor | None,
    selected: Tensor | None,
    window_mask: Tensor,
    sink: Tensor,
    *rest: Any,
) -> tuple[Tensor, Tensor, Tensor]:
    """Compiled. Attention and everything after it in the layer."""
    return after_attention(X, attend(q, kv, pool, selected, window_mask, sink, rest[-1]), *rest)


def engram_inject(
    X: Tensor,
    rows: Tensor,
    wkv: Tensor,
    q_weight: Tensor,
    k_weight: Tensor,
    blend: Tensor,
    c: SimpleNamespace,
) -> Tensor:
    """Compiled. X + gate * value from looked-up rows [B,T,columns,dim]."""
    m, D = c.hc_mult, c.hidden_size
    e = R.cache_fp8(rows).flatten(-2).to(X.dtype)  # stored rows are on the activation grid already
    key, value = F.linear(e, R.weight_fp8(wkv, blend)).split([m * D, D], -1)
    key, x = key.float().unflatten(-1, (m, D)), X.float()
    dot = (x * q_weight * k_weight * key).sum(-1) * D**-0.5
    dot = (
        dot
        * torch.rsqrt(x.square().mean(-1) + c.rms_norm_eps)
        * torch.rsqrt(key.square().mean(-1) + 1e-12)
    )
    gate = torch.sigmoid(torch.sign(dot) * dot.abs().clamp_min(1e-6).sqrt())
    return (x + gate[..., None] * value.float()[..., None, :]).to(X.dtype)


@dataclass
class Parts:
    """The three costly parts, eager or compiled."""

    inputs: Callable[..., Any] = attention_inputs
    rest: Callable[..., Any] = attention_and_ffn
    engram: Callable[..., Any] = engram_inject

    @classmethod
    def compiled(cls) -> Parts:
        return cls(
            *(
                torch.compile(f, dynamic=False)
                for f in (attention_inputs, attention_and_ffn, engram_inject)
            )
        )


def random_weight(*shape: int, std: float | None = None) -> nn.Parameter:
    return nn.Parameter(torch.randn(*shape) * (shape[-1] ** -0.5 if std is None else std))


def ones(*shape: int) -> nn.Parameter:
    return nn.Parameter(torch.ones(*shape))


class TrainLayer(nn.Module):
    """Parameters of one layer; the names match the checkpoint's, with dots as underscores."""

    def __init__(
        self, index: int, c: SimpleNamespace, num_experts: int, top_k: int, draft: bool = False
    ) -> None:
        super().__init__()
        self.index, self.top_k, self.ratio = index, top_k, 0 if draft else c.compress_ratios[index]
        D, H, d, G = c.hidden_size, c.num_attention_heads, c.head_dim, c.o_groups
        self.attn_norm, self.ffn_norm, self.q_norm, self.kv_norm = (
            ones(D),
            ones(D),
            ones(c.q_lora_rank),
            ones(d),
        )
        self.wq_a, self.wq_b = random_weight(c.q_lora_rank, D), random_weight(H * d, c.q_lora_rank)
        self.wkv, self.attn_sink = random_weight(d, D), nn.Parameter(torch.zeros(H))
        self.wo_a, self.wo_b = (
            random_weight(G * c.o_lora_rank, H * d // G),
            random_weight(D, G * c.o_lora_rank, std=0.0),
        )
        self.is_source = not draft and index in c.kv_source_layer_ids
        self.is_index_source = not draft and index in c.index_source_layer_ids
        if self.is_source:
            self.compressor_wkv, self.compressor_norm = random_weight(d, D), ones(d)
            self.indexer_wk, self.indexer_k_norm = (
                random_weight(c.index_head_dim, d),
                ones(c.index_head_dim),
            )
            if self.ratio > 1:
                self.compressor_wgate = random_weight(d, D)
        if self.is_index_source:
            self.indexer_wq_b = random_weight(c.index_n_heads * c.index_head_dim, c.q_lora_rank)
            self.indexer_weights_proj = random_weight(c.index_n_heads, D)
        m = c.hc_mult
        for number, name in enumerate(("attn", "ffn")):
            base = torch.randn((2 + m) * m) * 0.3
            base[:m] -= 1.1
            base[(2 * index + number) % m] += 1.5
            base[2 * m :] += 4 * torch.eye(m).flatten()
            self.register_parameter(f"hc_{name}_fn", random_weight((2 + m) * m, m * D))
            self.register_parameter(f"hc_{name}_base", nn.Parameter(base))
            self.register_parameter(f"hc_{name}_scale", nn.Parameter(torch.full((3,), 0.1)))
        I = c.moe_intermediate_size  # noqa: E741
        self.gate = random_weight(num_experts, D)
        self.register_buffer("gate_bias", torch.zeros(num_experts))
        self.w1, self.w3 = (
            random_weight(num_experts + 1, I, D),
            random_weight(num_experts + 1, I, D),
        )
        self.w2 = random_weight(num_experts + 1, D, I, std=0.0)
        if not draft and index in c.engram_layer_ids:
            columns = (c.engram_max_ngram_size - 1) * c.engram_n_heads
            self.engram_wkv = random_weight((m + 1) * D, columns * c.engram_head_dim, std=0.02)
            self.engram_q_weight, self.engram_k_weight = ones(m, D), ones(m, D)
            rows = c.engram_num_embeddings[c.engram_layer_ids.index(index)]
            self.engram_embed = random_weight(rows, c.engram_head_dim, std=0.5)

    def input_weights(self) -> tuple[Tensor, ...]:
        return (
            self.hc_attn_fn,
            self.hc_attn_base,
            self.hc_attn_scale,
            self.attn_norm,
            self.wq_a,
            self.q_norm,
            self.wq_b,
            self.wkv,
            self.kv_norm,
        )

    def ffn_weights(self) -> tuple[Tensor, ...]:
        return (
            self.hc_ffn_fn,
            self.hc_ffn_base,
            self.hc_ffn_scale,
            self.ffn_norm,
            self.gate,
            self.gate_bias,
            self.w1,
            self.w3,
            self.w2,
        )


@dataclass
class Clamp:
    """Simulated bounded replay: rows at or after a start see no window key before it. [B] each."""

    encoder: Tensor | None = None
    decoder: Tensor | None = None


@dataclass
class TrunkOutput:
    """hidden [B,T,D] (normed), features [B,T,targets*D] or None, index loss, loads per layer."""

    hidden: Tensor
    features: Tensor | None
    index_loss: Tensor | None
    loads: list[Tensor] = field(default_factory=list)


class Trunk(nn.Module):
    """The trainable model. `blend` moves the weights to their stored formats; `sparse` turns top-k on."""

    def __init__(
        self, c: SimpleNamespace, hash_ids: Callable[[Tensor], Sequence[Tensor]], context: int
    ) -> None:
        super().__init__()
        self.c, self.hash_ids = c, hash_ids
        self.embed, self.head = (
            random_weight(c.vocab_size, c.hidden_size, std=0.5),
            random_weight(c.vocab_size, c.hidden_size, std=0.02),
        )
        self.norm = ones(c.hidden_size)
        self.layers = nn.ModuleList(
            [
                TrainLayer(i, c, c.n_routed_experts, c.num_experts_per_tok)
                for i in range(c.num_hidden_layers)
            ]
        )
        self.sparse = False
        self.dropout = 0.0
        self.parts = Parts()
        self.register_buffer("blend", torch.zeros(()))
        rope = c.qk_rope_head_dim
        for name, table in (
            ("plain", rope_table(rope, c.rope_theta, context + 16)),
            ("yarn", rope_table(rope, c.compress_rope_theta, context + 16, c.rope_scaling)),
        ):
            self.register_buffer(f"cos_{name}", table[0], persistent=False)
            self.register_buffer(f"sin_{name}", table[1], persistent=False)

    def rope(self, ratio: int, length: int) -> tuple[Tensor, Tensor]:
        name = "yarn" if ratio else "plain"
        return getattr(self, f"cos_{name}")[:length], getattr(self, f"sin_{name}")[:length]

    def logits(self, hidden: Tensor) -> Tensor:
        return F.linear(hidden, self.head).float()

    def window_mask(self, batch: int, length: int, start: Tensor | None) -> Tensor:
        """[B, T/W, W, 2W]; rows at or after `start` [B] see no key before it."""
        W, dev = self.c.sliding_window, self.embed.device
        n = length // W
        query = torch.arange(length, device=dev).view(n, W, 1)
        key = (torch.arange(n, device=dev)[:, None] * W - W + torch.arange(2 * W, device=dev)).view(
            n, 1, 2 * W
        )
        mask = ((key <= query) & (key > query - W) & (key >= 0))[None]
        if start is not None:
            s = start.view(-1, 1, 1, 1)
            mask = mask & ((key >= s) | (query < s))
        return mask.expand(batch, -1, -1, -1).contiguous()

    def index_scores(
        self, layer: TrainLayer, qr: Tensor, y: Tensor, keys: Tensor, cos: Tensor, sin: Tensor
    ) -> Tensor:
        c = self.c
        B, T = y.shape[:2]
        q = F.linear(qr, R.weight_fp8(layer.indexer_wq_b, self.blend)).unflatten(
            -1, (c.index_n_heads, c.index_head_dim)
        )
        q = R.cache_mxfp4(rotate(q, cos[..., None, :], sin[..., None, :]))
        w = (
            F.linear(y, layer.indexer_weights_proj).float()
            * (c.index_head_dim * c.index_n_heads) ** -0.5
        )
        z = (q.reshape(B, T * c.index_n_heads, -1) @ keys.mT).view(B, T, c.index_n_heads, -1)
        return (z.relu() * w[..., None]).sum(2).float()

    def compress(
        self, layer: TrainLayer, y: Tensor, cos: Tensor, sin: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Pool rows [B,N,d] and index keys [B,N,di] of a source layer."""
        r = layer.ratio
        k = F.linear(y, layer.compressor_wkv)
        if r > 1:
            g = F.linear(y, layer.compressor_wgate).float().unflatten(1, (-1, r)).softmax(2)
            k = (k.float().unflatten(1, (-1, r)) * g).sum(2).to(k.dtype)
        latent = rms_norm(k, layer.compressor_norm)
        key = rms_norm(F.linear(latent.detach(), layer.indexer_wk), layer.indexer_k_norm)
        return R.cache_fp4(rotate(latent, cos[::r], sin[::r])), R.cache_mxfp4(
            rotate(key, cos[::r], sin[::r])
        )

    @torch.no_grad()
    def select(
        self, scores: Tensor, visible: Tensor, layer: TrainLayer, candidates: Tensor | None
    ) -> tuple[Tensor, Tensor | None]:
        """(selected rows [B,T,N], candidate mask). Ties go to the lower row."""
        c = self.c
        N = scores.shape[-1]
        S = scores - 1e-6 * torch.arange(N, device=scores.device) / N
        S = S.masked_fill(~visible, -torch.inf)
        if layer.index == c.candidate_source_layer_id:
            blocks = S.unflatten(-1, (-1, c.candidate_block_size)).amax(-1)
            newest = torch.arange(S.shape[1], device=S.device) // c.candidate_block_size
            blocks = blocks.masked_fill(
                torch.arange(blocks.shape[-1], device=S.device)[None] == newest[:, None], torch.inf
            )
            top = blocks.topk(min(c.candidate_topk_blocks, blocks.shape[-1]), -1)
            candidates = torch.zeros_like(blocks, dtype=torch.bool).scatter(
                -1, top.indices, top.values > -torch.inf
            )
            candidates = candidates.repeat_interleave(c.candidate_block_size, -1)
        elif candidates is not None:
            S = S.masked_fill(~candidates, -torch.inf)
        top = S.topk(min(c.index_topk, N), -1, sorted=False)
        selected = torch.zeros_like(S, dtype=torch.bool).scatter(
            -1, top.indices, top.values > -torch.inf
        )
        return selected & visible, candidates

    def index_loss(
        self,
        layer: TrainLayer,
        qr: Tensor,
        y: Tensor,
        q: Tensor,
        kv: Tensor,
        own: tuple[Tensor, Tensor],
        visible: Tensor,
        window_mask: Tensor,
        cos: Tensor,
        sin: Tensor,
        offset: int,
    ) -> Tensor:
        """KL(head-summed attention mass on visible pool rows || softmax of scores), every 4th chunk."""
        c = self.c
        W, H, d = c.sliding_window, c.num_attention_heads, c.head_dim

        def chunks(x: Tensor) -> Tensor:
            return x.unflatten(1, (-1, W))[:, offset::4]

        pool, B = own[0].detach(), y.shape[0]
        seen = visible.unflatten(0, (-1, W))[offset::4]
        with torch.no_grad():
            qs = chunks(q.detach())
            n = qs.shape[1]
            lw = (qs.reshape(B, n, W * H, d) @ window_keys(kv.detach(), W)[:, offset::4].mT).view(
                B, n, W, H, -1
            ).float() * d**-0.5
            lw = lw.masked_fill(~window_mask[:, offset::4, :, None], NEVER)
            lp = (qs.reshape(B, -1, d) @ pool.mT).view(B, n, W, H, -1).float() * d**-0.5
            lp = lp.masked_fill(~seen[None, :, :, None], NEVER)
            top = torch.maximum(torch.maximum(lw.amax(-1), lp.amax(-1)), layer.attn_sink)[..., None]
            ep = (lp - top).exp()
            total = (
                ep.sum(-1, True)
                + (lw - top).exp().sum(-1, True)
                + (layer.attn_sink[:, None] - top).exp()
            )
            mass = (ep / total).sum(3)
            mass = mass / (mass.sum(-1, True) + 1e-12)
        turn = (chunks(cos[None])[0].flatten(0, 1), chunks(sin[None])[0].flatten(0, 1))
        S = self.index_scores(
            layer,
            chunks(qr.detach()).flatten(1, 2),
            chunks(y.detach()).flatten(1, 2),
            own[1],
            *turn,
        )
        log_s = S.view(B, n, W, -1).masked_fill(~seen[None], NEVER).log_softmax(-1).clamp_min(-60)
        return (mass * (mass.clamp_min(1e-12).log() - log_s)).sum(-1).mean()

    def forward(
        self,
        ids: Tensor,
        clamp: Clamp | None = None,
        index_chunk: int | None = None,
        features: bool = False,
    ) -> TrunkOutput:
        """Runs rows of `ids` [B,T]; `index_chunk` (0..3) asks for the index loss on that quarter."""
        c, clamp = self.c, clamp or Clamp()
        parts = self.parts if torch.is_grad_enabled() else Parts()
        B, T = ids.shape
        dtype = torch.bfloat16 if torch.is_autocast_enabled(ids.device.type) else torch.float32
        X = self.embed[ids].to(dtype).unsqueeze(2).repeat(1, 1, c.hc_mult, 1)
        pre = torch.zeros(B, T, c.hc_mult, device=ids.device)
        pre[..., 0] = 1
        pre.requires_grad_(torch.is_grad_enabled())
        encoder_mask = self.window_mask(B, T, clamp.encoder)
        decoder_mask = (
            encoder_mask
            if clamp.decoder is None
            else encoder_mask & self.window_mask(B, T, clamp.decoder)
        )
        hashed = self.hash_ids(ids)
        losses, taps, loads = [], [], []
        own = selected = candidates = visible = None
        for layer in self.layers:
            cos, sin = self.rope(layer.ratio, T)
            if layer.index in c.engram_layer_ids:
                rows = F.embedding(
                    hashed[c.engram_layer_ids.index(layer.index)], layer.engram_embed
                )
                X = parts.engram(
                    X,
                    rows,
                    layer.engram_wkv,
                    layer.engram_q_weight,
                    layer.engram_k_weight,
                    self.blend,
                    c,
                )
            if features and layer.index in c.dspark_target_layer_ids:
                taps.append(X.float().mean(2).to(dtype))
            y, qr, q, kv, next_pre, post, K = parts.inputs(
                X, pre, *layer.input_weights(), cos, sin, self.blend, c
            )
            mask = decoder_mask if layer.index > c.kv_source_layer_ids[-1] else encoder_mask
            if layer.is_source:
                own = self.compress(layer, y, cos, sin)
                N = own[0].shape[1]
                visible = (
                    torch.arange(N, device=ids.device)[None]
                    < ((torch.arange(T, device=ids.device) + 1) // layer.ratio)[:, None]
                )
            if layer.is_index_source:
                # the loss first: autocast keeps a weight cast made without gradient
                if index_chunk is not None:
                    losses.append(
                        self.index_loss(
                            layer, qr, y, q, kv, own, visible, mask, cos, sin, index_chunk
                        )
                    )
                if self.sparse:
                    with torch.no_grad():
                        selected, candidates = self.select(
                            self.index_scores(layer, qr, y, own[1], cos, sin),
                            visible,
                            layer,
                            candidates,
                        )
                else:
                    selected = visible[None].expand(B, -1, -1).contiguous()
            keep = torch.ones(2, B, T, 1, device=ids.device, dtype=dtype)
            if self.training and self.dropout:
                keep = (
                    keep
                    * (torch.rand(2, B, T, c.hidden_size, device=ids.device) >= self.dropout).to(
                        dtype
                    )
                    / (1 - self.dropout)
                )
            X, pre, load = parts.rest(
                X,
                q,
                kv,
                own[0] if layer.ratio else None,
                selected if layer.ratio else None,
                mask,
                layer.attn_sink,
                cos,
                sin,
                layer.wo_a,
                layer.wo_b,
                next_pre,
                post,
                K,
                *layer.ffn_weights(),
                self.blend,
                keep,
                layer.top_k,
                c,
            )
            loads.append(load.detach())
        hidden = rms_norm(collapse(X, pre), self.norm)
        return TrunkOutput(
            hidden,
            torch.cat(taps, -1) if features else None,
            sum(losses) / len(losses) if losses else None,
            loads,
        )
