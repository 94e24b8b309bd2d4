"""How a case of a row kernel is written down: types by the names of its arguments."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from deepinfer.kernels.codegen import CHIPS, CompileCase

__all__ = ["cases", "level", "row_case"]


def cases() -> list[CompileCase]:
    """None of its own."""
    return []


def level(chip: int) -> int:
    """What a chip has: 1 for conversions of e4m3, 2 for packed bf16 arithmetic as well, else 0."""
    return 2 if chip >= 90 else int(chip >= 89)


def row_case(
    operation: str,
    entry: str,
    kernel: Any,
    types: Mapping[str, str],
    constants: Mapping[str, Any],
    warps: int,
    chips: tuple[int, ...] = CHIPS,
    stack_bytes: int = 0,
    tested: tuple[int, ...] = (),
    **options: Any,
) -> CompileCase:
    """A case whose other arguments are int32, and whose pointers and row strides are multiples of 16.

    Args:
        operation: Public name.
        entry: What distinguishes it.
        kernel: A function of Triton's.
        types: Types of arguments that are not int32.
        constants: Values of the constants.
        warps: Warps a program.
        chips: Compute capabilities, times 10.
        stack_bytes: Stack a thread that is accepted.
        tested: Those that tests compile for, where the code of the others is the same; none for all of `chips`.
        options: Further options of the launch.

    Returns:
        The case.
    """
    names = [n for n in kernel.arg_names if n not in constants]
    signature = {n: types.get(n, "i32") for n in names}
    strides = ("_row", "_token", "_head", "_stream", "_batch")
    aligned = tuple(n for n in names if signature[n].startswith("*") or n.endswith(strides))
    return CompileCase(
        operation, entry, kernel, signature, constants, aligned, {"num_warps": warps, **options}, chips,
        stack_bytes=stack_bytes, tested=tested,
    )  # fmt: skip
