"""Saved states that survive a kill at any moment: parts of bounded size in folders that appear whole."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path

import numpy as np
import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

MAX_PART_BYTES = 14_500_000


def replace_folder(target: Path, fill: Callable[[Path], None]) -> None:
    """Writes a folder under another name, then moves it to `target`; an older one is removed."""
    partial, old = (target.with_name(f".{target.name}.{kind}") for kind in ("partial", "old"))
    for leftover in (partial, old):
        shutil.rmtree(leftover, ignore_errors=True)
    partial.mkdir(parents=True)
    fill(partial)
    if target.exists():
        os.rename(target, old)
    os.rename(partial, target)
    shutil.rmtree(old, ignore_errors=True)


def replace_file(target: Path, fill: Callable[[Path], None]) -> None:
    """Writes a file under another name, then moves it to `target`."""
    partial = target.with_name(f".{target.name}")
    fill(partial)
    os.replace(partial, target)


def save_state(
    folder: Path, name: str, step: int, state: Mapping[str, Tensor], meta: Mapping[str, str]
) -> Path:
    """Saves a state as `folder/name-STEP/part-N.safetensors` and removes older ones of that name.

    Args:
        folder: Where the states of a run lie.
        name: "trunk" or "draft".
        step: Steps done.
        state: Tensors by name; matrices are stored in fp16, everything else as it is.
        meta: Strings kept with the tensors.

    Returns:
        The new folder. Every part has at most `MAX_PART_BYTES`, unless one tensor alone is larger.
    """
    stored = {
        key: (t.half() if t.is_floating_point() and t.dim() > 1 else t).detach().cpu().contiguous()
        for key, t in state.items()
    }
    target = folder / f"{name}-{step:06d}"
    older = [path for path in saved_states(folder, name) if path != target]

    def fill(path: Path) -> None:
        for number, part in enumerate(_split(stored)):
            save_file(part, path / f"part-{number}.safetensors", metadata=dict(meta))

    replace_folder(target, fill)
    for path in older:
        shutil.rmtree(path, ignore_errors=True)
    return target


def saved_states(folder: Path, name: str) -> list[Path]:
    """Complete saved states of that name, fewest steps first."""
    return sorted(path for path in folder.glob(f"{name}-*") if path.is_dir())


def load_state(path: Path, name: str) -> tuple[dict[str, Tensor], dict[str, str]]:
    """Joins the parts of a saved state.

    Args:
        path: The state's folder, or the folder of a run, whose newest state is taken.
        name: "trunk" or "draft".

    Returns:
        Tensors by name, floats in fp32, and the strings kept with them.

    Raises:
        FileNotFoundError: There is no such state.
    """
    states = saved_states(path, name) or [path]
    parts = sorted(states[-1].glob("part-*.safetensors"))
    if not parts:
        raise FileNotFoundError(f"{path} holds no saved {name}; give the --out folder of a run")
    state, meta = {}, {}
    for part in parts:
        with safe_open(part, framework="pt") as file:
            meta = file.metadata() or {}
            state |= {key: file.get_tensor(key) for key in file.keys()}  # noqa: SIM118
    return {k: t.float() if t.is_floating_point() else t for k, t in state.items()}, meta


def save_rows(path: Path, rows: Tensor) -> None:
    """Saves token rows as uint16 .npy."""

    def fill(partial: Path) -> None:
        with partial.open("wb") as file:
            np.save(file, rows.cpu().numpy().astype(np.uint16))

    replace_file(path, fill)


def load_rows(path: Path, device: torch.device) -> Tensor:
    """Token rows of `save_rows`, int32."""
    return torch.from_numpy(np.load(path).astype(np.int32)).to(device)


def _split(state: Mapping[str, Tensor]) -> list[dict[str, Tensor]]:
    parts: list[dict[str, Tensor]] = []
    left = 0
    for key, tensor in state.items():
        size = tensor.numel() * tensor.element_size()
        if not parts or size > left:
            parts.append({})
            left = MAX_PART_BYTES
        parts[-1][key] = tensor
        left -= size
    return parts
