"""Norms, alone and before rotation and cast, at the widths of the published model."""

from __future__ import annotations

from typing import Any

from deepinfer.kernels.codegen import CHIPS, CompileCase
from deepinfer.kernels.compile_cases.rows import level, row_case
from deepinfer.kernels.configs import rows as configs

__all__ = ["cases"]

_FORMATS = ("fp8", "mxfp4", "nvfp4")


def cases() -> list[CompileCase]:
    """The cases; needs Triton."""
    found = [_norm(5120, False), _norm(5120, True), _norm(1280, False, (90,))]
    found += [_norm(512, False, (90,)), _norm(7168, True, (90,))]
    found += [_cast(name, chip) for name in _FORMATS for chip in (80, 89)]
    found += [_pairs(name, (90, 100, 120) if name == "mxfp4" else (90,)) for name in _FORMATS]
    return [*found, _pairs("nvfp4", (90,), True)]


def _norm(channels: int, add: bool, chips: tuple[int, ...] = CHIPS) -> CompileCase:
    from deepinfer.kernels.triton.norms import rms_norm_kernel

    rows, warps = configs.norm(channels, add)
    main, rest = configs.pieces(channels)
    types = {**dict.fromkeys(("x", "residual", "weight", "out"), "*bf16"), "eps": "fp32"}
    constants: dict[str, Any] = {
        "CHANNELS": channels, "MAIN": main, "REST": rest, "ADD": add, "ROWS": rows,
        "EVICT": "", "HARDWARE": 1,
    }  # fmt: skip
    name = "fused_add_rms_norm" if add else "rms_norm"
    return row_case(name, f"{channels} channels", rms_norm_kernel, types, constants, warps, chips)


def _cast(format: str, chip: int) -> CompileCase:
    from deepinfer.kernels.triton.norms import norm_rope_cast_kernel

    group = 16 if format == "nvfp4" else 32
    rows, warps = configs.norm_rope_cast(512)
    types = {
        "x": "*bf16", "weight": "*bf16", "phases": "*fp32", "positions": "*i64", "q": "*u8",
        "scale": "*u8", "eps": "fp32",
    }  # fmt: skip
    constants: dict[str, Any] = {
        "CHANNELS": 512, "ROPE": 64, "HAS_NORM": True, "HAS_POSITIONS": True,
        "FORMAT": _FORMATS.index(format) + 1, "HARDWARE": level(chip),
        "ROWS": rows, "SPAN": 512 // group,
        "TURNED": 64 // group, "GROUP": group,
    }  # fmt: skip
    entry = f"512 channels, {format}{'' if chip >= 89 else ', e4m3 by integers'}"
    return row_case(
        "rms_norm_rope_quant", entry, norm_rope_cast_kernel, types, constants, warps, (chip,)
    )


def _pairs(format: str, tested: tuple[int, ...], apart: bool = False) -> CompileCase:
    """Apart: with a tile of their own for turned channels, which are no power of two."""
    from deepinfer.kernels.triton.norm_pairs import norm_rope_pairs_kernel

    group = 16 if format == "nvfp4" else 32
    rows, warps, each, shared, ahead = configs.norm_rope_pairs(512, 8 if format == "fp8" else 4)
    types = {
        "x": "*i32", "gains": "*i32", "phases": "*i64", "positions": "*i64",
        "q": "*i16" if format == "fp8" else "*u8", "scale": "*u8", "eps": "fp32",
    }  # fmt: skip
    constants: dict[str, Any] = {
        "CHANNELS": 512, "ROPE": 64, "HAS_NORM": True, "HAS_POSITIONS": True, "FLAT": True,
        "FORMAT": _FORMATS.index(format) + 1, "ROWS": rows, "SPAN": 512 // group,
        "TURNED": 64 // group, "GROUP": group, "EACH": each, "SHARED": shared and not apart,
        "AHEAD": ahead and not apart,
    }  # fmt: skip
    entry = f"512 channels, {format}, in pairs{', two tiles' if apart else ''}"
    return row_case(
        "rms_norm_rope_quant",
        entry,
        norm_rope_pairs_kernel,
        types,
        constants,
        warps,
        (90, 100, 120),
        tested=tested,
    )
