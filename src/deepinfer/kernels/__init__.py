"""Kernels of DeepSeek-V4.1 by name; today the casts and roundings of its number formats."""

from __future__ import annotations

from deepinfer.kernels.reference.cast import cast_back as cast_back
from deepinfer.kernels.reference.cast import decode_ue8m0 as decode_ue8m0
from deepinfer.kernels.reference.cast import encode_ue8m0 as encode_ue8m0
from deepinfer.kernels.reference.cast import per_block_cast_to_fp8 as per_block_cast_to_fp8
from deepinfer.kernels.reference.cast import per_token_cast_to_fp4 as per_token_cast_to_fp4
from deepinfer.kernels.reference.cast import per_token_cast_to_fp8 as per_token_cast_to_fp8
from deepinfer.kernels.reference.quant import ceil_to_ue8m0 as ceil_to_ue8m0
from deepinfer.kernels.reference.quant import round_fp8 as round_fp8
from deepinfer.kernels.reference.quant import round_mxfp4 as round_mxfp4
from deepinfer.kernels.reference.quant import round_nvfp4 as round_nvfp4

__all__ = [
    "cast_back",
    "ceil_to_ue8m0",
    "decode_ue8m0",
    "encode_ue8m0",
    "per_block_cast_to_fp8",
    "per_token_cast_to_fp4",
    "per_token_cast_to_fp8",
    "round_fp8",
    "round_mxfp4",
    "round_nvfp4",
]
