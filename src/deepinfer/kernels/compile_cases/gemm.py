"""Matrix products: every entry of the tables for Hopper, the portable kernel on every chip."""

from __future__ import annotations

from typing import Any

from deepinfer.kernels.codegen import CHIPS, CompileCase
from deepinfer.kernels.configs import gemm as configs

__all__ = ["cases"]

_SMALL_STACK = 24  # bytes a thread, outside of the loops
_TILE_STACK = 96  # bytes a thread: what a tile needs before and after its loop
_TENSOR_CORES = ("HMMA", "QMMA", "HGMMA", "QGMMA", "UTCHMMA", "UTCQMMA")


def cases() -> list[CompileCase]:
    """Each entry once, in the form that needs most."""
    found = [_few(s, 128) for s in [*_sizes(configs.MASKED_FP8, configs.DENSE_FP8), configs.SPLIT_FP8]]  # fmt: skip
    few = _sizes(configs.MASKED_FP8_32, configs.DENSE_FP8_32)
    found += [_few(s, 32) for s in [*few, configs.FEW_FP8_32] if s[0] >= 8]
    for table, group in ((configs.FOLDED_MXFP4, 128), (configs.FOLDED_MXFP4_32, 32)):
        found += [(_folded if s[0] >= 8 else _decoded)(s, group) for s in _sizes(table)]
    found += [_many(s, True, True) for s in _sizes(configs.CONTIGUOUS_FP8)]
    wide = _sizes(configs.TALL_FP8)
    found += [_many(s, True, False) for s in [*wide, (*wide[0][:6], 0), configs.TALL_SPLIT]]
    found += [_many(s, True, s[0] > 1, 32) for s in [*_sizes(configs.TALL_FP8_32), few[-1]]]
    for table, group in ((configs.CONTIGUOUS_MXFP4, 128), (configs.CONTIGUOUS_MXFP4_32, 32)):
        few = [s for s in _sizes(table) if s[0] >= 8]
        found.append(_folded(few[-1], group, True))
        masked = _sizes(configs.FOLDED_MXFP4 if group == 128 else configs.FOLDED_MXFP4_32)
        found += [_decoded(s, group) for s in _sizes(table) if 0 < s[0] < 8 and s not in masked]
        found += [_ragged(s) for s in _sizes(table) if s[0] == 0]
    found += _lists()
    found += [_many(s, False, not cut, cut=cut) for s in _sizes(configs.TALL_BF16) for cut in (False, True)]  # fmt: skip
    found += [_many(configs.TALL_NARROW, scaled, False) for scaled in (True, False)]
    small, large = configs.PORTABLE[0][4], configs.PORTABLE[-1][4]
    found += [
        # Each form, each size and each kind of tensor cores are compiled by tests, but not all of them together.
        _portable(small, 0, "bf16", CHIPS, (80, 90, 100)),
        _portable(small, 2, "fp8", (80,)),
        _portable(small, 2, "fp8", (90, 100, 120), (90, 120)),
        _portable(small, 2, "fp4", (89, 90), (90,)),
        _portable(large, 1, "fp4", (80,)),
        _portable(large, 1, "fp8_32", (89, 100), (89,)),
        _portable(large, 1, "fp4", (100, 120), (100,)),
    ]
    return found


def _sizes(*tables: tuple[configs.Row, ...]) -> list[tuple[int, ...]]:
    """The entries of some tables, each once."""
    return list(dict.fromkeys(row[4] for table in tables for row in table))


def _tile(dtype: str, rows: int, columns: int, row_bytes: int, bits: int) -> str:
    from deepinfer.kernels.triton.gemm_launch import tile_layout

    return f"tensordesc<{dtype}[{rows}, {columns}],{tile_layout(row_bytes, bits)!r}>"


def _list(dtype: str, size: int) -> str:
    from deepinfer.kernels.triton.gemm_launch import list_layout

    return f"tensordesc<{dtype}[{size}],{list_layout()!r}>"


def _integers(*names: str) -> dict[str, str]:
    return dict.fromkeys(names, "i32")


