"""Implementations of the sparse decode attention and of the merge: torch, Triton, and Triton for Hopper."""

from __future__ import annotations

from contextlib import AbstractContextManager

import torch
from torch import Tensor

from deepinfer.kernels import contract
from deepinfer.kernels.devices import on_device
from deepinfer.kernels.formats import KVCacheFormat
from deepinfer.kernels.reference import attention as reference
from deepinfer.kernels.reference.rope import turns_at
from deepinfer.kernels.registry import Operation

__all__ = ["CHOOSE", "register"]

CHOOSE = -1
"""Split size that stands for one chosen by the number of rows."""


def register(decode: Operation, merge: Operation) -> None:
    """Adds the implementations."""
    decode.register("torch", supports=_always)(_decode_torch)
    decode.register("triton", name="hopper", supports=_hopper_refusal, priority=20)(_decode_hopper)
    decode.register("triton", name="portable", supports=_portable_refusal, priority=10)(
        _decode_portable
    )
    merge.register("torch", supports=_always)(_merge_torch)
    merge.register("triton", supports=_merge_refusal, priority=10)(_merge_triton)


def _always(*args: object) -> None:
    """The references serve every call."""


def _on(x: Tensor) -> AbstractContextManager[object]:
    return on_device(x)


def _rows_of(phases: Tensor | None, phase_index: Tensor | None, rows: int) -> Tensor | None:
    """Phases of each row."""
    if phases is None:
        return None
    return phases[:rows] if phase_index is None else turns_at(phases, phase_index)


def _decode_torch(
    q: Tensor, k_cache: Tensor, indices: Tensor, lengths: Tensor | None, format: str, page_size: int,
    extra_k_cache: Tensor | None, extra_indices: Tensor | None, extra_lengths: Tensor | None, extra_format: str,
    extra_page_size: int, sink: Tensor | None, phases: Tensor | None, phase_index: Tensor | None, scale: float,
    split_keys: int, out: Tensor, lse: Tensor,
) -> None:  # fmt: skip
    scopes = [(k_cache, indices, lengths, KVCacheFormat[format], page_size)]
    if extra_k_cache is not None and extra_indices is not None:
        form = KVCacheFormat[extra_format]
        scopes.append((extra_k_cache, extra_indices, extra_lengths, form, extra_page_size))
    reference.attend_cached(q, scopes, sink, _rows_of(phases, phase_index, len(q)), scale, out, lse)


def _hopper_refusal(
    q: Tensor, k_cache: Tensor, indices: Tensor, lengths: Tensor | None, format: str, page_size: int,
    extra_k_cache: Tensor | None, extra_indices: Tensor | None, extra_lengths: Tensor | None, extra_format: str,
    extra_page_size: int, sink: Tensor | None, phases: Tensor | None, phase_index: Tensor | None, scale: float,
    split_keys: int, out: Tensor, lse: Tensor,
) -> str | None:  # fmt: skip
    reason = contract.gluon_refusal(q, k_cache, indices, out, lse)
    if reason is not None:
        return reason
    if q.dtype != torch.bfloat16 or out.dtype != torch.bfloat16:
        return f"it takes bf16 queries and outputs, not {q.dtype} and {out.dtype}"
    if format != "V41_MXFP8" or extra_format not in ("V41_MXFP8", "V41_NVFP4"):
        return "its first cache is V41_MXFP8, its second V41_MXFP8 or V41_NVFP4"
    if phases is not None and phases.shape[1] != 32:
        return f"it rotates 64 channels, not {2 * phases.shape[1]}"
    for cache in (k_cache, extra_k_cache):
        if cache is not None and (cache.stride(0) % 16 or cache.data_ptr() % 16):
            return "pages must begin at multiples of 16 bytes"
    return None


