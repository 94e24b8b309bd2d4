"""MXFP4 weights in the order and with the scales that the fast products of Hopper read.

The bytes are the same number as before. Of each 128 channels of a row, word 4 q + g holds eight channels of group g: those
at 16 h + 4 q + i, for h 0 and 1 and i 0 to 3. Their magnitudes (three bits) stand at bits 4 (4 h + i), their signs at bit
8 i + 7 for h 0 and 8 i + 3 for h 1. A group's scale is its row's factor, times a power of two from 2^-5 to 2^6; one byte
holds the power as the e4m3 code of half of it.
"""

from __future__ import annotations

import torch
from torch import Tensor

from deepinfer.core.errors import ShapeError
from deepinfer.kernels import contract

__all__ = ["prepare_mxfp4_weights", "unfold_mxfp4_weights"]

Pair = tuple[Tensor, Tensor]
_STEPS = 11  # powers of two between the least and the greatest scale of a row that one e4m3 byte can hold exactly


def prepare_mxfp4_weights(values: Tensor, scales: Tensor) -> Pair:
    """Puts MXFP4 weights into the form that products on Hopper read fastest; done once, when a model is loaded.

    Nothing is rounded: where the scales of a row lie more than 2^11 apart (groups of zeros aside), the weights come back
    as they are, and the products take the slower way. The products of a prepared and of an unprepared weight differ by
    the rounding of sums only.

    Args:
        values: Packed e2m1, shape [..., N, K/2], uint8 or int8 with its bytes, the even channel in the low four bits; K a multiple of 128.
        scales: e8m0 for 32 channels, shape [..., N, K/32], uint8 or float8_e8m0fnu. 255 makes its row NaN.

    Returns:
        Values [..., N, K/8] int32, and [..., K/128 + 1, N rounded up to 4] int32: four bytes of powers a word, and the
        factors of the rows as the bits of fp32 last. Both contiguous. The arguments, when they cannot be folded exactly.

    Raises:
        ShapeError: K is not a multiple of 128, the shapes do not belong together, or a dtype is another one.
    """
    if values.dim() < 2:
        raise ShapeError(
            f"values have shape {tuple(values.shape)}; they must be [..., N, K/2]. Give one row as [1, K/2].",
            argument="values", expected="[..., N, K/2]", found=tuple(values.shape),
        )  # fmt: skip
    if values.dtype == torch.int8:
        values = values.view(torch.uint8)
    contract.check_dtype("values", values, torch.uint8)
    contract.check_dtype("scales", scales, torch.uint8, torch.float8_e8m0fnu)
    n, k = values.shape[-2], 2 * values.shape[-1]
    if k % 128 or scales.shape != (*values.shape[:-1], k // 32):
        raise ShapeError(
            f"values of shape {tuple(values.shape)} and scales of shape {tuple(scales.shape)} were given; K must be a "
            "multiple of 128, with a scale for 32 channels of each row.",
            argument="scales", expected=(*values.shape[:-1], k // 32), found=tuple(scales.shape),
        )  # fmt: skip
    lead = values.shape[:-2]
    flat = values.reshape(-1, n, k // 2)
    codes = scales.view(torch.uint8).reshape(-1, n, k // 32)
    wide = -(-n // 4) * 4
    words = torch.empty(flat.shape[0], n, k // 8, dtype=torch.int32, device=values.device)
    steps = torch.zeros(flat.shape[0], k // 128 + 1, wide, dtype=torch.int32, device=values.device)
    for group in range(flat.shape[0]):
        used = ((flat[group] & 0x77) != 0).unflatten(-1, (-1, 16)).any(-1)
        folded = _fold_scales(codes[group], used)
        if folded is None:
            return values, scales
        powers, factors = folded
        words[group] = _reorder(flat[group])
        steps[group, :-1, :n] = powers.view(torch.int32).T
        steps[group, -1, :n] = factors.view(torch.int32)
    return words.view(*lead, n, k // 8), steps.view(*lead, k // 128 + 1, wide)


def _fold_scales(codes: Tensor, used: Tensor) -> Pair | None:
    """Powers as bytes [N, K/32] and factors [N] of e8m0 scales [N, K/32]; None when they lie too far apart."""
    e = codes.int()
    counted = used & (e != 255)
    top = torch.where(counted, e, -1).amax(-1)
    low = torch.where(counted, e, 256).amin(-1)
    if bool((top - low > _STEPS).any()):
        return None
    top = torch.where(top < 0, 127, top)
    powers = (0x60 + 8 * (e - top[:, None])).clamp(0x08, 0x60).to(torch.uint8)
    factors = torch.ldexp(torch.ones_like(top, dtype=torch.float32), top - 133)
    return powers, torch.where((e == 255).any(-1), torch.nan, factors)


def _reorder(packed: Tensor) -> Tensor:
    """Words [N, K/8] of packed e2m1 [N, K/2]."""
    n = packed.shape[0]
    c = torch.stack((packed & 15, packed >> 4), -1).view(n, -1, 4, 2, 4, 4)  # block, g, h, q, i
    c = c.permute(0, 1, 4, 2, 3, 5)  # block, q, g, h, i
    m, s = (c & 7).flatten(-2), c & 8
    byte = m[..., 0::2] | s[..., 1, :] | (m[..., 1::2] << 4) | (s[..., 0, :] << 4)
    return byte.contiguous().view(n, -1).view(torch.int32)


def unfold_mxfp4_weights(words: Tensor, steps: Tensor) -> Tensor:
    """Values of prepared weights.

    Args:
        words: Shape [..., N, K/8], int32, as `prepare_mxfp4_weights` returns it.
        steps: Shape [..., K/128 + 1, N rounded up to 4], int32, as there.

    Returns:
        Shape [..., N, K], fp32.
    """
    n, k = words.shape[-2], 8 * words.shape[-1]
    byte = words.contiguous().view(torch.uint8).unflatten(-1, (k // 128, 4, 4, 4))
    low, high = byte & 15, byte >> 4
    m = torch.stack((low & 7, high & 7), -1).flatten(-2).unflatten(-1, (2, 4))  # block, q, g, h, i
    s = torch.stack((high & 8, low & 8), -2)
    grid = torch.tensor(
        [0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6],
        dtype=torch.float32,
        device=words.device,
    )
    axes = m.dim()
    order = (*range(axes - 4), axes - 3, axes - 2, axes - 4, axes - 1)  # block, g, h, q, i
    value = grid[(m | s).long()].permute(order).flatten(-3)
    powers = steps[..., :-1, :n].transpose(-1, -2).flatten().view(torch.uint8)
    powers = torch.exp2(powers.view(*words.shape[:-1], k // 128, 4).float() / 8 - 6)
    factors = steps[..., -1, :n].flatten().view(torch.float32).view(words.shape[:-1])
    return (value * powers[..., None]).flatten(-3) * factors[..., None]
