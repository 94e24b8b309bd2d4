"""Launch of the sparse attention of many rows on Hopper, for arguments that were already checked."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from deepinfer.kernels.triton.gemm_launch import num_sms
from deepinfer.kernels.triton.launches import launch
from deepinfer.kernels.triton.mla_prefill_few import mla_prefill_few_kernel
from deepinfer.kernels.triton.mla_prefill_paired import mla_prefill_paired_kernel

__all__ = [
    "FewTuning",
    "PairedTuning",
    "aligned",
    "attend_few",
    "attend_paired",
]

_LOG2_E = 1.4426950408889634


@dataclass(frozen=True)
class FewTuning:
    """How the rows of few heads are computed; nothing of it changes the order of a sum.

    Attributes:
        heads: Heads of a program: 8, 16 or 32.
        parts: In how many pieces a tile of 64 keys is copied and handed over: 1, 2 or 4.
        depth: Tiles in the ring: 3, or 2 with 32 heads.
        copy_rows: Keys that are copied in one go: 16, 32 or 64.
        copy_warps: Warps that copy.
        copy_registers: Registers of each of their threads.
    """

    heads: int
    parts: int = 1
    depth: int = 3
    copy_rows: int = 32
    copy_warps: int = 4
    copy_registers: int = 96


@dataclass(frozen=True)
class PairedTuning:
    """How the rows of 64 heads are computed by warpgroups that take every other tile; nothing of it changes the order of a sum.

    Attributes:
        copy_rows: Keys that are copied in one go: 16, 32 or 64.
        copy_registers: Registers of each thread that copies.
        registers: Registers of each thread of the second warpgroup that multiplies.
    """

    copy_rows: int = 64
    copy_registers: int = 64
    registers: int = 224


def attend_paired(
    q: Tensor,
    kv: Tensor,
    indices: Tensor,
    lengths: Tensor | None,
    extra_kv: Tensor | None,
    extra_indices: Tensor | None,
    extra_lengths: Tensor | None,
    sink: Tensor | None,
    phases: Tensor | None,
    scale: float,
    window: int | None,
    out: Tensor,
    max_logits: Tensor,
    lse: Tensor,
    tuning: PairedTuning,
) -> None:
    """Attention of each row to the keys of its lists.

    Args:
        q: Shape [rows, heads, 512], bf16, last stride 1; address a multiple of 16 bytes, other
            strides of 16 elements.
        kv: Shape [keys, 512], bf16, likewise.
        indices: Shape [rows, width], int32, last stride 1; with a window, the first key of each row, shape [rows].
        lengths: Shape [rows], int32, contiguous, or None; needed with a window.
        extra_kv: Of the shape of `kv`, or None.
        extra_indices: Shape [rows, extra width], int32, last stride 1, or None.
        extra_lengths: Shape [rows], int32, contiguous, or None.
        sink: Shape [heads], fp32, contiguous, or None.
        phases: Shape [rows, 32, 2], fp32, contiguous, or None.
        scale: Factor on q . k.
        window: Most keys of a band, or None for lists.
        out: Shape [rows, heads, 512], bf16, strides as of `q`.
        max_logits: Shape [rows, heads], fp32, contiguous.
        lse: Shape [rows, heads], fp32, contiguous.
        tuning: Form of the kernel.
    """
    arguments, constants = _arguments(
        q, kv, indices, lengths, extra_kv, extra_indices, extra_lengths, sink, phases, scale, window, out, max_logits, lse
    )  # fmt: skip
    units = q.shape[0] * -(-q.shape[1] // 64)
    launch(
        mla_prefill_paired_kernel,
        min(units, num_sms(q.device.index)),
        *arguments,
        **constants,
        COPY_ROWS=tuning.copy_rows,
        COPY_WARPS=4,
        COPY_REGISTERS=tuning.copy_registers,
        REGISTERS=tuning.registers,
        num_warps=4,
    )


def attend_few(
    q: Tensor,
    kv: Tensor,
    indices: Tensor,
    lengths: Tensor | None,
    extra_kv: Tensor | None,
    extra_indices: Tensor | None,
    extra_lengths: Tensor | None,
    sink: Tensor | None,
    phases: Tensor | None,
    scale: float,
    window: int | None,
    out: Tensor,
    max_logits: Tensor,
    lse: Tensor,
    tuning: FewTuning,
) -> None:
    """The same with few heads of 512 channels; arguments as of `attend_paired`, `tuning` apart."""
    arguments, constants = _arguments(
        q, kv, indices, lengths, extra_kv, extra_indices, extra_lengths, sink, phases, scale, window, out, max_logits, lse
    )  # fmt: skip
    units = q.shape[0] * -(-q.shape[1] // tuning.heads)
    launch(
        mla_prefill_few_kernel,
        min(units, num_sms(q.device.index)),
        *arguments,
        **constants,
        HEADS=tuning.heads,
        PARTS=tuning.parts,
        DEPTH=tuning.depth,
        COPY_ROWS=tuning.copy_rows,
        COPY_WARPS=tuning.copy_warps,
        COPY_REGISTERS=tuning.copy_registers,
        num_warps=4,
    )


def _arguments(
    q: Tensor,
    kv: Tensor,
    indices: Tensor,
    lengths: Tensor | None,
    extra_kv: Tensor | None,
    extra_indices: Tensor | None,
    extra_lengths: Tensor | None,
    sink: Tensor | None,
    phases: Tensor | None,
    scale: float,
    window: int | None,
    out: Tensor,
    max_logits: Tensor,
    lse: Tensor,
) -> tuple[tuple[object, ...], dict[str, bool]]:
    """What both kernels take."""
    two = extra_kv is not None and extra_indices is not None
    more_kv = extra_kv if extra_kv is not None else kv
    more = extra_indices if extra_indices is not None else indices
    arguments = (
        q,
        kv,
        indices,
        indices if lengths is None else lengths,
        more_kv,
        more,
        more if extra_lengths is None else extra_lengths,
        lse if sink is None else sink,
        lse if phases is None else phases,
        out,
        max_logits,
        lse,
        q.shape[0],
        q.shape[1],
        kv.shape[0],
        more_kv.shape[0],
        indices.shape[1] if window is None else window,
        more.shape[1] if two else 0,
        scale * _LOG2_E,
        q.stride(0),
        q.stride(1),
        kv.stride(0),
        more_kv.stride(0),
        indices.stride(0) if window is None else 0,
        more.stride(0) if two else 0,
        out.stride(0),
        out.stride(1),
    )
    constants = {
        "BAND": window is not None,
        "COUNTED": lengths is not None,
        "EXTRA": two,
        "EXTRA_COUNTED": extra_lengths is not None,
        "SINK": sink is not None,
        "ROPE": phases is not None,
    }
    return arguments, constants


def aligned(x: Tensor) -> Tensor:
    """The tensor, or a contiguous copy when its rows do not begin at multiples of 32 bytes."""
    good = x.data_ptr() % 16 == 0 and x.stride(-1) == 1
    return x if good and all(s % 16 == 0 for s in x.stride()[:-1]) else x.contiguous()
