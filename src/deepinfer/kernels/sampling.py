"""Choosing tokens from rows of logits: highest, drawn, drawn among the top, masked, penalised; log probabilities.

The noise of a token is a function of (seed, position, token id, purpose) alone, Philox4x32-10 with key = seed and
counter = (position, token id >> 2, stream, 0), so a row gives the same token alone, in any batch and on any device.
Equal logits rank by token id, lower first. A row whose highest logit is not finite (NaN, +inf, all -inf) gives token -1.
"""

from __future__ import annotations

import torch
from torch import Tensor

from deepinfer.core.errors import ShapeError
from deepinfer.kernels import contract
from deepinfer.kernels.configs import sampling as configs
from deepinfer.kernels.sampling_backends import (
    ARGMAX,
    BITMASK,
    GUMBEL,
    LOG_PROBS,
    MASK,
    OPERATIONS,
    PENALTIES,
    SAMPLE,
)
from deepinfer.kernels.topk import topk

__all__ = [
    "OPERATIONS",
    "apply_penalties",
    "apply_token_bitmask",
    "argmax_sample",
    "gumbel_sample",
    "log_probs",
    "top_k_top_p_mask",
    "top_k_top_p_sample",
]

_FLOATS = (torch.float32, torch.bfloat16, torch.float16)
_INTS = (torch.int64, torch.int32)
_REALS = (torch.float64, torch.float32)


def argmax_sample(logits: Tensor, *, backend: str | None = None) -> Tensor:
    """The token of the highest logit of each row.

    Args:
        logits: Shape [rows, vocab], fp32, bf16 or fp16; rows may lie apart.
        backend: "torch" or "triton"; None for the best that serves the call.

    Returns:
        Shape [rows], int64; of equal logits the lowest id. -1 where the highest logit is not finite or one is NaN.

    Raises:
        ShapeError: A shape, dtype or stride is not as above.
        UnsupportedHardware: The backend asked for cannot serve the call.
    """
    rows = _check_logits(logits)
    out = logits.new_empty((rows,), dtype=torch.int64)
    if rows:
        ARGMAX(backend, logits, out)
    return out


def gumbel_sample(
    logits: Tensor,
    seeds: Tensor,
    positions: Tensor,
    *,
    temperature: Tensor | None = None,
    stream: int = 0,
    backend: str | None = None,
) -> Tensor:
    """Draws a token of each row: the highest `logit / temperature + noise`, in fp64.

    Args:
        logits: Shape [rows, vocab], fp32, bf16 or fp16; rows may lie apart.
        seeds: 64 bits each, shape [rows], int64.
        positions: Position of the token to be chosen, shape [rows], int64 or int32.
        temperature: Shape [rows], fp64 or fp32; 0 takes the highest logit. None for 1.
        stream: Purpose of the noise, in [0, 2^32); what uses another is independent.
        backend: "torch" or "triton"; None for the best that serves the call.

    Returns:
        Shape [rows], int64; -1 where the highest logit is not finite or one is NaN.

    Raises:
        ShapeError: A shape, dtype or stride is not as above.
        UnsupportedHardware: The backend asked for cannot serve the call.
    """
    rows = _check_logits(logits)
    _check_option("seeds", seeds, rows, torch.int64)
    _check_option("positions", positions, rows, *_INTS)
    _check_option("temperature", temperature, rows, *_REALS)
    _check_stream(stream)
    out = logits.new_empty((rows,), dtype=torch.int64)
    if rows:
        GUMBEL(backend, logits, temperature, seeds, positions, stream, out)
    return out


