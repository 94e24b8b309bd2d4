"""The indexer: scores pool rows for each query and selects the best, with a candidate filter between layers."""

from __future__ import annotations

from dataclasses import dataclass
from types import ModuleType
from typing import Any

import torch
from torch import Tensor, nn

from deepinfer.core.errors import InvariantBroken
from deepinfer.kernels import batch_invariant, per_token_cast_to_fp8
from deepinfer.kernels.fused import has_triton
from deepinfer.models.deepseek_v41 import small_cpu
from deepinfer.models.deepseek_v41.config import DeepseekV41Config
from deepinfer.models.deepseek_v41.norm import Linear, RMSNorm
from deepinfer.models.deepseek_v41.rope import apply_rope_
from deepinfer.models.deepseek_v41.rounding import Rounding
from deepinfer.models.deepseek_v41.topk import topk_lowest_index

__all__ = [
    "PAGED_HEADS",
    "IndexQueries",
    "Indexer",
    "candidate_mask",
    "index_scores",
    "query_codes",
    "select_rows",
]


PAGED_HEADS = (8, 16, 32, 64, 128)
"""Numbers of heads for which keys are scored in their pages."""


@dataclass(frozen=True, slots=True)
class IndexQueries:
    """Index queries of a step behind their projection, for scores from codes or from values.

    Attributes:
        projected: Shape [tokens, heads, index_head_dim].
        phases: Cosine and sine of the tokens' rotations, shape [tokens, rope_dim / 2, 2], fp32.
        weights: Projected weights of the heads, shape [tokens, heads].
        scale: Multiplied into them.
        kernels: Row-wise steps.
    """

    projected: Tensor
    phases: Tensor
    weights: Tensor
    scale: float
    kernels: Any

    def values(self) -> tuple[Tensor, Tensor]:
        """Queries rounded to MXFP4, shape of `projected`, and weights, shape [tokens, heads], fp32."""
        found = self.kernels.norm_rope_round(self.projected, phases=self.phases, rounding="mxfp4")
        return found, self.weights.float() * self.scale

    def codes(self) -> tuple[Tensor, Tensor]:
        """What `query_codes` makes of `values`, in one step."""
        found: tuple[Tensor, Tensor] = self.kernels.index_queries(
            self.projected, self.phases, self.weights, self.scale
        )
        return found


