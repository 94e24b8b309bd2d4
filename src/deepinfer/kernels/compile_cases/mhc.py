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

    found = []
    for split, name, chips in ((3, "bf16 streams", CHIPS), (0, "fp32 streams", (80, 90))):
        tokens, block, times, warps, stages = configs.project(5120, split > 0)
        sizes: dict[str, Any] = {
            "CHANNELS": 5120, "TOKENS": tokens, "BLOCK": block, "BLOCKS": times, "SPLIT": split,
        }  # fmt: skip
        types = _TYPES if split else {**_TYPES, "streams": "*fp32", "collapsed": "*fp32"}
        case = row_case(
            "mhc_pre", name, mixes.mhc_project_kernel, types, sizes, warps, chips,
            num_stages=stages,
        )  # fmt: skip
        found.append(case)
    scores = {**_TYPES, "out": "*fp32"}
    found.append(
        row_case("sinkhorn", "32 tokens", mixes.sinkhorn_kernel, scores, {"TOKENS": 32}, 1)
    )
    constants: dict[str, Any] = {"CHANNELS": 5120, "TOKENS": 32}
    found.append(
        row_case("mhc_pre", "coefficients", mixes.mhc_coefficients_kernel, _TYPES, constants, 1)
    )
    block, warps = configs.stream_block(5120)
    constants = {"CHANNELS": 5120, "BLOCK": block, "EVICT": "evict_first"}
    for name, kernel in (
        ("mhc_post", streams.mhc_post_kernel),
        ("mhc_head", streams.mhc_head_kernel),
    ):
        found.append(row_case(name, "5120 channels", kernel, _TYPES, constants, warps))
    return found
