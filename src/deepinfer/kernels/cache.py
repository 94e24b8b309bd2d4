"""Rows into and out of paged caches of quantised keys, with what comes before: pool of two tokens, norm, rotation.

A cache is bytes, shape [pages, at least `KVCacheFormat.page_bytes(page_size)`], uint8; pages may lie apart, so that a
page may hold several caches. Slot s is row s % page_size of page s // page_size. Each slot may be written once a call.
Addresses are 64 bits wide.

An index that is negative or behind what it points into (a slot, a token, a request, an entry of `phases`) is none, on every
device: no memory is read or written for it.

A group of channels that is not finite gets the scale NaN, and comes out as NaN; its codes mean nothing.
"""

from __future__ import annotations

import torch
from torch import Tensor

from deepinfer.core.errors import ShapeError
from deepinfer.kernels import contract
from deepinfer.kernels.cache_backends import COMPRESS, GATHER, INSERT, OPERATIONS, ROPE
from deepinfer.kernels.formats import KVCacheFormat

__all__ = [
    "OPERATIONS",
    "compress_norm",
    "gather_and_dequantize_k_cache",
    "quantize_and_insert_k_cache",
    "rope_quant_insert",
]

_FLOATS = (torch.bfloat16, torch.float32, torch.float16)


def quantize_and_insert_k_cache(
    k: Tensor,
    cache: Tensor,
    slot_mapping: Tensor,
    format: KVCacheFormat,
    page_size: int,
    *,
    backend: str | None = None,
) -> None:
    """Quantises rows and writes them at their slots.

    Args:
        k: Shape [rows, channels], bf16, fp16 or fp32; rows may lie apart.
        cache: Shape [pages, bytes], uint8, written.
        slot_mapping: Slot of each row, shape [rows], int32 or int64; rows of slots that the cache does not have are
            written nowhere.
        format: Format of the cache.
        page_size: Rows of a page.
        backend: "torch" or "triton"; None for the best that serves the call.

    Raises:
        ShapeError: A shape, dtype or stride is not as above.
        ConfigError: `page_size` is below 1.
        UnsupportedHardware: The backend asked for cannot serve the call.
    """
    contract.check_dtype("k", k, *_FLOATS)
    contract.check_shape("k", k, (None, format.channels), "rows, channels")
    contract.check_last_stride("k", k)
    _check_cache(cache, "slot_mapping", slot_mapping, format, page_size)
    contract.check_shape("slot_mapping", slot_mapping, (len(k),), "rows")
    if len(k):
        INSERT(backend, k, cache, slot_mapping, format.name, page_size)


def gather_and_dequantize_k_cache(
    cache: Tensor,
    slots: Tensor,
    format: KVCacheFormat,
    page_size: int,
    *,
    dtype: torch.dtype = torch.bfloat16,
    out: Tensor | None = None,
    backend: str | None = None,
) -> Tensor:
    """Reads rows at their slots.

    Args:
        cache: Shape [pages, bytes], uint8.
        slots: Any shape, int32 or int64; a slot that the cache does not have reads zeros.
        format: Format of the cache.
        page_size: Rows of a page.
        dtype: Of a new tensor: bf16, fp16 or fp32; values are made in fp32.
        out: Written and returned, shape [*slots.shape, channels], contiguous but for the distance of rows when `slots`
            has one axis; None for a new tensor.
        backend: "torch" or "triton"; None for the best that serves the call.

    Returns:
        Shape [*slots.shape, channels].

    Raises:
        ShapeError: A shape, dtype or stride is not as above.
        ConfigError: `page_size` is below 1.
        UnsupportedHardware: The backend asked for cannot serve the call.
    """
    _check_cache(cache, "slots", slots, format, page_size)
    if out is None:
        out = cache.new_empty((*slots.shape, format.channels), dtype=dtype)
    contract.check_dtype("out", out, *_FLOATS)
    contract.check_shape("out", out, (*slots.shape, format.channels), "*slots, channels")
    contract.check_last_stride("out", out)
    if out.numel():
        flat = out if slots.dim() == 1 else out.view(-1, format.channels)
        GATHER(backend, cache, slots.reshape(-1), flat, format.name, page_size)
    return out