class Indexer(nn.Module):
    """Queries of an index source, and the keys too when the layer owns the pool.

    Attributes:
        wq_b: Queries from the query bottleneck, weight [heads * index_head_dim, q_lora].
        weights_proj: Weight of each head, weight [heads, hidden].
        wk: Keys from the pool latent, weight [index_head_dim, head_dim]; None without a pool of its own.
        k_norm: Norm of the keys; None without a pool of its own.
    """

    def __init__(
        self,
        config: DeepseekV41Config,
        rounding: Rounding,
        *,
        owns_keys: bool,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        factory = {"device": device, "dtype": dtype}
        heads, dim = config.index_n_heads, config.index_head_dim
        self.num_heads = heads
        self.scale = dim**-0.5 * heads**-0.5
        self.rounding = rounding
        self.wq_b = Linear(config.q_lora_rank, heads * dim, **factory)
        self.weights_proj = Linear(config.hidden_size, heads, **factory)
        self.wk = Linear(config.head_dim, dim, **factory) if owns_keys else None
        self.k_norm = RMSNorm(dim, config.rms_norm_eps, **factory) if owns_keys else None

    def keys(self, latents: Tensor, phases: Tensor) -> Tensor:
        """Index keys of pool rows.

        Args:
            latents: Pool latents before rotation, shape [rows, head_dim].
            phases: Rotations of the rows' positions, shape [rows, rope_dim / 2], complex64.

        Returns:
            Rounded keys, shape [rows, index_head_dim].
        """
        if self.wk is None or self.k_norm is None:
            raise InvariantBroken("This indexer reads the keys of an earlier layer; it makes none.")
        return self.rounding.index(apply_rope_(self.k_norm(self.wk(latents)), phases))

    def queries(self, bottleneck: Tensor, y: Tensor, phases: Tensor) -> tuple[Tensor, Tensor]:
        """Index queries and head weights.

        Args:
            bottleneck: Query bottleneck, rounded as a linear's input, shape [tokens, q_lora].
            y: Normed attention input, shape [tokens, hidden].
            phases: Rotations of the tokens' positions, shape [tokens, 1, rope_dim / 2], complex64.

        Returns:
            Rounded queries, shape [tokens, heads, index_head_dim], and weights, shape [tokens, heads], fp32.
        """
        queries = self.wq_b(bottleneck).view(len(y), self.num_heads, -1)
        return self.rounding.index(apply_rope_(queries, phases)), self.weights_proj(
            y
        ).float() * self.scale

    def fused_keys(self, latents: Tensor, phases: Tensor, kernels: ModuleType) -> Tensor:
        """As `keys`, through row-wise kernels; `phases` is real, shape [rows, rope_dim / 2, 2]."""
        if self.wk is None or self.k_norm is None:
            raise InvariantBroken("This indexer reads the keys of an earlier layer; it makes none.")
        form = "none" if self.rounding.level == "none" else "mxfp4"
        keys, norm = self.wk(latents).unsqueeze(1), self.k_norm
        found = kernels.norm_rope_round(keys, norm.weight, norm.eps, phases, rounding=form)
        return found.squeeze(1)

    def projected_queries(
        self, bottleneck: Tensor, y: Tensor, phases: Tensor, kernels: ModuleType
    ) -> IndexQueries:
        """As `queries`, not yet rotated and rounded; `phases` is real, shape [tokens, rope_dim / 2, 2]."""
        queries = self.wq_b(bottleneck).view(len(y), self.num_heads, -1)
        return IndexQueries(queries, phases, self.weights_proj(y), self.scale, kernels)

    def fused_queries(
        self, bottleneck: Tensor, y: Tensor, phases: Tensor, kernels: ModuleType
    ) -> tuple[Tensor, Tensor]:
        """As `queries`, through row-wise kernels; `phases` is real, shape [tokens, rope_dim / 2, 2]."""
        form = "none" if self.rounding.level == "none" else "mxfp4"
        queries = self.wq_b(bottleneck).view(len(y), self.num_heads, -1)
        queries = kernels.norm_rope_round(queries, phases=phases, rounding=form)
        return queries, self.weights_proj(y).float() * self.scale


def index_scores(
    queries: Tensor,
    weights: Tensor,
    keys: Tensor,
    visible: Tensor | None = None,
    *,
    deterministic: bool = False,
) -> Tensor:
    """Score of every key for every query: the weighted sum over heads of the positive part of q . k, in fp32.

    Args:
        queries: Shape [groups, tokens, heads, index_head_dim].
        weights: Shape [groups, tokens, heads], fp32.
        keys: Shape [groups, rows, index_head_dim].
        visible: Rows that each query sees, from the first on; the scores of the others are -inf. Shape [groups,
            tokens], int64, on the device of the keys; None for all.
        deterministic: Whether the bits of a score must be free of the other queries and keys.

    Returns:
        Scores, shape [groups, tokens, rows], fp32.
    """
    if deterministic or _has_kernel(queries):
        return batch_invariant.index_scores(queries, weights, keys, visible)
    groups, tokens, heads, _ = queries.shape
    dots = torch.bmm(queries.flatten(1, 2).float(), keys.float().transpose(1, 2)).relu_()
    dots = dots.view(groups * tokens, heads, -1)
    scores = torch.bmm(weights.view(groups * tokens, 1, heads), dots).view(groups, tokens, -1)
    if visible is None:
        return scores
    # On the device: a mask of tokens times rows is too large to be made on the host and copied.
    hidden = torch.arange(keys.shape[1], device=keys.device) >= visible.unsqueeze(-1)
    return scores.masked_fill_(hidden, -torch.inf)


def _has_kernel(queries: Tensor) -> bool:
    """Whether the dots of all heads, which memory is too small for, can stay out of it."""
    return queries.is_cuda and not torch.is_grad_enabled() and has_triton()


def query_codes(queries: Tensor, weights: Tensor) -> tuple[Tensor, Tensor]:
    """Index queries as e4m3, exactly, with their scales in the weights of the heads.

    Args:
        queries: Rounded to MXFP4, shape [tokens, heads, index_head_dim]. Groups whose scale is more than 2^14 below that of
            their head are rounded further.
        weights: Shape [tokens, heads], fp32.

    Returns:
        Codes, shape [tokens, heads, index_head_dim], e4m3, and weights, shape [tokens, heads], fp32.
    """
    codes, scales = per_token_cast_to_fp8(queries, queries.shape[-1], scale_dtype=torch.float32)
    return codes, weights * scales.squeeze(-1)


def candidate_mask(scores: Tensor, num_visible: Tensor, num_blocks: int, block_size: int) -> Tensor:
    """Rows in the best blocks of consecutive rows, as the candidate source passes them on.

    Args:
        scores: Scores, `-inf` where a row is not visible, shape [..., rows], fp32.
        num_visible: Visible rows of each query, shape [...], int64.
        num_blocks: Blocks to keep.
        block_size: Rows in a block.

    Returns:
        True for candidates, shape [..., rows]. A block counts by its best row; the block with the newest
        visible row is always kept; equal blocks: the lower one wins; rows that are not visible are False.
    """
    if small_cpu.fits(scores):
        return small_cpu.candidate_mask(scores, num_visible, num_blocks, block_size)
    rows = scores.shape[-1]
    blocks = -(-rows // block_size)
    padded = torch.nn.functional.pad(scores, (0, blocks * block_size - rows), value=-torch.inf)
    best = padded.unflatten(-1, (blocks, block_size)).amax(-1)
    newest = (num_visible - 1).clamp_min(0).unsqueeze(-1) // block_size
    forced = torch.arange(blocks, device=scores.device) == newest
    visible = best > -torch.inf
    best = best.masked_fill(forced & visible, torch.inf)
    picked = topk_lowest_index(best, min(num_blocks, blocks))
    kept = torch.zeros_like(visible).scatter_(-1, picked, True) & visible
    return kept.repeat_interleave(block_size, -1)[..., :rows] & (scores > -torch.inf)


def select_rows(scores: Tensor, topk: int) -> Tensor:
    """The best rows of each query.

    Args:
        scores: Scores, `-inf` where a row must not be picked, shape [..., rows], fp32.
        topk: Rows to pick at most.

    Returns:
        Row indices, shape [..., min(topk, rows)], int64, ascending; equal scores: the lower index wins. Where fewer
        rows may be picked, the rest are rows whose score is `-inf`.
    """
    return topk_lowest_index(scores, min(topk, scores.shape[-1]))
