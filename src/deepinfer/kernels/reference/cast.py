"""Casts to and from the byte layouts of the published DeepSeek-V4.1 checkpoints and caches, in plain torch.

| what | values | scales |
| --- | --- | --- |
| dense FP8 weight [N, K] | e4m3 [N, K] | e8m0 [ceil(N/32), ceil(K/32)], one per 32x32 block |
| Engram table, window row [..., K] | e4m3 [..., K] | e8m0 [..., ceil(K/32)], one per 32 channels |
| MXFP4 expert, index key [..., K] | two e2m1 codes a byte [..., K/2] | e8m0 [..., K/32] |
| KV pool row [..., K] | two e2m1 codes a byte [..., K/2] | e4m3 [..., K/16] |

An FP4 byte holds the even element in its low and the odd one in its high four bits; a code is the sign times 8 plus the
index into {0, .5, 1, 1.5, 2, 3, 4, 6}. An e8m0 byte b is 2^(b - 127), and 255 is NaN: the bytes are viewed, never
cast, because a numeric cast between e8m0 and integers changes them.

A group that is not finite gets a NaN scale, so the cast back gives NaN throughout, as `round_fp8` and its like do:
`cast_back` of a cast equals the rounding function bit for bit (but for NaN payloads).
"""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor
from torch.nn import functional as F

from deepinfer.core.errors import ShapeError
from deepinfer.kernels import contract
from deepinfer.kernels.reference.quant import (
    fp8_scale,
    mxfp4_scale,
    nvfp4_scale,
    round_to_fp4_grid,
    split_groups,
)

__all__ = [
    "cast_back",
    "decode_ue8m0",
    "encode_ue8m0",
    "per_block_cast_to_fp8",
    "per_token_cast_to_fp4",
    "per_token_cast_to_fp8",
]

_FP4_GRID = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)


def encode_ue8m0(scale: Tensor) -> Tensor:
    """Stores powers of two as e8m0.

    Args:
        scale: Powers of two in [2^-126, 2^127], any shape, fp32; infinity and NaN become the NaN byte 255.

    Returns:
        Same shape, float8_e8m0fnu. What is no power of two gives the one below it.

    Raises:
        ShapeError: `scale` has another dtype.
    """
    contract.check_dtype("scale", scale, torch.float32)
    exponent = (scale.view(torch.int32) >> 23) & 0xFF
    return exponent.to(torch.uint8).view(torch.float8_e8m0fnu)


def decode_ue8m0(scale: Tensor) -> Tensor:
    """The values of e8m0 bytes.

    Args:
        scale: Any shape, float8_e8m0fnu, or uint8 with the same bytes.

    Returns:
        2^(byte - 127), same shape, fp32; NaN for byte 255.

    Raises:
        ShapeError: `scale` has another dtype.
    """
    contract.check_dtype("scale", scale, torch.float8_e8m0fnu, torch.uint8)
    return scale.view(torch.float8_e8m0fnu).float()


def per_token_cast_to_fp8(x: Tensor, group: int = 32) -> tuple[Tensor, Tensor]:
    """Casts to e4m3 with one e8m0 scale per `group` channels.

    Args:
        x: Values, shape [..., channels], any float dtype; the last group may be short.
        group: Channels that share a scale.

    Returns:
        Codes, shape [..., channels], float8_e4m3fn; scales, shape [..., ceil(channels / group)], float8_e8m0fnu.
    """
    g = split_groups(_pad_last(x, group), group)
    scale = fp8_scale(g)
    codes = (g / scale).to(torch.float8_e4m3fn).flatten(-2)
    return codes[..., : x.shape[-1]].contiguous(), encode_ue8m0(scale.squeeze(-1))


