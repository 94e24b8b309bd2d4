"""Small steps around the selection: maxima of candidate blocks before it, slots of a paged cache behind it."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

__all__ = [
    "block_max",
    "block_max_kernel",
    "physical_slots",
    "physical_slots_kernel",
]


@triton.jit(do_not_specialize=["total", "columns", "num_requests"])
def physical_slots_kernel(
    index, table, requests, out, total, columns, num_requests, num_pages, stride_i, stride_t, stride_o,
    HAS_REQUESTS: tl.constexpr, PAGE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Slots of positions, -1 where there is no page."""
    i = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = i < total
    row = i // columns
    column = i % columns
    position = tl.load(index + row * stride_i + column, mask=inside, other=-1).to(tl.int64)
    request = row
    if HAS_REQUESTS:
        request = tl.load(requests + row, mask=inside, other=-1).to(tl.int64)
    # Quotients are truncated here: positions below 0 must not reach one.
    good = inside & (position >= 0) & (request >= 0) & (request < num_requests)
    position = tl.where(good, position, 0)
    page = position // PAGE
    good = good & (page < num_pages)
    found = tl.load(table + request * stride_t + page, mask=good, other=-1).to(tl.int64)
    slot = tl.where(found >= 0, found * PAGE + position % PAGE, -1)
    tl.store(out + row * stride_o + column, slot.to(out.dtype.element_ty), mask=inside)


def physical_slots(
    index: Tensor, table: Tensor, requests: Tensor | None, out: Tensor, page_size: int
) -> None:
    """See `deepinfer.kernels.topk.topk_to_physical_indices`."""
    rows, columns = index.shape
    physical_slots_kernel[(triton.cdiv(rows * columns, 1024),)](
        index, table, index if requests is None else requests, out, rows * columns, columns, len(table), table.shape[1],
        index.stride(0), table.stride(0), out.stride(0), HAS_REQUESTS=requests is not None, PAGE=page_size, BLOCK=1024,
    )  # fmt: skip


@triton.jit(do_not_specialize=["columns", "blocks", "chunks"])
def block_max_kernel(
    scores, lengths, out, columns, blocks, chunks, stride_s, stride_o, SIZE: tl.constexpr, BLOCK: tl.constexpr
):  # fmt: skip
    """Maxima of blocks of neighbours among the first `lengths` of a row; +inf for the last block that has one."""
    row = (tl.program_id(0) // chunks).to(tl.int64)
    b = tl.program_id(0) % chunks * BLOCK + tl.arange(0, BLOCK)
    length = tl.minimum(tl.load(lengths + row), columns)
    at = b[:, None] * SIZE + tl.arange(0, SIZE)[None, :]
    lowest = float("-inf")
    x = tl.load(scores + row * stride_s + at, mask=at < length, other=lowest).to(tl.float32)
    best = tl.max(tl.where(x == x, x, lowest), 1)
    newest = (length > 0) & (b == tl.maximum(length - 1, 0) // SIZE)
    best = tl.where(newest & (best > lowest), float("inf"), best)
    tl.store(out + row * stride_o + b, best, mask=b < blocks)


def block_max(scores: Tensor, lengths: Tensor, out: Tensor, size: int) -> None:
    """See `deepinfer.kernels.topk.candidate_block_max`."""
    rows, blocks = out.shape
    block = max(16, 4096 // size)
    chunks = triton.cdiv(blocks, block)
    block_max_kernel[(rows * chunks,)](
        scores, lengths, out, scores.shape[1], blocks, chunks, scores.stride(0), out.stride(0), SIZE=size, BLOCK=block
    )  # fmt: skip
