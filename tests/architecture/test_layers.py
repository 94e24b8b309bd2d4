"""The layer contracts of pyproject.toml hold, and they cover every package."""

from __future__ import annotations

import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

pytest.importorskip("importlinter")


def test_contracts_hold(repo_root: Path, tmp_path: Path) -> None:
    tool = Path(sys.executable).with_name("lint-imports")
    done = subprocess.run(
        [tool, "--config", repo_root / "pyproject.toml", "--cache-dir", tmp_path],
        cwd=repo_root,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stdout + done.stderr


def test_every_package_has_a_layer(repo_root: Path, all_packages: list[str]) -> None:
    contracts = tomllib.loads((repo_root / "pyproject.toml").read_text())["tool"]["importlinter"]
    layers = next(c for c in contracts["contracts"] if c["type"] == "layers")
    placed = {name.strip(" ()") for layer in layers["layers"] for name in layer.split("|")}
    found = {name.split(".")[1] for name in all_packages if "." in name}
    assert found <= placed
