"""Launches of norms and rotations, for arguments that were already checked."""

from __future__ import annotations

import torch
from torch import Tensor

from deepinfer.kernels import contract
from deepinfer.kernels.configs import rows as configs
from deepinfer.kernels.triton.launches import cdiv, launch, next_power_of_2
from deepinfer.kernels.triton.norms import norm_rope_cast_kernel, rms_norm_kernel
from deepinfer.kernels.triton.quant_launch import hardware_level
from deepinfer.kernels.triton.ropes import rope_kernel
from deepinfer.kernels.triton.small_floats import E4M3_E8M0

__all__ = ["norm_rope_cast", "rms_norm", "rope"]

_WIDEST = 2048  # a warp holds a row in registers


def rms_norm(
    x: Tensor, residual: Tensor | None, weight: Tensor, eps: float, out: Tensor,
    tuning: tuple[int, int] | None = None, evict: str = "",
) -> None:  # fmt: skip
    """RMS norm of rows, of their sum with a residual when there is one.

    Args:
        x: Shape [rows, channels], last stride 1.
        residual: Of the shape of `x`; becomes the sum.
        weight: Gains, shape [channels], contiguous.
        eps: Added to the mean square.
        out: Of the shape of `x`, and may be it.
        tuning: Rows a program, and warps; None for those of the table.
        evict: What the caches are told of the values that are read.
    """
    rows, channels = x.shape
    at_once, warps = tuning or configs.norm(channels, residual is not None)
    main, rest = configs.pieces(channels)
    other = x if residual is None else residual
    launch(
        rms_norm_kernel, cdiv(rows, at_once),
        x, other, weight, out, rows, x.stride(0), other.stride(0), out.stride(0), eps,
        CHANNELS=channels, MAIN=main, REST=rest, ADD=residual is not None, ROWS=at_once,
        EVICT=evict, HARDWARE=hardware_level(x), num_warps=warps,
    )  # fmt: skip


