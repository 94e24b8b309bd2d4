"""The kernels over rows of logits, at a vocabulary of 129,280."""

from __future__ import annotations

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
    """A case whose other arguments are int32; tests compile it for Hopper alone, unless it says so."""
    names = [n for n in kernel.arg_names if n not in constants]
    signature = {n: types.get(n, "i32") for n in names}
    aligned = tuple(n for n in names if signature[n].startswith("*") or n in ("vocab", "stride"))
    rest.setdefault("tested", (90,))
    return CompileCase(operation, entry, kernel, signature, constants, aligned, **rest)


_ROW = {
    "logits": "*fp32",
    "temperatures": "*fp64",
    "top_ks": "*i64",
    "top_ps": "*fp64",
    "shares": "*fp64",
    "min_ps": "*fp64",
    "seeds": "*i64",
    "positions": "*i64",
    "cuts": "*fp32",
    "cut_ids": "*i32",
    "bounds": "*fp32",
    "bound_ids": "*i32",
    "counts": "*i32",
    "found": "*i32",
    "selected": "*i32",
    "scratch": "*i32",
    "scores": "*fp32",
    "maxima": "*fp32",
    "levels": "*i32",
    "tokens": "*i32",
    "tops": "*fp32",
    "groups": "*fp32",
    "masses": "*fp32",
    "sums": "*fp32",
    "exact": "*i64",
    "highests": "*fp32",
    "ends": "*fp32",
    "end_ids": "*i32",
    "waiting": "*i32",
    "facts": "*fp32",
    "num_open": "*i32",
    "open_rows": "*i32",
    "lists": "*i32",
    "still_open": "*i32",
    "still_open_rows": "*i32",
    "arrived": "*i32",
    "out": "*i64",
}
"""Types of arguments that mean the same in all kernels over rows."""

_Form = tuple[str, str, Any, dict[str, Any], int, tuple[int, ...]]
"""Operation, entry, kernel, constants, warps and chips of a case."""


def _chosen() -> list[_Form]:
    """Cases of the highest token and of draws from whole laws."""
    from deepinfer.kernels.triton import sampling_candidates as draw
    from deepinfer.kernels.triton import sampling_highest as high

    highest, warps = configs.lookup("argmax", _VOCAB)
    block, more = configs.lookup("scores", _VOCAB)
    flags = {"WARM": True, "CUT": True, "FAST": True, "LIST": configs.LISTED_GROUPS, "BLOCK": block}
    choice = _choice(block) | {"STRICT": False, "JUDGED": False}
    row = {"CHUNKS": _chunks(highest)}
    return [
        ("argmax_sample", f"chunk of {highest}", high.highest_of_chunk_kernel, {"BLOCK": highest}, warps, CHIPS),
        ("argmax_sample", "row", high.highest_of_row_kernel, row, 1, (90,)),
        ("gumbel_sample", f"chunk of {block}", draw.group_scores_kernel, flags, more, CHIPS),
        ("gumbel_sample", "row", draw.choice_kernel, flags | choice, 16, (90,)),
    ]  # fmt: skip


def _choice(block: int) -> dict[str, Any]:
    """Sizes of the choice among the tokens of a row that can win."""
    return {
        "RANK": False,
        "EXPECTED": configs.EXPECTED,
        "CHUNKS": _chunks(block),
    }


