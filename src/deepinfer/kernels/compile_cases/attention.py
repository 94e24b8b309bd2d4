"""Sparse decode attention: the forms for Hopper with both records, the portable kernel, the merge."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from deepinfer.kernels.codegen import CHIPS, CompileCase
from deepinfer.kernels.configs import attention as configs

__all__ = ["cases"]

_MMA = {
    80: ("HMMA",),
    89: ("HMMA",),
    90: ("HMMA", "HGMMA"),
    100: ("HMMA", "UTCHMMA"),
    120: ("HMMA",),
}
_WGMMA = {90: ("HGMMA",)}
# Spilled at the begin and end of a row, and nowhere in the loops over tiles.
_HOPPER_STACK = 144
_PORTABLE_STACK = {"*bf16": 128, "*fp32": 2048}


def cases() -> list[CompileCase]:
    """Each table entry with FP8 and FP4 pools; the portable kernel on every chip."""
    found = [_wide(fp4, partial) for fp4, partial in ((False, False), (True, False), (True, True))]
    found += [_few(heads, fp4) for heads, fp4 in ((8, False), (16, True), (32, False))]
    found += [
        # Both sizes, the chip with the least shared memory, and each kind of tensor cores.
        _portable(64, "V41_MXFP8", "V41_NVFP4", "*bf16", CHIPS, (89, 90)),
        _portable(16, "V41_MXFP8", "V41_NVFP4", "*bf16", CHIPS, (80, 100, 120)),
        _portable(16, "V4_FP8", "V41_MXFP8", "*bf16", (90,)),
        _portable(16, "V41_MXFP8", "V41_NVFP4", "*fp32", (89, 90), (89,)),
    ]
    return [*found, _merge(16, CHIPS, (80, 90)), _merge(17, (90,))]


def _types(kernel: Any, special: Mapping[str, str]) -> dict[str, str]:
    """Types of the arguments of a kernel by their names, without its constants."""
    known = {
        "words": "*i32", "extra_words": "*i32", "cache": "*u8", "extra_cache": "*u8", "tails": "*u8",
        "extra_tails": "*u8", "index": "*i32", "extra_index": "*i32", "lengths": "*i32", "extra_lengths": "*i32",
        "phase_index": "*i32", "lse": "*fp32", "sink": "*fp32", "phases": "*fp32", "scale": "fp32",
        "scales": "*u8", "extra_scales": "*u8", "out": "*bf16",
    }  # fmt: skip
    known |= special
    return {n: known.get(n, "i32") for n in kernel.arg_names if not n.isupper()}


def _aligned(types: Mapping[str, str]) -> tuple[str, ...]:
    names = (
        "page16",
        "extra_page16",
        "page_bytes",
        "extra_page_bytes",
        "stride_ot",
        "stride_os",
        "stride_oh",
    )
    more = ("stride_qt", "stride_qh", "stride_vt", "stride_vp", "stride_vh")
    return tuple(n for n, t in types.items() if t.startswith("*") or n in names + more)


def _hopper(kernel: Any, rows: int, fp4: bool, partial: bool, sizes: Mapping[str, int], entry: str, stack: int) -> CompileCase:  # fmt: skip
    from triton.experimental.gluon import language as gl

    layout = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16)
    types = _types(kernel, {
        "q_desc": f"tensordesc<bf16[{rows}, 512],{layout!r}>", "out": "*fp32" if partial else "*bf16",
        "extra_scales": "*i16" if fp4 else "*u8",
    })  # fmt: skip
    constants = {
        "FP4": False, "PAGE": 64, "LENGTHS": True, "EXTRA": True, "EXTRA_FP4": fp4, "EXTRA_PAGE": 64,
        "EXTRA_LENGTHS": True, "SINK": not partial, "ROTATE": not partial, "INDEXED": not partial, "PARTIAL": partial,
        **sizes,
    }  # fmt: skip
    return CompileCase(
        "flash_mla_with_kvcache", entry, kernel, types, constants, aligned=_aligned(types), options={"num_warps": 4},
        chips=(90,), tensor_core=_WGMMA, stack_bytes=stack,
    )  # fmt: skip


def _wide(fp4: bool, partial: bool) -> CompileCase:
    from deepinfer.kernels.triton.mla_decode import mla_decode_kernel

    lead, follow = configs.WIDE
    sizes = {"DEPTH": 2, "FOLLOWERS": follow, "REGISTERS": 504 - lead - follow}
    entry = f"64 heads {'288' if fp4 else '528'} B{' parts' if partial else ''}"
    return _hopper(mla_decode_kernel, 64, fp4, partial, sizes, entry, _HOPPER_STACK)


def _few(heads: int, fp4: bool) -> CompileCase:
    from deepinfer.kernels.triton.mla_decode_few import mla_decode_few_kernel

    warps, keys, lead, follow = configs.FEW[heads]
    rest = ((504 if warps == 4 else 512) - lead - follow) * 4 // warps
    sizes = {
        "HEADS": heads, "DEPTH": 2, "WARPS": warps, "KEYS": keys, "FOLLOWERS": follow,
        "REGISTERS": rest,
    }  # fmt: skip
    entry = f"{heads} heads {'288' if fp4 else '528'} B"
    return _hopper(mla_decode_few_kernel, heads, fp4, False, sizes, entry, _HOPPER_STACK)


def _portable(
    heads: int,
    form: str,
    more: str,
    kind: str,
    chips: tuple[int, ...],
    tested: tuple[int, ...] = (),
) -> CompileCase:
    from deepinfer.kernels.triton.mla_decode_portable import mla_decode_portable_kernel

    block, keys, warps = configs.portable(kind == "*fp32", heads)
    tails = "*i16" if form == "V4_FP8" else "*u8"
    types = _types(mla_decode_portable_kernel, {"q": kind, "out": kind, "tails": tails})
    constants = {
        "FORM": form, "PAGE": 64, "LENGTHS": True, "EXTRA": True, "EXTRA_FORM": more, "EXTRA_PAGE": 64,
        "EXTRA_LENGTHS": True, "SINK": True, "ROTATED": 64, "INDEXED": True, "PARTIAL": False, "DIM": 512,
        "HEADS": block, "KEYS": keys,
    }  # fmt: skip
    return CompileCase(
        "flash_mla_with_kvcache", f"portable {heads} heads {form} {more} {kind[1:]}", mla_decode_portable_kernel, types,
        constants, aligned=_aligned(types), options={"num_warps": warps, "num_stages": 1}, chips=chips,
        tensor_core={} if kind == "*fp32" else _MMA, stack_bytes=_PORTABLE_STACK[kind], tested=tested,
    )  # fmt: skip


def _merge(parts: int, chips: tuple[int, ...], tested: tuple[int, ...] = ()) -> CompileCase:
    from deepinfer.kernels.triton.mla_merge import merge_states_kernel

    types = _types(merge_states_kernel, {"v": "*fp32", "s": "*fp32"})
    constants = {
        "DIM": 512, "ROTATED": 64, "SINK": True, "ROTATE": True, "INDEXED": True, "PARTS": 16, "ONCE": parts <= 16
    }  # fmt: skip
    return CompileCase(
        "merge_attn_states", f"{parts} parts", merge_states_kernel, types, constants, aligned=_aligned(types),
        options={"num_warps": 4}, chips=chips, tested=tested,
    )  # fmt: skip
