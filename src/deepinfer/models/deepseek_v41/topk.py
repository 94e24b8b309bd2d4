"""Top-k whose ties are part of the model: the lower index wins, and the result is ascending."""

from __future__ import annotations

import torch
from torch import Tensor

__all__ = ["topk_lowest_index"]

_MAX_INDEX = 2**31 - 1
_SORTED_WIDTH = 256


def topk_lowest_index(scores: Tensor, k: int) -> Tensor:
    """Indices of the `k` largest scores of each row.

    Short rows are sorted; in long ones, scores and indices are packed into unique 64-bit keys (score bits above,
    inverted index below). Either way the result does not depend on the width, the batch or the device. `-0.0` equals
    `0.0`; NaN is not allowed.

    Args:
        scores: Scores, shape [..., n], fp32, n below 2**31; `-inf` is the lowest score and can be picked.
        k: How many to pick, at most n.

    Returns:
        Indices, shape [..., k], int64, ascending in each row. Equal scores: the lower index is picked first.
    """
    scores = scores + 0.0
    if scores.shape[-1] <= _SORTED_WIDTH:
        order = scores.sort(dim=-1, descending=True, stable=True).indices
        return order[..., :k].sort(-1).values
    bits = scores.view(torch.int32)
    ordered = bits ^ ((bits >> 31) & _MAX_INDEX)
    inverted = _MAX_INDEX - torch.arange(scores.shape[-1], device=scores.device)
    keys = (ordered.to(torch.int64) << 32) + inverted
    return keys.topk(k, -1, sorted=False).indices.sort(-1).values
