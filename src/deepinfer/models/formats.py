"""How one weight is stored in a checkpoint: plain, or as codes with scales.

A model describes each of its weights by a `Weight`: its logical shape, its storage kind, and where it lives in the
module. From that follow the tensors in the file (`stored_tensors`), the bytes to write (`quantise`) and the values to
load (`dequantise`). A weight `x.weight` of codes has its scales beside it in `x.scale`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from deepinfer.kernels import (
    cast_back,
    per_block_cast_to_fp8,
    per_token_cast_to_fp4,
    per_token_cast_to_fp8,
)

__all__ = [
    "DTYPE_CODES",
    "FLOAT_CODES",
    "Layout",
    "Storage",
    "TensorSpec",
    "Weight",
    "dequantise",
    "quantise",
    "row_chunks",
    "scale_name",
    "stored_tensors",
]

Storage = Literal["bf16", "fp32", "fp8_block", "fp8_group", "mxfp4"]
"""Plain bf16 or fp32; e4m3 with one scale a 32x32 block; e4m3 with one scale per 32 channels; e2m1 per 32 channels."""

Layout = Literal["published", "plain"]
"""`published`: each weight in its storage kind. `plain`: every weight as floats, without scales."""

GROUP = 32
CHUNK_ELEMENTS = 1 << 22

DTYPE_CODES: Mapping[str, torch.dtype] = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "F8_E8M0": torch.float8_e8m0fnu,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}
"""Dtype codes of the safetensors format."""

FLOAT_CODES = ("F32", "BF16", "F16", "F64")


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """One tensor of a checkpoint file.

    Attributes:
        shape: Shape as stored; packed axes are halved.
        dtype: Code of the safetensors format, e.g. "F8_E4M3".
    """

    shape: tuple[int, ...]
    dtype: str

    @property
    def size_bytes(self) -> int:
        """Bytes of the data."""
        size = DTYPE_CODES[self.dtype].itemsize
        for n in self.shape:
            size *= n
        return size

    def __str__(self) -> str:
        return f"{self.dtype} {list(self.shape)}"


@dataclass(frozen=True, slots=True)
class Weight:
    """One weight of a model.

    Attributes:
        shape: Logical shape, unpacked.
        storage: How a published checkpoint stores it.
        parameter: Name of the module's parameter that holds it, or None when that is the weight's own name.
        index: Where it lies in that parameter: one int or slice for each leading axis; empty for all of it.
    """

    shape: tuple[int, ...]
    storage: Storage
    parameter: str | None = None
    index: tuple[int | slice, ...] = ()


def scale_name(name: str) -> str:
    """Name of the scales of a quantised weight: `x.weight` has them in `x.scale`."""
    return f"{name.removesuffix('.weight')}.scale"


def block_of(storage: Storage) -> tuple[int, int] | None:
    """Rows and columns that share a scale, or None for a plain weight."""
    if storage in ("bf16", "fp32"):
        return None
    return (GROUP, GROUP) if storage == "fp8_block" else (1, GROUP)


def stored_tensors(name: str, weight: Weight, layout: Layout) -> dict[str, TensorSpec]:
    """The tensors that hold a weight.

    Args:
        name: The weight's name.
        weight: Its description.
        layout: "published" or "plain".

    Returns:
        Name to shape and dtype; plain weights are listed as BF16 or F32, though a loader takes any float dtype.
    """
    block = block_of(weight.storage)
    if layout == "plain" or block is None:
        plain_fp32 = layout == "plain" or weight.storage == "fp32"
        return {name: TensorSpec(weight.shape, "F32" if plain_fp32 else "BF16")}
    *lead, n, k = weight.shape
    packed = weight.storage == "mxfp4"
    codes = TensorSpec((*lead, n, k // 2 if packed else k), "I8" if packed else "F8_E4M3")
    scales = TensorSpec((*lead, -(-n // block[0]), -(-k // block[1])), "F8_E8M0")
    return {name: codes, scale_name(name): scales}


def quantise(name: str, values: Tensor, storage: Storage) -> dict[str, Tensor]:
    """Makes the published tensors of a weight.

    Args:
        name: The weight's name.
        values: Logical values, shape of the weight, any float dtype.
        storage: Storage kind.

    Returns:
        Name to tensor, in the dtypes of `stored_tensors`. The rounding is that of `deepinfer.kernels`: to nearest even
        with the smallest power-of-two scale that fits.
    """
    if storage in ("bf16", "fp32"):
        return {name: values.to(torch.bfloat16 if storage == "bf16" else torch.float32)}
    pieces = [_cast(values[start:stop], storage) for start, stop in row_chunks(tuple(values.shape))]
    codes, scale = (torch.cat(parts) for parts in zip(*pieces, strict=True))
    code_type = torch.int8 if storage == "mxfp4" else torch.float8_e4m3fn
    return {name: codes.view(code_type), scale_name(name): scale.view(torch.float8_e8m0fnu)}


def _cast(values: Tensor, storage: Storage) -> tuple[Tensor, Tensor]:
    """Codes and scales as uint8."""
    if storage == "mxfp4":
        codes, scale = per_token_cast_to_fp4(values)
    elif storage == "fp8_block":
        codes, scale = per_block_cast_to_fp8(values)
    else:
        codes, scale = per_token_cast_to_fp8(values)
    return codes.view(torch.uint8), scale.view(torch.uint8)


def dequantise(codes: Tensor, scale: Tensor | None, storage: Storage, dtype: torch.dtype) -> Tensor:
    """The values of a stored weight.

    Args:
        codes: Stored floats of the logical shape, or codes: shape [..., K] as float8_e4m3fn, or [..., K / 2] as FP4
            pairs.
        scale: Scales, shape [..., ceil(N / rows), ceil(K / 32)] by the blocks of `storage`, e8m0; None for floats.
        storage: Storage kind; ignored for a plain tensor.
        dtype: Of the result.

    Returns:
        Logical values in `dtype`.
    """
    block = block_of(storage)
    if scale is None or block is None:
        return codes.to(dtype)
    return cast_back(codes, scale, block=block, dtype=dtype)


def row_chunks(shape: tuple[int, ...]) -> Iterator[tuple[int, int]]:
    """Splits a weight into pieces that need little memory.

    Args:
        shape: Its logical shape.

    Yields:
        First row and row after the last one of the leading axis: at most 2^22 elements, but at least 32 rows, aligned
        to 32 rows. A scalar counts as one row.
    """
    rows = shape[0] if shape else 1
    per_row = 1
    for n in shape[1:]:
        per_row *= n
    step = max(32, CHUNK_ELEMENTS // max(per_row, 1) // 32 * 32)
    for start in range(0, max(rows, 1), step):
        yield start, min(start + step, rows)
