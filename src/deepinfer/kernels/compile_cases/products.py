"""Products of a few rows that are bound by the reading of the weights, the streams' way into a sublayer, and index queries."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

from deepinfer.kernels.codegen import CHIPS, CompileCase
from deepinfer.kernels.compile_cases.rows import row_case

__all__ = ["cases"]

_BF16 = {80: ("HMMA",), 89: ("HMMA",), 90: ("HGMMA",), 100: ("UTCHMMA", "HMMA"), 120: ("HMMA",)}
_FP8 = {89: ("QMMA",), 90: ("QGMMA",), 120: ("QMMA",)}


def cases() -> list[CompileCase]:
    """The cases; needs Triton."""
    found = [_wide(tokens) for tokens in (16, 32, 64)]
    found += [_codes(tokens, (89, 90, 120)) for tokens in (16, 32, 64)]
    return [
        *found,
        _codes(64, (100,)),
        _project(CHIPS),
        _queries((80,)),
        _queries((89, 90, 100, 120)),
    ]


def _wide(tokens: int) -> CompileCase:
    from deepinfer.kernels.triton.wide_products import wide_products_kernel

    types = {"x": "*bf16", "weight": "*fp32", "sums": "*fp32"}
    constants = {
        "ROWS": 64, "TOKENS": tokens, "BLOCK": 64, "STAGES": 4,
    }  # fmt: skip
    case = row_case(
        "wide_linear", f"{tokens} rows", wide_products_kernel, types, constants, 4,
        CHIPS, 16,
    )  # fmt: skip
    return _with(case, {chip: _BF16[chip] for chip in case.chips})


def _codes(tokens: int, chips: tuple[int, ...]) -> CompileCase:
    from deepinfer.kernels.triton.code_products import code_products_kernel

    types = {
        "x": "*fp8e4nv", "weight": "*fp8e4nv", "x_scale": "*i32", "w_scale": "*i32", "sums": "*fp32",
    }  # fmt: skip
    constants = {"ROWS": 64, "TOKENS": tokens, "STAGES": 4}
    case = row_case(
        "code_linear",
        f"{tokens} rows",
        code_products_kernel,
        types,
        constants,
        4,
        chips,
        352 if 100 in chips else 0,
    )
    return _with(case, {chip: _FP8[chip] for chip in chips if chip in _FP8})


def _project(chips: tuple[int, ...]) -> CompileCase:
    from deepinfer.kernels.triton.hyper_connection import _project

    types = {"streams": "*bf16", **dict.fromkeys(("pre", "fn", "sums"), "*fp32")}
    constants = {"CHANNELS": 5120, "TOKENS": 16, "BLOCK": 64}
    return row_case("enter_streams", "5120 channels", _project, types, constants, 4, chips)


def _queries(chips: tuple[int, ...]) -> CompileCase:
    from deepinfer.kernels.triton.index_queries import index_queries_kernel

    types = {
        "x": "*bf16", "phases": "*fp32", "weights": "*bf16", "codes": "*u8", "scaled": "*fp32",
        "factor": "fp32",
    }  # fmt: skip
    constants = {"CHANNELS": 128, "ROPE": 64, "HARDWARE": chips[0] >= 89, "ROWS": 16}
    name = f"128 channels{'' if chips[0] >= 89 else ', e4m3 by integers'}"
    return row_case("index_queries", name, index_queries_kernel, types, constants, 4, chips)


def _with(case: CompileCase, instructions: Mapping[int, tuple[str, ...]]) -> CompileCase:
    aligned = (
        *case.aligned,
        *(
            n
            for n in case.signature
            if n.endswith("stride") or n in ("span", "outputs", "channels")
        ),
    )
    return dataclasses.replace(case, tensor_core=instructions, aligned=aligned)
