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
from deepinfer.kernels.devices import on_device
from deepinfer.kernels.reference import topk as reference
from deepinfer.kernels.registry import Operation

__all__ = ["candidate_block_max", "topk", "topk_to_physical_indices"]

TOPK = Operation("topk", "Tensor x, int k, Tensor? lengths, Tensor(x!) out, int fill")
SLOTS = Operation(
    "topk_to_physical_indices",
    "Tensor indices, Tensor table, Tensor? requests, Tensor(x!) out, int page_size",
)
BLOCKS = Operation(
    "candidate_block_max", "Tensor scores, Tensor lengths, Tensor(x!) out, int block_size"
)
OPERATIONS = (TOPK, SLOTS, BLOCKS)

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


def topk_to_physical_indices(
    indices: Tensor,
    block_table: Tensor,
    page_size: int,
    *,
    requests: Tensor | None = None,
    out: Tensor | None = None,
    backend: str | None = None,
) -> Tensor:
    """Positions within requests to slots of a paged cache.

    Args:
        indices: Positions, negative for none, shape [rows, k], int32 or int64, last stride 1.
        block_table: Pages of each request in order, negative for none, shape [requests, most pages], int32.
        page_size: Positions of a page, at least 1.
        requests: Request of each row, one that is not in the table for none, shape [rows], int32 or int64; None when row i is of request i.
        out: Shape [rows, k], int32 or int64, last stride 1; a new tensor of the dtype of `indices` when None.
        backend: "torch" or "triton"; None for the best that serves the call.

    Returns:
        `block_table[request, position // page_size] * page_size + position % page_size`, shape [rows, k]; -1 where the
        position, the request or the page is negative, or the position or the request behind the table.

    Raises:
        ShapeError: A shape, dtype or stride is not as above.
        UnsupportedHardware: The backend asked for cannot serve the call.
    """
    contract.check_dtype("indices", indices, torch.int32, torch.int64)
    contract.check_shape("indices", indices, (None, None), "rows, k")
    contract.check_last_stride("indices", indices)
    contract.check_dtype("block_table", block_table, torch.int32)
    rows = indices.shape[0]
    if requests is None:
        contract.check_shape("block_table", block_table, (rows, None), "rows, most pages")
    else:
        contract.check_dtype("requests", requests, torch.int32, torch.int64)
        contract.check_shape("requests", requests, (rows,), "rows")
        contract.check_shape("block_table", block_table, (None, None), "requests, most pages")
    contract.check_last_stride("block_table", block_table)
    if page_size < 1:
        raise ShapeError(
            f"page_size is {page_size}; a page has at least 1 position.",
            argument="page_size", expected="at least 1", found=page_size,
        )  # fmt: skip
    if out is None:
        out = torch.empty_like(indices, memory_format=torch.contiguous_format)
    contract.check_dtype("out", out, torch.int32, torch.int64)
    contract.check_shape("out", out, tuple(indices.shape), "rows, k")
    contract.check_last_stride("out", out)
    if out.numel():
        SLOTS(backend, indices, block_table, requests, out, page_size)
    return out


