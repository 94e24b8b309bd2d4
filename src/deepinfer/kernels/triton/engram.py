"""Small steps of a few layers, one launch each: the gate of an Engram, and the latents of pairs of tokens."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

__all__ = ["add_engram", "pair_latents"]

_BLOCK = 1024


@triton.jit
def _add_engram(
    streams, projected, q_weight, k_weight, is_image, out, eps, STREAMS: tl.constexpr,
    CHANNELS: tl.constexpr, HAS_IMAGE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    token, stream = tl.program_id(0).to(tl.int64), tl.program_id(1)
    from_stream = streams + (token * STREAMS + stream) * CHANNELS
    from_key = projected + (token * (STREAMS + 1) + stream) * CHANNELS
    from_value = projected + (token * (STREAMS + 1) + STREAMS) * CHANNELS
    dots = tl.zeros([BLOCK], tl.float32)
    squares = tl.zeros([BLOCK], tl.float32)
    key_squares = tl.zeros([BLOCK], tl.float32)
    for start in range(0, CHANNELS, BLOCK):
        c = start + tl.arange(0, BLOCK)
        inside = c < CHANNELS
        s = tl.load(from_stream + c, mask=inside, other=0.0).to(tl.float32)
        k = tl.load(from_key + c, mask=inside, other=0.0).to(tl.float32)
        gain = tl.load(q_weight + stream * CHANNELS + c, mask=inside, other=0.0)
        gain *= tl.load(k_weight + stream * CHANNELS + c, mask=inside, other=0.0)
        dots += s * gain * k
        squares += s * s
        key_squares += k * k
    square = tl.sum(squares, axis=0) / CHANNELS + eps
    dot = tl.sum(dots, axis=0)
    dot *= tl.rsqrt(square * (tl.sum(key_squares, axis=0) / CHANNELS + eps) * CHANNELS)
    root = tl.sqrt(tl.maximum(tl.abs(dot), 1e-6))
    root = tl.where(dot > 0, root, tl.where(dot < 0, -root, dot))  # a NaN stays one
    gate = 1.0 / (1.0 + tl.exp(-root))
    if HAS_IMAGE:
        gate = tl.where(tl.load(is_image + token) != 0, 0.0, gate)
    for start in range(0, CHANNELS, BLOCK):
        c = start + tl.arange(0, BLOCK)
        inside = c < CHANNELS
        s = tl.load(from_stream + c, mask=inside, other=0.0).to(tl.float32)
        v = tl.load(from_value + c, mask=inside, other=0.0).to(tl.float32)
        at = out + (token * STREAMS + stream) * CHANNELS + c
        tl.store(at, (s + gate * v).to(out.dtype.element_ty), mask=inside)


def add_engram(
    streams: Tensor,
    projected: Tensor,
    q_weight: Tensor,
    k_weight: Tensor,
    eps: float,
    is_image: Tensor | None = None,
) -> Tensor:
    """Adds a gated value to streams; see `deepinfer.kernels.reference.engram.add_engram`."""
    tokens, count, channels = streams.shape
    streams = streams.contiguous()
    out = torch.empty_like(streams)
    if tokens:
        _add_engram[(tokens, count)](
            streams, projected, q_weight, k_weight,
            streams if is_image is None else is_image.view(torch.uint8), out, eps,
            STREAMS=count, CHANNELS=channels, HAS_IMAGE=is_image is not None,
            BLOCK=min(_BLOCK, triton.next_power_of_2(channels)), num_warps=4,
        )  # fmt: skip
    return out


@triton.jit
def _pair_latents(
    first, second, weight, out, first_row, second_row, eps, CHANNELS: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    pair = tl.program_id(0).to(tl.int64)
    c = tl.arange(0, BLOCK)
    inside = c < CHANNELS
    kind = out.dtype.element_ty
    one, two = first + pair * first_row + c, second + pair * second_row + c
    gates = tl.load(one + CHANNELS, mask=inside, other=0.0)
    gates -= tl.load(two + CHANNELS, mask=inside, other=0.0)
    share = 1.0 / (1.0 + tl.exp(-gates))
    v = share * tl.load(one, mask=inside, other=0.0)
    v += (1.0 - share) * tl.load(two, mask=inside, other=0.0)
    v = v.to(kind).to(tl.float32)
    v = tl.where(inside, v, 0.0)
    gain = tl.load(weight + c, mask=inside, other=0.0).to(tl.float32)
    v = v * tl.rsqrt(tl.sum(v * v, axis=0) / CHANNELS + eps) * gain
    tl.store(out + pair * CHANNELS + c, v.to(kind), mask=inside)


def pair_latents(first: Tensor, second: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Normed latents of pairs; see `deepinfer.kernels.reference.engram.pair_latents`."""
    pairs, _, channels = first.shape
    first, second = (
        t if t.stride()[1:] == (channels, 1) else t.contiguous() for t in (first, second)
    )
    out = torch.empty(pairs, channels, dtype=weight.dtype, device=first.device)
    if pairs:
        _pair_latents[(pairs,)](
            first, second, weight, out, first.stride(0), second.stride(0), eps,
            CHANNELS=channels, BLOCK=triton.next_power_of_2(channels), num_warps=4,
        )  # fmt: skip
    return out
