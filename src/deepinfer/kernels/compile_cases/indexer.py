"""Index scores: every entry of the table."""

from __future__ import annotations

from deepinfer.kernels.codegen import CompileCase
from deepinfer.kernels.configs import indexer as configs

__all__ = ["cases"]


def cases() -> list[CompileCase]:
    """The scores of Hopper for each number of heads, and the recast of MXFP4 keys."""
    found = [_scores(heads) for heads in (8, 16, 32, 64)]
    found += [_paged(32, packed, (89, 90, 100, 120)) for packed in (False, True)]
    found += [_paged(32, packed, (80,)) for packed in (False, True)]
    found += [_paged(128, packed, (90,)) for packed in (False, True)]
    found += [
        _pages(next_n, heads, packed)
        for packed in (False, True)
        for next_n, heads in ((1, 32), (2, 32), (6, 32), (1, 64))
    ]
    return [*found, _recast(), _shares()]


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


def _scores(heads: int) -> CompileCase:
    from deepinfer.kernels.triton.indexer_scores import index_scores_kernel

    queries, depth, chunk, parts, relu = configs.lookup(heads)
    return CompileCase(
        "fp8_mqa_logits", f"{heads} heads", index_scores_kernel, _signature(heads * queries),
        {"PARTS": parts, "QUERIES": queries, "HEADS": heads, "CHUNK": chunk, "DEPTH": depth, "RELU": relu},
        _ALIGNED, {"num_warps": 4}, (90,), {90: ("QGMMA",)},
    )  # fmt: skip


def _paged(columns: int, packed: bool, chips: tuple[int, ...]) -> CompileCase:
    from deepinfer.kernels.triton.indexer_paged import paged_scores_kernel

    block, stages, warps = configs.lookup_paged(columns, packed)
    strides = ("stride_page", "stride_w", "stride_table", "stride_out")
    name = "fp8_fp4_paged_mqa_logits" if packed else "fp8_paged_mqa_logits"
    return CompileCase(
        name, f"{columns} columns", paged_scores_kernel,
        {"q": "*u8", "cache": "*u8", "weights": "*fp32", "lengths": "*i32", "table": "*i32", "meta": "*i32",
         "out": "*fp32", "next_n": "i32", "most": "i32", "num_pages": "i32", **dict.fromkeys(strides, "i32")},
        {"HEADS": 32, "D": 128, "NEXT": columns // 32, "PAGE": 64, "FP4": packed, "NATIVE": min(chips) > 80,
         "SPLIT": configs.SPLIT, "BLOCK": block, "STAGES": stages},
        ("q", "cache", "weights", "out", "stride_page", "stride_w", "stride_out"), {"num_warps": warps}, chips,
        dict.fromkeys(chips, ("HMMA", "QMMA", "HGMMA", "QGMMA", "UTCHMMA", "UTCQMMA")) | {90: ("QGMMA",)}, 24,
    )  # fmt: skip


def _pages(next_n: int, heads: int, packed: bool) -> CompileCase:
    from triton.experimental.gluon import language as gl

    from deepinfer.kernels.triton.indexer_pages import page_scores_kernel

    queries, depth, parts, together, folded = configs.lookup_pages(next_n, heads, packed)
    width, bits, kind = (64, 32, "i32[1, 64, 16]") if packed else (128, 8, "fp8e4nv[1, 64, 128]")
    keys = gl.NVMMASharedLayout(swizzle_byte_width=width, element_bitwidth=bits, rank=3)
    scales = gl.NVMMASharedLayout(swizzle_byte_width=0, element_bitwidth=32, rank=2)
    sizes = ("next_n", "most", "num_pages", "each", "programs", "requests", "stride_w", "stride_table", "stride_out")  # fmt: skip
    return CompileCase(
        "fp8_fp4_paged_mqa_logits" if packed else "fp8_paged_mqa_logits", f"{next_n} x {heads} heads, pages",
        page_scores_kernel,
        {"k_desc": f"tensordesc<{kind},{keys!r}>", "s_desc": f"tensordesc<i32[1, 64],{scales!r}>", "q": "*u8",
         "weights": "*fp32", **dict.fromkeys(("lengths", "table", "meta"), "*i32"), "out": "*fp32",
         **dict.fromkeys(sizes, "i32")},
        {"HEADS": heads, "QUERIES": queries, "CHUNKS": -(-next_n // queries), "PAGE": 64, "FP4": int(packed) + int(folded),
         "SPLIT": configs.SPLIT, "DEPTH": depth, "PARTS": parts, "TOGETHER": together},
        ("q", "weights", "lengths", "meta", "out", "stride_w", "stride_out"), {"num_warps": 4}, (90,), {90: ("QGMMA",)},
    )  # fmt: skip


def _shares() -> CompileCase:
    from deepinfer.kernels.triton.indexer_shares import share_splits_kernel

    names = ("requests", "next_n", "programs", "stride_r", "stride_j")
    return CompileCase(
        "get_paged_mqa_logits_metadata", "any", share_splits_kernel,
        {"lengths": "*i32", "meta": "*i32", **dict.fromkeys(names, "i32")},
        {"SPLIT": configs.SPLIT, "BLOCK": 256, "PLACES": 8}, ("lengths", "meta"), stack_bytes=8,  # with Triton 3.9
    )  # fmt: skip


def _recast() -> CompileCase:
    from deepinfer.kernels.triton.indexer_keys import recast_keys_kernel

    return CompileCase(
        "fp8_fp4_mqa_logits", "recast keys", recast_keys_kernel,
        {"packed": "*u8", "codes": "*u8", "wide": "*fp8e4nv", "scale": "*fp32", "num_keys": "i32"},
        {"DIM": 128, "BLOCK": 64}, ("packed", "codes", "wide", "scale"), {}, (90,),
    )  # fmt: skip