def _hopper(operation: str, entry: str, kernel: Any, signature: dict[str, str], constants: dict[str, Any],
            options: dict[str, Any], stack_bytes: int, scaled: bool = True) -> CompileCase:  # fmt: skip
    aligned = ("out", "x_scale", "w_scale", "counts", "rows_of", "layout", "sums", "factors", "N", "stride_og", "stride_om",
               "stride_fg", "stride_tg", "stride_tk")  # fmt: skip
    return CompileCase(
        operation, entry, kernel, signature, constants,
        tuple(n for n in aligned if n in signature and not signature[n].startswith("tensordesc")),
        {"num_warps": 4, **options}, (90,), tensor_core={90: ("QGMMA" if scaled else "HGMMA",)}, stack_bytes=stack_bytes,
    )  # fmt: skip


def _few(sizes: tuple[int, ...], group: int) -> CompileCase:
    """Few tokens: weights are the tall operand."""
    from deepinfer.kernels.triton.gemm_launch import SwappedTuning, register_shares
    from deepinfer.kernels.triton.grouped_swapped import grouped_swapped_kernel

    t = SwappedTuning(*sizes)
    options, registers = register_shares(t)
    rows = 64 * t.parts // t.split
    scale = "*fp32" if group == 128 else "*i32"
    signature = {
        "w_desc": _tile("fp8e4nv", rows, 128, 128, 8), "x_desc": _tile("fp8e4nv", t.block_m, 128, 128, 8),
        "out": "*bf16", "w_scale": scale, "x_scale": scale, "counts": "*i32", "tiles": "*i32",
        **_integers("num_groups", "N", "max_m", "steps", "stride_og", "stride_om", "stride_wg", "stride_wn",
                    "stride_xg", "stride_xm", "stride_xk"),
    }  # fmt: skip
    constants = {"COUNTED": 2 if t.split == 1 else 0, "GROUP": group, "PARTS": t.parts, "BLOCK_M": t.block_m,
                 "SPLIT": t.split, "DEPTH": t.depth, "REGISTERS": registers, "AHEAD": t.ahead == 1}  # fmt: skip
    name = "gemm_nt" if t.split == 2 else "m_grouped_gemm_nt_masked"
    entry = f"few tokens FP8 1x{group} {'x'.join(map(str, sizes))}"
    return _hopper(name, entry, grouped_swapped_kernel, signature, constants, options, _SMALL_STACK)


def _lists() -> list[CompileCase]:
    """The lists of the tiles that have work."""
    from deepinfer.kernels.triton.grouped_list import ragged_tiles_kernel, used_tiles_kernel

    name = "m_grouped_gemm_nt_contiguous"
    grouped = {"layout": "*i32", "tiles": "*i32", "num_rows": "i32", "num_groups": "i32"}
    return [
        CompileCase(name, "list of tiles", used_tiles_kernel, grouped, {"ROWS": 16, "BLOCK": 4096}, ("layout", "tiles"),
                    {"num_warps": 16}, (90,)),
        CompileCase(name, "list of ragged tiles", ragged_tiles_kernel, grouped, {"BLOCK": 512}, ("layout", "tiles"),
                    {"num_warps": 16}, (90,)),
    ]  # fmt: skip


