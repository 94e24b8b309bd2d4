"""Index scores over a paged cache of keys, and what makes candidates of them."""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor

from deepinfer.core.errors import ShapeError
from deepinfer.kernels import contract
from deepinfer.kernels.configs import indexer as configs
from deepinfer.kernels.devices import on_device
from deepinfer.kernels.formats import KVCacheFormat
from deepinfer.kernels.reference import indexer as reference
from deepinfer.kernels.registry import Operation

__all__ = ["fp8_fp4_paged_mqa_logits", "fp8_paged_mqa_logits", "get_paged_mqa_logits_metadata"]

_ARGUMENTS = "Tensor q, Tensor cache, Tensor weights, Tensor lengths, Tensor table, Tensor meta, Tensor(x!) out, int page_size"
FP8 = Operation("fp8_paged_mqa_logits", _ARGUMENTS)
FP4 = Operation("fp8_fp4_paged_mqa_logits", _ARGUMENTS)
SHARES = Operation("get_paged_mqa_logits_metadata", "Tensor context_lens, Tensor(x!) meta")
OPERATIONS = (FP8, FP4, SHARES)


def get_paged_mqa_logits_metadata(context_lens: Tensor, block_kv: int, num_sms: int) -> Tensor:
    """The work of each program of the paged scores: equal shares of the splits of all requests, in order.

    It is made on the device without a look at the values from the host, so it may be part of a recorded graph. Scores do
    not depend on its shares; one that was made for other lengths, or by other means, may leave scores unwritten.

    Args:
        context_lens: Keys of each request, shape [requests], or of each of its queries, shape [requests, next_n], int32.
        block_kv: Keys of a page, at least 1; taken for the name's sake, shares are the same for every size.
        num_sms: Processors of the device, at least 1.

    Returns:
        Shape [programs + 1, 2], int32: the request and the split where each program begins; the next row is its end.

    Raises:
        ShapeError: A shape or dtype is not as above, or a number is below 1.
    """
    contract.check_dtype("context_lens", context_lens, torch.int32)
    if context_lens.dim() not in (1, 2) or num_sms < 1 or block_kv < 1:
        raise ShapeError(
            f"context_lens has shape {tuple(context_lens.shape)}, for pages of {block_kv} and {num_sms} processors; it must "
            "be [requests] or [requests, next_n], and the numbers at least 1.",
            argument="context_lens", expected="[requests] or [requests, next_n]", found=tuple(context_lens.shape),
        )  # fmt: skip
    return _shares(context_lens, num_sms, None)


def _shares(lengths: Tensor, num_sms: int, backend: str | None) -> Tensor:
    meta = lengths.new_empty((configs.PROGRAMS * num_sms + 1, 2))
    SHARES(backend, lengths, meta)
    return meta


def fp8_paged_mqa_logits(
    q: Tensor,
    kv_cache: Tensor,
    weights: Tensor,
    context_lens: Tensor,
    block_table: Tensor,
    schedule_meta: Tensor | None,
    max_context_len: int,
    *,
    page_size: int = 64,
    clean_logits: bool = True,
    out: Tensor | None = None,
    backend: str | None = None,
) -> Tensor:
    """Scores of the last queries of each request over its cached keys (`INDEXER_FP8`, 132 bytes a key).

    `out[b * next_n + j, s] = scale[s] * sum over h of weights[b * next_n + j, h] * max(q[b, j, h] . k[s], 0)`

    The heads are summed in one order, and a score hangs on its query and key alone.

    Args:
        q: Queries, shape [requests, next_n, heads, dim], e4m3; heads a power of two from 8 to 128.
        kv_cache: Shape [pages, bytes], uint8, bytes at least `KVCacheFormat.INDEXER_FP8.page_bytes(page_size)`.
        weights: Shape [requests * next_n, heads], fp32.
        context_lens: Keys of each request with its new ones, shape [requests], int32: query j of next_n sees all but the
            last next_n - 1 - j; or the keys that each query sees, shape [requests, next_n].
        block_table: Pages of each request in order, shape [requests, most pages], int32; negative ones are not read, and
            their scores are -inf.
        schedule_meta: Of `get_paged_mqa_logits_metadata`, shape [programs + 1, 2], int32; None to make it.
        max_context_len: Columns of the result, at least 0; keys of longer requests have none.
        page_size: Keys of a page.
        clean_logits: Write -inf behind the keys of a query; else these places are left as they are.
        out: Shape [requests * next_n, max_context_len], fp32 or bf16, last stride 1; a new fp32 tensor when None.
        backend: "torch" or "triton"; None for the best that serves the call.

    Returns:
        Shape [requests * next_n, max_context_len].

    Raises:
        ShapeError: A shape, dtype or stride is not as above.
        UnsupportedHardware: The backend asked for cannot serve the call.
    """
    return _call(
        FP8, KVCacheFormat.INDEXER_FP8, q, kv_cache, weights, context_lens, block_table, schedule_meta,
        max_context_len, page_size, clean_logits, out, backend,
    )  # fmt: skip


