"""Index scores in plain torch."""

from __future__ import annotations

import torch
from torch import Tensor

from deepinfer.kernels.formats import KVCacheFormat
from deepinfer.kernels.reference.cache import gather_rows

__all__ = ["mqa_logits", "paged_mqa_logits", "share_splits"]

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
        table: Pages of each request, shape [requests, most pages], integers; scores of pages that are none are -inf.
        out: Shape [requests * next_n, at least the longest length].
        form: Format of the keys.
        page_size: Keys of a page.
    """
    requests, next_n = q.shape[:2]
    for b in range(requests):
        count = min(int(lengths[b].max()), out.shape[1], table.shape[1] * page_size)
        if count <= 0:
            continue
        at = torch.arange(count, device=q.device)
        pages = table[b, at // page_size].long()
        pages = torch.where(pages < len(cache), pages, -1)
        slots = torch.where(pages >= 0, pages * page_size + at % page_size, -1)
        keys = torch.empty((count, form.channels), dtype=torch.float32, device=q.device)
        gather_rows(cache, slots, keys, form, page_size)
        rows = slice(b * next_n, (b + 1) * next_n)
        starts = torch.zeros_like(lengths[b])
        mqa_logits(q[b], keys, weights[rows], starts, lengths[b], out[rows, :count])
        out[rows, :count].masked_fill_(pages < 0, -torch.inf)


def share_splits(lengths: Tensor, num_programs: int, split: int) -> Tensor:
    """Equal shares of the splits of all requests, in order.

    Args:
        lengths: Keys of each request, shape [requests], or of each of its queries, shape [requests, next_n], integers.
        num_programs: Programs that share.
        split: Keys of a split.

    Returns:
        Shape [num_programs + 1, 2], int32: the request and the split where each share begins; the last row is the end.
    """
    most = lengths if lengths.dim() == 1 else lengths.amax(1)
    splits = (most.clamp_min(0) + (split - 1)) // split
    ends = splits.cumsum(0)
    ends = torch.cat((ends.new_zeros(1), ends))
    places = torch.arange(num_programs + 1, device=ends.device) * ends[-1] // num_programs
    # The last request that begins at or before a place; the place behind everything is the end of the last request.
    request = torch.searchsorted(ends, places, right=True) - 1
    request = request.clamp(0, max(lengths.shape[0] - 1, 0))
    return torch.stack((request, places - ends[request]), 1).to(torch.int32)
