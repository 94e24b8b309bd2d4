"""Index scores in plain torch."""

from __future__ import annotations

import torch
from torch import Tensor

__all__ = ["mqa_logits"]

_QUERIES = 256


def mqa_logits(
    q: Tensor, keys: Tensor, weights: Tensor, starts: Tensor, ends: Tensor, out: Tensor
) -> None:
    """Writes `sum over h of weights[t, h] * max(q[t, h] . keys[s], 0)`, and -inf where a query does not see a key.

    Args:
        q: Queries, shape [T, heads, dim], any float dtype.
        keys: Dequantised keys, shape [S, dim], fp32.
        weights: Shape [T, heads], fp32.
        starts: First key that each query sees, shape [T], integers.
        ends: Key behind the last one, shape [T], integers.
        out: Shape [T, S].
    """
    at = torch.arange(keys.shape[0], device=q.device)
    for low in range(0, q.shape[0], _QUERIES):
        rows = slice(low, low + _QUERIES)
        scores = (q[rows].float() @ keys.T).relu_()
        y = torch.einsum("ths,th->ts", scores, weights[rows].float())
        seen = (at >= starts[rows, None]) & (at < ends[rows, None])
        out[rows] = y.masked_fill_(~seen, -torch.inf).to(out.dtype)
