"""The compressor: turns tokens into rows of the long-range key-value pool.

Ratio 1 keeps one latent a token. Ratio 2 keeps one latent a pair of tokens: a softmax over the two tokens, per
channel, without overlap between pairs. A lone last token waits for its partner.
"""

from __future__ import annotations

from types import ModuleType

import torch
from torch import Tensor, nn

from deepinfer.kernels import batch_invariant
from deepinfer.models.deepseek_v41.config import DeepseekV41Config
from deepinfer.models.deepseek_v41.norm import Linear, RMSNorm
from deepinfer.models.deepseek_v41.wide_products import wide_linear

__all__ = ["Compressor"]


class Compressor(nn.Module):
    """Latents of a KV source layer; the same latent feeds the pool row and the index key.

    Attributes:
        ratio: Tokens per latent, 1 or 2.
        wkv: Values, weight [head_dim, hidden], fp32.
        wgate: Gates, weight [head_dim, hidden], fp32; None for ratio 1.
        norm: Norm of the latent, weight [head_dim].
        deterministic: Whether a token's bits must be free of the other tokens.
        wide_parts: Both weights as `wide_products.split_weight` gives them, or None.
        wide_whole: The memory of both weights, shape [2 * head_dim, hidden], or None, as for ratio 1.
    """

    deterministic = False
    wide_parts: Tensor | None = None
    wide_whole: Tensor | None = None

    def __init__(
        self,
        config: DeepseekV41Config,
        ratio: int,
        *,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        self.ratio = ratio
        wide = {"device": device, "dtype": torch.float32}
        self.wkv = Linear(config.hidden_size, config.head_dim, **wide)
        self.wgate = Linear(config.hidden_size, config.head_dim, **wide) if ratio > 1 else None
        self.norm = RMSNorm(config.head_dim, config.rms_norm_eps, device=device, dtype=dtype)

    def project(self, y: Tensor) -> Tensor:
        """Per-token values, and for ratio 2 the gates behind them.

        Args:
            y: Normed attention input, shape [tokens, hidden].

        Returns:
            Shape [tokens, head_dim] for ratio 1, [tokens, 2, head_dim] (value, gate) for ratio 2, fp32.
        """
        values = self.wkv(y)
        if self.wgate is None:
            return values
        return torch.stack((values, self.wgate(y)), 1)

    def project_parts(self, y: Tensor) -> list[Tensor]:
        """As `project`, values and gates apart, each of shape [tokens, head_dim], fp32."""
        weights = [self.wkv.weight] if self.wgate is None else [self.wkv.weight, self.wgate.weight]
        return wide_linear(self, weights, y)

    def latents(self, first: Tensor, second: Tensor | None, dtype: torch.dtype) -> Tensor:
        """Normed latents from projected tokens.

        Args:
            first: `project` of the first token of each group, shape [groups, head_dim] or [groups, 2, head_dim].
            second: `project` of the second token of each pair, shape [groups, 2, head_dim]; None for ratio 1.
            dtype: The model's activation dtype; the norm sees values rounded to it.

        Returns:
            Latents before rotation, shape [groups, head_dim].
        """
        if second is None:
            return self.norm(first.to(dtype))
        sigmoid = batch_invariant.sigmoid if self.deterministic else torch.sigmoid
        share = sigmoid(first[:, 1] - second[:, 1])
        return self.norm((share * first[:, 0] + (1 - share) * second[:, 0]).to(dtype))

    def fused_latents(
        self, first: Tensor, second: Tensor | None, dtype: torch.dtype, kernels: ModuleType
    ) -> Tensor:
        """As `latents`, through row-wise kernels."""
        if second is None:
            rows = first.to(dtype).unsqueeze(1)
            return kernels.norm_rope_round(rows, self.norm.weight, self.norm.eps).squeeze(1)
        return kernels.pair_latents(first, second, self.norm.weight, self.norm.eps)
