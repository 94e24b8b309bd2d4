"""Top-k whose ties are part of the model: the lower index wins, and the result is ascending."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from deepinfer.kernels.fused import fused_kernels

__all__ = ["topk_lowest_index"]

_MAX_INDEX = 2**31 - 1


def topk_lowest_index(scores: Tensor, k: int) -> Tensor:
    """Indices of the `k` largest scores of each row.

    The result depends on a row's scores alone, not on the batch or the device. `-0.0` equals `0.0`; NaN is not allowed.

    Args:
        scores: Scores, shape [..., n], fp32, n below 2**31; `-inf` is the lowest score and can be picked.
        k: How many to pick, from 1 to n.

    Returns:
        Indices, shape [..., k], int64, ascending in each row. Equal scores: the lower index is picked first.
    """
    n = scores.shape[-1]
    if scores.is_cpu:
        # numpy selects several times faster than torch here; without ties at the border the values say all.
        values = scores.detach().numpy()
        least = np.partition(values, n - k, -1)[..., n - k : n - k + 1]
        picked = (values >= least).nonzero()[-1]
        if picked.size == values.size // n * k:
            return torch.from_numpy(picked.reshape(*values.shape[:-1], k))
        found = (values + np.float32(0)).view(np.int32)
        keys = (found ^ ((found >> 31) & _MAX_INDEX)).astype(np.int64)
        keys <<= 32
        keys += np.arange(_MAX_INDEX, _MAX_INDEX - n, -1)
        picked = keys.argpartition(n - k, -1)[..., n - k :]
        picked.sort(-1)
        return torch.from_numpy(picked)
    return fused_kernels(scores.device).topk_rows(scores, k)