def candidate_block_max(
    scores: Tensor, lengths: Tensor, block_size: int, *, backend: str | None = None
) -> Tensor:
    """The best score of each block of consecutive keys, of which `topk` then selects the candidates of later layers.

    Args:
        scores: Shape [rows, keys], fp32 or bf16, last stride 1.
        lengths: Keys that each row sees, from the first on, shape [rows], int32.
        block_size: Keys of a block, a power of two up to 128.
        backend: "torch" or "triton"; None for the best that serves the call.

    Returns:
        Shape [rows, ceil(keys / block_size)], fp32; -inf for a block without a key that counts (NaN does not), +inf for
        the block of the newest key that the row sees, which is always a candidate, unless all its scores are -inf.

    Raises:
        ShapeError: A shape, dtype or stride is not as above.
        UnsupportedHardware: The backend asked for cannot serve the call.
    """
    contract.check_dtype("scores", scores, torch.float32, torch.bfloat16)
    contract.check_shape("scores", scores, (None, None), "rows, keys")
    contract.check_last_stride("scores", scores)
    contract.check_dtype("lengths", lengths, torch.int32)
    contract.check_shape("lengths", lengths, (scores.shape[0],), "rows")
    if block_size < 1 or block_size > 128 or block_size & (block_size - 1):
        raise ShapeError(
            f"block_size is {block_size}; it must be a power of two up to 128.",
            argument="block_size", expected="a power of two up to 128", found=block_size,
        )  # fmt: skip
    rows, keys = scores.shape
    out = scores.new_empty((rows, -(-keys // block_size)), dtype=torch.float32)
    if out.numel():
        BLOCKS(backend, scores, lengths, out, block_size)
    return out


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
SLOTS.register("torch", supports=_always)(reference.physical_slots)
BLOCKS.register("torch", supports=_always)(reference.block_max)


def _slots_refusal(
    indices: Tensor, table: Tensor, requests: Tensor | None, out: Tensor, page_size: int
) -> str | None:
    found = (indices, table, out) if requests is None else (indices, table, out, requests)
    return contract.triton_refusal(*found)


@SLOTS.register("triton", supports=_slots_refusal, priority=10)
def _slots_triton(
    indices: Tensor, table: Tensor, requests: Tensor | None, out: Tensor, page_size: int
) -> None:
    from deepinfer.kernels.triton.topk_slots import physical_slots

    with on_device(out):
        physical_slots(
            indices, table, None if requests is None else requests.contiguous(), out, page_size
        )


def _blocks_refusal(scores: Tensor, lengths: Tensor, out: Tensor, block_size: int) -> str | None:
    return contract.triton_refusal(scores, lengths, out)


@BLOCKS.register("triton", supports=_blocks_refusal, priority=10)
def _blocks_triton(scores: Tensor, lengths: Tensor, out: Tensor, block_size: int) -> None:
    from deepinfer.kernels.triton.topk_slots import block_max

    with on_device(out):
        block_max(scores, lengths.contiguous(), out, block_size)


def _refusal(x: Tensor, k: int, lengths: Tensor | None, out: Tensor, fill: int) -> str | None:
    return contract.triton_refusal(*(t for t in (x, lengths, out) if t is not None))


@TOPK.register("triton", supports=_refusal, priority=10)
def _triton(x: Tensor, k: int, lengths: Tensor | None, out: Tensor, fill: int) -> None:
    import deepinfer.kernels.triton.topk_launch as launch

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
    import deepinfer.kernels.triton.topk_launch as launch

    tuning = launch.WideTuning(*configs.lookup_wide(x.shape[0], x.shape[1], k))
    with on_device(x):
        launch.topk_wide(x, k, None if lengths is None else lengths.contiguous(), out, fill, tuning)


def _grouped_refusal(
    x: Tensor, k: int, lengths: Tensor | None, out: Tensor, fill: int
) -> str | None:
    if configs.lookup_grouped(x.shape[1], k) is None:
        return "rows are too short, or k too large, for the maxima of small groups"
    return _refusal(x, k, lengths, out, fill)


@TOPK.register("triton", name="grouped", supports=_grouped_refusal, priority=15)
def _grouped(x: Tensor, k: int, lengths: Tensor | None, out: Tensor, fill: int) -> None:
    import deepinfer.kernels.triton.topk_launch as launch

    tuning = launch.GroupedTuning(*(configs.lookup_grouped(x.shape[1], k) or (0,) * 7))
    with on_device(x):
        launch.topk_grouped(
            x, k, None if lengths is None else lengths.contiguous(), out, fill, tuning
        )


def _by_groups_refusal(
    x: Tensor, k: int, lengths: Tensor | None, out: Tensor, fill: int
) -> str | None:
    if configs.lookup_by_groups(x.shape[0], x.shape[1], k, x.itemsize) is None:
        return "a program a row does better at this shape"
    return _wide_refusal(x, k, lengths, out, fill)


@TOPK.register("triton", name="by_groups", supports=_by_groups_refusal, priority=40)
def _by_groups(x: Tensor, k: int, lengths: Tensor | None, out: Tensor, fill: int) -> None:
    import deepinfer.kernels.triton.topk_launch as launch

    sizes = configs.lookup_by_groups(x.shape[0], x.shape[1], k, x.itemsize)
    if sizes is not None:
        with on_device(x):
            launch.topk_by_groups(
                x, k, None if lengths is None else lengths.contiguous(), out, fill, launch.ByGroupsTuning(*sizes)
            )  # fmt: skip