def rope_quant_insert(
    k: Tensor,
    phases: Tensor,
    cache: Tensor,
    slot_mapping: Tensor,
    format: KVCacheFormat,
    page_size: int,
    *,
    weight: Tensor | None = None,
    eps: float = 0.0,
    phase_index: Tensor | None = None,
    positions: Tensor | None = None,
    write_floor: Tensor | None = None,
    backend: str | None = None,
) -> None:
    """Rotates the last channels of rows, quantises and writes them at their slots; with a weight, norms them first.

    Values pass through the dtype of `k` between the steps, as in separate calls, so the bytes are those of separate
    calls; with a norm they are so but for the order of its sum.

    Args:
        k: Shape [rows, channels], bf16, fp16 or fp32; rows may lie apart.
        phases: Cosine and sine of each rotated pair of neighbours, shape [entries, rotated / 2, 2], fp32; `rotated` is a
            power of two, at most the format's `tail_channels` if it has some, and the pairs of an entry lie side by side.
        cache: Shape [pages, bytes], uint8, written.
        slot_mapping: Slot of each row, shape [rows], int32 or int64; rows of slots that the cache does not have are
            written nowhere.
        format: Format of the cache.
        page_size: Rows of a page.
        weight: Gains of an RMS norm, shape [channels], or None for no norm.
        eps: Added to the mean square.
        phase_index: Entry of each row, shape [rows], int32 or int64; None when entry i is that of row i. A row of an entry
            that `phases` does not have is not turned.
        positions: Position of each row, shape [rows], int32 or int64; needed with `write_floor`.
        write_floor: First position that may be written, of each row, shape [rows], int32 or int64; rows below are
            written nowhere. None to write all.
        backend: "torch" or "triton"; None for the best that serves the call.

    Raises:
        ShapeError: A shape, dtype or stride is not as above.
        ConfigError: `page_size` is below 1.
        UnsupportedHardware: The backend asked for cannot serve the call.
    """
    contract.check_dtype("k", k, *_FLOATS)
    contract.check_shape("k", k, (None, format.channels), "rows, channels")
    contract.check_last_stride("k", k)
    _check_cache(cache, "slot_mapping", slot_mapping, format, page_size)
    contract.check_shape("slot_mapping", slot_mapping, (len(k),), "rows")
    _check_row_steps(len(k), format, phases, weight, phase_index)
    _check_floor(len(k), positions, write_floor)
    if len(k):
        ROPE(
            backend, k, phases, cache, slot_mapping, format.name, page_size, weight, eps, phase_index, positions,
            write_floor,
        )  # fmt: skip


def compress_norm(
    values: Tensor,
    gates: Tensor | None,
    weight: Tensor,
    eps: float,
    phases: Tensor,
    cache: Tensor,
    slot_mapping: Tensor,
    format: KVCacheFormat,
    page_size: int,
    *,
    last: Tensor | None = None,
    state: Tensor | None = None,
    requests: Tensor | None = None,
    positions: Tensor | None = None,
    phase_index: Tensor | None = None,
    write_floor: Tensor | None = None,
    dtype: torch.dtype = torch.bfloat16,
    latents: Tensor | None = None,
    backend: str | None = None,
) -> Tensor:
    """The compressor: latents of single tokens or of pairs, normed; rotated and quantised they go into the cache.

    With gates, a latent is the softmax-weighted sum of two tokens, for each channel of its own:

        share = sigmoid(gate of the first - gate of the second);  share * first + (1 - share) * second

    The first token of a pair is the one before in the batch if it is of the same request and position less one, else it
    is read from `state`. Afterwards the last tokens of each request, as many as a ring holds, are kept in `state`.

    Args:
        values: Projected tokens, shape [tokens, channels], fp32; rows may lie apart.
        gates: Their gates, of the same shape, fp32, for pairs; None when each token is a latent.
        weight: Gains of the norm, shape [channels].
        eps: Added to the mean square.
        phases: Cosine and sine of each rotated pair of neighbours, shape [entries, rotated / 2, 2], fp32; `rotated` and
            strides as in `rope_quant_insert`.
        cache: Shape [pages, bytes], uint8, written.
        slot_mapping: Slot of each latent, shape [rows], int32 or int64; latents of slots that the cache does not have are
            not cached.
        format: Format of the cache.
        page_size: Rows of a page.
        last: Last token of each latent, shape [rows], int32 or int64; one outside of the tokens is none, its latent is 0
            and not cached. None when latent i is that of token i.
        state: Tokens of earlier steps, shape [requests, ring, 2, channels], fp32, the value then the gate, a token at
            its position modulo the ring; written. Needed with gates.
        requests: Request of each token, shape [tokens], int32 or int64; the tokens of a request stand side by side, in
            order. Needed with gates. A token of a request that `state` does not have is not kept there, and the latent whose
            last token it is is 0 and not cached.
        positions: Position of each token, shape [tokens], int32 or int64. Needed with gates or `write_floor`. With gates, a
            token of a negative position counts as one of no request.
        phase_index: Entry of each latent, shape [rows], int32 or int64; None when entry i is that of latent i. A latent of
            an entry that `phases` does not have is cached without a rotation.
        write_floor: First position that may be written, of each token, shape [tokens], int32 or int64; a latent whose
            last token is below is not cached. None to cache all.
        dtype: Of new latents, and of the values that enter the norm.
        latents: Written and returned, shape [rows, channels], bf16, fp16 or fp32; None for a new tensor.
        backend: "torch" or "triton"; None for the best that serves the call.

    Returns:
        Normed latents before the rotation, shape [rows, channels].

    Raises:
        ShapeError: A shape, dtype or stride is not as above, or an argument that gates need is None.
        ConfigError: `page_size` is below 1.
        UnsupportedHardware: The backend asked for cannot serve the call.
    """
    contract.check_dtype("values", values, torch.float32)
    contract.check_shape("values", values, (None, format.channels), "tokens, channels")
    contract.check_last_stride("values", values)
    _check_cache(cache, "slot_mapping", slot_mapping, format, page_size)
    contract.check_shape("slot_mapping", slot_mapping, (None,), "rows")
    tokens, rows = len(values), len(slot_mapping)
    if last is not None:
        _check_integers("last", last, rows)
    elif rows != tokens:
        raise ShapeError(
            f"slot_mapping has {rows} latents for {tokens} tokens; give `last`, the last token of each latent.",
            argument="last", expected=tokens, found=rows,
        )  # fmt: skip
    if gates is not None:
        _check_pairs(values, gates, state, requests, positions)
    _check_row_steps(rows, format, phases, weight, phase_index)
    _check_floor(tokens, positions, write_floor)
    if latents is None:
        latents = values.new_empty((rows, format.channels), dtype=dtype)
    contract.check_dtype("latents", latents, *_FLOATS)
    contract.check_shape("latents", latents, (rows, format.channels), "rows, channels")
    contract.check_last_stride("latents", latents)
    if tokens:
        COMPRESS(
            backend, values, gates, weight, eps, phases, cache, slot_mapping, format.name, page_size, last, state,
            requests, positions, phase_index, write_floor, latents,
        )  # fmt: skip
    else:
        latents.zero_()
    return latents


