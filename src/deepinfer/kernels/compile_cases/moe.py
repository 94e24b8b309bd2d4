"""Routing at the widths of V4.1: 384 experts, top-6, 5,120 channels."""

from __future__ import annotations

from typing import Any

from deepinfer.kernels.codegen import CHIPS, CompileCase

__all__ = ["cases"]

_ONE = (90,)


def _case(
    operation: str,
    entry: str,
    kernel: Any,
    types: dict[str, str],
    constants: dict[str, Any],
    **rest: Any,
) -> CompileCase:
    """A case whose other arguments are int32."""
    names = [n for n in kernel.arg_names if n not in constants]
    signature = {n: types.get(n, "i32") for n in names}
    aligned = tuple(n for n in names if signature[n][0] == "*" or n.startswith("stride"))
    return CompileCase(operation, entry, kernel, signature, constants, aligned, **rest)


def cases() -> list[CompileCase]:
    """The cases; needs Triton 3.6 or newer."""
    from deepinfer.kernels.triton import (
        aligned_groups,
        moe_gate,
        moe_map,
        moe_rows,
        moe_swiglu,
    )

    gate = {"logits": "*fp32", "bias": "*fp32", "bias_vl": "*fp32", "is_image": "*u8", "count": "*i64",
            "weights": "*fp32", "experts": "*i64", "scale": "fp32"}  # fmt: skip
    forms = {"BIAS": True, "VISION": False, "COUNTED": False, "RENORMALISE": True, "WIDTH": 8}
    v41 = {"SCORE": 0, "EXPERTS": 384, "GROUPS": 1, "TOPK_GROUPS": 1, "TOPK": 6, "ROWS": 1, "COLUMNS": 512}  # fmt: skip
    v3 = {"SCORE": 1, "EXPERTS": 256, "GROUPS": 8, "TOPK_GROUPS": 4, "TOPK": 8, "ROWS": 8, "COLUMNS": 32}  # fmt: skip
    one = {"num_warps": 1}
    found = [
        _case("topk_gate", "top-6 of 384", moe_gate.topk_gate_kernel, gate, forms | v41, options=one),
        _case("topk_gate", "top-8 of 8 groups", moe_gate.topk_gate_kernel, gate,
              forms | v3 | {"VISION": True, "COUNTED": True}, options=one, chips=_ONE),
    ]  # fmt: skip
    names = ("counts", "totals", "pair_place", "place_pair", "place_expert", "starts", "ends")
    pairs = {"topk_ids": "*i64"} | dict.fromkeys(names, "*i32")
    bins = {"EXPERTS": 384, "BINS": 512, "BLOCK": 512}
    four = {"num_warps": 4}
    found.append(
        _case(
            "get_fused_mapping",
            "counts",
            moe_map.pair_counts_kernel,
            pairs,
            bins,
            options=four,
            chips=_ONE,
        )
    )
    found.append(
        _case(
            "get_fused_mapping",
            "sums",
            moe_map.block_sums_kernel,
            pairs,
            {"BINS": 512, "COLUMNS": 32},
            options=four,
            chips=_ONE,
        )
    )
    for masked, counted in ((False, False), (False, True), (True, False)):
        flags = {
            "MASKED": masked,
            "LISTED": not masked,
            "COUNTED": counted,
            "ALIGN": 128,
            "OWN": 128,
            "PADDED": 8,
        }
        entry = f"{'masked' if masked else 'contiguous'}{' counted' if counted else ''}"
        found.append(
            _case(
                "get_fused_mapping",
                entry,
                moe_map.pair_places_kernel,
                pairs,
                bins | flags,
                options=four,
                chips=_ONE if masked or counted else CHIPS,
            )
        )
    rows = {"x": "*i32", "out": "*i32", "scale": "*i32", "out_scale": "*i32", "topk_weights": "*fp32",
            "out_weights": "*fp32", "places": "*i32"}  # fmt: skip
    sizes = {"CHANNELS": 1280, "SCALES": 40, "TOPK": 6, "BLOCK": 256, "SCALE_BLOCK": 64}
    found.append(
        _case(
            "expand_to_fused",
            "fp8",
            moe_rows.expand_kernel,
            rows,
            sizes | {"SCALED": True, "WEIGHTED": True},
            options=four,
        )
    )
    sums = {
        "y": "*bf16",
        "added": "*bf16",
        "out": "*bf16",
        "topk_weights": "*fp32",
        "places": "*i32",
    }
    flags = {"WEIGHTED": True, "ADDED": True, "CHANNELS": 5120, "TOPK": 6, "BLOCK": 1024}
    found.append(
        _case(
            "reduce_fused",
            "bf16",
            moe_rows.reduce_kernel,
            sums,
            flags,
            options=four | {"enable_fp_fusion": False},
        )
    )
    swiglu = {
        "x": "*bf16",
        "topk_weights": "*fp32",
        "places": "*i32",
        "q": "*u8",
        "scale": "*fp32",
        "limit": "fp32",
    }
    flags = {
        "CHANNELS": 2304,
        "HAS_LIMIT": True,
        "MODE": 1,
        "CAST": True,
        "ALIGNED": False,
        "SCALE_FP32": True,
        "HARDWARE": True,
        "GROUPS": 8,
        "GROUP": 128,
    }
    for hardware in (True, False):
        found.append(
            _case(
                "silu_and_mul_quant_fused",
                "fp8" if hardware else "fp8 by hand",
                moe_swiglu.swiglu_pairs_kernel,
                swiglu,
                flags | {"HARDWARE": hardware},
                options=four | {"enable_fp_fusion": False},
                chips=tuple(c for c in CHIPS if (c >= 89) == hardware),
            )
        )
    exact = four | {"enable_fp_fusion": False}
    aligned = flags | {"ALIGNED": True, "GROUPS": 32, "GROUP": 32}
    found.append(
        _case("silu_and_mul_quant_fused", "aligned", moe_swiglu.swiglu_pairs_kernel, swiglu, aligned, options=exact,
              chips=_ONE)
    )  # fmt: skip
    rows = {"x": "*bf16", "q": "*u8", "scale": "*fp32"}
    for hardware in (True, False):
        found.append(
            _case("per_token_cast_to_fp8_aligned", "fp8" if hardware else "fp8 by hand", aligned_groups.cast_aligned_kernel, rows,
                  {"CHANNELS": 5120, "HARDWARE": hardware, "GROUPS": 32}, options=exact,
                  chips=tuple(c for c in CHIPS if (c >= 89) == hardware), tested=(90,) if hardware else (80,))
        )  # fmt: skip
    return found