def _decode_hopper(
    q: Tensor, k_cache: Tensor, indices: Tensor, lengths: Tensor | None, format: str, page_size: int,
    extra_k_cache: Tensor | None, extra_indices: Tensor | None, extra_lengths: Tensor | None, extra_format: str,
    extra_page_size: int, sink: Tensor | None, phases: Tensor | None, phase_index: Tensor | None, scale: float,
    split_keys: int, out: Tensor, lse: Tensor,
) -> None:  # fmt: skip
    import deepinfer.kernels.triton.mla_decode_launch as launch

    extra = None
    if extra_k_cache is not None and extra_indices is not None:
        extra = launch.Scope(
            extra_k_cache, extra_indices, extra_lengths, extra_format == "V41_NVFP4", extra_page_size
        )  # fmt: skip
    first = launch.Scope(k_cache, indices, lengths, format == "V41_NVFP4", page_size)
    ends = launch.Ends(sink, phases, phase_index)
    with _on(q):
        launch.decode(q, first, extra, ends, scale, split_keys, out, lse)


def _portable_refusal(
    q: Tensor, k_cache: Tensor, indices: Tensor, lengths: Tensor | None, format: str, page_size: int,
    extra_k_cache: Tensor | None, extra_indices: Tensor | None, extra_lengths: Tensor | None, extra_format: str,
    extra_page_size: int, sink: Tensor | None, phases: Tensor | None, phase_index: Tensor | None, scale: float,
    split_keys: int, out: Tensor, lse: Tensor,
) -> str | None:  # fmt: skip
    reason = contract.triton_refusal(q, k_cache, indices, out, lse)
    if reason is None and q.dtype not in (torch.bfloat16, torch.float32):
        return f"it takes bf16 and fp32 queries, not {q.dtype}"
    for name, cache in ((format, k_cache), (extra_format, extra_k_cache)):
        is_odd = cache is not None and (
            cache.stride(0) % 2 or cache.shape[1] % 2 or cache.data_ptr() % 2
        )
        if reason is None and name == "V4_FP8" and is_odd:
            return "pages with bf16 channels must begin at even bytes"
    return reason


def _decode_portable(
    q: Tensor, k_cache: Tensor, indices: Tensor, lengths: Tensor | None, format: str, page_size: int,
    extra_k_cache: Tensor | None, extra_indices: Tensor | None, extra_lengths: Tensor | None, extra_format: str,
    extra_page_size: int, sink: Tensor | None, phases: Tensor | None, phase_index: Tensor | None, scale: float,
    split_keys: int, out: Tensor, lse: Tensor,
) -> None:  # fmt: skip
    import deepinfer.kernels.triton.mla_decode_portable_launch as launch

    extra = None
    if extra_k_cache is not None and extra_indices is not None:
        extra = launch.PortableScope(
            extra_k_cache, extra_indices, extra_lengths, KVCacheFormat[extra_format], extra_page_size
        )  # fmt: skip
    first = launch.PortableScope(k_cache, indices, lengths, KVCacheFormat[format], page_size)
    sms = torch.cuda.get_device_properties(q.device).multi_processor_count if q.is_cuda else 4
    with _on(q):
        launch.decode_portable(
            q, first, extra, sink, phases, phase_index, scale, split_keys, out, lse, num_sms=sms
        )  # fmt: skip


def _merge_torch(
    v: Tensor, s: Tensor, sink: Tensor | None, phases: Tensor | None, phase_index: Tensor | None, out: Tensor,
    lse: Tensor,
) -> None:  # fmt: skip
    reference.merge_states(v, s, sink, _rows_of(phases, phase_index, len(v)), out, lse)


def _merge_refusal(
    v: Tensor, s: Tensor, sink: Tensor | None, phases: Tensor | None, phase_index: Tensor | None, out: Tensor,
    lse: Tensor,
) -> str | None:  # fmt: skip
    reason = contract.triton_refusal(v, s, out, lse)
    channels = v.shape[3]
    if reason is None and (channels & (channels - 1) or not 16 <= channels <= 1024):
        return f"it takes 16 to 1024 channels, a power of two, not {channels}"
    return reason


def _merge_triton(
    v: Tensor, s: Tensor, sink: Tensor | None, phases: Tensor | None, phase_index: Tensor | None, out: Tensor,
    lse: Tensor,
) -> None:  # fmt: skip
    from deepinfer.kernels.triton import mla_merge

    with _on(v):
        mla_merge.merge_states(v, s, sink, phases, phase_index, out, lse)
