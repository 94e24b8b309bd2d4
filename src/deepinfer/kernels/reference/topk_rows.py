"""The best entries of each row, whose ties are part of the result, in plain torch."""

from __future__ import annotations

import torch
from torch import Tensor

__all__ = ["topk_rows"]

_MAX_INDEX = 2**31 - 1


def topk_rows(scores: Tensor, k: int) -> Tensor:
    """Indices of the `k` largest scores of each row.

    Scores and indices are packed into unique 64-bit keys (score bits above, inverted index below), so the
    result does not depend on the width, the batch or the device. `-0.0` equals `0.0`; NaN is not allowed.

    Args:
        scores: Scores, shape [..., n], fp32, n below 2**31; `-inf` is the lowest score and can be picked.
        k: How many to pick, from 1 to n.

    Returns:
        Indices, shape [..., k], int64, ascending in each row. Equal scores: the lower index is picked first.
    """
    bits = (scores.detach() + 0.0).view(torch.int32)
    ordered = bits ^ ((bits >> 31) & _MAX_INDEX)
    inverted = _MAX_INDEX - torch.arange(scores.shape[-1], device=scores.device)
    keys = (ordered.to(torch.int64) << 32) + inverted
    return keys.topk(k, -1, sorted=False).indices.sort(-1).values