def top_k_top_p_mask(
    logits: Tensor,
    top_k: Tensor | int | None = None,
    top_p: Tensor | float | None = None,
    *,
    min_p: Tensor | float | None = None,
    temperature: Tensor | None = None,
    widest: int | None = None,
    out: Tensor | None = None,
    backend: str | None = None,
) -> Tensor:
    """The logits with -inf at the tokens that min-p, top-k and top-p drop, in this order, without a sort.

    top-p keeps the smallest set of tokens, highest first, whose share of what the other filters left reaches it.
    Probabilities are integers, `round(exp((logit - highest) / temperature) * 2^42)`, so their sums have no order.

    Args:
        logits: Shape [rows, vocab], fp32, bf16 or fp16; rows may lie apart.
        top_k: Highest logits to keep, ties to the lower id; 0 or less for all. A number, or shape [rows], int64 or
            int32.
        top_p: From 0, which keeps the highest alone; 1 or more keeps all. A number, or shape [rows], fp64 or fp32.
        min_p: From 0 to 1: tokens of at least this share of the highest probability. A number, or shape [rows], fp64
            or fp32.
        temperature: Shape [rows], fp64 or fp32; 0 keeps the highest logit alone. None for 1.
        widest: The largest top-k of the rows, if every row has one: kernels that only other rows need are left out.
            Known anyway when `top_k` is a number.
        out: Shape [rows, vocab], dtype of `logits`, last stride 1, written and returned; may be `logits` itself. A new
            tensor when None.
        backend: "torch" or "triton"; None for the best that serves the call.

    Returns:
        Shape [rows, vocab]. A row whose highest logit is not finite stays as it is.

    Raises:
        ShapeError: A shape, dtype or stride is not as above.
        UnsupportedHardware: The backend asked for cannot serve the call.
    """
    rows = _check_logits(logits)
    options = _options(logits, temperature, top_k, top_p, min_p, widest)
    if out is None:
        out = torch.empty(logits.shape, dtype=logits.dtype, device=logits.device)
    contract.check_dtype("out", out, logits.dtype)
    contract.check_shape("out", out, tuple(logits.shape), "rows, vocab")
    contract.check_last_stride("out", out)
    if rows:
        MASK(backend, logits, *options, out)
    return out


def top_k_top_p_sample(
    logits: Tensor,
    seeds: Tensor,
    positions: Tensor,
    top_k: Tensor | int | None = None,
    top_p: Tensor | float | None = None,
    *,
    min_p: Tensor | float | None = None,
    temperature: Tensor | None = None,
    stream: int = 0,
    widest: int | None = None,
    backend: str | None = None,
) -> Tensor:
    """Draws a token of each row among those that min-p, top-k and top-p keep, without a sort.

    Args:
        logits: Shape [rows, vocab], fp32, bf16 or fp16; rows may lie apart.
        seeds: 64 bits each, shape [rows], int64.
        positions: Position of the token to be chosen, shape [rows], int64 or int32.
        top_k: A number, or shape [rows]; as in `top_k_top_p_mask`, like the rest.
        top_p: A number, or shape [rows].
        min_p: A number, or shape [rows].
        temperature: Shape [rows], or None for 1.
        stream: Purpose of the noise, as in `gumbel_sample`.
        widest: As in `top_k_top_p_mask`.
        backend: "torch" or "triton"; None for the best that serves the call.

    Returns:
        Shape [rows], int64; -1 where the highest logit is not finite or one is NaN. The same token as `gumbel_sample` of
        what `top_k_top_p_mask` leaves.

    Raises:
        ShapeError: A shape, dtype or stride is not as above.
        UnsupportedHardware: The backend asked for cannot serve the call.
    """
    rows = _check_logits(logits)
    _check_option("seeds", seeds, rows, torch.int64)
    _check_option("positions", positions, rows, *_INTS)
    _check_stream(stream)
    *options, most = _options(logits, temperature, top_k, top_p, min_p, widest)
    out = logits.new_empty((rows,), dtype=torch.int64)
    if rows:
        SAMPLE(backend, logits, *options, seeds, positions, stream, most, out)
    return out


