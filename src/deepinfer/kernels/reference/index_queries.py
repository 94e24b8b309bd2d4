"""Index queries from their projection to what scores are made of, in torch."""

from __future__ import annotations

from torch import Tensor

from deepinfer.kernels.reference.cast import decode_ue8m0, per_token_cast_to_fp8
from deepinfer.kernels.reference.rows import norm_rope_round

__all__ = ["index_queries"]


def index_queries(
    x: Tensor, phases: Tensor, weights: Tensor, factor: float
) -> tuple[Tensor, Tensor]:
    """Index queries as e4m3: rotated, rounded to MXFP4 and cast with one scale a head, which goes into its weight.

    The cast changes nothing unless the scale of a group is more than 2^14 below that of its head.

    Args:
        x: Projections, shape [tokens, heads, channels], any float dtype, heads and channels contiguous; channels are a power of
            two from 32 on.
        phases: Cosine and sine of each rotated pair of the trailing channels, shape [tokens, rope_dim / 2, 2], fp32.
        weights: Weights of the heads, shape [tokens, heads], any float dtype, heads contiguous.
        factor: Multiplied into the weights.

    Returns:
        Codes, shape [tokens, heads, channels], e4m3, and the weights times `factor` and the scales, [tokens, heads], fp32.
    """
    rounded = norm_rope_round(x, phases=phases, rounding="mxfp4")
    codes, scales = per_token_cast_to_fp8(rounded, x.shape[-1])
    return codes, weights.float() * factor * decode_ue8m0(scales).squeeze(-1)
