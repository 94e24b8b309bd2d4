"""Notebooks are committed clean, use public names only, and end by checking what they claim."""

from __future__ import annotations

import ast
import importlib
import json
import re
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]
NOTEBOOKS = sorted(path.name for path in (ROOT / "notebooks").glob("*.ipynb"))


def read(name: str) -> dict[str, Any]:
    return json.loads((ROOT / "notebooks" / name).read_text(encoding="utf-8"))


def code_cells(name: str) -> list[dict[str, Any]]:
    return [cell for cell in read(name)["cells"] if cell["cell_type"] == "code"]


def source(name: str) -> ast.Module:
    return ast.parse("\n".join("".join(cell["source"]) for cell in code_cells(name)))


def test_all_are_in_the_navigation() -> None:
    listed = re.findall(r"gallery/(\w+)\.md", (ROOT / "mkdocs.yml").read_text())
    assert sorted(f"{name}.ipynb" for name in listed) == NOTEBOOKS


@pytest.mark.parametrize("name", NOTEBOOKS)
def test_no_outputs_are_committed(name: str) -> None:
    for cell in code_cells(name):
        assert cell["outputs"] == []
        assert cell["execution_count"] is None
    ids = [cell["id"] for cell in read(name)["cells"]]
    assert len(set(ids)) == len(ids)


@pytest.mark.parametrize("name", NOTEBOOKS)
def test_only_public_names_are_used(name: str) -> None:
    for node in ast.walk(source(name)):
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("deepinfer"):
            exported = importlib.import_module(node.module or "").__all__
            wanted = {alias.name for alias in node.names}
            if node.module == "deepinfer":
                wanted -= {"viz"}  # a package, imported by its name
            assert wanted <= set(exported), node.module
        elif isinstance(node, ast.Attribute):
            assert not node.attr.startswith("_") or node.attr.endswith("__"), node.attr


@pytest.mark.parametrize("name", NOTEBOOKS)
def test_begins_with_the_environment_and_ends_with_a_check(name: str) -> None:
    cells = ["".join(cell["source"]) for cell in code_cells(name)]
    assert "deepinfer.__version__" in cells[0]
    assert any(isinstance(node, ast.Assert) for node in ast.walk(ast.parse(cells[-1])))


@pytest.mark.parametrize("name", NOTEBOOKS)
def test_every_picture_is_described(name: str) -> None:
    draws = [
        cell
        for cell in code_cells(name)
        if re.search(r"\bplot_\w+\(", "".join(cell["source"])) and "def " not in cell["source"]
    ]
    assert draws
    for cell in draws:
        assert len(cell["metadata"].get("alt", "")) > 20, "".join(cell["source"])