def apply_token_bitmask(
    logits: Tensor,
    bitmask: Tensor,
    *,
    rows: Tensor | None = None,
    vocab_size: int | None = None,
    backend: str | None = None,
) -> Tensor:
    """Sets the logits of tokens whose bit is 0 to -inf, in place.

    Args:
        logits: Shape [rows, columns], fp32, bf16 or fp16, any strides.
        bitmask: Shape [mask rows, words], int32, any strides; token t is bit `t & 31` of word `t >> 5`.
        rows: Row of the logits for each row of the bitmask, shape [mask rows], int64 or int32, no row twice; what is no
            row is left out, and other rows stay as they are. None when row i belongs to row i.
        vocab_size: Columns that the bitmask speaks of, those behind are set to -inf; None for all that it has bits for.
        backend: "torch" or "triton"; None for the best that serves the call.

    Returns:
        `logits`.

    Raises:
        ShapeError: A shape or dtype is not as above, or the bitmask has fewer bits than `vocab_size`.
        UnsupportedHardware: The backend asked for cannot serve the call.
    """
    contract.check_dtype("logits", logits, *_FLOATS)
    contract.check_shape("logits", logits, (None, None), "rows, columns")
    contract.check_dtype("bitmask", bitmask, torch.int32)
    contract.check_shape("bitmask", bitmask, (None, None), "mask rows, words")
    columns, bits = logits.shape[1], 32 * bitmask.shape[1]
    width = min(columns, bits) if vocab_size is None else vocab_size
    if not 0 <= width <= min(columns, bits):
        raise ShapeError(
            f"vocab_size is {width}, with {columns} columns of logits and {bits} bits a row; it can be at most the "
            "smaller one.",
            argument="vocab_size", expected=f"[0, {min(columns, bits)}]", found=width,
        )  # fmt: skip
    if rows is None and bitmask.shape[0] != logits.shape[0]:
        raise ShapeError(
            f"bitmask has {bitmask.shape[0]} rows for {logits.shape[0]} rows of logits; give `rows`, or one each.",
            argument="bitmask", expected=logits.shape[0], found=bitmask.shape[0],
        )  # fmt: skip
    _check_option("rows", rows, bitmask.shape[0], *_INTS)
    if bitmask.shape[0] and columns:
        BITMASK(backend, logits, bitmask, rows, width)
    return logits


def apply_penalties(
    logits: Tensor,
    output_ids: Tensor,
    *,
    prompt_ids: Tensor | None = None,
    presence: Tensor,
    frequency: Tensor,
    repetition: Tensor,
    backend: str | None = None,
) -> Tensor:
    """Applies repetition, frequency and presence penalties, in this order, in place.

    The repetition penalty divides positive and multiplies other logits of the tokens of prompt and output; the other two
    look at the output only: `count * frequency + presence` is subtracted.

    Args:
        logits: Shape [rows, vocab], fp32, bf16 or fp16; rows may lie apart.
        output_ids: Tokens generated so far, shape [rows, length], int64 or int32, -1 behind the last of a row; what is
            no id of the vocabulary is left out.
        prompt_ids: The same for prompts, shape [rows, length], or None when they do not count.
        presence: Shape [rows], fp32 or fp64; 0 is off.
        frequency: Shape [rows], fp32 or fp64; 0 is off.
        repetition: Above 0, shape [rows], fp32 or fp64; 1 is off.
        backend: "torch" or "triton"; None for the best that serves the call.

    Returns:
        `logits`; rows of tokens that do not occur are not touched.

    Raises:
        ShapeError: A shape, dtype or stride is not as above.
        UnsupportedHardware: The backend asked for cannot serve the call.
    """
    rows = _check_logits(logits)
    for name, ids in (("output_ids", output_ids), ("prompt_ids", prompt_ids)):
        if ids is not None:
            contract.check_dtype(name, ids, *_INTS)
            contract.check_shape(name, ids, (rows, None), "rows, length")
            contract.check_last_stride(name, ids)
    _check_option("presence", presence, rows, *_REALS)
    _check_option("frequency", frequency, rows, *_REALS)
    _check_option("repetition", repetition, rows, *_REALS)
    if rows:
        PENALTIES(backend, logits, output_ids, prompt_ids, presence, frequency, repetition)
    return logits