def _check_integers(name: str, x: Tensor, count: int) -> None:
    contract.check_dtype(name, x, torch.int32, torch.int64)
    contract.check_shape(name, x, (count,), "rows")


def _check_cache(
    cache: Tensor, name: str, slots: Tensor, form: KVCacheFormat, page_size: int
) -> None:
    needed = form.page_bytes(page_size)
    contract.check_dtype("cache", cache, torch.uint8)
    contract.check_shape("cache", cache, (None, None), "pages, bytes")
    contract.check_last_stride("cache", cache)
    contract.check_dtype(name, slots, torch.int32, torch.int64)
    if cache.shape[1] < needed:
        raise ShapeError(
            f"cache has pages of {cache.shape[1]} bytes; {page_size} rows of {form.name} take {needed}.",
            argument="cache", expected=needed, found=cache.shape[1],
        )  # fmt: skip


def _check_row_steps(
    rows: int, form: KVCacheFormat, phases: Tensor, weight: Tensor | None, index: Tensor | None
) -> None:
    contract.check_dtype("phases", phases, torch.float32)
    contract.check_shape("phases", phases, (None, None, 2), "entries, rotated / 2, 2")
    half = phases.shape[1]
    most = form.tail_channels or form.channels
    if half < 1 or half & (half - 1) or 2 * half > most:
        raise ShapeError(
            f"phases rotate {2 * half} channels; {form.name} rotates a power of two, from 2 to {most}.",
            argument="phases", expected=f"a power of two, at most {most}", found=2 * half,
        )  # fmt: skip
    if phases[:1].stride()[1:] != (2, 1):
        raise ShapeError(
            f"phases has strides {phases.stride()}; the pairs of an entry must lie side by side. Call .contiguous() on it.",
            argument="phases", expected=(2, 1), found=phases.stride()[1:],
        )  # fmt: skip
    if index is not None:
        _check_integers("phase_index", index, rows)
    elif len(phases) < rows:
        raise ShapeError(
            f"phases has {len(phases)} entries for {rows} rows; give one a row, or `phase_index`.",
            argument="phases", expected=rows, found=len(phases),
        )  # fmt: skip
    if weight is not None:
        contract.check_dtype("weight", weight, *_FLOATS)
        contract.check_shape("weight", weight, (form.channels,), "channels")


def _check_floor(rows: int, positions: Tensor | None, floors: Tensor | None) -> None:
    if positions is not None:
        _check_integers("positions", positions, rows)
    if floors is not None:
        _check_integers("write_floor", floors, rows)
        if positions is None:
            raise ShapeError(
                "write_floor is given without positions; give the position of each row.",
                argument="positions", expected=rows, found=None,
            )  # fmt: skip


def _check_pairs(
    values: Tensor,
    gates: Tensor,
    state: Tensor | None,
    requests: Tensor | None,
    positions: Tensor | None,
) -> None:
    tokens, channels = values.shape
    contract.check_dtype("gates", gates, torch.float32)
    contract.check_shape("gates", gates, (tokens, channels), "tokens, channels")
    contract.check_last_stride("gates", gates)
    if state is None or requests is None or positions is None:
        raise ShapeError(
            "gates are given without state, requests or positions; pairs of tokens need all three.",
            argument="state", expected="a tensor", found=None,
        )  # fmt: skip
    contract.check_dtype("state", state, torch.float32)
    contract.check_shape("state", state, (None, None, 2, channels), "requests, ring, 2, channels")
    if state.stride()[2:] != (channels, 1) or state.shape[1] < 1:
        raise ShapeError(
            f"state has strides {state.stride()} and rings of {state.shape[1]}; a value and its gate lie side by side, "
            "and a ring has at least one token.",
            argument="state", expected=(channels, 1), found=state.stride()[2:],
        )  # fmt: skip
    _check_integers("requests", requests, tokens)
