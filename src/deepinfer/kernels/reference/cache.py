"""Rows into and out of paged caches, in plain torch."""

from __future__ import annotations

import torch
from torch import Tensor

from deepinfer.kernels.formats import KVCacheFormat
from deepinfer.kernels.reference.cast import (
    cast_back,
    decode_ue8m0,
    per_token_cast_to_fp4,
    per_token_cast_to_fp8,
)
from deepinfer.kernels.reference.rope import turns_at
from deepinfer.kernels.reference.rows import norm_rope_round

__all__ = [
    "decode_rows",
    "encode_rows",
    "gather_rows",
    "insert_rows",
    "keep_state",
    "known_tokens",
    "pool_pairs",
    "rotated",
]


def encode_rows(rows: Tensor, form: KVCacheFormat) -> tuple[Tensor, Tensor, Tensor]:
    """Rows to the bytes of a format.

    Args:
        rows: Shape [rows, channels], any float dtype.
        form: The format.

    Returns:
        Bytes of codes, scales and bf16 channels, shapes [rows, bytes of each], uint8.
    """
    coded = rows[:, : form.coded_channels]
    if form.code_bits == 8:
        codes, scales = per_token_cast_to_fp8(coded, form.group)
    else:
        codes, scales = per_token_cast_to_fp4(coded, 16 if form.group == 16 else 32)
    if form.scale_type == "fp32":
        scales = decode_ue8m0(scales)
    scale_bytes = scales.contiguous().view(torch.uint8)
    missing = form.scale_bytes - scale_bytes.shape[1]
    scale_bytes = torch.nn.functional.pad(scale_bytes, (0, missing))
    tail = rows[:, form.coded_channels :].to(torch.bfloat16).contiguous().view(torch.uint8)
    return codes.view(torch.uint8), scale_bytes, tail


def decode_rows(codes: Tensor, scales: Tensor, tail: Tensor, form: KVCacheFormat) -> Tensor:
    """Bytes of a format to rows.

    Args:
        codes: Shape [rows, code_bytes], uint8.
        scales: Shape [rows, scale_bytes], uint8.
        tail: Shape [rows, 2 * tail_channels], uint8.
        form: The format.

    Returns:
        Shape [rows, channels], fp32.
    """
    dtype = {"e8m0": torch.uint8, "e4m3": torch.float8_e4m3fn, "fp32": torch.float32}
    factors = scales.contiguous().view(dtype[form.scale_type])[:, : form.num_scales]
    values = codes.view(torch.float8_e4m3fn) if form.code_bits == 8 else codes
    found = cast_back(values, factors, block=(1, form.group))
    if form.tail_channels:
        found = torch.cat((found, tail.contiguous().view(torch.bfloat16).float()), 1)
    return found


def insert_rows(
    rows: Tensor, cache: Tensor, slots: Tensor, form: KVCacheFormat, page_size: int
) -> None:
    """Writes rows into a cache.

    Args:
        rows: Shape [rows, channels], any float dtype.
        cache: Shape [pages, bytes], uint8.
        slots: Shape [rows], integers; rows of slots that the cache does not have are written nowhere.
        form: Format of the cache.
        page_size: Rows of a page.
    """
    kept = _within(slots, len(cache) * page_size)
    rows, slots = rows[kept], slots[kept].long()
    for part, offset in zip(encode_rows(rows, form), _offsets(form, page_size), strict=True):
        page, at = _places(slots, offset, part.shape[1], page_size)
        cache[page, at] = part


def gather_rows(
    cache: Tensor, slots: Tensor, out: Tensor, form: KVCacheFormat, page_size: int
) -> None:
    """Reads rows of a cache.

    Args:
        cache: Shape [pages, bytes], uint8.
        slots: Shape [rows], integers; zeros are written for those that the cache does not have.
        out: Shape [rows, channels].
        form: Format of the cache.
        page_size: Rows of a page.
    """
    known = _within(slots, len(cache) * page_size)
    places = slots[known].long()
    sizes = (form.code_bytes, form.scale_bytes, 2 * form.tail_channels)
    parts = [
        cache[_places(places, offset, size, page_size)]
        for offset, size in zip(_offsets(form, page_size), sizes, strict=True)
    ]
    out.zero_()
    out[known] = decode_rows(parts[0], parts[1], parts[2], form).to(out.dtype)


