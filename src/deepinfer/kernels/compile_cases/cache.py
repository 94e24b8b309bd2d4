"""Cache kernels: each format, the compressor, the state."""

from __future__ import annotations

from deepinfer.kernels.codegen import CompileCase
from deepinfer.kernels.configs import cache as configs
from deepinfer.kernels.formats import KVCacheFormat

__all__ = ["cases"]

_F = KVCacheFormat
_STRIDES = (
    "stride_x",
    "stride_gates",
    "stride_slot",
    "stride_tail",
    "stride_latents",
    "stride_phases",
    "stride_page",
)


def cases() -> list[CompileCase]:
    """One insert of each format on Hopper, the published ones on every chip; tests leave out what is the same code."""
    newer = (90, 100, 120)
    found = [_insert(_F.V41_MXFP8, 8192, (80,)), _insert(_F.V41_MXFP8, 8192, (89,))]
    found += [_insert(_F.V41_NVFP4, 8192, (80, 89), (80,)), _insert(_F.V41_NVFP4, 8192, (90,))]
    found += [_insert(_F.INDEXER_MXFP4, 8192, (90,))]
    found += [_insert(f, 8192, (90,)) for f in (_F.V4_FP8, _F.V32_FP8)]
    found += [_pairs(_F.V41_MXFP8, True, newer, newer), _pairs(_F.V41_NVFP4, False, newer, (90,))]
    found += [_pairs(_F.INDEXER_MXFP4, True, (90,))]
    found += [_pairs_of_fp32(True, newer, (90,)), _pairs_of_fp32(False, (90,))]
    found += [_compress(8192, True, (80, 89), (80,)), _compress(8192, True, (90,))]
    found += [_gather(_F.V41_MXFP8, (80,)), _gather(_F.V41_MXFP8, (89, *newer), (90,))]
    found += [_gather(f, (90,)) for f in (_F.V41_NVFP4, _F.V4_FP8)]
    found += [_gather_pairs(_F.V41_NVFP4, newer, (90, 120)), _gather_pairs(_F.INDEXER_MXFP4, (90,))]
    found += [_values(_F.V41_MXFP8, (80,)), _values(_F.V41_MXFP8, (89, *newer), (90,))]
    return [*found, _state()]


def _constants(form: KVCacheFormat, rows: int) -> dict[str, int | bool]:
    from deepinfer.kernels.triton.cache_launch import constants

    return constants(form, 64, True) | {"ROWS": rows}


def _insert(
    form: KVCacheFormat, rows: int, chips: tuple[int, ...], tested: tuple[int, ...] = ()
) -> CompileCase:
    return _rows("rope_quant_insert", form, configs.lookup_insert(rows, form.channels, False), chips, "*bf16", {
        "PAIR": False, "HAS_LAST": False, "HAS_NORM": True, "HAS_FLOOR": True, "HAS_LATENTS": False,
        "HAS_PHASE_INDEX": False, "ROPE": 64, "KIND": "bf16",
    }, f"{form.name} {rows} rows", tested)  # fmt: skip


def _values(
    form: KVCacheFormat, chips: tuple[int, ...], tested: tuple[int, ...] = ()
) -> CompileCase:
    sizes = configs.lookup_insert(8192, form.channels, False)
    return _rows("quantize_and_insert_k_cache", form, sizes, chips, "*bf16", {
        "PAIR": False, "HAS_LAST": False, "HAS_NORM": False, "HAS_FLOOR": False, "HAS_LATENTS": False,
        "HAS_PHASE_INDEX": False, "ROPE": 0, "KIND": "bf16",
    }, f"{form.name} 8192 rows", tested)  # fmt: skip


def _compress(
    rows: int, pair: bool, chips: tuple[int, ...], tested: tuple[int, ...] = ()
) -> CompileCase:
    form = KVCacheFormat.V41_NVFP4
    return _rows("compress_norm", form, configs.lookup_compress(rows), chips, "*fp32", {
        "PAIR": pair, "HAS_LAST": pair, "HAS_NORM": True, "HAS_FLOOR": False, "HAS_LATENTS": True,
        "HAS_PHASE_INDEX": False, "ROPE": 64, "KIND": "bf16",
    }, f"{'pairs' if pair else 'tokens'} {rows} rows", tested)  # fmt: skip


def _rows(
    operation: str, form: KVCacheFormat, sizes: tuple[int, int], chips: tuple[int, ...], kind: str,
    constants: dict[str, object], entry: str, tested: tuple[int, ...],
) -> CompileCase:  # fmt: skip
    import triton.language as tl

    from deepinfer.kernels.triton.cache_insert import cache_insert_kernel

    rows, warps = sizes
    sizes_of = {k: v for k, v in _constants(form, rows).items() if k != "WIDTH"}
    constants = (
        dict(constants)
        | sizes_of
        | {"FUSED": True, "ALIGNED": True, "PAIRS": min(chips) >= 90, "KIND": tl.bfloat16}
    )
    if 80 in chips:
        constants["NATIVE"] = False
    integers = (
        "num_rows",
        "num_tokens",
        "num_pages",
        "num_requests",
        "num_phases",
        "tail_size",
        *_STRIDES,
    )
    return CompileCase(
        operation, entry, cache_insert_kernel,
        {
            "x": kind, "gates": kind, "state": "*fp32", "requests": "*i32", "last": "*i64", "weight": "*bf16",
            "phases": "*fp32", "phase_index": "*i64", "positions": "*i64", "floors": "*i64", "slots": "*i64",
            "latents": "*bf16", "cache": "*u8", "eps": "fp32", **dict.fromkeys(integers, "i32"),
        },
        constants, ("x", "gates", "state", "weight", "phases", "slots", "latents", "cache", *_STRIDES),
        {"num_warps": warps, "enable_fp_fusion": False}, chips, tested=tested,
    )  # fmt: skip