def _folded(sizes: tuple[int, ...], x_group: int, listed: bool = False) -> CompileCase:
    """Prepared MXFP4 weights."""
    from deepinfer.kernels.triton.gemm_launch import SwappedTuning, register_shares
    from deepinfer.kernels.triton.grouped_folded import grouped_folded_kernel

    t = SwappedTuning(*sizes)
    options, registers = register_shares(t)
    many = listed or t.block_m == 128
    signature = {
        "w_desc": _tile("u32", 64, 16 * t.span, 64 * t.span, 32), "x_desc": _tile("fp8e4nv", t.block_m, 128, 128, 8),
        "t_desc": _list("i32", 64), "out": "*bf16", "factors": "*fp32",
        "x_scale": "*fp32" if x_group == 128 else "*i32", "rows_of": "*i32",
        "tiles": "*i32",
        **_integers("num_groups", "N", "max_m", "steps", "stride_og", "stride_om", "stride_fg", "stride_tg", "stride_tk",
                    "stride_xg", "stride_xm", "stride_xk"),
    }  # fmt: skip
    constants = {"MODE": 1 if many else 2, "X_GROUP": x_group, "SPAN": t.span, "PARTS": t.parts, "BLOCK_M": t.block_m, "DEPTH": t.depth,
                 "REGISTERS": registers}  # fmt: skip
    name = "m_grouped_gemm_nt_contiguous" if many else "m_grouped_gemm_nt_masked"
    entry = f"prepared MXFP4, tokens 1x{x_group}{', listed' if listed else ''}, {'x'.join(map(str, sizes))}"
    return _hopper(name, entry, grouped_folded_kernel, signature, constants, options, _SMALL_STACK)


def _decoded(sizes: tuple[int, ...], x_group: int) -> CompileCase:
    """Prepared MXFP4 weights that are decoded into shared memory."""
    from deepinfer.kernels.triton.folded_decoded import folded_decoded_kernel
    from deepinfer.kernels.triton.folded_decoded_launch import DecodedTuning

    t = DecodedTuning(*sizes)
    signature = {
        "w_desc": _tile("u32", 64, 16, 64, 32), "x_desc": _tile("fp8e4nv", 64, 128, 128, 8), "t_desc": _list("i32", 64),
        "out": "*bf16", "factors": "*fp32",
        "x_scale": "*fp32" if x_group == 128 else "*i32", "rows_of": "*i32",
        **_integers("num_groups", "N", "max_m", "steps", "stride_og", "stride_om", "stride_fg", "stride_tg",
                    "stride_tk", "stride_xg", "stride_xm", "stride_xk"),
    }  # fmt: skip
    constants = {
        "MODE": 2 if t.parts_m == 1 else 1,
        "TM": t.parts_m,
        "TN": t.parts_n,
        "X_GROUP": x_group,
        "DEPTH": t.depth,
    }
    name = "m_grouped_gemm_nt_masked" if t.parts_m == 1 else "m_grouped_gemm_nt_contiguous"
    entry = f"prepared MXFP4 decoded, tokens 1x{x_group}, {'x'.join(map(str, sizes))}"
    return _hopper(name, entry, folded_decoded_kernel, signature, constants, {}, _TILE_STACK)


def _ragged(sizes: tuple[int, ...]) -> CompileCase:
    """Prepared MXFP4 weights and tiles that are as wide as groups have tokens."""
    from deepinfer.kernels.triton.folded_ragged import folded_ragged_kernel

    signature = {
        "w_desc": _tile("u32", 64, 16, 64, 32), "x_desc": _tile("fp8e4nv", 128, 128, 128, 8),
        "half_desc": _tile("fp8e4nv", 64, 128, 128, 8), "more_desc": _tile("fp8e4nv", 32, 128, 128, 8),
        "t_desc": _list("i32", 64), "out": "*bf16", "factors": "*fp32",
        "x_scale": "*fp32", "layout": "*i32", "tiles": "*i32",
        **_integers("M", "N", "steps", "stride_om", "stride_fg", "stride_tg", "stride_tk", "stride_xm", "stride_xk"),
    }  # fmt: skip
    entry = f"prepared MXFP4 ragged, tokens 1x128, {'x'.join(map(str, sizes))}"
    return _hopper(
        "m_grouped_gemm_nt_contiguous",
        entry,
        folded_ragged_kernel,
        signature,
        {"DEPTH": sizes[1]},
        {},
        _TILE_STACK,
    )


