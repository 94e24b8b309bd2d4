"""The public names of every package, pinned.

A deliberate change is written down with `python tests/architecture/test_public_api.py`.
"""

from __future__ import annotations

import importlib
import json
import types
from pathlib import Path

PINNED = Path(__file__).with_name("public_api.json")
HINT = f"if that is meant: python tests/architecture/{Path(__file__).name}"


def test_exports_are_the_visible_names(package: str) -> None:
    module = importlib.import_module(package)
    exported = module.__all__
    assert len(set(exported)) == len(exported)
    missing = [name for name in exported if not hasattr(module, name)]
    assert missing == []
    plumbing = {"annotations", "TYPE_CHECKING", "lazy_exports"}
    visible = {
        name
        for name in dir(module)
        if not name.startswith("_") and not isinstance(getattr(module, name), types.ModuleType)
    }
    assert visible - plumbing - set(exported) == set()


def test_exports_are_pinned(package: str) -> None:
    pinned = json.loads(PINNED.read_text())
    exported = sorted(importlib.import_module(package).__all__)
    assert exported == pinned.get(package), HINT


def test_no_package_disappeared(all_packages: list[str]) -> None:
    assert set(json.loads(PINNED.read_text())) == set(all_packages), HINT


def write() -> None:
    source = Path(__file__).resolve().parents[2] / "src"
    names = {}
    for path in sorted(source.rglob("__init__.py")):
        package = ".".join(path.parent.relative_to(source).parts)
        names[package] = sorted(importlib.import_module(package).__all__)
    PINNED.write_text(json.dumps(names, indent=1) + "\n")


if __name__ == "__main__":
    write()
