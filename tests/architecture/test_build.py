"""build.sh: short, and clear about what it cannot do."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest

pytestmark = pytest.mark.skipif(shutil.which("bash") is None, reason="no bash")


def run(root: Path, *arguments: str, **variables: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        ["bash", root / "build.sh", *arguments],
        env={**os.environ, **variables},
        capture_output=True,
        text=True,
        timeout=60,
    )


def test_it_fits_on_a_screen(repo_root: Path) -> None:
    assert len((repo_root / "build.sh").read_text().splitlines()) < 60
    assert os.access(repo_root / "build.sh", os.X_OK)
    assert os.access(repo_root / ".ci" / "run", os.X_OK)


def test_unknown_action(repo_root: Path) -> None:
    done = run(repo_root, "tset")
    assert done.returncode != 0
    assert "unknown action 'tset'; use demo, test, dev" in done.stderr


def test_unknown_accelerator(repo_root: Path) -> None:
    done = run(repo_root, DEEPINFER_ACCELERATOR="cuda")
    assert done.returncode != 0
    assert "DEEPINFER_ACCELERATOR is 'cuda'; use cpu, nvidia or ascend" in done.stderr


def test_no_usable_python(repo_root: Path, tmp_path: Path) -> None:
    shutil.copy(repo_root / "build.sh", tmp_path)
    shutil.copy(repo_root / "pyproject.toml", tmp_path)
    done = run(tmp_path, DEEPINFER_ACCELERATOR="cpu", PYTHON="no-such-python")
    assert done.returncode != 0
    assert "no Python from 3.11" in done.stderr


def test_ascend_without_its_runtime(repo_root: Path, tmp_path: Path) -> None:
    shutil.copy(repo_root / "build.sh", tmp_path)
    shutil.copy(repo_root / "pyproject.toml", tmp_path)
    python = tmp_path / ".venv" / "bin" / "python"
    python.parent.mkdir(parents=True)
    # Stands in for an interpreter without torch: pip works, a look for torch fails.
    python.write_text('#!/bin/sh\ncase "$*" in *torch*) exit 1 ;; esac\n')
    python.chmod(0o755)
    done = run(tmp_path, DEEPINFER_ACCELERATOR="ascend")
    assert done.returncode != 0
    assert "torch and torch-npu are not installed" in done.stderr


def test_nothing_is_done_twice(repo_root: Path, tmp_path: Path) -> None:
    shutil.copy(repo_root / "build.sh", tmp_path)
    shutil.copy(repo_root / "pyproject.toml", tmp_path)
    python = tmp_path / ".venv" / "bin" / "python"
    python.parent.mkdir(parents=True)
    python.write_text(f'#!/bin/sh\necho "$@" >>{tmp_path}/calls\n')
    python.chmod(0o755)
    calls = tmp_path / "calls"
    assert run(tmp_path, "dev", DEEPINFER_ACCELERATOR="cpu").returncode == 0
    assert "--group dev" in calls.read_text()
    calls.unlink()
    assert run(tmp_path, "dev", DEEPINFER_ACCELERATOR="cpu").returncode == 0
    assert not calls.exists()
    assert run(tmp_path, "test", "-k", "a b", DEEPINFER_ACCELERATOR="cpu").returncode == 0
    assert calls.read_text() == "-m pytest -n 2 --dist loadfile -k a b\n"
    (tmp_path / "pyproject.toml").write_text("# changed\n")
    assert run(tmp_path, "dev", DEEPINFER_ACCELERATOR="cpu").returncode == 0
    assert "--group dev" in calls.read_text()
