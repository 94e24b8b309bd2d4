"""The kernels over rows of logits, at a vocabulary of 129,280."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from deepinfer.kernels.codegen import CHIPS, CompileCase
from deepinfer.kernels.configs import sampling as configs

__all__ = ["cases"]

_VOCAB = 129_280


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
    aligned = tuple(n for n in names if signature[n].startswith("*") or n in ("vocab", "stride"))
    return CompileCase(operation, entry, kernel, signature, constants, aligned, **rest)


def _rounds(row: dict[str, str], rounds: Any, settle: Any) -> list[CompileCase]:
    """The kernels that draw and judge by rounds."""
    first, warps = configs.lookup("first_round", _VOCAB)
    following, more_warps = configs.lookup("next_round", _VOCAB)
    last, last_warps = configs.lookup("settle", _VOCAB)
    row = row | {
        "waiting": "*i32",
        "facts": "*fp32",
        "masses": "*fp32",
        "counts": "*i32",
        "num_open": "*i32",
        "open_rows": "*i32",
        "arrived": "*i32",
        "still_open": "*i32",
        "still_open_rows": "*i32",
    }
    every = {"WARM": True, "TOP_K": True, "TOP_P": True, "MIN_P": True}
    chunks = 2 ** (-(-_VOCAB // first) - 1).bit_length()
    some = {"GROUPS": first // 16, "CHUNKS": chunks}
    forms: tuple[tuple[str, Any, dict[str, Any], int], ...] = (
        ("first round", rounds.first_round_kernel,
         {"WARM": True, "MASS": True, "FAST": True, "BLOCK": first, "GROUPS": first // 16,
          "PARTS": 4}, warps),
        ("first judge", rounds.first_judge_kernel,
         every | some | {"ALL_GROUPS": chunks * first // 16, "SIZE": 16}, 16),
        ("next round", rounds.next_round_kernel,
         every | {"FAST": True, "CHUNKS": 32, "BLOCK": following}, more_warps),
        ("settle", settle.settle_kernel, every | {"FAST": True, "BLOCK": last}, last_warps),
    )  # fmt: skip
    return _draws(row, forms, widely="first round")


def _draws(
    row: dict[str, str], forms: Sequence[tuple[str, Any, dict[str, Any], int]], widely: str
) -> list[CompileCase]:
    """Kernels of draws among the highest for Hopper, and one of them for other chips too."""
    return [
        _case(
            "top_k_top_p_sample",
            name,
            kernel,
            row,
            constants,
            options={"num_warps": count},
            stack_bytes=160,  # around the calls of fp64 divisions
            chips=(80, 90, 120) if name == widely else (90,),
        )
        for name, kernel, constants, count in forms
    ]


def _gathered(row: dict[str, str], gather: Any) -> list[CompileCase]:
    """The kernels that draw from a list of the highest."""
    block, warps = configs.lookup("maxima", _VOCAB)
    row = row | {"bounds": "*i32", "counts": "*i32", "found": "*i32"}
    options = {"WARM": True, "CHUNKS": 16}
    forms: tuple[tuple[str, Any, dict[str, Any], int], ...] = (
        ("bound", gather.bound_kernel,
         options | {"GROUPS": block // 32, "ALL_GROUPS": block // 2}, 8),
        ("gather", gather.gather_kernel, {"BLOCK": block, "CAPACITY": 2048}, warps),
        ("finish", gather.finish_kernel,
         options | {"TOP_P": True, "MIN_P": True, "FAST": True, "CAPACITY": 2048}, 8),
    )  # fmt: skip
    return _draws(row, forms, widely="gather")


def cases() -> list[CompileCase]:
    """The cases; needs Triton 3.6 or newer."""
    from deepinfer.kernels.triton import sampling_bracket as bracket
    from deepinfer.kernels.triton import sampling_cut as cut
    from deepinfer.kernels.triton import sampling_draw as draw
    from deepinfer.kernels.triton import sampling_edit as edit
    from deepinfer.kernels.triton import sampling_gather as gather
    from deepinfer.kernels.triton import sampling_logprobs as logprobs
    from deepinfer.kernels.triton import sampling_rounds as rounds
    from deepinfer.kernels.triton import sampling_settle as settle

    sizes = {name: configs.lookup(name, _VOCAB) for name in ("argmax", "gumbel", "maxima", "edit")}
    filters = {"temperatures": "*fp64", "top_ks": "*i64", "top_ps": "*fp64", "min_ps": "*fp64"}
    row = {
        "logits": "*fp32",
        "seeds": "*i64",
        "positions": "*i64",
        "cuts": "*fp32",
        "cut_ids": "*i32",
        "tokens": "*i32",
        "noises": "*fp64",
        "tops": "*fp32",
        "out": "*i64",
    } | filters
    found = []
    for drawn, is_cut in ((False, False), (True, False), (True, True)):
        block, warps = sizes["gumbel" if drawn else "argmax"]
        flags: dict[str, Any] = {"DRAWN": drawn, "WARM": drawn, "CUT": is_cut}
        name = "gumbel_sample" if drawn else "argmax_sample"
        form = " cut" if is_cut else ""
        found.append(
            _case(
                name,
                f"chunk of {block}{form}",
                draw.best_token_kernel,
                row,
                flags | {"FAST": True, "BLOCK": block},
                options={"num_warps": warps},
                chips=(90,) if is_cut else CHIPS,
            )
        )
        if not is_cut:
            found.append(
                _case(
                    name,
                    "row",
                    draw.best_of_chunks_kernel,
                    row,
                    flags | {"CHUNKS": 64 if drawn else 32},
                    options={"num_warps": 4 if drawn else 1},
                    chips=(90,),
                )
            )
    found.append(
        _case(
            "argmax_sample",
            "whole row",
            draw.best_of_row_kernel,
            row | {"logits": "*bf16"},
            {"BLOCK": 8192, "STAGES": 3},
            options={"num_warps": 16},
            chips=(90,),
        )
    )
    block, warps = sizes["maxima"]
    groups, options = block // 32, {"num_warps": warps}
    row |= {
        "groups": "*fp32",
        "exact": "*i64",
        "found_ids": "*i32",
        "found_counts": "*i32",
        "scratch": "*i32",
        "coarse": "*fp32",
        "fine": "*fp32",
        "sums": "*fp32",
    }
    found.append(
        _case(
            "top_k_top_p_sample",
            "maxima",
            cut.chunk_maxima_kernel,
            row,
            {"BLOCK": block, "GROUPS": groups},
            options=options,
        )
    )
    flags = {"WARM": True, "TOP_K": True, "MIN_P": True, "CHUNKS": 16, "BLOCK": block}
    last = {
        "GROUPS": groups,
        "ALL_GROUPS": 16 * groups,
        "MOST_K": 2 * configs.MOST_TOP_K,
        "CAPACITY": 2048,
        "EACH": 256,
        "TOP_P": True,
        "SPAN": 2048,
        "STEPS": 14,
        "FAST": True,
    }
    for is_sample, bins in ((True, False), (True, True)):
        found.append(
            _case(
                "top_k_top_p_sample",
                f"row{' any' if bins else ''}",
                cut.row_cut_kernel,
                row,
                flags | last | {"BINS": bins, "SAMPLE": is_sample, "FEW": not bins},
                options={"num_warps": 8},
                stack_bytes=160,  # around the calls of fp64 divisions
                chips=(80, 90, 120) if bins else (90,),
            )
        )
    found.append(
        _case(
            "top_k_top_p_sample",
            "row wide",
            cut.row_cut_kernel,
            row,
            flags | last | {"BINS": False, "SAMPLE": True, "FEW": True, "SPAN": 8192, "STEPS": 32},
            options={"num_warps": 16},
            stack_bytes=160,
            chips=(90,),
        )
    )
    found += _rounds(row, rounds, settle) + _gathered(row, gather)
    few = ("WARM", "MIN_P", "CHUNKS", "TOP_P", "MOST_K", "CAPACITY")
    found.append(
        _case(
            "top_k_top_p_sample",
            "row of few",
            cut.few_cut_kernel,
            row,
            {n: (flags | last)[n] for n in few} | {"SAMPLE": True},
            options={"num_warps": 1},
            stack_bytes=160,
            chips=(90,),
        )
    )
    found.append(
        _case(
            "top_k_top_p_mask",
            "bracket masses",
            bracket.bracket_mass_kernel,
            row,
            flags | {"FINE": True},
            options={"num_warps": configs.lookup("bracket", _VOCAB)[1]},
            chips=(90,),
        )
    )
    found.append(
        _case(
            "top_k_top_p_mask",
            "bracket tokens",
            bracket.bracket_tokens_kernel,
            row,
            flags | {"EACH": 256},
            stack_bytes=64,
            options={"num_warps": configs.lookup("bracket", _VOCAB)[1]},
            chips=(90,),
        )
    )
    block, warps = sizes["edit"]
    found.append(
        _case(
            "top_k_top_p_mask",
            "cut",
            edit.apply_cut_kernel,
            row | {"out": "*fp32"},
            {"BLOCK": block},
            options={"num_warps": warps},
        )
    )
    found.append(
        _case(
            "apply_token_bitmask",
            "rows",
            edit.token_bitmask_kernel,
            {"logits": "*fp32", "bitmask": "*i32", "rows": "*i32"},
            {
                "ROWS": True,
                "BLOCK": configs.lookup("bitmask", _VOCAB)[0],
                "stride_column": 1,
                "stride_mask_word": 1,
            },
            options={"num_warps": configs.lookup("bitmask", _VOCAB)[1]},
        )
    )
    found.append(
        _case(
            "apply_penalties",
            "last launch",
            edit.penalty_kernel,
            {
                "logits": "*fp32",
                "prompt": "*i64",
                "output": "*i64",
                "seen": "*i32",
                "presence": "*fp32",
                "frequency": "*fp32",
                "repetition": "*fp32",
            },
            {"BLOCK": configs.PENALTY_BLOCK, "PHASE": 2},
            options={"num_warps": 4, "enable_fp_fusion": False},
        )
    )
    block, warps = configs.lookup("logprobs", _VOCAB)
    row |= {
        "tokens": "*i64",
        "counts": "*i32",
        "best_ids": "*i32",
        "found_ids": "*i32",
        "logprobs": "*fp32",
        "ranks": "*i64",
        "best_logprobs": "*fp32",
    }
    found.append(
        _case(
            "log_probs",
            f"chunk of {block}",
            logprobs.logprob_chunk_kernel,
            row,
            {"BLOCK": block},
            options={"num_warps": warps},
        )
    )
    found.append(
        _case(
            "log_probs",
            "row",
            logprobs.logprob_row_kernel,
            row,
            {"CHUNKS": 16, "TOP": 32, "SORT": True},
            options={"num_warps": 1},
            chips=(90,),
        )
    )
    return found
