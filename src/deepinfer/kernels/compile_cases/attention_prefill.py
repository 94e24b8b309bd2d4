"""Attention of many rows: the kernels for Hopper and the portable one."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from deepinfer.kernels.codegen import CHIPS, SHARED_BYTES, CompileCase
from deepinfer.kernels.configs import attention_prefill as configs

__all__ = ["cases"]

_POINTERS = {
    "q": "*bf16", "kv": "*bf16", "indices": "*i32", "lengths": "*i32", "extra_kv": "*bf16",
    "extra_indices": "*i32", "extra_lengths": "*i32", "sink": "*fp32", "phases": "*fp32", "out": "*bf16",
    "max_logits": "*fp32", "lse": "*fp32",
}  # fmt: skip
_STRIDES = (
    "stride_qt", "stride_qh", "stride_kv", "stride_extra", "stride_i", "stride_ei", "stride_ot", "stride_oh",
)  # fmt: skip
_ALIGNED = (
    "q",
    "kv",
    "indices",
    "extra_kv",
    "extra_indices",
    "out",
    "max_logits",
    "lse",
    *_STRIDES,
)
_SIZES = ("heads", "s_kv", "s_extra", "width", "extra_width")
_PLAIN = {
    "BAND": False, "COUNTED": False, "EXTRA": False, "EXTRA_COUNTED": False, "SINK": True, "ROPE": False,
}  # fmt: skip
_ALL = dict.fromkeys(_PLAIN, True)


def _hopper(operation: str, entry: str, kernel: Any, scopes: Mapping[str, bool], warps: int, **form: Any) -> CompileCase:  # fmt: skip
    scalars = dict.fromkeys(("s_q", *_SIZES, *_STRIDES), "i32")
    return CompileCase(
        operation,
        entry,
        kernel,
        {**_POINTERS, **scalars, "scale": "fp32"},
        {**scopes, **form},
        _ALIGNED,
        {"num_warps": warps},
        (90,),
        {90: ("HGMMA",)},
        # Of addresses, with Triton 3.9.
        64,
    )


def _portable(
    operation: str,
    entry: str,
    kernel: Any,
    scopes: Mapping[str, bool],
    bytes_each: int,
    heads: int,
    tail: int = 0,
    chips: tuple[int, ...] = CHIPS,
    tested: tuple[int, ...] = (),
) -> CompileCase:
    shared = min(SHARED_BYTES[chip] for chip in chips)
    block, tile, warps, stages = configs.portable(heads, bytes_each, tail > 0, shared)
    kind = "*fp32" if bytes_each == 4 else "*bf16"
    pointers = _POINTERS | dict.fromkeys(("q", "kv", "extra_kv", "out"), kind)
    scalars = dict.fromkeys((*_SIZES, "d", "d_v", "pairs", *_STRIDES), "i32")
    mma = {
        80: ("HMMA",),
        89: ("HMMA",),
        90: ("HMMA", "HGMMA"),
        100: ("HMMA", "UTC"),
        120: ("HMMA",),
    }
    return CompileCase(
        operation,
        entry,
        kernel,
        {**pointers, **scalars, "scale": "fp32"},
        {**scopes, "HEADS": block, "TILE": tile, "VALUES": 512, "TAIL": tail},
        (*_ALIGNED, "d", "d_v", "pairs"),
        {"num_warps": warps, "num_stages": stages},
        chips,
        mma if bytes_each == 2 else {},
        # With everything on, at the end of a row; newer assemblers take more.
        160 if block == 64 else 0,
        tested=tested,
    )


def cases() -> list[CompileCase]:
    """Every kernel with every entry of its tables."""
    from deepinfer.kernels.triton.mla_prefill_few import mla_prefill_few_kernel as few
    from deepinfer.kernels.triton.mla_prefill_paired import mla_prefill_paired_kernel as paired
    from deepinfer.kernels.triton.mla_prefill_portable import (
        mla_prefill_portable_kernel as portable,
    )

    sparse, window = "flash_mla_sparse_fwd", "swa_attention"
    found: list[CompileCase] = []
    rows, copy_registers, registers = configs.paired()
    form = {
        "COPY_ROWS": rows,
        "COPY_WARPS": 4,
        "COPY_REGISTERS": copy_registers,
        "REGISTERS": registers,
    }
    found.append(_hopper(sparse, "paired", paired, _PLAIN, 4, **form))
    found.append(_hopper(window, "paired", paired, _ALL, 4, **form))
    for heads in (8, 16, 32):
        block, parts, depth, rows, warps, registers = configs.few(heads)
        form = {"HEADS": block, "PARTS": parts, "DEPTH": depth, "COPY_ROWS": rows, "COPY_WARPS": warps, "COPY_REGISTERS": registers}  # fmt: skip
        operation, scopes = (window, _ALL) if heads == 16 else (sparse, _PLAIN)
        found.append(_hopper(operation, f"few {heads}", few, scopes, 4, **form))
    large = (80, 90, 100)
    found.append(
        _portable(sparse, "portable bf16, 576", portable, _PLAIN, 2, 64, 64, CHIPS, (89, 120))
    )
    found.append(
        _portable(window, "portable bf16, 16 heads", portable, _ALL, 2, 16, 0, CHIPS, (80, 100))
    )
    found.append(
        _portable(window, "portable bf16, 64 heads", portable, _ALL, 2, 64, 0, large, (90,))
    )
    found.append(_portable(sparse, "portable fp32", portable, _PLAIN, 4, 16, 0, (80, 120), (120,)))
    return found
