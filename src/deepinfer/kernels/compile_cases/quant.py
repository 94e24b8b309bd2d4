"""Casts, casts back, and SwiGLU with its cast, at the widths of the published model."""

from __future__ import annotations

from typing import Any

from deepinfer.kernels.codegen import CHIPS, CompileCase
from deepinfer.kernels.compile_cases.rows import level, row_case
from deepinfer.kernels.configs import rows as configs

__all__ = ["cases"]

_BYTES = {"x": "*bf16", "q": "*u8", "scale": "*u8"}


def cases() -> list[CompileCase]:
    """The cases; needs Triton."""
    from deepinfer.kernels.triton.quant_casts import cast_blocks_kernel

    found = [_cast(1, 32, chip) for chip in CHIPS]
    found += [_cast(1, 128, 90), _cast(2, 32, 80), _cast(2, 32, 89), _cast(3, 16, 80)]
    found += [_cast(3, 16, 89), _pairs(True, 32, (90, 120)), _pairs(False, 16, (90, 100))]
    found += [_back(False, 1, 32, chip) for chip in CHIPS]
    found += [_back(True, 2, 16, 90), _back(False, 1, 128, 90)]
    found += [_swiglu(1, 32, chip) for chip in (80, 89, 90)] + [
        _swiglu(0, 32, 90),
        _swiglu(2, 32, 80),
    ]
    found += [_swiglu_pairs(2, 32), _swiglu_pairs(3, 16)]
    for rows, columns, chip in (
        *((32, 32, chip) for chip in CHIPS),
        (128, 128, 80),
        (128, 128, 90),
    ):
        side, warps = configs.blocks(rows, columns)
        constants: dict[str, Any] = {
            "N": 5120, "K": 5120, "SCALE_FP32": False, "HARDWARE": level(chip), "ROWS": rows,
            "COLUMNS": columns, "SIDE": side,
        }  # fmt: skip
        name = f"blocks of {rows}x{columns}{_code(chip)}"
        found.append(
            row_case(
                "per_block_cast_to_fp8", name, cast_blocks_kernel, _BYTES, constants, warps, (chip,)
            )
        )
    return found


def _pairs(power: bool, group: int, tested: tuple[int, ...]) -> CompileCase:
    from deepinfer.kernels.triton.fp4_pairs import cast_pairs_kernel

    groups, warps, each = configs.pairs(group)
    constants: dict[str, Any] = {
        "CHANNELS": 5120, "POWER": power, "GROUPS": groups, "GROUP": group, "EACH": each,
    }  # fmt: skip
    types, entry = {**_BYTES, "x": "*i32"}, f"groups of {group}, in pairs"
    chips = (90, 100, 120)
    return row_case(
        "per_token_cast_to_fp4",
        entry,
        cast_pairs_kernel,
        types,
        constants,
        warps,
        chips,
        tested=tested,
    )


def _swiglu_pairs(format: int, group: int) -> CompileCase:
    from deepinfer.kernels.triton.swiglu_pairs import swiglu_pairs_kernel

    groups, warps, mode, each = configs.swiglu(group, 4)
    constants: dict[str, Any] = {
        "CHANNELS": 2304, "HAS_LIMIT": 2, "HAS_WEIGHTS": True, "MODE": mode, "FORMAT": format,
        "GROUPS": groups, "GROUP": group, "EACH": each,
    }  # fmt: skip
    types = {**_BYTES, "x": "*i32", "weights": "*fp32", "limit": "fp32"}
    entry = f"{'mxfp4' if format == 2 else 'nvfp4'}, in pairs"
    chips = (90, 100, 120)
    return row_case(
        "silu_and_mul_quant",
        entry,
        swiglu_pairs_kernel,
        types,
        constants,
        warps,
        chips,
        tested=(90,),
    )


def _code(chip: int) -> str:
    return "" if chip >= 89 else ", e4m3 by integers"


def _cast(format: int, group: int, chip: int) -> CompileCase:
    from deepinfer.kernels.triton.quant_casts import cast_groups_kernel

    groups, warps = configs.groups(group)
    constants: dict[str, Any] = {
        "CHANNELS": 5120, "FORMAT": format, "SCALE_FP32": False, "HARDWARE": level(chip),
        "GROUPS": groups, "GROUP": group,
    }  # fmt: skip
    name = f"per_token_cast_to_fp{8 if format == 1 else 4}"
    entry = f"groups of {group}{_code(chip)}"
    return row_case(name, entry, cast_groups_kernel, _BYTES, constants, warps, (chip,))


def _back(packed: bool, scale: int, group: int, chip: int) -> CompileCase:
    from deepinfer.kernels.triton.quant_casts import cast_back_kernel

    groups, warps = configs.cast_back(group)
    constants: dict[str, Any] = {
        "N": 5120, "K": 5120, "PACKED": packed, "SCALE": scale, "HARDWARE": level(chip),
        "ROWS": 128 if group == 128 else 1, "GROUPS": groups, "GROUP": group,
    }  # fmt: skip
    entry = f"{'e2m1' if packed else 'e4m3'} groups of {group}{_code(chip)}"
    types = {**_BYTES, "out": "*bf16"}
    return row_case("cast_back", entry, cast_back_kernel, types, constants, warps, (chip,))


def _swiglu(format: int, group: int, chip: int) -> CompileCase:
    from deepinfer.kernels.triton.swiglu_cast import swiglu_cast_kernel

    groups, warps, mode, _ = configs.swiglu(group, 8)
    constants: dict[str, Any] = {
        "CHANNELS": 2304, "HAS_LIMIT": True, "HAS_WEIGHTS": True, "MODE": mode, "FORMAT": format,
        "SCALE_FP32": False, "HARDWARE": level(chip), "GROUPS": groups, "GROUP": group,
    }  # fmt: skip
    entry = f"{('no cast', 'fp8', 'mxfp4')[format]}{_code(chip)}"
    types = {**_BYTES, "weights": "*fp32", "limit": "fp32"}
    if format == 0:
        types["q"] = "*bf16"
    return row_case(
        "silu_and_mul_quant", entry, swiglu_cast_kernel, types, constants, warps, (chip,)
    )
