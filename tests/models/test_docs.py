"""The code of the page about checkpoints runs, with a tiny checkpoint in place of its names."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch


def test_checkpoints_page(
    repo_root: Path, save_tiny: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pillow = pytest.importorskip("PIL.Image")
    page = (repo_root / "docs" / "how-to" / "checkpoints.md").read_text()
    code = "\n".join(re.findall(r"```python\n(.*?)```", page, re.DOTALL))
    folder = str(save_tiny())
    for name in ("nano", "path/to/folder", "owner/name"):
        code = code.replace(f'"{name}"', repr(folder))
    code = code.replace('device="cuda"', 'device="cpu"').replace(', revision="main"', "")
    monkeypatch.chdir(tmp_path)
    pillow.fromarray(np.zeros((20, 30, 3), dtype=np.uint8)).save("photo.png")
    scope: dict[str, object] = {}
    exec(code, scope)
    assert isinstance(scope["logits"], torch.Tensor)
    assert (tmp_path / "out" / "config.json").is_file()
