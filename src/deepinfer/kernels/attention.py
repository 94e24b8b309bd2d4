"""Sparse attention of MLA decode over paged caches of quantised keys, with a sink and inverse rotation.

A query row attends to rows of a cache that a list of slots picks, and to those of a second cache: the window and the
selected pool rows of DeepSeek-V4.1. Keys are values too (head_dim channels, rotated ones included):

    o = sum over k of exp(q . k * scale - m) * k / (sum over k of exp(q . k * scale - m) + exp(sink - m))

A slot that is negative or behind the cache is skipped, and so is what lies behind a list's length; a slot that a list
holds twice counts twice. A row without keys has the output 0 and the log-sum-exp +inf.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from deepinfer.core.errors import ConfigError, ShapeError
from deepinfer.kernels import attention_backends, contract
from deepinfer.kernels.attention_backends import CHOOSE
from deepinfer.kernels.configs import attention as configs
from deepinfer.kernels.formats import KVCacheFormat
from deepinfer.kernels.registry import Operation

__all__ = ["MLASchedMeta", "flash_mla_with_kvcache", "get_mla_metadata", "merge_attn_states"]

DECODE = Operation(
    "flash_mla_with_kvcache",
    "Tensor q, Tensor k_cache, Tensor indices, Tensor? lengths, str format, int page_size, Tensor? extra_k_cache, "
    "Tensor? extra_indices, Tensor? extra_lengths, str extra_format, int extra_page_size, Tensor? sink, "
    "Tensor? phases, Tensor? phase_index, float scale, int split_keys, Tensor(x!) out, Tensor(y!) lse",
)
MERGE = Operation(
    "merge_attn_states",
    "Tensor v, Tensor s, Tensor? sink, Tensor? phases, Tensor? phase_index, Tensor(x!) out, Tensor(y!) lse",
)
OPERATIONS = (DECODE, MERGE)

_FORMATS = (KVCacheFormat.V41_MXFP8, KVCacheFormat.V41_NVFP4, KVCacheFormat.V4_FP8)


@dataclass(frozen=True)
class MLASchedMeta:
    """How rows are cut into parts that run side by side.

    Attributes:
        split_keys: Keys of a part, a multiple of 64; 0 for whole rows.
    """

    split_keys: int


def get_mla_metadata(
    rows: int,
    num_heads: int,
    num_keys: int,
    *,
    batch_invariant: bool = False,
    num_sms: int = 132,
) -> tuple[MLASchedMeta, None]:
    """Chooses the parts of `flash_mla_with_kvcache`.

    Args:
        rows: Query rows: requests times rows of a request.
        num_heads: Heads of a row.
        num_keys: Keys of a row, of both lists together.
        batch_invariant: Choose for one row always, so that a row's bits do not hang on how many others there are.
        num_sms: Multiprocessors of the device.

    Returns:
        The choice, and None in the place of FlashMLA's number of splits.
    """
    chosen = configs.split_keys(1 if batch_invariant else rows, num_heads, num_keys, num_sms)
    if batch_invariant:
        chosen = configs.INVARIANT_KEYS if num_keys > configs.INVARIANT_KEYS else 0
    return MLASchedMeta(chosen), None


def flash_mla_with_kvcache(
    q: Tensor,
    k_cache: Tensor,
    indices: Tensor,
    *,
    page_size: int,
    format: KVCacheFormat = KVCacheFormat.V41_MXFP8,
    softmax_scale: float | None = None,
    attn_sink: Tensor | None = None,
    topk_length: Tensor | None = None,
    extra_k_cache: Tensor | None = None,
    extra_indices_in_kvcache: Tensor | None = None,
    extra_topk_length: Tensor | None = None,
    extra_page_size: int | None = None,
    extra_format: KVCacheFormat | None = None,
    phases: Tensor | None = None,
    phase_index: Tensor | None = None,
    sched_meta: MLASchedMeta | None = None,
    out: Tensor | None = None,
    backend: str | None = None,
) -> tuple[Tensor, Tensor]:
    """Sparse MLA attention of decode and verification rows over one or two quantised caches.

    Rows of a request (`s_q` of them) have lists of their own. Logits and sums are fp32; on the tensor cores keys and
    shares are bf16, which is exact for the keys. A list is walked in tiles of 64 keys with a running maximum, first list
    first; with parts, each part has a softmax of its own, and parts are merged from first to last. The bits of a row
    hang on its own lists and on `sched_meta` alone.

    Args:
        q: Shape [batch, s_q, heads, channels], bf16 (any float dtype for "torch"), last stride 1.
        k_cache: Shape [pages, at least `format.page_bytes(page_size)`], uint8.
        indices: Slots, shape [batch, s_q, width], int32.
        page_size: Rows of a page of `k_cache`.
        format: V41_MXFP8, V41_NVFP4 or V4_FP8.
        softmax_scale: Factor of the logits; None for channels ** -0.5.
        attn_sink: Logit of each head without a value, shape [heads], fp32, +-inf allowed; the log-sum-exp has it not.
        topk_length: Entries of each list that count, shape [batch] or [batch, s_q], int32; None for all.
        extra_k_cache: The second cache, shape [pages, at least `extra_format.page_bytes(extra_page_size)`], uint8, or None.
        extra_indices_in_kvcache: Slots there, shape [batch, s_q, extra width], int32.
        extra_topk_length: As `topk_length`, shape [batch] or [batch, s_q], int32; None for all.
        extra_page_size: Rows of a page of `extra_k_cache`; None for `page_size`.
        extra_format: Its format; None for `format`.
        phases: Cosine and sine of each rotated pair, shape [entries, rotated / 2, 2], fp32: the last channels of the
            output are rotated back by them; None for no rotation.
        phase_index: Entry of each row, shape [batch, s_q], int32; None when entry i is that of row i. A row of an
            entry that `phases` does not have is not turned.
        sched_meta: The first of what `get_mla_metadata` returns; None to choose by the number of rows, which is not batch-invariant.
        out: Shape [batch, s_q, heads, channels], bf16 (any float dtype for "torch"), written and returned; None for a new
            tensor of q's dtype.
        backend: "torch" or "triton"; None for the best that serves the call.

    Returns:
        Output, shape [batch, s_q, heads, channels]; natural logarithm of the summed exponentials, shape
        [batch, heads, s_q], fp32 (a view whose heads lie side by side).

    Raises:
        ShapeError: A shape, dtype or stride is not as above.
        ConfigError: A format, page size or split size is not served.
        UnsupportedHardware: The backend asked for cannot serve the call.
    """
    contract.check_shape("q", q, (None, None, None, None), "batch, s_q, heads, channels")
    contract.check_floats("q", q)
    contract.check_last_stride("q", q)
    batch, s_q, heads, channels = q.shape
    rows = batch * s_q
    lists = _scope("", k_cache, indices, topk_length, format, page_size, batch, s_q)
    contract.check_shape("q", q, (None, None, None, format.channels), "batch, s_q, heads, channels")
    more: tuple[Tensor | None, Tensor | None, Tensor | None] = (None, None, None)
    extra_form, extra_page = extra_format or format, extra_page_size or page_size
    if extra_k_cache is not None and extra_indices_in_kvcache is not None:
        more = _scope(
            "extra_", extra_k_cache, extra_indices_in_kvcache, extra_topk_length, extra_form, extra_page, batch, s_q
        )  # fmt: skip
        if extra_form.channels != channels:
            raise ConfigError(
                f"extra_format {extra_form.name} has {extra_form.channels} channels and format {channels}; "
                "both caches must have the same.",
                field="extra_format", value=extra_form.name, limit=str(channels),
            )  # fmt: skip
    elif extra_k_cache is not None or extra_indices_in_kvcache is not None:
        raise ShapeError(
            "extra_k_cache and extra_indices_in_kvcache must be given together; one of them is None.",
            argument="extra_k_cache", expected="both or none", found="one",
        )  # fmt: skip
    _check_ends(heads, channels, (batch, s_q), attn_sink, phases, phase_index)
    out = _output(out, q)
    lse = torch.empty((batch, s_q, heads), dtype=torch.float32, device=q.device)
    if rows and heads:
        if sched_meta is not None and not isinstance(sched_meta, MLASchedMeta):
            raise ConfigError(
                f"sched_meta is of type {type(sched_meta).__name__}; it must be an MLASchedMeta, the first of the two that "
                "get_mla_metadata returns, or None.",
                field="sched_meta", value=sched_meta, limit="an MLASchedMeta",
            )  # fmt: skip
        split = CHOOSE if sched_meta is None else sched_meta.split_keys
        if split != CHOOSE and (split < 0 or split % 64):
            raise ConfigError(
                f"split_keys is {split}; it must be 0 or a multiple of 64.",
                field="split_keys", value=split, limit="multiples of 64",
            )  # fmt: skip
        DECODE(
            backend, q.reshape(rows, heads, channels), *lists, format.name, page_size, *more, extra_form.name,
            extra_page, attn_sink, phases, None if phase_index is None else phase_index.reshape(rows),
            channels**-0.5 if softmax_scale is None else softmax_scale, split, out.view(rows, heads, channels),
            lse.view(rows, heads),
        )  # fmt: skip
    return out, lse.transpose(1, 2)


def merge_attn_states(
    v: Tensor,
    s: Tensor,
    *,
    attn_sink: Tensor | None = None,
    phases: Tensor | None = None,
    phase_index: Tensor | None = None,
    out: Tensor | None = None,
    backend: str | None = None,
) -> tuple[Tensor, Tensor]:
    """Merges attention over parts of the keys, each with a softmax of its own, from the first part to the last.

        out = sum over parts of exp(s - m) * v / sum over parts of exp(s - m)

    Args:
        v: Output of each part, shape [rows, parts, heads, channels], fp32, bf16 or fp16.
        s: Its natural log-sum-exp, shape [rows, parts, heads], fp32; +inf or -inf for a part without keys, whose v is
            not read.
        attn_sink: Shape [heads], fp32: a logit without a value, which the returned log-sum-exp has not.
        phases: Cosine and sine of each rotated pair, shape [entries, rotated / 2, 2], fp32: rotates the last channels
            back; None for no rotation.
        phase_index: Entry of each row, shape [rows], int32; None when entry i is that of row i. A row of an
            entry that `phases` does not have is not turned.
        out: Shape [rows, heads, channels], written and returned; None for a new tensor of v's dtype.
        backend: "torch" or "triton"; None for the best that serves the call.

    Returns:
        Shape [rows, heads, channels]; log-sum-exp, shape [rows, heads], fp32. A row without keys has 0 and +inf.

    Raises:
        ShapeError: A shape, dtype or stride is not as above.
        UnsupportedHardware: The backend asked for cannot serve the call.
    """
    contract.check_shape("v", v, (None, None, None, None), "rows, parts, heads, channels")
    contract.check_dtype("v", v, torch.float32, torch.bfloat16, torch.float16)
    contract.check_last_stride("v", v)
    rows, parts, heads, channels = v.shape
    contract.check_shape("s", s, (rows, parts, heads), "rows, parts, heads")
    contract.check_dtype("s", s, torch.float32)
    _check_ends(heads, channels, (rows,), attn_sink, phases, phase_index)
    if out is None:
        out = v.new_empty((rows, heads, channels))
    contract.check_floats("out", out)
    contract.check_shape("out", out, (rows, heads, channels), "rows, heads, channels")
    contract.check_last_stride("out", out)
    lse = torch.empty((rows, heads), dtype=torch.float32, device=v.device)
    if out.numel():
        MERGE(backend, v, s, attn_sink, phases, phase_index, out, lse)
    return out, lse


def _scope(
    prefix: str,
    cache: Tensor,
    indices: Tensor,
    lengths: Tensor | None,
    form: KVCacheFormat,
    page_size: int,
    batch: int,
    s_q: int,
) -> tuple[Tensor, Tensor, Tensor | None]:
    """A cache with its lists, [rows, width], and lengths, [rows]."""
    if form not in _FORMATS:
        known = ", ".join(f.name for f in _FORMATS)
        raise ConfigError(
            f"{prefix}format is {form.name}; attention reads {known}.",
            field=f"{prefix}format", value=form.name, limit=known,
        )  # fmt: skip
    contract.check_dtype(f"{prefix}k_cache", cache, torch.uint8)
    contract.check_shape(f"{prefix}k_cache", cache, (None, None), "pages, bytes")
    contract.check_last_stride(f"{prefix}k_cache", cache)
    if cache.shape[1] < form.page_bytes(page_size):
        raise ShapeError(
            f"{prefix}k_cache has pages of {cache.shape[1]} bytes; {page_size} rows of {form.name} need "
            f"{form.page_bytes(page_size)}.",
            argument=f"{prefix}k_cache", expected=form.page_bytes(page_size), found=cache.shape[1],
        )  # fmt: skip
    name = "extra_indices_in_kvcache" if prefix else "indices"
    contract.check_dtype(name, indices, torch.int32)
    contract.check_shape(name, indices, (batch, s_q, None), "batch, s_q, width")
    flat = indices.reshape(batch * s_q, indices.shape[-1])
    if flat.stride(-1) != 1:
        flat = flat.contiguous()
    if lengths is not None:
        contract.check_dtype(f"{prefix}topk_length", lengths, torch.int32)
        if lengths.dim() == 1:
            contract.check_shape(f"{prefix}topk_length", lengths, (batch,), "batch")
            lengths = lengths[:, None].expand(batch, s_q)
        contract.check_shape(f"{prefix}topk_length", lengths, (batch, s_q), "batch, s_q")
        lengths = lengths.reshape(batch * s_q).contiguous()
    return cache, flat, lengths


def _check_ends(
    heads: int,
    channels: int,
    shape: tuple[int, ...],
    sink: Tensor | None,
    phases: Tensor | None,
    phase_index: Tensor | None,
) -> None:
    if sink is not None:
        contract.check_dtype("attn_sink", sink, torch.float32)
        contract.check_shape("attn_sink", sink, (heads,), "heads")
    if phases is None:
        return
    contract.check_dtype("phases", phases, torch.float32)
    contract.check_shape("phases", phases, (None, None, 2), "entries, rotated / 2, 2")
    if not 0 < 2 * phases.shape[1] <= channels:
        raise ShapeError(
            f"phases rotate {2 * phases.shape[1]} channels; a head has {channels}. Give None for no rotation.",
            argument="phases", expected=f"[2, {channels}]", found=2 * phases.shape[1],
        )  # fmt: skip
    if phase_index is not None:
        contract.check_dtype("phase_index", phase_index, torch.int32)
        axes = "batch, s_q" if len(shape) == 2 else "rows"
        contract.check_shape("phase_index", phase_index, shape, axes)
    elif phases.shape[0] < (rows := math.prod(shape)):
        raise ShapeError(
            f"phases has {phases.shape[0]} entries for {rows} rows; give phase_index, or one entry a row.",
            argument="phases", expected=rows, found=phases.shape[0],
        )  # fmt: skip


def _output(out: Tensor | None, q: Tensor) -> Tensor:
    if out is None:
        return torch.empty(q.shape, dtype=q.dtype, device=q.device)
    contract.check_floats("out", out)
    contract.check_shape("out", out, tuple(q.shape), "batch, s_q, heads, channels")
    contract.check_last_stride("out", out)
    if out.shape[1] > 1 and out.shape[0] > 1 and out.stride(0) != out.shape[1] * out.stride(1):
        raise ShapeError(
            f"out has stride {out.stride(0)} from request to request; its rows must lie {out.stride(1)} apart throughout.",
            argument="out", expected=out.shape[1] * out.stride(1), found=out.stride(0),
        )  # fmt: skip
    return out


attention_backends.register(DECODE, MERGE)