def log_probs(
    logits: Tensor, token_ids: Tensor, num_top: int = 0, *, backend: str | None = None
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Log probabilities of one token of each row and of its likeliest tokens.

    Args:
        logits: Shape [rows, vocab], fp32, bf16 or fp16; rows may lie apart.
        token_ids: Shape [rows], int64 or int32; one that is no token of the vocabulary gives NaN and rank 0.
        num_top: Likeliest tokens to list, from 0 to 4096.
        backend: "torch" or "triton"; None for the best that serves the call.

    Returns:
        Log probability of the tokens, shape [rows], fp32, from fp64 sums of fp32 exponentials; their rank from 1, shape
        [rows], int64, ties by id; ids of the likeliest tokens, highest first, shape [rows, num_top], int32, -1 behind
        the last of a small vocabulary; their log probabilities, shape [rows, num_top], fp32, -inf there. In a row with NaN,
        with +inf or of -inf alone all of them are NaN.

    Raises:
        ShapeError: A shape, dtype or stride is not as above, or `num_top` is out of range.
        UnsupportedHardware: The backend asked for cannot serve the call.
    """
    rows = _check_logits(logits)
    _check_option("token_ids", token_ids, rows, *_INTS)
    if not 0 <= num_top <= 4096:
        raise ShapeError(
            f"num_top is {num_top}; it must lie in [0, 4096].",
            argument="num_top", expected="[0, 4096]", found=num_top,
        )  # fmt: skip
    best = logits.new_empty((rows, num_top), dtype=torch.int32)
    found = None
    if num_top:
        found = torch.empty_like(best)
        values = logits.float() if logits.dtype == torch.float16 else logits
        in_order = num_top > configs.MOST_SORTED
        topk(
            values, num_top, sorted=in_order, output_idx=found, return_value=False, backend=backend
        )
    out = logits.new_empty((rows,), dtype=torch.float32)
    ranks = logits.new_empty((rows,), dtype=torch.int64)
    top = logits.new_empty((rows, num_top), dtype=torch.float32)
    if rows:
        LOG_PROBS(backend, logits, token_ids, found, out, ranks, best, top)
    return out, ranks, best, top


def _check_logits(logits: Tensor) -> int:
    """Checks logits; returns the number of rows."""
    contract.check_dtype("logits", logits, *_FLOATS)
    contract.check_shape("logits", logits, (None, None), "rows, vocab")
    contract.check_last_stride("logits", logits)
    if not 0 < logits.shape[1] < 2**30:
        raise ShapeError(
            f"logits have a vocabulary of {logits.shape[1]}; it must lie in [1, 2^30).",
            argument="logits", expected="[1, 2^30)", found=logits.shape[1],
        )  # fmt: skip
    return logits.shape[0]


def _check_option(name: str, value: Tensor | None, rows: int, *dtypes: torch.dtype) -> None:
    if value is not None:
        if not isinstance(value, Tensor):
            raise ShapeError(
                f"{name} is {value!r}; it must be a tensor with one entry a row.",
                argument=name, expected=(rows,), found=value,
            )  # fmt: skip
        contract.check_dtype(name, value, *dtypes)
        contract.check_shape(name, value, (rows,), "rows")
        contract.check_last_stride(name, value)


def _check_stream(stream: int) -> None:
    if not 0 <= stream < 2**32:
        raise ShapeError(
            f"stream is {stream}; the purpose of the noise is a word of 32 bits, in [0, 2^32).",
            argument="stream", expected="[0, 2^32)", found=stream,
        )  # fmt: skip


def _options(
    logits: Tensor,
    temperature: Tensor | None,
    top_k: Tensor | int | None,
    top_p: Tensor | float | None,
    min_p: Tensor | float | None,
    widest: int | None,
) -> tuple[Tensor | None, Tensor | None, Tensor | None, Tensor | None, int]:
    """Options as columns, None where they are off, and the largest top-k if every row has one, else 0."""
    rows = logits.shape[0]
    _check_option("temperature", temperature, rows, *_REALS)
    if isinstance(top_k, int):
        widest = max(0, top_k)
        top_k = None if top_k <= 0 else logits.new_full((rows,), top_k, dtype=torch.int64)
    _check_option("top_k", top_k, rows, *_INTS)
    columns = []
    for name, value, off in (("top_p", top_p, 1.0), ("min_p", min_p, 0.0)):
        if isinstance(value, (int, float)):
            if not value >= 0 or (name == "min_p" and value > 1):  # NaN too
                raise ShapeError(
                    f"{name} is {value}; it must be a share of at least 0{', at most 1' if name == 'min_p' else ''}.",
                    argument=name, expected="[0, 1]", found=value,
                )  # fmt: skip
            is_off = value >= off if name == "top_p" else value <= off
            value = None if is_off else logits.new_full((rows,), value, dtype=torch.float64)
        _check_option(name, value, rows, *_REALS)
        columns.append(value)
    most = widest or 0
    if top_k is None or most > logits.shape[1]:
        most = 0
    return temperature, top_k, columns[0], columns[1], most
