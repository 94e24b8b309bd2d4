"""Selection of the k largest elements of rows.

The selected set is a function of the values alone: ties go to the lowest index, the two zeros are equal, and NaN counts
as less than -inf. Indices come out ascending, or by value. No atomic operation has a say in any of it.
"""

from __future__ import annotations

import torch
from torch import Tensor

from deepinfer.core.errors import ShapeError
from deepinfer.kernels import contract
from deepinfer.kernels.configs import topk as configs
from deepinfer.kernels.reference import topk as reference
from deepinfer.kernels.registry import Operation

__all__ = ["topk"]

TOPK = Operation("topk", "Tensor x, int k, Tensor? lengths, Tensor(x!) out, int fill")
OPERATIONS = (TOPK,)

_MOST = 4096


def topk(
    input: Tensor,
    topk: int,
    *,
    sorted: bool = False,
    end: Tensor | None = None,
    indices_type: torch.dtype = torch.int32,
    output_idx: Tensor | None = None,
    idx_oob_fill_value: int = -1,
    value_oob_fill_value: float = -torch.inf,
    return_value: bool = True,
    backend: str | None = None,
) -> tuple[Tensor | None, Tensor]:
    """The k largest elements of each row.

    Args:
        input: Shape [rows, n], bf16 or fp32; rows may lie apart.
        topk: How many elements of a row, in [1, 4096].
        sorted: Order by value, largest first and the lower index first among equals; else by ascending index.
        end: How many elements of each row count, shape [rows], int32; all of them when None.
        indices_type: Of the indices, int32 or int64.
        output_idx: Written with the indices and returned, shape [rows, topk], last stride 1; a new tensor when None.
        idx_oob_fill_value: Index behind the last element of a row with fewer than `topk`.
        value_oob_fill_value: Value there.
        return_value: Whether to gather the values.
        backend: "torch" or "triton"; None for the best that serves the call.

    Returns:
        Values, shape [rows, topk], dtype of `input`, or None; indices, shape [rows, topk].

    Raises:
        ShapeError: A shape, dtype or stride is not as above, or `topk` is out of range.
        UnsupportedHardware: The backend asked for cannot serve the call.
    """
    contract.check_dtype("input", input, torch.bfloat16, torch.float32)
    contract.check_shape("input", input, (None, None), "rows, n")
    contract.check_last_stride("input", input)
    rows = input.shape[0]
    if not 1 <= topk <= _MOST:
        raise ShapeError(
            f"topk is {topk}; it must lie in [1, {_MOST}]. Use torch.topk for more.",
            argument="topk", expected=f"[1, {_MOST}]", found=topk,
        )  # fmt: skip
    if indices_type not in (torch.int32, torch.int64):
        raise ShapeError(
            f"indices_type is {indices_type}; it must be torch.int32 or torch.int64.",
            argument="indices_type", expected="int32 or int64", found=indices_type,
        )  # fmt: skip
    if end is not None:
        contract.check_dtype("end", end, torch.int32)
        contract.check_shape("end", end, (rows,), "rows")
    out = output_idx
    if out is None:
        out = input.new_empty((rows, topk), dtype=indices_type)
    else:
        contract.check_dtype("output_idx", out, torch.int32, torch.int64)
        contract.check_shape("output_idx", out, (rows, topk), "rows, topk")
        contract.check_last_stride("output_idx", out)
    plain = not sorted and not return_value
    if rows:
        TOPK(backend, input, topk, end, out, idx_oob_fill_value if plain else -1)
    if plain:
        return None, out
    return _finish(input, out, sorted, idx_oob_fill_value, value_oob_fill_value, return_value)


def _finish(
    x: Tensor, out: Tensor, by_value: bool, fill: int, value_fill: float, return_value: bool
) -> tuple[Tensor | None, Tensor]:
    """Gathers values, and orders by them."""
    missing = out < 0
    if x.shape[1] == 0:
        values = x.new_full(out.shape, value_fill)
    else:
        values = x.gather(1, out.clamp_min(0).long())
    if by_value:
        keys = reference.order_keys(values).masked_fill_(missing, torch.iinfo(torch.int64).min)
        order = keys.argsort(dim=1, descending=True, stable=True)
        out.copy_(out.gather(1, order))
        values, missing = values.gather(1, order), missing.gather(1, order)
    out.masked_fill_(missing, fill)
    return (values.masked_fill(missing, value_fill) if return_value else None), out


def _always(*args: object) -> None:
    """The reference serves every call."""


TOPK.register("torch", supports=_always)(reference.topk_indices)


def _refusal(x: Tensor, k: int, lengths: Tensor | None, out: Tensor, fill: int) -> str | None:
    return contract.triton_refusal(*(t for t in (x, lengths, out) if t is not None))


@TOPK.register("triton", supports=_refusal, priority=10)
def _triton(x: Tensor, k: int, lengths: Tensor | None, out: Tensor, fill: int) -> None:
    from deepinfer.kernels.triton import topk_launch as launch

    tuning = launch.TopkTuning(*configs.lookup(x.shape[0], x.shape[1], k))
    launch.topk_select(x, k, None if lengths is None else lengths.contiguous(), out, fill, tuning)


def _wide_refusal(x: Tensor, k: int, lengths: Tensor | None, out: Tensor, fill: int) -> str | None:
    if not x.is_cuda:
        return f"the tensors are on {x.device}, and it needs cuda"
    if x.stride(0) * x.itemsize % 16 or x.data_ptr() % 16:
        return "rows do not begin at multiples of 16 bytes"
    return contract.triton_refusal(*(t for t in (x, lengths, out) if t is not None)) or (
        None if contract.has_gluon() else "it needs Triton 3.6 or newer"
    )


@TOPK.register("triton", name="wide", supports=_wide_refusal, priority=20)
def _wide(x: Tensor, k: int, lengths: Tensor | None, out: Tensor, fill: int) -> None:
    from deepinfer.kernels.triton import topk_launch as launch

    tuning = launch.WideTuning(*configs.lookup_wide(x.shape[1], k))
    with torch.cuda.device(x.device):
        launch.topk_wide(x, k, None if lengths is None else lengths.contiguous(), out, fill, tuning)


def _grouped_refusal(
    x: Tensor, k: int, lengths: Tensor | None, out: Tensor, fill: int
) -> str | None:
    if configs.lookup_grouped(x.shape[1], k) is None:
        return "rows are too short, or k too large, for the maxima of small groups"
    return _refusal(x, k, lengths, out, fill)


@TOPK.register("triton", name="grouped", supports=_grouped_refusal, priority=30)
def _grouped(x: Tensor, k: int, lengths: Tensor | None, out: Tensor, fill: int) -> None:
    from deepinfer.kernels.triton import topk_launch as launch

    tuning = launch.GroupedTuning(*(configs.lookup_grouped(x.shape[1], k) or (0,) * 7))
    with torch.cuda.device(x.device if x.is_cuda else -1):
        launch.topk_grouped(
            x, k, None if lengths is None else lengths.contiguous(), out, fill, tuning
        )
