"""Index scores in plain torch."""

from __future__ import annotations

import torch
from torch import Tensor

from deepinfer.kernels.formats import KVCacheFormat
from deepinfer.kernels.reference.cache import gather_rows

__all__ = ["mqa_logits", "paged_mqa_logits"]

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


def paged_mqa_logits(
    q: Tensor,
    cache: Tensor,
    weights: Tensor,
    lengths: Tensor,
    table: Tensor,
    out: Tensor,
    form: KVCacheFormat,
    page_size: int,
) -> None:
    """Writes the scores of each request over its pages; what is behind its keys is left as it is.

    Args:
        q: Shape [requests, next_n, heads, dim], any float dtype.
        cache: Shape [pages, bytes], uint8.
        weights: Shape [requests * next_n, heads], fp32.
        lengths: Keys that each query sees, shape [requests, next_n], integers.
        table: Pages of each request, shape [requests, most pages], integers; scores of negative pages are -inf.
        out: Shape [requests * next_n, at least the longest length].
        form: Format of the keys.
        page_size: Keys of a page.
    """
    requests, next_n = q.shape[:2]
    for b in range(requests):
        count = int(lengths[b].max())
        if count <= 0:
            continue
        at = torch.arange(count, device=q.device)
        pages = table[b, at // page_size].long()
        slots = torch.where(pages >= 0, pages * page_size + at % page_size, -1)
        keys = torch.empty((count, form.channels), device=q.device)
        gather_rows(cache, slots, keys, form, page_size)
        rows = slice(b * next_n, (b + 1) * next_n)
        starts = torch.zeros_like(lengths[b])
        mqa_logits(q[b], keys, weights[rows], starts, lengths[b], out[rows, :count])
        out[rows, :count].masked_fill_(pages < 0, -torch.inf)
