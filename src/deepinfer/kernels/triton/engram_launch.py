"""Launches of an Engram's steps, for arguments that were already checked."""

from __future__ import annotations

import torch
from torch import Tensor

from deepinfer.kernels.configs import rows as configs
from deepinfer.kernels.triton.engram_rows import (
    engram_gate_kernel,
    engram_hash_kernel,
    engram_lookup_kernel,
)
from deepinfer.kernels.triton.launches import cdiv, next_power_of_2, on_device
from deepinfer.kernels.triton.quant_launch import hardware_level

__all__ = ["engram_gate", "engram_hash", "engram_lookup"]

_TOKENS = 8


def engram_hash(
    history: Tensor, token_map: Tensor, multipliers: Tensor, primes: Tensor, offsets: Tensor, pad: int,
    out: Tensor,
) -> None:  # fmt: skip
    """Table rows of n-grams, shape [tokens, columns], of histories, shape [tokens, n], last stride 1, all int64."""
    tokens, ngram = history.shape
    columns = len(primes)
    with on_device(history):
        engram_hash_kernel[(cdiv(tokens, _TOKENS),)](
            history, token_map, multipliers, primes, offsets, out, tokens, len(token_map), pad,
            history.stride(0), NGRAM=ngram, HEADS=columns // (ngram - 1), COLUMNS=columns,
            TOKENS=_TOKENS, BLOCK=next_power_of_2(columns), num_warps=4,
        )  # fmt: skip


def engram_lookup(
    rows: Tensor, table: Tensor, scale: Tensor, out: Tensor,
    tuning: tuple[int, int, int, bool] | None = None,
) -> None:  # fmt: skip
    """Dequantised rows.

    Args:
        rows: Any shape, contiguous, int64.
        table: Shape [rows of the table, channels], uint8, last stride 1.
        scale: Shape [rows of the table, groups], uint8, last stride 1.
        out: Shape [*rows.shape, channels], contiguous.
        tuning: As `configs.rows.engram_lookup` gives it; None for that.
    """
    channels, groups = table.shape[1], scale.shape[1]
    at_once, warps, steps, stream = tuning or configs.engram_lookup(channels)
    with on_device(table):
        engram_lookup_kernel[(cdiv(rows.numel(), at_once * steps),)](
            rows, table, scale, out, rows.numel(), len(table), table.stride(0), scale.stride(0),
            CHANNELS=channels, GROUP=channels // groups, HARDWARE=hardware_level(table),
            ROWS=at_once, STEPS=steps, STREAM=stream, num_warps=warps,
        )  # fmt: skip


def engram_gate(
    streams: Tensor, projected: Tensor, q_weight: Tensor, k_weight: Tensor, eps: float,
    is_image: Tensor | None, out: Tensor, tuning: tuple[int, int] | None = None,
) -> None:  # fmt: skip
    """Adds a gated value to streams.

    Args:
        streams: Shape [tokens, n, channels], last stride 1.
        projected: Shape [tokens, (n + 1) * channels], last stride 1.
        q_weight: Shape [n, channels], contiguous.
        k_weight: Shape [n, channels], contiguous.
        eps: Added to every mean square.
        is_image: Shape [tokens], bool, contiguous, or None.
        out: Shape [tokens, n, channels], contiguous.
        tuning: Tokens one after the other, and warps; None for those of the table.
    """
    tokens, count, channels = streams.shape
    steps, warps = tuning or configs.engram_gate(channels, tokens)
    main, rest = configs.pieces(channels)
    with on_device(streams):
        engram_gate_kernel[(cdiv(tokens, steps) * count,)](
            streams, projected, q_weight, k_weight,
            streams if is_image is None else is_image.view(torch.uint8), out, tokens, steps,
            streams.stride(0), streams.stride(1), projected.stride(0), eps, STREAMS=count,
            CHANNELS=channels, MAIN=main, REST=rest, HAS_IMAGE=is_image is not None,
            ONE=steps == 1, num_warps=warps,
        )  # fmt: skip
