"""Equal shares of the splits of paged index scores."""

from __future__ import annotations

import triton
import triton.language as tl

__all__ = ["share_splits_kernel"]


@triton.jit
def _splits(lengths, r, requests, next_n, stride_r, stride_j, SPLIT: tl.constexpr):
    """Splits of some requests, int32; none behind the last one."""
    there = r < requests
    at = lengths + r.to(tl.int64) * stride_r
    most = tl.zeros(r.shape, tl.int32)
    for j in range(next_n):
        most = tl.maximum(most, tl.load(at + j * stride_j, mask=there, other=0))
    # Lengths near the largest number do not wrap.
    return most // SPLIT + (most % SPLIT > 0).to(tl.int32)


@triton.jit(do_not_specialize=["requests", "next_n", "programs"])
def share_splits_kernel(
    lengths, meta, requests, next_n, programs, stride_r, stride_j,
    SPLIT: tl.constexpr, BLOCK: tl.constexpr, PLACES: tl.constexpr,
):  # fmt: skip
    """`meta[i]` is the request and the split at place `i * total // programs`, for i from 0 to programs.

    Args:
        lengths: Keys of each query of each request, int32.
        meta: Shape [programs + 1, 2], int32.
        requests: Requests.
        next_n: Queries of a request, at least 1.
        programs: Shares.
        stride_r: Distance of requests in `lengths`.
        stride_j: Distance of queries in `lengths`.
        SPLIT: Keys of a split.
        BLOCK: Requests at once.
        PLACES: Places of a program of this kernel.
    """
    r = tl.arange(0, BLOCK)
    total = tl.zeros((), tl.int64)
    for start in range(0, requests, BLOCK):
        found = _splits(lengths, start + r, requests, next_n, stride_r, stride_j, SPLIT)
        total += tl.sum(found.to(tl.int64), 0)
    i = tl.program_id(0) * PLACES + tl.arange(0, PLACES)
    place = i.to(tl.int64) * total // programs
    passed = tl.zeros((), tl.int64)
    request = tl.zeros((PLACES,), tl.int32)
    begin = tl.zeros((PLACES,), tl.int64)
    for start in range(0, requests, BLOCK):
        found = _splits(lengths, start + r, requests, next_n, stride_r, stride_j, SPLIT)
        found = found.to(tl.int64)
        ends = passed + tl.cumsum(found, 0)
        # The last request has whatever is behind the others, so its end is no bound.
        below = (start + r < requests - 1)[None, :] & (ends[None, :] <= place[:, None])
        request += tl.sum(below.to(tl.int32), 1)
        begin = tl.maximum(begin, tl.max(tl.where(below, ends[None, :], 0), 1))
        passed += tl.sum(found, 0)
    tl.store(meta + 2 * i, request, mask=i <= programs)
    tl.store(meta + 2 * i + 1, (place - begin).to(tl.int32), mask=i <= programs)
