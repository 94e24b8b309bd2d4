"""The rotation of 64 of 512 channels, in place and to elsewhere."""

from __future__ import annotations

from typing import Any

from deepinfer.kernels.codegen import CHIPS, CompileCase
from deepinfer.kernels.compile_cases.rows import row_case
from deepinfer.kernels.configs import rows as configs

__all__ = ["cases"]


def cases() -> list[CompileCase]:
    """The cases; needs Triton."""
    return [_rope(True, True, CHIPS), _rope(False, True, (80, 90)), _rope(False, False, (90,))]


def _rope(in_place: bool, alike: bool, chips: tuple[int, ...]) -> CompileCase:
    from deepinfer.kernels.triton.ropes import rope_kernel

    rows, warps = configs.rope(512, in_place)
    types = {"x": "*bf16", "phases": "*fp32", "positions": "*i64", "out": "*bf16"}
    constants: dict[str, Any] = {
        "CHANNELS": 512, "ROPE": 64, "BLOCK": 64, "REST": 512, "INVERSE": in_place,
        "HAS_POSITIONS": True, "COPY": not in_place, "ROWS": rows, "ALIKE": alike,
    }  # fmt: skip
    entry = f"512 channels{', in place' if in_place else ''}{'' if alike else ', few heads'}"
    return row_case("apply_rope", entry, rope_kernel, types, constants, warps, chips)
