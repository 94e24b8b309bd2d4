"""Hyper-connections of four streams of 5120 channels."""

from __future__ import annotations

from typing import Any

from deepinfer.kernels.codegen import CHIPS, CompileCase
from deepinfer.kernels.compile_cases.rows import row_case
from deepinfer.kernels.configs import rows as configs

__all__ = ["cases"]

_FP32 = dict.fromkeys(("fn", "sums", "base", "scale", "pre", "post", "mix", "scores"), "*fp32")
_TYPES = {
    **_FP32, "streams": "*bf16", "output": "*bf16", "collapsed": "*bf16", "out": "*bf16",
    "eps": "fp32", "norm_eps": "fp32",
}  # fmt: skip


def cases() -> list[CompileCase]:
    """The cases; needs Triton."""
    from deepinfer.kernels.triton import mhc_mixes as mixes
    from deepinfer.kernels.triton import mhc_streams as streams

    found = [_bulk(False), _bulk(True)]
    # The other chips have the code of one of those that tests compile for.
    for narrow, name, chips, tested in (
        (True, "bf16 streams", CHIPS, (80, 90, 100)), (False, "fp32 streams", (80, 90), (90,)),
    ):  # fmt: skip
        tokens, block, times, warps, stages = configs.project(5120, narrow)
        sizes: dict[str, Any] = {
            "CHANNELS": 5120, "TOKENS": tokens, "BLOCK": block, "BLOCKS": times,
            "SPLIT": 2 if narrow else 0,
        }  # fmt: skip
        kind = "*bf16" if narrow else "*fp32"
        types = {**_TYPES, **dict.fromkeys(("streams", "collapsed", "fn"), kind)}
        found.append(
            row_case(
                "mhc_pre", name, mixes.mhc_project_kernel, types, sizes, warps, chips,
                stack_bytes=8, num_stages=stages, tested=tested,  # stack: of sm_100 with Triton 3.9
            )
        )  # fmt: skip
    types = {"fn": "*fp32", "parts": "*bf16"}
    constants: dict[str, Any] = {"SPLIT": 2, "BLOCK": 1024}
    found.append(
        row_case(
            "mhc_pre", "split", mixes.mhc_split_kernel, types, constants, 4, (80, 90), tested=(80,)
        )
    )
    scores = {**_TYPES, "out": "*fp32"}
    found.append(
        row_case(
            "sinkhorn", "32 tokens", mixes.sinkhorn_kernel, scores, {"TOKENS": 32, "FAST": True}, 1
        )
    )
    found += [_coefficients(8192, 16, 1, (90,)), _coefficients(64, 16, 5, (90,))]
    found.append(_coefficients(8192, 8, 1, CHIPS, (80,)))
    block, warps = configs.stream_block(5120)
    constants = {"CHANNELS": 5120, "BLOCK": block, "EVICT": ""}
    for name, kernel in (
        ("mhc_post", streams.mhc_post_kernel),
        ("mhc_head", streams.mhc_head_kernel),
    ):
        found.append(row_case(name, "5120 channels", kernel, _TYPES, constants, warps))
    return found


def _coefficients(
    tokens: int, parts: int, pieces: int, chips: tuple[int, ...], tested: tuple[int, ...] = ()
) -> CompileCase:
    """What follows bulk copies (16 parts), or the portable projection."""
    from deepinfer.kernels.triton.mhc_mixes import mhc_coefficients_kernel

    at_once, warps = configs.coefficients(tokens)
    constants: dict[str, Any] = {
        "CHANNELS": 5120, "TOKENS": at_once, "PARTS": parts, "PIECES": pieces, "FAST": True,
    }  # fmt: skip
    entry = f"coefficients of {parts} x {pieces} sums"
    return row_case(
        "mhc_pre", entry, mhc_coefficients_kernel, _TYPES, constants, warps, chips, tested=tested
    )


def _bulk(apart: bool) -> CompileCase:
    """Bulk copies and warpgroup products of Hopper."""
    from deepinfer.kernels.triton.gemm_launch import tile_layout
    from deepinfer.kernels.triton.mhc_bulk import mhc_project_bulk_kernel

    def tile(rows: int) -> str:
        return f"tensordesc<bf16[{rows}, 64],{tile_layout(128, 16)!r}>"

    blocks, depth = configs.project_bulk(5120)
    signature = {
        "x_desc": tile(64), "high_desc": tile(32),
        "low_desc": tile(32), "pre": "*fp32", "sums": "*fp32",
        "collapsed": "*bf16", "tokens": "i32", "parts": "i32", "x_stream": "i32",
    }  # fmt: skip
    return CompileCase(
        "mhc_pre", f"bf16 streams, bulk copies, {'few' if apart else 'many'} tokens", mhc_project_bulk_kernel, signature,
        {"CHANNELS": 5120, "BLOCKS": 1 if apart else blocks, "DEPTH": depth},
        ("pre", "sums", "collapsed", "x_stream"),
        {"num_warps": 4}, (90,), tensor_core={90: ("HGMMA",)},
    )  # fmt: skip