def norm_rope_cast(
    x: Tensor, weight: Tensor | None, eps: float, phases: Tensor | None, positions: Tensor | None,
    q: Tensor, scale: Tensor, format: int, group: int, tuning: tuple[int, ...] | None = None,
    pairs: bool = True,
) -> None:  # fmt: skip
    """RMS norm, rotation and cast of the heads of tokens.

    Args:
        x: Shape [tokens, heads, channels], last stride 1.
        weight: Gains, shape [channels], contiguous, or None for no norm.
        eps: Added to the mean square.
        phases: Cosine and sine, shape [places, rope_dim / 2, 2], fp32, contiguous, or None for no rotation.
        positions: Place of each token, shape [tokens], contiguous, or None for its number.
        q: Codes of all heads, shape as `x` or half as wide, uint8, contiguous.
        scale: Scales of all heads, shape [rows, heads, groups], uint8, contiguous.
        format: As in `small_floats`.
        group: Channels of a group.
        tuning: Rows a program, and warps; two values at a time also pairs of a thread, whether turned channels are spread over
            a warp, and whether rows come by way of shared memory. None for those of the table.
        pairs: Whether two values may go at a time where they can.
    """
    tokens, heads, channels = x.shape
    turned = 0 if phases is None else cdiv(2 * phases.shape[1], group)
    if pairs and _in_pairs(x, weight, phases, q):
        _norm_rope_pairs(x, weight, eps, phases, positions, q, scale, format, group, turned, tuning)
        return
    rows, warps = tuning[:2] if tuning else configs.norm_rope_cast(channels)
    launch(
        norm_rope_cast_kernel, cdiv(tokens * heads, rows),
        x, x if weight is None else weight, x if phases is None else phases,
        x if positions is None else positions, q, scale, tokens * heads,
        0 if phases is None else len(phases), heads, x.stride(0),
        x.stride(1), eps, CHANNELS=channels, ROPE=0 if phases is None else 2 * phases.shape[1],
        HAS_NORM=weight is not None, HAS_POSITIONS=positions is not None, FORMAT=format,
        HARDWARE=hardware_level(x), ROWS=rows, SPAN=next_power_of_2(channels // group),
        TURNED=next_power_of_2(turned) if turned else 0, GROUP=group, num_warps=warps, enable_fp_fusion=False,
    )  # fmt: skip


def _in_pairs(x: Tensor, weight: Tensor | None, phases: Tensor | None, q: Tensor) -> bool:
    """Whether bf16 can be read two at a time, on a chip that computes with pairs."""
    if x.dtype != torch.bfloat16 or hardware_level(x) != 2 or not contract.has_gluon():
        return False
    if x.shape[2] > _WIDEST:
        return False
    aligned = (x.data_ptr() | q.data_ptr()) % 4 == 0 and (x.stride(0) | x.stride(1)) % 2 == 0
    if weight is not None:
        aligned = aligned and weight.dtype == torch.bfloat16 and weight.data_ptr() % 4 == 0
    return aligned and (phases is None or phases.data_ptr() % 8 == 0)


def _norm_rope_pairs(
    x: Tensor, weight: Tensor | None, eps: float, phases: Tensor | None, positions: Tensor | None,
    q: Tensor, scale: Tensor, format: int, group: int, turned: int, tuning: tuple[int, ...] | None,
) -> None:  # fmt: skip
    from deepinfer.kernels.triton.norm_pairs import norm_rope_pairs_kernel

    tokens, heads, channels = x.shape
    sizes = tuning or configs.norm_rope_pairs(channels, 8 if format == E4M3_E8M0 else 4)
    rows, warps, each, shared, ahead = (*sizes, *(8, True, False)[len(sizes) - 2 :])
    width = 0 if phases is None else phases.shape[1]
    whole = width > 0 and (channels & (channels - 1) | width & (width - 1)) == 0
    words = x.view(torch.int32)
    shared = bool(shared) and whole
    # Heads of one token, side by side.
    ahead = (
        shared
        and bool(ahead)
        and heads % rows == 0
        and x.is_contiguous()
        and x.data_ptr() % 16 == 0
    )
    flat = heads == 1 or x.stride(0) == heads * x.stride(1)
    launch(
        norm_rope_pairs_kernel, cdiv(tokens * heads, rows),
        words, words if weight is None else weight.view(torch.int32),
        words if phases is None else phases.view(torch.int64),
        words if positions is None else positions,
        q.view(torch.int16) if format == E4M3_E8M0 else q, scale, tokens * heads,
        0 if phases is None else len(phases), heads,
        words.stride(0), words.stride(0 if heads == 1 else 1), eps, CHANNELS=channels,
        ROPE=0 if phases is None else 2 * phases.shape[1], HAS_NORM=weight is not None,
        HAS_POSITIONS=positions is not None, FLAT=flat, FORMAT=format, ROWS=rows,
        SPAN=next_power_of_2(channels // group),
        TURNED=next_power_of_2(turned) if turned else 0, GROUP=group, EACH=each, SHARED=shared, AHEAD=ahead,
        num_warps=warps, enable_fp_fusion=False,
    )  # fmt: skip


def rope(
    x: Tensor, phases: Tensor, positions: Tensor | None, inverse: bool, out: Tensor,
    tuning: tuple[int, int] | None = None,
) -> None:  # fmt: skip
    """Rotates the last channels of the heads of tokens.

    Args:
        x: Shape [tokens, heads, channels], last stride 1.
        phases: Cosine and sine, shape [places, rope_dim / 2, 2], fp32, contiguous.
        positions: Place of each token, shape [tokens], contiguous, or None for its number.
        inverse: Rotate back.
        out: Of the shape of `x`, and may be it.
        tuning: Rows a program, and warps; None for those of the table.
    """
    tokens, heads, channels = x.shape
    width = 2 * phases.shape[1]
    in_place = out.data_ptr() == x.data_ptr()
    rows, warps = tuning or configs.rope(channels, in_place)
    launch(
        rope_kernel, cdiv(tokens * heads, rows),
        x, phases, x if positions is None else positions, out, tokens * heads, len(phases), heads,
        x.stride(0), x.stride(1), out.stride(0), out.stride(1), CHANNELS=channels, ROPE=width,
        BLOCK=next_power_of_2(width), REST=next_power_of_2(max(2, channels - width)),
        INVERSE=inverse, HAS_POSITIONS=positions is not None, COPY=not in_place, ROWS=rows,
        ALIKE=heads % rows == 0, num_warps=warps, enable_fp_fusion=False,
    )  # fmt: skip