def fp8_fp4_paged_mqa_logits(
    q: Tensor,
    kv_cache: Tensor,
    weights: Tensor,
    context_lens: Tensor,
    block_table: Tensor,
    schedule_meta: Tensor | None,
    max_context_len: int,
    *,
    page_size: int = 64,
    clean_logits: bool = True,
    out: Tensor | None = None,
    backend: str | None = None,
) -> Tensor:
    """The same scores over MXFP4 keys (`INDEXER_MXFP4`, 68 bytes a key), which are used as they lie.

    On Hopper a group of 32 channels counts as zeros when its scale is 2^-12 of the key's largest or less, 2^-127 counts as
    0 where it is the largest, and a score that is not finite is NaN.

    Args:
        q: Queries, shape [requests, next_n, heads, dim], e4m3; heads a power of two from 8 to 128.
        kv_cache: Shape [pages, bytes], uint8, bytes at least `KVCacheFormat.INDEXER_MXFP4.page_bytes(page_size)`.
        weights: Shape [requests * next_n, heads], fp32.
        context_lens: Keys of each request, shape [requests], or of each query, shape [requests, next_n], int32, as in
            `fp8_paged_mqa_logits`.
        block_table: Pages of each request in order, negative for none, shape [requests, most pages], int32.
        schedule_meta: Of `get_paged_mqa_logits_metadata`, shape [programs + 1, 2], int32; None to make it.
        max_context_len: Columns of the result, at least 0; keys of longer requests have none.
        page_size: Keys of a page.
        clean_logits: Write -inf behind the keys of a query; else these places are left as they are.
        out: Shape [requests * next_n, max_context_len], fp32 or bf16, last stride 1; a new fp32 tensor when None.
        backend: "torch" or "triton"; None for the best that serves the call.

    Returns:
        Shape [requests * next_n, max_context_len].

    Raises:
        ShapeError: A shape, dtype or stride is not as above.
        UnsupportedHardware: The backend asked for cannot serve the call.
    """
    return _call(
        FP4, KVCacheFormat.INDEXER_MXFP4, q, kv_cache, weights, context_lens, block_table, schedule_meta,
        max_context_len, page_size, clean_logits, out, backend,
    )  # fmt: skip


def _call(
    op: Operation, form: KVCacheFormat, q: Tensor, cache: Tensor, weights: Tensor, lengths: Tensor, table: Tensor,
    meta: Tensor | None, columns: int, page_size: int, clean: bool, out: Tensor | None, backend: str | None,
) -> Tensor:  # fmt: skip
    contract.check_dtype("q", q, torch.float8_e4m3fn)
    contract.check_shape("q", q, (None, None, None, form.channels), "requests, next_n, heads, dim")
    requests, next_n, heads, _ = q.shape
    if heads not in (8, 16, 32, 64, 128):
        raise ShapeError(
            f"q has {heads} heads; there must be 8, 16, 32, 64 or 128.",
            argument="q", expected="8, 16, 32, 64 or 128 heads", found=heads,
        )  # fmt: skip
    contract.check_dtype("kv_cache", cache, torch.uint8)
    contract.check_shape("kv_cache", cache, (None, None), "pages, bytes")
    contract.check_last_stride("kv_cache", cache)
    if cache.shape[1] < form.page_bytes(page_size):
        raise ShapeError(
            f"kv_cache has pages of {cache.shape[1]} bytes; {page_size} keys of {form.name} take "
            f"{form.page_bytes(page_size)}.",
            argument="kv_cache", expected=form.page_bytes(page_size), found=cache.shape[1],
        )  # fmt: skip
    contract.check_dtype("weights", weights, torch.float32)
    contract.check_shape("weights", weights, (requests * next_n, heads), "requests * next_n, heads")
    contract.check_last_stride("weights", weights)
    contract.check_dtype("context_lens", lengths, torch.int32)
    contract.check_dtype("block_table", table, torch.int32)
    contract.check_shape("block_table", table, (requests, None), "requests, most pages")
    if lengths.dim() == 1:
        contract.check_shape("context_lens", lengths, (requests,), "requests")
        back = torch.arange(next_n - 1, -1, -1, device=lengths.device, dtype=torch.int32)
        lengths = lengths[:, None] - back
    contract.check_shape("context_lens", lengths, (requests, next_n), "requests, next_n")
    if columns < 0:
        raise ShapeError(
            f"max_context_len is {columns}; it must be at least 0.",
            argument="max_context_len", expected=">= 0", found=columns,
        )  # fmt: skip
    if out is None:
        out = weights.new_empty((requests * next_n, columns))
    contract.check_dtype("out", out, torch.float32, torch.bfloat16)
    contract.check_shape("out", out, (requests * next_n, columns), "requests * next_n, columns")
    contract.check_last_stride("out", out)
    if clean:
        out.fill_(-torch.inf)
    if out.numel() and table.shape[1]:
        if meta is None:
            meta = _shares(lengths, configs.num_sms(q.device), backend)
        contract.check_dtype("schedule_meta", meta, torch.int32)
        contract.check_shape("schedule_meta", meta, (None, 2), "programs + 1, 2")
        op(backend, q, cache, weights, lengths, table, meta, out, page_size)
    return out


