"""Products of a few rows that are bound by the reading of the weights, the streams' way into a sublayer, and index queries."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

from deepinfer.kernels.codegen import CHIPS, CompileCase
from deepinfer.kernels.compile_cases.rows import row_case

__all__ = ["cases"]

_BF16 = {80: ("HMMA",), 89: ("HMMA",), 90: ("HGMMA",), 100: ("UTCHMMA", "HMMA"), 120: ("HMMA",)}


def cases() -> list[CompileCase]:
    """The cases; needs Triton."""
    return [
        # More rows need more room; the smaller chips have the least of it.
        _wide(16, (80, 100)),
        _wide(32, (90,)),
        _wide(64, (89, 90)),
        _project(CHIPS, (80, 90, 100)),
        _queries((80,)),
        _queries((89, 90, 100, 120), (90, 120)),
    ]


def _wide(tokens: int, tested: tuple[int, ...]) -> CompileCase:
    from deepinfer.kernels.triton.wide_products import wide_products_kernel

    types = {"x": "*bf16", "weight": "*fp32", "sums": "*fp32"}
    constants = {
        "ROWS": 64, "TOKENS": tokens, "BLOCK": 64, "STAGES": 4,
    }  # fmt: skip
    case = row_case(
        "wide_linear", f"{tokens} rows", wide_products_kernel, types, constants, 4,
        CHIPS, 16, tested,
    )  # fmt: skip
    return _with(case, {chip: _BF16[chip] for chip in case.chips})


def _project(chips: tuple[int, ...], tested: tuple[int, ...]) -> CompileCase:
    from deepinfer.kernels.triton.hyper_connection import _project

    types = {"streams": "*bf16", **dict.fromkeys(("pre", "fn", "sums"), "*fp32")}
    constants = {"CHANNELS": 5120, "TOKENS": 16, "BLOCK": 64}
    return row_case(
        "enter_streams", "5120 channels", _project, types, constants, 4, chips, tested=tested
    )


def _queries(chips: tuple[int, ...], tested: tuple[int, ...] = ()) -> CompileCase:
    from deepinfer.kernels.triton.index_queries import index_queries_kernel

    types = {
        "x": "*bf16", "phases": "*fp32", "weights": "*bf16", "codes": "*u8", "scaled": "*fp32",
        "factor": "fp32",
    }  # fmt: skip
    constants = {"CHANNELS": 128, "ROPE": 64, "HARDWARE": chips[0] >= 89, "ROWS": 16}
    name = f"128 channels{'' if chips[0] >= 89 else ', e4m3 by integers'}"
    return row_case(
        "index_queries", name, index_queries_kernel, types, constants, 4, chips, tested=tested
    )


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
