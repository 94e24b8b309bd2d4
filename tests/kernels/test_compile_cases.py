"""Machine code of every kernel with every entry of its tables, for every chip that it is for; no GPU needed."""

from __future__ import annotations

import importlib.util
import os
import runpy
from pathlib import Path

import pytest

if importlib.util.find_spec("triton") is None:
    pytest.skip("triton is not installed", allow_module_level=True)
if os.environ.get("TRITON_INTERPRET") == "1":
    pytest.skip("the interpreter replaces the compiler", allow_module_level=True)
from deepinfer.kernels.codegen import CompileCase
from deepinfer.kernels.compile_cases import all_cases
from deepinfer.kernels.contract import has_gluon

if not has_gluon():
    pytest.skip("it needs Triton 3.6 or newer", allow_module_level=True)

pytestmark = pytest.mark.slow
CASES = [
    pytest.param(case, chip, id=f"{case.operation}-{case.entry}-sm_{chip}")
    for case in all_cases()
    for chip in case.tested or case.chips
]


@pytest.mark.parametrize(("case", "chip"), CASES)
def test_machine_code(case: CompileCase, chip: int) -> None:
    assert case.faults(case.compile(chip)) == []


def test_what_triton_would_serve_is_compiled(repo_root: Path) -> None:
    """No cell of the page of what runs where says "not compiled"."""
    chosen, _, _ = runpy.run_path(str(repo_root / "docs" / "kernel_choices.py"))["choices"]()
    compiled = {(case.operation, str(chip)) for case in all_cases() for chip in case.chips}
    served = {
        (o, chip) for o, by in chosen.items() for chip, name in by.items() if name == "triton"
    }
    assert served - compiled == set()
