"""Attention of many rows in torch, and in Triton: for Hopper, and for every GPU that Triton has."""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor

from deepinfer.kernels import contract
from deepinfer.kernels.configs import attention_prefill as configs
from deepinfer.kernels.devices import on_device
from deepinfer.kernels.reference import attention_prefill as reference
from deepinfer.kernels.registry import Operation

__all__ = ["register"]


def register(sparse: Operation, window: Operation) -> None:
    """Gives the operations their implementations.

    Args:
        sparse: `flash_mla_sparse_fwd`, with a list of keys a row.
        window: `swa_attention`, with a band of keys a row.
    """
    sparse.register("torch", supports=_always)(reference.sparse_attention)
    window.register("torch", supports=_always)(reference.band_attention)
    for op, hopper, portable in (
        (sparse, _sparse_hopper, _sparse_portable),
        (window, _hopper, _portable),
    ):
        op.register("triton", name="hopper", supports=_hopper_refusal, priority=20)(hopper)
        op.register("triton", name="portable", supports=_portable_refusal, priority=10)(portable)


def _always(*args: object) -> None:
    """The references serve every call."""


def _tensors(*args: object) -> list[Tensor]:
    return [a for a in args if isinstance(a, Tensor)]


def _hopper_refusal(*args: object) -> str | None:
    tensors = _tensors(*args)
    reason = contract.gluon_refusal(*tensors)
    if reason is not None:
        return reason
    q, out, phases = tensors[0], tensors[-3], args[8]
    if q.dtype != torch.bfloat16 or q.shape[2] != 512 or out.shape[2] != 512:
        kind = str(q.dtype).removeprefix("torch.")
        return f"it takes bf16 queries of 512 channels and values of 512, not {kind} of {q.shape[2]} and {out.shape[2]}"
    if isinstance(phases, Tensor) and phases.shape[1] != 32:
        return f"it rotates 64 channels, not {2 * phases.shape[1]}"
    return None


def _portable_refusal(*args: object) -> str | None:
    tensors = _tensors(*args)
    reason = contract.triton_refusal(*tensors)
    if reason is None and tensors[0].dtype == torch.float64:
        return "it computes in fp32"
    if reason is None and tensors[-3].shape[2] % 2 and args[8] is not None:
        return "it rotates pairs of an even number of channels"
    return reason


def _sparse_hopper(*args: Any) -> None:
    """Lists have no window."""
    _hopper(*_with(None, args))


def _hopper(  # type: ignore[no-untyped-def]
    q, kv, indices, lengths, extra_kv, extra_indices, extra_lengths, sink, phases, scale, window, out, max_logits, lse
):  # fmt: skip
    import deepinfer.kernels.triton.mla_prefill_launch as launch

    to = launch.aligned(out)
    arguments = (
        launch.aligned(q), launch.aligned(kv), _rows(indices), _plain(lengths),
        None if extra_kv is None else launch.aligned(extra_kv), extra_indices, _plain(extra_lengths), _plain(sink),
        _plain(phases), scale, window, to, max_logits, lse,
    )  # fmt: skip
    heads = q.shape[1]
    if heads <= 32:
        launch.attend_few(*arguments, launch.FewTuning(*configs.few(heads)))
    else:
        launch.attend_paired(*arguments, launch.PairedTuning(*configs.paired()))
    if to is not out:
        out.copy_(to)


def _sparse_portable(*args: Any) -> None:
    """Lists have no window."""
    _portable(*_with(None, args))


def _portable(  # type: ignore[no-untyped-def]
    q, kv, indices, lengths, extra_kv, extra_indices, extra_lengths, sink, phases, scale, window, out, max_logits, lse
):  # fmt: skip
    import deepinfer.kernels.triton.mla_prefill_portable_launch as launch

    tail = q.shape[2] > out.shape[2]
    sizes = configs.portable(q.shape[1], q.element_size(), tail, _shared_bytes(q))
    with _on(q):
        launch.attend_portable(
            q, kv, _rows(indices), _plain(lengths), extra_kv, extra_indices, _plain(extra_lengths), _plain(sink),
            _plain(phases), scale, window, out, max_logits, lse, launch.PortableTuning(*sizes),
        )  # fmt: skip


def _with(window: None, args: tuple[Any, ...]) -> list[Any]:
    """The arguments of a band's operation: the window stands behind the scale."""
    return [*args[:10], window, *args[10:]]


def _shared_bytes(x: Tensor) -> int:
    """Shared memory that a program may have; unknown under the interpreter, which has no limit."""
    if not x.is_cuda:
        return 0
    return torch.cuda.get_device_properties(x.device).shared_memory_per_block_optin


def _plain(x: Tensor | None) -> Tensor | None:
    return None if x is None else x.contiguous()


def _rows(indices: Tensor) -> Tensor:
    """Lists may lie apart; the first keys of bands may not."""
    return indices.contiguous() if indices.dim() == 1 else indices


def _on(x: Tensor) -> AbstractContextManager[object]:
    """The tensor's device as the current one; nothing under the interpreter."""
    return on_device(x)
