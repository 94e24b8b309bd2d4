"""Index scores: every entry of the table."""

from __future__ import annotations

from deepinfer.kernels.codegen import CompileCase

__all__ = ["cases"]

_RECAST_CHIPS = (89, 90, 100, 120)


def cases() -> list[CompileCase]:
    """The scores of Hopper for each number of heads, and the recast of MXFP4 keys."""
    found = [_scores(32, 4, 3, 16, 1), _scores(64, 2, 3, 16, 1), _scores(32, 8, 2, 8, 1)]
    found += [_shared(heads) for heads in (8, 16, 32, 64)]
    return [*found, _recast()]


def _signature(wide: int) -> dict[str, str]:
    from triton.experimental.gluon import language as gl

    layout = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=8)
    return {
        "q_desc": f"tensordesc<fp8e4nv[{wide}, 128],{layout!r}>",
        "k_desc": f"tensordesc<fp8e4nv[64, 128],{layout!r}>",
        "out": "*fp32", "weights": "*fp32", "k_scale": "*fp32", "starts": "*i32", "ends": "*i32",
        **dict.fromkeys(("T", "S", "stride_ot", "stride_wt"), "i32"),
    }  # fmt: skip


_ALIGNED = ("out", "weights", "k_scale", "starts", "ends", "stride_ot", "stride_wt")


def _scores(heads: int, queries: int, parts: int, depth: int, relu: int) -> CompileCase:
    from deepinfer.kernels.triton.indexer_scores import index_scores_kernel

    return CompileCase(
        "fp8_mqa_logits", f"{heads} heads, {queries} queries, {parts} parts", index_scores_kernel,
        _signature(heads * queries),
        {"PARTS": parts, "QUERIES": queries, "HEADS": heads, "CHUNK": 8192, "DEPTH": depth, "RELU": relu},
        _ALIGNED, {"num_warps": 4}, (90,), {90: ("QGMMA",)},
    )  # fmt: skip


def _shared(heads: int) -> CompileCase:
    from deepinfer.kernels.triton.indexer_wide import index_scores_kernel

    queries = (128 if heads >= 32 else 64) // heads
    return CompileCase(
        "fp8_mqa_logits", f"{heads} heads, shared sums", index_scores_kernel, _signature(heads * queries),
        {"QUERIES": queries, "HEADS": heads, "CHUNK": 8192, "DEPTH": 12},
        _ALIGNED, {"num_warps": 4}, (90,), {90: ("QGMMA",)}, stack_bytes=128,
    )  # fmt: skip


def _recast() -> CompileCase:
    from deepinfer.kernels.triton.indexer_keys import recast_keys_kernel

    return CompileCase(
        "fp8_fp4_mqa_logits", "recast keys", recast_keys_kernel,
        {"packed": "*u8", "codes": "*u8", "wide": "*fp8e4nv", "scale": "*fp32", "num_keys": "i32"},
        {"DIM": 128, "BLOCK": 64}, ("packed", "codes", "wide", "scale"), {}, _RECAST_CHIPS,
    )  # fmt: skip
