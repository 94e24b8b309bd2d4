"""Weights that stay as their published bytes in memory and are dequantised where they are used."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_map_only

from deepinfer.models.formats import Storage, block_of, dequantise

__all__ = ["PackedWeight"]

_aten = torch.ops.aten


class PackedWeight(Tensor):
    """A read-only tensor that holds codes and scales and stands for their values.

    It has the logical shape and dtype, and any operation sees the dequantised values, bit for bit those of a loaded
    dequantised weight. Choosing rows of the leading axis (`weight[e]`, an embedding) dequantises the chosen rows only;
    everything else dequantises the whole weight for the time of the operation. Moving it to a device moves the bytes;
    another dtype changes what it dequantises to.

    Attributes:
        codes: Stored codes, shape of the weight (last axis halved for MXFP4), uint8.
        scale: e8m0 bytes, one a block, uint8.
        kind: Storage kind, which gives the blocks.
        aligned: Codes and fp32 powers for 128 x 128 beside these, see `deepseek_v41.aligned_products`, or None.
    """

    codes: Tensor
    scale: Tensor
    kind: Storage
    aligned: tuple[Tensor, Tensor] | None = None

    @staticmethod
    def __new__(
        cls, codes: Tensor, scale: Tensor, kind: Storage, dtype: torch.dtype
    ) -> PackedWeight:
        """Wraps codes and scales, uint8; `dtype` is that of the values."""
        columns = codes.shape[-1] * (2 if kind == "mxfp4" else 1)
        self: PackedWeight = torch.Tensor._make_wrapper_subclass(
            cls, (*codes.shape[:-1], columns), dtype=dtype, device=codes.device
        )
        self.codes, self.scale, self.kind = codes, scale, kind
        return self

    @classmethod
    def empty(
        cls,
        shape: tuple[int, ...],
        kind: Storage,
        *,
        device: torch.device | str,
        dtype: torch.dtype,
    ) -> PackedWeight:
        """A weight of `shape` whose bytes are to be filled in.

        Args:
            shape: Logical shape, at least two axes.
            kind: "fp8_block", "fp8_group" or "mxfp4".
            device: Where the bytes live.
            dtype: What it dequantises to.
        """
        *lead, n, k = shape
        rows, columns = block_of(kind) or (1, k)
        codes = torch.empty(
            *lead, n, k // 2 if kind == "mxfp4" else k, dtype=torch.uint8, device=device
        )
        scale = torch.empty(
            *lead, -(-n // rows), -(-k // columns), dtype=torch.uint8, device=device
        )
        return cls(codes, scale, kind, dtype)

    @property
    def size_bytes(self) -> int:
        """Bytes that the codes and scales take."""
        return self.codes.nbytes + self.scale.nbytes

    def part(self, index: tuple[int | slice, ...]) -> PackedWeight:
        """A piece that shares the bytes.

        Args:
            index: One int or slice for each leading axis; rows of a 32x32-block weight cannot be cut.
        """
        return self._with(lambda t: t[index])

    def unpack(self) -> Tensor:
        """The values, a new tensor of the logical shape and dtype."""
        return self._values(self.codes, self.scale)

    def _values(self, codes: Tensor, scale: Tensor) -> Tensor:
        if self.kind != "mxfp4":
            codes = codes.view(torch.float8_e4m3fn)
        return dequantise(codes, scale, self.kind, self.dtype)

    def _rows(self, choose: Callable[[Tensor], Tensor]) -> Tensor:
        """Values of chosen rows of the leading axis; not for two axes of 32-row blocks."""
        return self._values(choose(self.codes), choose(self.scale))

    @property
    def _has_free_rows(self) -> bool:
        return self.dim() > 2 or (self.dim() == 2 and self.kind != "fp8_block")

    def _with(
        self, move: Callable[[Tensor], Tensor], dtype: torch.dtype | None = None
    ) -> PackedWeight:
        return PackedWeight(move(self.codes), move(self.scale), self.kind, dtype or self.dtype)

    def __repr__(self, *, tensor_contents: object = None) -> str:
        return (
            f"PackedWeight({self.kind}, shape={tuple(self.shape)}, dtype={self.dtype}, "
            f"device={self.device}, size_bytes={self.size_bytes})"
        )

    def __tensor_flatten__(self) -> tuple[list[str], tuple[Storage, torch.dtype]]:
        return ["codes", "scale"], (self.kind, self.dtype)

    @staticmethod
    def __tensor_unflatten__(
        inner: Mapping[str, Tensor],
        context: tuple[Storage, torch.dtype],
        outer_size: object,
        outer_stride: object,
    ) -> PackedWeight:
        return PackedWeight(inner["codes"], inner["scale"], *context)

    @classmethod
    def __torch_dispatch__(
        cls,
        func: Any,
        types: tuple[type, ...],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        # a view must not be an inference tensor when what it views is none
        with torch.inference_mode(False) if func.is_view else nullcontext():
            out = cls._packed_result(func, args, kwargs or {})
            if out is not None:
                return out
            plain = tree_map_only(PackedWeight, PackedWeight.unpack, (args, dict(kwargs or {})))
            return func(*plain[0], **plain[1])

    @staticmethod
    def _packed_result(
        func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]
    ) -> Tensor | None:
        """Result of the operations that need not unpack the whole weight, or None for any other."""
        weight = args[0] if args else None
        if not isinstance(weight, PackedWeight):
            return None
        if func is _aten.detach.default:
            return weight._with(lambda t: t)
        if func is _aten.clone.default:
            return weight._with(torch.clone)
        if func is _aten._to_copy.default:
            device, dtype = kwargs.get("device"), kwargs.get("dtype") or weight.dtype
            if dtype.is_floating_point:
                return weight._with(lambda t: t.to(device, copy=True), dtype)
        if not weight._has_free_rows:
            return None
        if func is _aten.select.int and args[1] == 0:
            return weight._rows(lambda t: t[args[2]])
        if func is _aten.embedding.default:
            return weight._rows(lambda t: t[args[1]])
        if func is _aten.index.Tensor and len(args[1]) == 1 and args[1][0].dtype != torch.bool:
            return weight._rows(lambda t: t[args[1][0]])
        return None