def per_block_cast_to_fp8(w: Tensor, block: int | tuple[int, int] = 32) -> tuple[Tensor, Tensor]:
    """Casts a weight to e4m3 with one e8m0 scale a block.

    Args:
        w: Weight, shape [..., N, K], any float dtype; the last blocks may be short.
        block: Rows and columns of a block, or one number for both.

    Returns:
        Codes, shape [..., N, K], float8_e4m3fn; scales, shape [..., ceil(N / rows), ceil(K / columns)], float8_e8m0fnu.

    Raises:
        ShapeError: `w` has fewer than two axes.
    """
    if w.dim() < 2:
        raise ShapeError(
            f"w has shape {tuple(w.shape)}; blocks need [..., N, K]. "
            f"Use per_token_cast_to_fp8 for a vector.",
            argument="w",
            expected="[..., N, K]",
            found=tuple(w.shape),
        )
    rows, columns = (block, block) if isinstance(block, int) else block
    n, k = w.shape[-2:]
    padded = F.pad(w.float(), (0, -k % columns, 0, -n % rows))
    grid = (padded.shape[-2] // rows, padded.shape[-1] // columns)
    blocks = padded.unflatten(-1, (grid[1], columns)).unflatten(-3, (grid[0], rows))
    blocks = blocks.transpose(-3, -2)  # [..., N / rows, K / columns, rows, columns]
    scale = fp8_scale(blocks.flatten(-2)).unsqueeze(-1)
    codes = (blocks / scale).to(torch.float8_e4m3fn).transpose(-3, -2).flatten(-4, -3).flatten(-2)
    return codes[..., :n, :k].contiguous(), encode_ue8m0(scale[..., 0, 0])


def per_token_cast_to_fp4(x: Tensor, group: Literal[16, 32] = 32) -> tuple[Tensor, Tensor]:
    """Casts to packed e2m1: MXFP4 with e8m0 scales per 32 channels, or the KV pool's format with e4m3 scales per 16.

    Args:
        x: Values, shape [..., channels], any float dtype; channels divisible by `group`.
        group: 32 (e8m0 scales) or 16 (e4m3 scales).

    Returns:
        Bytes, shape [..., channels / 2], uint8; scales, shape [..., channels / group], float8_e8m0fnu or float8_e4m3fn.

    Raises:
        ShapeError: `channels` is not a multiple of `group`, or `group` is neither 16 nor 32.
    """
    if group not in (16, 32):
        raise ShapeError(
            f"group is {group}; FP4 is stored with groups of 32 (e8m0) or 16 (e4m3).",
            argument="group",
            expected="16 or 32",
            found=group,
        )
    g = split_groups(x, group)
    scale = mxfp4_scale(g) if group == 32 else nvfp4_scale(g)
    y = round_to_fp4_grid(g / scale).nan_to_num_(0.0).flatten(-2)
    grid = torch.tensor(_FP4_GRID, dtype=torch.float32, device=x.device)
    codes = torch.bucketize(y.abs(), grid).to(torch.uint8)
    codes |= torch.signbit(y).to(torch.uint8) << 3
    packed = codes[..., 0::2] | (codes[..., 1::2] << 4)
    scale = scale.squeeze(-1)
    return packed, encode_ue8m0(scale) if group == 32 else scale.to(torch.float8_e4m3fn)


def cast_back(
    q: Tensor,
    scale: Tensor,
    *,
    block: tuple[int, int] = (1, 32),
    dtype: torch.dtype = torch.float32,
) -> Tensor:
    """Dequantises what one of the casts made.

    Args:
        q: Codes: float8_e4m3fn [..., K], or packed e2m1 as uint8 or int8 [..., K / 2].
        scale: One scale a block, shape [..., ceil(N / rows), ceil(K / columns)]; float8_e8m0fnu, uint8 (e8m0 bytes),
            float8_e4m3fn, or fp32. The axis N is the one before K; with one row a block it needs no such axis.
        block: Rows and columns that share a scale: (32, 32) for dense weights, (1, 32) for Engram tables and MXFP4,
            (1, 16) for KV pool rows.
        dtype: Of the result; the product is made in fp32.

    Returns:
        Values, shape [..., K]; NaN where the scale is NaN.

    Raises:
        ShapeError: The shapes of codes and scales do not fit together, or `q` has another dtype.
    """
    values = _decode(q)
    rows, columns = block
    k = values.shape[-1]
    expected = [*values.shape[:-1], -(-k // columns)]
    if rows > 1 and len(expected) > 1:
        expected[-2] = -(-expected[-2] // rows)
    if list(scale.shape) != expected:
        raise ShapeError(
            f"scale has shape {tuple(scale.shape)}; {tuple(values.shape)} values in blocks of {rows}x{columns} "
            f"need {tuple(expected)}. Check `block` against the layout.",
            argument="scale",
            expected=tuple(expected),
            found=tuple(scale.shape),
        )
    if scale.dtype == torch.float8_e4m3fn or scale.dtype.itemsize > 1:
        factor = scale.float()
    else:
        factor = decode_ue8m0(scale)
    if rows > 1 and values.dim() > 1:
        factor = factor.repeat_interleave(rows, -2)[..., : values.shape[-2], :]
    padded = _pad_last(values, columns)
    grouped = padded.unflatten(-1, (expected[-1], columns)) * factor.unsqueeze(-1)
    return grouped.flatten(-2)[..., :k].to(dtype)


def _decode(q: Tensor) -> Tensor:
    """Codes to fp32 values, without the scale."""
    if q.dtype == torch.float8_e4m3fn:
        if q.device.type != "cpu":
            return q.float()
        # a CPU converts fp8 one element at a time; looking the 256 values up is five times faster
        table = torch.arange(256, dtype=torch.uint8, device="cpu").view(torch.float8_e4m3fn).float()
        codes = q.contiguous().view(torch.uint8).flatten().int()
        return table.index_select(0, codes).view(q.shape)
    if q.dtype in (torch.uint8, torch.int8):
        grid = torch.tensor(_FP4_GRID, dtype=torch.float32, device=q.device)
        nibbles = torch.cat([grid, -grid])
        pairs = torch.stack([nibbles.repeat(16), nibbles.repeat_interleave(16)], dim=1)
        codes = q.contiguous().view(torch.uint8).flatten().int()
        return pairs.index_select(0, codes).view(*q.shape[:-1], 2 * q.shape[-1])
    raise ShapeError(
        f"q has dtype {q.dtype}; codes are float8_e4m3fn, or FP4 pairs as uint8 or int8.",
        argument="q",
        expected="float8_e4m3fn, uint8 or int8",
        found=q.dtype,
    )


def _pad_last(x: Tensor, multiple: int) -> Tensor:
    missing = -x.shape[-1] % multiple
    return F.pad(x, (0, missing)) if missing else x