def _always(*args: object) -> None:
    """The references serve every call."""


@FP8.register("torch", supports=_always)
def _fp8_torch(q, cache, weights, lengths, table, meta, out, page_size):  # type: ignore[no-untyped-def]
    reference.paged_mqa_logits(
        q, cache, weights, lengths, table, out, KVCacheFormat.INDEXER_FP8, page_size
    )


@FP4.register("torch", supports=_always)
def _fp4_torch(q, cache, weights, lengths, table, meta, out, page_size):  # type: ignore[no-untyped-def]
    reference.paged_mqa_logits(
        q, cache, weights, lengths, table, out, KVCacheFormat.INDEXER_MXFP4, page_size
    )


@SHARES.register("torch", supports=_always)
def _shares_torch(context_lens, meta):  # type: ignore[no-untyped-def]
    meta.copy_(reference.share_splits(context_lens, meta.shape[0] - 1, configs.SPLIT))


def _shares_refusal(context_lens, meta):  # type: ignore[no-untyped-def]
    return contract.triton_refusal(context_lens, meta)


@SHARES.register("triton", supports=_shares_refusal, priority=10)
def _shares_triton(context_lens, meta):  # type: ignore[no-untyped-def]
    from deepinfer.kernels.triton.indexer_paged_launch import share_splits

    with on_device(context_lens):
        share_splits(context_lens, meta)


def _refusal(q, cache, weights, lengths, table, meta, out, page_size):  # type: ignore[no-untyped-def]
    if (cache.data_ptr() | cache.stride(0) | page_size) % 4:
        return "pages and their scales do not begin at multiples of 4 bytes"
    return contract.triton_refusal(q, cache, weights, lengths, table, meta, out)


def _triton(packed, q, cache, weights, lengths, table, meta, out, page_size):  # type: ignore[no-untyped-def]
    import deepinfer.kernels.triton.indexer_paged_launch as launch

    tuning = launch.PagedTuning(*configs.lookup_paged(q.shape[1] * q.shape[2], packed))
    with on_device(q):
        launch.paged_scores(
            q.contiguous(), cache, weights, lengths.contiguous(), table.contiguous(), meta.contiguous(), out,
            page_size, packed, tuning,
        )  # fmt: skip


@FP8.register("triton", supports=_refusal, priority=10)
def _fp8_triton(*args):  # type: ignore[no-untyped-def]
    _triton(False, *args)


@FP4.register("triton", supports=_refusal, priority=10)
def _fp4_triton(*args):  # type: ignore[no-untyped-def]
    _triton(True, *args)


def _pages_refusal(packed, q, cache, weights, lengths, table, meta, out, page_size):  # type: ignore[no-untyped-def]
    reason = contract.gluon_refusal(q, cache, weights, lengths, table, meta, out)
    if reason is not None:
        return reason
    _, next_n, heads, _ = q.shape
    if heads * next_n > 256 or heads > (64 if packed else 128):
        return f"it takes 256 queries times heads and {64 if packed else 128} heads at most, not {next_n} x {heads}"
    if page_size % 64 and table.shape[1] > 1:
        return f"it takes pages of multiples of 64 keys, or one page a request, not pages of {page_size}"
    if (cache.data_ptr() | cache.stride(0)) % 16 or not len(cache):
        return "it takes pages that begin at multiples of 16 bytes"
    return None


def _hopper(packed, q, cache, weights, lengths, table, meta, out, page_size):  # type: ignore[no-untyped-def]
    import deepinfer.kernels.triton.indexer_pages_launch as launch

    tuning = launch.PageTuning(*configs.lookup_pages(q.shape[1], q.shape[2], packed))
    with on_device(q):
        launch.page_scores(
            q.contiguous(), cache, weights, lengths.contiguous(), table.contiguous(), meta.contiguous(), out,
            page_size, packed, tuning,
        )  # fmt: skip


@FP8.register("triton", name="hopper", supports=partial(_pages_refusal, False), priority=20)
def _fp8_hopper(*args):  # type: ignore[no-untyped-def]
    _hopper(False, *args)


@FP4.register("triton", name="hopper", supports=partial(_pages_refusal, True), priority=20)
def _fp4_hopper(*args):  # type: ignore[no-untyped-def]
    _hopper(True, *args)