def _pairs(
    form: KVCacheFormat, norm: bool, chips: tuple[int, ...], tested: tuple[int, ...] = ()
) -> CompileCase:
    sizes = configs.lookup_pairs(8192, form.channels, False)
    return _two_at_a_time("rope_quant_insert", form, sizes, chips, tested, {
        "WIDE": False, "PAIR": False, "HAS_LAST": False, "HAS_NORM": norm, "HAS_FLOOR": norm, "HAS_LATENTS": False,
    })  # fmt: skip


def _pairs_of_fp32(
    pools: bool, chips: tuple[int, ...], tested: tuple[int, ...] = ()
) -> CompileCase:
    sizes = configs.lookup_pairs(8192, 512, True)
    return _two_at_a_time("compress_norm", KVCacheFormat.V41_NVFP4, sizes, chips, tested, {
        "WIDE": True, "PAIR": pools, "HAS_LAST": pools, "HAS_NORM": True, "HAS_FLOOR": False, "HAS_LATENTS": True,
    })  # fmt: skip


def _two_at_a_time(
    operation: str, form: KVCacheFormat, sizes: tuple[int, int, int, bool], chips: tuple[int, ...],
    tested: tuple[int, ...], constants: dict[str, object],
) -> CompileCase:  # fmt: skip
    from deepinfer.kernels.triton.cache_pairs import cache_pairs_kernel
    from deepinfer.kernels.triton.cache_pairs_launch import constants as of_form

    rows, warps, each, shared = sizes
    words = "*i64" if constants["WIDE"] else "*i32"
    types = {
        "x": words, "gates": words, "state": words, "requests": "*i32", "last": "*i64", "gains": "*i32",
        "phases": "*i64", "phase_index": "*i64", "positions": "*i64", "floors": "*i64", "slots": "*i64",
        "latents": "*i32", "codes": "*i16" if form.code_bits == 8 else "*u8", "scales": "*u8", "eps": "fp32",
    }  # fmt: skip
    constants = dict(constants) | of_form(form, 64)
    constants |= {
        "HAS_PHASE_INDEX": False, "ROPE": 64, "ROWS": rows, "EACH": each, "EARLY": True, "SHARED": shared,
    }  # fmt: skip
    names = [n for n in cache_pairs_kernel.arg_names if n not in constants]
    signature = {n: types.get(n, "i32") for n in names}
    aligned = tuple(n for n in names if signature[n].startswith("*") or n.startswith("stride_"))
    entry = f"{form.name}, two values at a time{', pools' if constants['PAIR'] else ''}"
    return CompileCase(
        operation, entry, cache_pairs_kernel, signature, constants, aligned,
        {"num_warps": warps, "enable_fp_fusion": False}, chips, tested=tested,
    )  # fmt: skip


def _gather(
    form: KVCacheFormat, chips: tuple[int, ...], tested: tuple[int, ...] = ()
) -> CompileCase:
    from deepinfer.kernels.triton.cache_gather import cache_gather_kernel

    rows, warps = configs.lookup_gather(8192, form.channels)
    constants = _constants(form, rows) | ({"NATIVE": False} if 80 in chips else {})
    return CompileCase(
        "gather_and_dequantize_k_cache", form.name, cache_gather_kernel,
        {"cache": "*u8", "slots": "*i64", "out": "*bf16", "num_rows": "i32", "num_pages": "i32", "stride_page": "i32", "stride_out": "i32"},
        constants, ("cache", "slots", "out", "stride_page", "stride_out"), {"num_warps": warps}, chips, tested=tested,
    )  # fmt: skip


def _gather_pairs(
    form: KVCacheFormat, chips: tuple[int, ...], tested: tuple[int, ...] = ()
) -> CompileCase:
    from deepinfer.kernels.triton.cache_gather_pairs import cache_gather_pairs_kernel

    rows, warps = configs.lookup_gather(8192, form.channels)
    constants = {
        "CHANNELS": form.coded_channels, "GROUP": form.group, "E4M3": form.scale_type == "e4m3", "ROW_STRIDE": form.row_stride,
        "SCALE_STRIDE": form.scale_stride, "SCALES_AT": form.scales_offset(64), "PAGE": 64, "ROWS": rows,
    }  # fmt: skip
    types = {"words": "*i32", "scales": "*u8", "slots": "*i64", "out": "*i32"}
    names = [n for n in cache_gather_pairs_kernel.arg_names if n not in constants]
    return CompileCase(
        "gather_and_dequantize_k_cache", f"{form.name}, eight values at a time", cache_gather_pairs_kernel,
        {n: types.get(n, "i32") for n in names}, constants, tuple(n for n in names if not n.startswith("num_")),
        {"num_warps": warps}, chips, tested=tested,
    )  # fmt: skip


def _state() -> CompileCase:
    from deepinfer.kernels.triton.cache_gather import cache_state_kernel

    integers = (
        "num_tokens",
        "num_requests",
        "stride_x",
        "stride_gates",
        "stride_slot",
        "stride_tail",
        "tail_size",
    )
    return CompileCase(
        "compress_norm", "state", cache_state_kernel,
        {"x": "*fp32", "gates": "*fp32", "requests": "*i32", "positions": "*i64", "state": "*fp32",
         **dict.fromkeys(integers, "i32")},
        {"CHANNELS": 512, "BLOCK": 512, "TOKENS": 8, "EARLY": True}, ("x", "gates", "state", *integers[2:6]), {"num_warps": 4}, (90,),
    )  # fmt: skip
