"""Verification of five drafts at a vocabulary of 129,280, and drafts from texts."""

from __future__ import annotations

from typing import Any

from deepinfer.kernels.codegen import CHIPS, CompileCase
from deepinfer.kernels.configs import sampling as configs

__all__ = ["cases"]

_VOCAB = 129_280
_ONE = (90,)


def _case(
    operation: str,
    entry: str,
    kernel: Any,
    constants: dict[str, Any],
    warps: int,
    chips: tuple[int, ...] = _ONE,
) -> CompileCase:
    types = {"target": "*fp32", "draft": "*fp32", "drafts": "*i64", "lengths": "*i64", "temperatures": "*fp64",
             "row_temperatures": "*fp64", "seeds": "*i64", "positions": "*i64", "row_seeds": "*i64",
             "row_positions": "*i64", "own": "*i64", "out": "*i64", "num_accepted": "*i64", "next_rows": "*i64",
             "next_laws": "*fp64", "tops": "*fp32", "sums": "*fp32", "best": "*i32", "scores": "*fp64",
             "tokens": "*i64" if operation == "ngram_propose" else "*i32", "matched": "*i32"}  # fmt: skip
    names = [n for n in kernel.arg_names if n not in constants]
    signature = {n: types.get(n, "i32") for n in names}
    aligned = tuple(n for n in names if signature[n][0] == "*" or n.startswith("stride"))
    return CompileCase(
        operation, entry, kernel, signature, constants, aligned, {"num_warps": warps}, chips
    )


def cases() -> list[CompileCase]:
    """The cases; needs Triton 3.6 or newer."""
    from deepinfer.kernels.triton import spec_ngram, spec_rows
    from deepinfer.kernels.triton import spec_standard as standard

    block, warps = configs.lookup("verify", _VOCAB)
    chunks = -(-_VOCAB // block)
    padded = 1 << (chunks - 1).bit_length()
    row = {"DRAFTS": 5, "WIDTH": 8, "REQUESTS": 256}
    warm = {"WARM": True}
    coupled, other = "speculative_verify_coupled", "speculative_verify_standard"
    return [
        _case(coupled, "options", spec_rows.row_options_kernel, row | warm, 1),
        _case(coupled, "verdict", spec_rows.coupled_accept_kernel, row, 1, CHIPS),
        _case(other, "sums", standard.law_sums_kernel, warm | {"DRAFTS": 5, "BLOCK": block}, warps),
        _case(other, "verdict", standard.standard_accept_kernel, row | warm | {"DRAWN": True, "CHUNKS": padded}, 1),
        _case(other, "residual", standard.residual_chunk_kernel, warm | {"DRAWN": True, "FAST": True, "BLOCK": block}, warps, CHIPS),
        _case(other, "residual of chosen", standard.residual_chunk_kernel, warm | {"DRAWN": False, "FAST": True, "BLOCK": block}, warps),
        _case(other, "token", standard.chosen_token_kernel, {"DRAFTS": 5, "CHUNKS": padded}, 1),
        _case("ngram_propose", "2048", spec_ngram.ngram_kernel,
              {"NUM_DRAFTS": 5, "MIN_N": 2, "MAX_N": 4, "BLOCK": 2048, "WIDTH": 8}, 8, CHIPS),
    ]  # fmt: skip
