"""Engram at the sizes of the published model."""

from __future__ import annotations

from typing import Any

from deepinfer.kernels.codegen import CHIPS, CompileCase
from deepinfer.kernels.compile_cases.rows import level, row_case
from deepinfer.kernels.configs import rows as configs

__all__ = ["cases"]


def cases() -> list[CompileCase]:
    """The cases; needs Triton."""
    from deepinfer.kernels.triton import engram_rows as kernels

    integers = ("history", "token_map", "multipliers", "primes", "offsets", "out")
    sizes: dict[str, Any] = {"NGRAM": 4, "HEADS": 8, "COLUMNS": 24, "TOKENS": 8, "BLOCK": 32}
    hashes = dict.fromkeys(integers, "*i64")
    found = [row_case("engram_hash", "24 columns", kernels.engram_hash_kernel, hashes, sizes, 4)]
    for chip in CHIPS:
        rows, warps, steps, stream = configs.engram_lookup(256)
        constants: dict[str, Any] = {
            "CHANNELS": 256, "GROUP": 32, "HARDWARE": level(chip), "ROWS": rows, "STEPS": steps, "STREAM": stream,
        }  # fmt: skip
        types = {
            "rows": "*i64",
            "table": "*u8",
            "scale": "*u8",
            "out": "*bf16",
            "table_rows": "i64",
        }
        entry = f"rows of 256{'' if chip >= 89 else ', e4m3 by integers'}"
        found.append(
            row_case(
                "engram_lookup",
                entry,
                kernels.engram_lookup_kernel,
                types,
                constants,
                warps,
                (chip,),
            )
        )
    _, warps = configs.engram_gate(5120, 8192)
    main, rest = configs.pieces(5120)
    constants = {"STREAMS": 4, "CHANNELS": 5120, "MAIN": main, "REST": rest, "HAS_IMAGE": True}
    types = {
        "streams": "*bf16", "projected": "*bf16", "q_weight": "*fp32", "k_weight": "*fp32",
        "is_image": "*u8", "out": "*bf16", "eps": "fp32",
    }  # fmt: skip
    gate = kernels.engram_gate_kernel
    for one, name, chips in ((False, "", CHIPS), (True, ", few tokens", (80, 90))):
        entry = f"4 x 5120 channels{name}"
        sizes = constants | {"ONE": one}
        found.append(row_case("engram_gate", entry, gate, types, sizes, warps, chips))
    return found
