"""Launch of the attention of many rows for every chip, for arguments that were already checked."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from deepinfer.kernels.triton.launches import cdiv, next_power_of_2
from deepinfer.kernels.triton.mla_prefill_portable import mla_prefill_portable_kernel

__all__ = ["PortableTuning", "attend_portable"]

_LOG2_E = 1.4426950408889634


@dataclass(frozen=True)
class PortableTuning:
    """Sizes of the tiles.

    Attributes:
        heads: Heads of a program, at least 16.
        tile: Keys of a tile, at least 16; it decides the order of the sums.
        warps: Warps of a program.
        stages: Tiles that are copied ahead, plus one.
    """

    heads: int = 16
    tile: int = 32
    warps: int = 4
    stages: int = 1


def attend_portable(
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
    tuning: PortableTuning,
) -> None:
    """Attention of each row to the keys of its lists.

    Args:
        q: Shape [rows, heads, d], last stride 1.
        kv: Shape [keys, d], last stride 1.
        indices: Shape [rows, width], int32, last stride 1; with a window, the first key of each row, shape [rows].
        lengths: Shape [rows], int32, contiguous, or None; needed with a window.
        extra_kv: Shape [extra keys, d], last stride 1, or None.
        extra_indices: Shape [rows, extra width], int32, last stride 1, or None.
        extra_lengths: Shape [rows], int32, contiguous, or None.
        sink: Shape [heads], fp32, contiguous, or None.
        phases: Shape [rows, pairs, 2], fp32, contiguous, or None.
        scale: Factor on q . k.
        window: Most keys of a band, or None for lists.
        out: Shape [rows, heads, values], last stride 1.
        max_logits: Shape [rows, heads], fp32, contiguous.
        lse: Shape [rows, heads], fp32, contiguous.
        tuning: Sizes of the tiles.
    """
    rows, heads, d = q.shape
    d_v = out.shape[2]
    two = extra_kv is not None and extra_indices is not None
    more_kv = extra_kv if extra_kv is not None else kv
    more = extra_indices if extra_indices is not None else indices
    mla_prefill_portable_kernel[(rows, cdiv(heads, tuning.heads))](
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
        heads,
        kv.shape[0],
        more_kv.shape[0],
        indices.shape[1] if window is None else window,
        more.shape[1] if two else 0,
        scale * _LOG2_E,
        d,
        d_v,
        0 if phases is None else phases.shape[1],
        q.stride(0),
        q.stride(1),
        kv.stride(0),
        more_kv.stride(0),
        indices.stride(0) if window is None else 0,
        more.stride(0) if two else 0,
        out.stride(0),
        out.stride(1),
        BAND=window is not None,
        COUNTED=lengths is not None,
        EXTRA=two,
        EXTRA_COUNTED=extra_lengths is not None,
        SINK=sink is not None,
        ROPE=phases is not None,
        HEADS=tuning.heads,
        TILE=tuning.tile,
        VALUES=max(16, next_power_of_2(d_v)),
        TAIL=max(16, next_power_of_2(d - d_v)) if d > d_v else 0,
        num_warps=tuning.warps,
        num_stages=tuning.stages,
    )
