"""What the matrix products ask of their operands; shapes, dtypes and strides only, so that no call waits for a device."""

from __future__ import annotations

import torch
from torch import Tensor

from deepinfer.core.errors import ShapeError
from deepinfer.kernels import contract
from deepinfer.kernels.gemm_backends import CONTIGUOUS_ALIGNMENT, channels
from deepinfer.kernels.host import is_readable

__all__ = ["aligned_groups", "expected_rows", "operand", "out", "same_k", "scales"]

_OUT = (torch.bfloat16, torch.float32)
_SCALES = (torch.float32, torch.float8_e8m0fnu, torch.uint8)
_USUAL_SCALES = {torch.float8_e4m3fn: torch.float32, torch.int32: torch.int32}


def operand(name: str, x: Tensor, dtypes: tuple[torch.dtype, ...], dims: int) -> int:
    """Checks an operand; returns K."""
    if x.dtype not in dtypes or x.dim() != dims or x.stride(-1) != 1:
        if torch.uint8 in dtypes and x.itemsize == 1 and x.dtype != torch.uint8:
            raise ShapeError(
                f"{name} has dtype {str(x.dtype).removeprefix('torch.')}; packed e2m1 must be uint8. Look at its bytes: "
                ".view(torch.uint8). A cast would change them.",
                argument=name, expected=torch.uint8, found=x.dtype,
            )  # fmt: skip
        if torch.uint8 in dtypes and x.dtype not in dtypes:
            raise ShapeError(
                f"{name} has dtype {str(x.dtype).removeprefix('torch.')}; MXFP4 weights are uint8 as per_token_cast_to_fp4 "
                "makes them, or int32 as prepare_mxfp4_weights returns them.",
                argument=name, expected=dtypes, found=x.dtype,
            )  # fmt: skip
        contract.check_dtype(name, x, *dtypes)
        contract.check_shape(name, x, (None,) * dims, "groups, rows, K"[-7 if dims == 2 else 0 :])
        contract.check_last_stride(name, x)
    return channels(x)


def scales(name: str, values: Tensor, scale: Tensor | None, k: int, weights: bool) -> None:
    """Refuses values whose scales are missing, of a dtype that is no scale's, or for other rows, groups or channels.

    Args:
        name: Name of the operand.
        values: Its values, shape [rows, K] or [groups, rows, K], or fewer for packed ones.
        scale: Its scales, shape [rows, K / 32 or 128], or [rows / 32 or 128, K / the same] for e4m3 weights; with groups as
            `values`.
        k: Channels.
        weights: Whether rows may share a scale.
    """
    if values.dtype == torch.bfloat16:
        return
    if scale is None:
        raise ShapeError(
            f"{name} has values of {values.dtype} without scales; give (values, scales).",
            argument=name, expected="(values, scales)", found=None,
        )  # fmt: skip
    folded = values.dtype == torch.int32
    if scale.dtype != _USUAL_SCALES.get(values.dtype) and (folded or scale.dtype not in _SCALES):
        if scale.dtype == torch.int32:
            raise ShapeError(
                f"scales of {name} have dtype int32; exponents packed by four (`pack_ue8m0`) are for other libraries. Give "
                "them unpacked, as float8_e8m0fnu or uint8, or give fp32.",
                argument=f"scales of {name}", expected=_SCALES, found=scale.dtype,
            )  # fmt: skip
        contract.check_dtype(f"scales of {name}", scale, *((torch.int32,) if folded else _SCALES))
    blocks = weights and values.dtype == torch.float8_e4m3fn
    shape, of = scale.shape, values.shape
    rows = of[-2]
    if len(shape) == len(of) and (len(of) == 2 or shape[0] == of[0]):
        if folded:
            if shape[-1] == -(-rows // 4) * 4 and shape[-2] == k // 128 + 1:
                if not scale.is_contiguous():
                    raise ShapeError(
                        f"scales of {name} have strides {tuple(scale.stride())}; prepared ones must be contiguous. Call "
                        ".contiguous() on them.",
                        argument=f"scales of {name}", expected="contiguous", found=tuple(scale.stride()),
                    )  # fmt: skip
                return
        else:
            for width in (128, 32):
                if shape[-1] == -(-k // width) and (
                    shape[-2] == rows or (blocks and shape[-2] == -(-rows // width))
                ):
                    return
    lead = ", ".join(map(str, (*of[:-2], "")))
    kinds = [f"[{lead}{rows}, {-(-k // width)}]" for width in (128, 32)]
    if blocks:
        kinds += [f"[{lead}{-(-rows // width)}, {-(-k // width)}]" for width in (128, 32)]
    wanted = " or ".join(dict.fromkeys(kinds))
    if folded:
        wanted = f"[{lead}{k // 128 + 1}, {-(-rows // 4) * 4}], as prepare_mxfp4_weights returned them with the values"
    raise ShapeError(
        f"scales of {name} have shape {tuple(shape)} for values of shape {tuple(of)}; they must be {wanted}.",
        argument=f"scales of {name}", expected=wanted, found=tuple(shape),
    )  # fmt: skip


def expected_rows(expected_m: int | None) -> None:
    """Refuses groups that are likely to have less than one row."""
    if expected_m is not None and expected_m < 1:
        raise ShapeError(
            f"expected_m is {expected_m}; it must be at least 1, or None when it is not known.",
            argument="expected_m", expected="at least 1", found=expected_m,
        )  # fmt: skip


def same_k(a: int, b: int) -> None:
    """Refuses operands of other channels than each other's."""
    if a != b:
        raise ShapeError(
            f"a has {a} channels and b has {b}; both need the same number.",
            argument="b", expected=a, found=b,
        )  # fmt: skip


def out(d: Tensor, shape: tuple[int, ...], axes: str) -> None:
    """Refuses a `d` that cannot hold the result."""
    contract.check_dtype("d", d, *_OUT)
    contract.check_shape("d", d, shape, axes)
    contract.check_last_stride("d", d)


def aligned_groups(layout: Tensor, num_groups: int) -> None:
    """Refuses a layout in which rows of a tile have other groups, where its values can be looked at without a wait.

    Args:
        layout: Group of each row, shape [M], int32.
        num_groups: Groups that there are; rows of others are padding.
    """
    if not is_readable(layout) or not layout.numel():
        return
    groups = torch.where((layout >= 0) & (layout < num_groups), layout, -1)
    missing = -len(groups) % CONTIGUOUS_ALIGNMENT
    tiles = torch.cat((groups, groups.new_full((missing,), -1))).view(-1, CONTIGUOUS_ALIGNMENT)
    other = (tiles[:, 1:] != tiles[:, :-1]) & (tiles[:, 1:] >= 0)
    if bool(other.any()):
        tile, place = (int(i) for i in other.nonzero()[0])
        row = tile * CONTIGUOUS_ALIGNMENT + place
        raise ShapeError(
            f"grouped_layout has group {int(layout[row])} at row {row} and {int(layout[row + 1])} behind it; the rows of a "
            f"group lie together from a multiple of {CONTIGUOUS_ALIGNMENT} on, with padding behind them only, as "
            "get_fused_mapping places them. A GPU does not look for it.",
            argument="grouped_layout", expected=f"groups from multiples of {CONTIGUOUS_ALIGNMENT} on", found=row + 1,
        )  # fmt: skip