def known_tokens(
    values: Tensor,
    last: Tensor | None,
    requests: Tensor | None,
    positions: Tensor | None,
    state: Tensor | None,
) -> tuple[Tensor, Tensor]:
    """Which latents have a token, and which token.

    Args:
        values: Shape [tokens, channels].
        last: Last token of each latent, shape [rows], or None when latent i is that of token i. One outside of the tokens is
            none.
        requests: Request of each token, shape [tokens]; with `state`, one outside of it is none.
        positions: Position of each token, shape [tokens]; with `state`, a negative one is none.
        state: Shape [requests, ring, 2, channels], for pairs, or None.

    Returns:
        Numbers of the latents that have one, ascending, and their tokens; both shape [latents that have one], int64.
    """
    tokens = len(values)
    rows = torch.arange(tokens if last is None else len(last), device=values.device)
    at = rows if last is None else last.long()
    known = _within(at, tokens)
    if state is not None and requests is not None and positions is not None:
        safe = at.clamp(0, tokens - 1)
        known &= _within(requests[safe], len(state)) & (positions[safe] >= 0)
    return rows[known], at[known]


def pool_pairs(
    values: Tensor, gates: Tensor, last: Tensor, requests: Tensor, positions: Tensor, state: Tensor
) -> Tensor:
    """Pools of pairs of tokens: a softmax over the two gates of each channel.

    Args:
        values: Shape [tokens, channels], fp32.
        gates: Shape [tokens, channels], fp32.
        last: Second token of each pair, shape [rows], each of a request and at a position that are not negative.
        requests: Request of each token, shape [tokens].
        positions: Position of each token, shape [tokens].
        state: Tokens of earlier steps, shape [requests, ring, 2, channels], fp32; a token stands at its position
            modulo the ring.

    Returns:
        Shape [rows, channels], fp32.
    """
    last = last.long()
    before = (last - 1).clamp_min(0)
    request, position = requests[last].long(), positions[last].long()
    near = (last > 0) & (requests[before] == request) & (positions[before] == position - 1)
    kept = state[request, (position - 1) % state.shape[1]]
    first = torch.where(near[:, None], values[before], kept[:, 0])
    gate = torch.where(near[:, None], gates[before], kept[:, 1]) - gates[last]
    share = torch.sigmoid(gate)
    return share * first + (1 - share) * values[last]


def keep_state(
    values: Tensor, gates: Tensor, requests: Tensor, positions: Tensor, state: Tensor
) -> None:
    """Keeps the last tokens of each request in its ring.

    Args:
        values: Shape [tokens, channels], fp32.
        gates: Shape [tokens, channels], fp32.
        requests: Request of each token, shape [tokens]; its tokens stand side by side. One that `state` does not have is
            none, and its tokens are not kept.
        positions: Position of each token, shape [tokens]; tokens of negative ones are not kept.
        state: Shape [requests, ring, 2, channels], fp32.
    """
    size = state.shape[1]
    newest = _within(requests, len(state)) & (positions >= 0)
    newest[:-size] &= requests[:-size] != requests[size:]
    place = (requests[newest].long(), positions[newest].long() % size)
    state[place] = torch.stack((values[newest], gates[newest]), 1)


def rotated(
    rows: Tensor,
    phases: Tensor | None,
    phase_index: Tensor | None,
    weight: Tensor | None,
    eps: float,
) -> Tensor:
    """Norm and rotation of rows.

    Args:
        rows: Shape [rows, channels].
        phases: Cosines and sines, shape [entries, rotated / 2, 2], fp32, or None.
        phase_index: Entry of each row, shape [rows], or None when it is the row; a row of an entry that `phases` does
            not have is not turned.
        weight: Gains of the norm, shape [channels], or None.
        eps: Added to the mean square.

    Returns:
        Same shape and dtype.
    """
    if phases is not None and phase_index is not None:
        phases = turns_at(phases, phase_index)
    if phases is not None:
        phases = phases[: len(rows)]
    return norm_rope_round(rows.unsqueeze(1), weight, eps, phases).squeeze(1)


def _within(index: Tensor, size: int) -> Tensor:
    """Which indices point into something of a size."""
    return (index >= 0) & (index < size)


def _offsets(form: KVCacheFormat, page_size: int) -> tuple[tuple[int, int], ...]:
    """Byte of the first row's codes, scales and bf16 channels in a page, and the bytes from row to row."""
    return (
        (0, form.row_stride),
        (form.scales_offset(page_size), form.scale_stride),
        (form.tail_offset, form.row_stride),
    )


def _places(
    slots: Tensor, offset: tuple[int, int], size: int, page_size: int
) -> tuple[Tensor, Tensor]:
    """Pages and bytes of slots."""
    begin, stride = offset
    at = begin + slots % page_size * stride
    span = torch.arange(size, device=slots.device)
    return (slots // page_size)[:, None], at[:, None] + span
