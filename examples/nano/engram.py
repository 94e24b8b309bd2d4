"""Engram in training: table rows for whole batches, and the gated injection into the streams."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from deepinfer.models.deepseek_v41.config import DeepseekV41Config
from deepinfer.models.deepseek_v41.engram import EngramHash

from . import rounding as R


class NgramRows:
    """Maps ids [B, T] to table rows [B, T, columns] by layer; positions before the row count as padding.

    Args:
        c: The configuration.
        token_map: Folded id of every token id, shape [vocab].
    """

    def __init__(self, c: DeepseekV41Config, token_map: Sequence[int] | Tensor) -> None:
        self.hash = EngramHash(c)
        self.hash.set_token_map(token_map)

    def __call__(self, ids: Tensor) -> dict[int, Tensor]:
        """Rows of every position of `ids`."""
        n = self.hash.ngram
        return self.of_history(F.pad(ids, (n - 1, 0), value=-1).unfold(1, n, 1).flip(-1))

    def of_history(self, history: Tensor) -> dict[int, Tensor]:
        """The same from each token and those before it, newest first, shape [B, T, n]; negative: none."""
        rows = self.hash.rows(history.flatten(0, 1))
        return {layer: found.unflatten(0, history.shape[:2]) for layer, found in rows.items()}


class EngramWeights(NamedTuple):
    """Projection and gains of one Engram; names as in the checkpoint."""

    wkv: Tensor
    q_weight: Tensor
    k_weight: Tensor


def engram_inject(
    streams: Tensor, rows: Tensor, w: EngramWeights, blend: Tensor, c: DeepseekV41Config
) -> Tensor:
    """Adds the gated n-gram value: streams [B, T, M, D], looked-up rows [B, T, columns, dim]."""
    m, D = c.hc_mult, c.hidden_size
    found = R.cache_fp8(rows).flatten(-2).to(streams.dtype)
    key, value = F.linear(found, R.weight_fp8(w.wkv, blend)).split([m * D, D], -1)
    key, x = key.float().unflatten(-1, (m, D)), streams.float()
    dot = (x * w.q_weight * w.k_weight * key).sum(-1) * D**-0.5
    dot = dot * torch.rsqrt(x.square().mean(-1) + c.rms_norm_eps)
    dot = dot * torch.rsqrt(key.square().mean(-1) + 1e-12)
    gate = torch.sigmoid(torch.sign(dot) * dot.abs().clamp_min(1e-6).sqrt())
    return (x + gate[..., None] * value.float()[..., None, :]).to(streams.dtype)
