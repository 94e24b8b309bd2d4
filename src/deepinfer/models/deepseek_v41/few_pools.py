"""Twins of the compressor and of the indexer's projections, for a few tokens on the CPU; see `few_tokens`."""

from __future__ import annotations

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from deepinfer.core.errors import InvariantBroken
from deepinfer.models.deepseek_v41 import small_cpu
from deepinfer.models.deepseek_v41.compressor import Compressor
from deepinfer.models.deepseek_v41.indexer import Indexer
from deepinfer.models.deepseek_v41.norm import RMSNorm

__all__ = ["CompressorViews", "IndexerViews"]


class CompressorViews:
    """Twin of `Compressor`.

    Attributes:
        ratio: Tokens per latent, 1 or 2.
    """

    def __init__(self, compressor: Compressor) -> None:
        self.ratio = compressor.ratio
        self._wkv = compressor.wkv.weight
        self._wgate = None if compressor.wgate is None else compressor.wgate.weight
        self._norm = _arrays(compressor.norm)

    def project(self, y: Tensor) -> Tensor:
        """Twin of `Compressor.project`."""
        values = F.linear(y, self._wkv)
        if self._wgate is None:
            return values
        return torch.stack((values, F.linear(y, self._wgate)), 1)

    def latents(self, first: Tensor, second: Tensor | None, dtype: torch.dtype) -> Tensor:
        """Twin of `Compressor.latents`; `dtype` is fp32."""
        latents = first.numpy()
        if second is not None:
            one, two = latents, second.numpy()
            share = 1 / (1 + np.exp(two[:, 1] - one[:, 1]))
            latents = share * one[:, 0]
            latents += (1 - share) * two[:, 0]
        return torch.from_numpy(small_cpu.rms_norm(latents, *self._norm))


class IndexerViews:
    """Twin of `Indexer`."""

    def __init__(self, indexer: Indexer) -> None:
        self._heads, self._scale = indexer.num_heads, np.float32(indexer.scale)
        self._rounds = indexer.rounding.level != "none"
        self._wq_b, self._weights = indexer.wq_b.weight, indexer.weights_proj.weight
        self._makes_keys: tuple[Tensor, np.ndarray, float] | None = None
        if indexer.wk is not None and indexer.k_norm is not None:
            self._makes_keys = indexer.wk.weight, *_arrays(indexer.k_norm)

    def keys(self, latents: Tensor, phases: Tensor) -> Tensor:
        """Twin of `Indexer.keys`."""
        if self._makes_keys is None:
            raise InvariantBroken("This indexer reads the keys of an earlier layer; it makes none.")
        weight, gains, eps = self._makes_keys
        keys = F.linear(latents, weight).numpy()
        return self._finish(small_cpu.rms_norm(keys, gains, eps), phases)

    def queries(self, bottleneck: Tensor, y: Tensor, phases: Tensor) -> tuple[Tensor, Tensor]:
        """Twin of `Indexer.queries`."""
        queries = F.linear(bottleneck, self._wq_b).numpy().reshape(len(y), self._heads, -1)
        weights = F.linear(y, self._weights).numpy()
        weights *= self._scale
        return self._finish(queries, phases), torch.from_numpy(weights)

    def _finish(self, x: np.ndarray, phases: Tensor) -> Tensor:
        small_cpu.apply_rope_(x, phases.numpy())
        return torch.from_numpy(small_cpu.round_mxfp4(x) if self._rounds else x)


def _arrays(norm: RMSNorm) -> tuple[np.ndarray, float]:
    return norm.weight.detach().numpy(), norm.eps