def _many(sizes: tuple[int, ...], scaled: bool, grouped: bool, group: int = 128, cut: bool = False) -> CompileCase:  # fmt: skip
    """Many tokens: they are the tall operand."""
    from deepinfer.kernels.triton.gemm_launch import TallTuning
    from deepinfer.kernels.triton.gemm_tall import gemm_tall_kernel

    t = TallTuning(*sizes)
    dtype, columns, bits = ("fp8e4nv", 128, 8) if scaled else ("bf16", 64, 16)
    scales = ["*fp32" if group == 128 else "*i32"] * 2
    if t.spread:
        scales = [_list("fp32", 256), _list("fp32", 32)]
    signature = {
        "x_desc": _tile(dtype, 64, columns, 128, bits), "w_desc": _tile(dtype, t.block_n, columns, 128, bits),
        "out": "*bf16", "x_scale": scales[0], "w_scale": scales[1], "layout": "*i32", "sums": "*fp32",
        **_integers("M", "N", "steps", "num_groups", "part_steps", "stride_om", "stride_xm", "stride_xk", "stride_wg", "stride_wn"),
        "out_desc": _tile("bf16", 64, 64, 128, 16) if t.rooms else "*bf16",
    }  # fmt: skip
    constants = {"SCALED": scaled, "GROUPED": grouped, "PARTS": t.parts, "BLOCK_N": t.block_n, "BAND": t.band,
                 "SPLIT": t.split, "GROUP": group, "CUT": cut, "DEPTH": t.depth, "SPREAD": t.spread == 1,
                 "ROOMS": t.rooms}  # fmt: skip
    name = "m_grouped_gemm_nt_contiguous" if grouped else "gemm_nt"
    entry = f"many tokens {f'FP8 1x{group}' if scaled else 'bf16 in parts' if cut else 'bf16'} {'x'.join(map(str, sizes))}"
    # Some compilers keep a constant of the loop on the stack.
    stack = _TILE_STACK if t.parts == 1 or (scaled and t.block_n == 256) else 0
    return _hopper(name, entry, gemm_tall_kernel, signature, constants, {}, stack, scaled)


def _portable(
    sizes: tuple[int, ...],
    mode: int,
    kind: str,
    chips: tuple[int, ...],
    tested: tuple[int, ...] = (),
) -> CompileCase:
    """The kernel for every GPU; e4m3 is widened by hand where Triton has none."""
    from deepinfer.kernels.triton.gemm_portable import gemm_portable_kernel

    block_m, block_n, warps, stages = sizes
    strides = ("stride_xg", "stride_xm", "stride_wg", "stride_wn", "stride_og", "stride_om")
    scales = ("stride_sg", "stride_sm", "stride_sk", "stride_fg", "stride_fn")
    scaled, packed, small = kind != "bf16", kind == "fp4", kind == "fp8_32"
    widen = scaled and min(chips) < 89
    value = "*bf16" if not scaled else "*u8" if widen else "*fp8e4nv"
    signature = {
        "x": value, "weight": "*u8" if packed else value, "out": "*bf16", "rows_of": "*i32",
        "x_scale": "*u8" if small else "*fp32", "w_scale": "*u8" if small or packed else "*fp32",
        **_integers("M", "N", "K", "num_groups", *strides, *scales),
    }  # fmt: skip
    constants = {
        "MODE": mode, "SCALED": scaled, "X_GROUP": 32 if small else 128,
        "W_ROWS": {"fp8": 128, "fp8_32": 32}.get(kind, 1), "W_GROUP": 32 if small or packed else 128,
        "X_E8M0": small, "W_E8M0": small or packed, "PACKED": packed, "WIDEN": widen, "BLOCK_M": block_m,
        "BLOCK_N": block_n, "BLOCK_K": 64 if not scaled else 32 if small or packed else 128, "NUM_STAGES": stages,
    }  # fmt: skip
    name = ("gemm_nt", "m_grouped_gemm_nt_contiguous", "m_grouped_gemm_nt_masked")[mode]
    return CompileCase(
        name, f"portable {kind} {block_m}x{block_n}{' widened' if widen else ''}", gemm_portable_kernel, signature,
        constants, ("x", "weight", "out", "rows_of", "x_scale", "w_scale", "N", "K", *strides), {"num_warps": warps},
        chips, tested=tested, tensor_core=dict.fromkeys(chips, _TENSOR_CORES), stack_bytes=_SMALL_STACK,
    )  # fmt: skip