def _highest() -> list[_Form]:
    """Cases of draws and cuts by top-k."""
    from deepinfer.kernels.triton import sampling_bounds as bounds
    from deepinfer.kernels.triton import sampling_groups as groups
    from deepinfer.kernels.triton import sampling_selected as selected

    block, warps = configs.lookup("gather", _VOCAB)
    wide, wide_warps = configs.lookup("maxima", _VOCAB)
    highest, few_warps = configs.lookup("argmax", _VOCAB)
    sample, most = configs.SAMPLE, configs.MOST_LISTED
    op, mask = "top_k_top_p_sample", "top_k_top_p_mask"
    every = {"WARM": True, "MIN_P": True}
    drawn = every | {"TOP_P": True, "FAST": True, "CHUNKS": _chunks(highest)}
    few = {"WARM": True, "TOP_P": True, "MIN_P": True, "DRAWN": True, "FAST": True, "CHUNKS": _chunks(wide),
           "MOST_K": 2 * configs.FEW_TOP_K, "CAPACITY": 2048}  # fmt: skip
    row = {"BLOCK": wide, "GROUPS": wide // 32, "ALL_GROUPS": _chunks(wide) * wide // 32,
           "SPAN": 2048, "STEPS": 14}  # fmt: skip
    return [
        (op, "maxima", groups.chunk_maxima_kernel, {"BLOCK": wide, "GROUPS": wide // 32}, wide_warps, (90,)),
        (op, "groups", groups.row_cut_kernel, few | row, 8, (90,)),
        (op, "few", groups.few_cut_kernel, few, 1, (90,)),
        (op, "maxima of neighbours", selected.neighbour_maxima_kernel, {"BLOCK": 4096, "GROUP": 8}, 4, (90,)),
        (op, "tops", selected.chunk_top_kernel, {"BLOCK": highest}, few_warps, (90,)),
        (op, "draw from 4096", selected.draw_selected_kernel, drawn | {"CAPACITY": 4096}, 16, (90,)),
        (mask, "bounds of top-k", bounds.bounds_kernel, {"WARM": True, "TOP_K": True, "SIZE": sample},
         sample // 512, (90,)),
        (mask, "list between bounds", bounds.gather_kernel, {"BLOCK": block, "CAPACITY": most}, warps, (90,)),
        (mask, "cut by top-k", bounds.cut_between_kernel,
         every | {"TOP_K": True, "CHUNKS": _chunks(block), "CAPACITY": most}, 16, (90,)),
    ]  # fmt: skip


def _by_mass() -> list[_Form]:
    """Cases of draws by top-p, and of its exact cut."""
    from deepinfer.kernels.triton import sampling_candidates as draw
    from deepinfer.kernels.triton import sampling_mass as mass
    from deepinfer.kernels.triton import sampling_settle as settle
    from deepinfer.kernels.triton import sampling_weigh as weigh

    first, warps = configs.lookup("scores", _VOCAB)
    weighed, few_warps = configs.lookup("weigh", _VOCAB)
    last, most_warps = configs.lookup("settle", _VOCAB)
    block, some = configs.lookup("gather", _VOCAB)
    op, cut = "top_k_top_p_sample", "top_k_top_p_mask"
    flags = {"WARM": True, "CUT": True}
    lists = {"CHUNKS": _chunks(block), "CAPACITY": configs.MOST_LISTED}
    drawn = {
        "WARM": True,
        "CUT": False,
        "FAST": True,
        "LIST": configs.LISTED_GROUPS,
        "BLOCK": first,
    }
    choice = _choice(first) | {"STRICT": True, "JUDGED": True}
    return [
        (op, "scores", draw.group_scores_kernel, drawn, warps, CHIPS),
        (op, "choice", draw.choice_kernel, drawn | choice, 16, (90,)),
        (op, "weigh", weigh.weigh_kernel,
         {"WARM": True, "RANK": False, "FIRST": 0, "BLOCK": weighed, "SPAN": 8192 // weighed, "CHUNKS": _chunks(8192)}, few_warps, (90,)),
        (op, "settle", settle.settle_kernel, flags | {"RANK": False, "FAST": True, "BLOCK": last}, most_warps, (90,)),
        (cut, "masses", mass.chunk_masses_kernel, flags | {"BLOCK": block}, some, (90,)),
        (cut, "bounds by groups", mass.mass_bounds_kernel,
         flags | {"CHUNKS": _chunks(block), "GROUPS": block // 16}, 16, (90,)),
        (cut, "narrower bounds", mass.narrow_kernel,
         {"WARM": True, "CHUNKS": _chunks(block), "BLOCK": block}, some, (90,)),
        (cut, "list by mass", mass.mass_gather_kernel,
         flags | {"BLOCK": block, "CAPACITY": configs.MOST_LISTED}, some, (90,)),
        (cut, "cut by mass", mass.mass_finish_kernel, flags | lists, 16, (90,)),
    ]  # fmt: skip


def _edits() -> list[CompileCase]:
    """Cases of changes of logits."""
    from deepinfer.kernels.triton import sampling_edit as edit

    block, warps = configs.lookup("edit", _VOCAB)
    bits, few = configs.lookup("bitmask", _VOCAB)
    return [
        _case(
            "top_k_top_p_mask", "cut", edit.apply_cut_kernel, _ROW | {"out": "*fp32"}, {"BLOCK": block},
            options={"num_warps": warps},
        ),
        _case(
            "apply_token_bitmask", "rows", edit.token_bitmask_kernel,
            {"logits": "*fp32", "bitmask": "*i32", "rows": "*i32"},
            {"ROWS": True, "BLOCK": bits, "stride_column": 1, "stride_mask_word": 1},
            options={"num_warps": few},
        ),
        _case(
            "apply_penalties", "last launch", edit.penalty_kernel,
            {
                "logits": "*fp32", "prompt": "*i64", "output": "*i64", "seen": "*i32", "presence": "*fp32",
                "frequency": "*fp32", "repetition": "*fp32",
            },
            {"BLOCK": configs.PENALTY_BLOCK, "PHASE": 2},
            options={"num_warps": 4, "enable_fp_fusion": False},
        ),
    ]  # fmt: skip


def _logprobs() -> list[CompileCase]:
    """Cases of log probabilities."""
    from deepinfer.kernels.triton import sampling_logprobs as logprobs

    block, warps = configs.lookup("logprobs", _VOCAB)
    row = _ROW | {
        "tokens": "*i64",
        "best_ids": "*i32",
        "found_ids": "*i32",
        "logprobs": "*fp32",
        "ranks": "*i64",
        "best_logprobs": "*fp32",
    }
    return [
        _case(
            "log_probs", f"chunk of {block}", logprobs.logprob_chunk_kernel, row, {"BLOCK": block},
            options={"num_warps": warps},
        ),
        _case(
            "log_probs", "row", logprobs.logprob_row_kernel, row,
            {"CHUNKS": _chunks(block), "TOP": 32, "SORT": True}, options={"num_warps": 1}, chips=(90,),
        ),
    ]  # fmt: skip


def _chunks(block: int) -> int:
    """Chunks of a row, as a power of two."""
    return 1 << (-(-_VOCAB // block) - 1).bit_length()


def cases() -> list[CompileCase]:
    """The cases; needs Triton 3.6 or newer."""
    found = [
        _case(
            operation,
            entry,
            kernel,
            _ROW,
            constants,
            options={"num_warps": warps},
            stack_bytes=160,  # around the calls of fp64 divisions
            chips=chips,
            # The heaviest of them for each kind of machine code.
            tested=(80, 90, 120) if entry == "scores" else (90,),
        )
        for operation, entry, kernel, constants, warps, chips in _chosen() + _highest() + _by_mass()
    ]
    return found + _edits() + _logprobs()
