"""Recorded lines: what was measured, on which weights, with what, when."""

from __future__ import annotations

import datetime
import hashlib
import json
import platform
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass, field
from importlib import metadata
from pathlib import Path
from typing import Any

from .metrics import Rate

ROOT = Path(__file__).resolve().parents[2]
RESULTS = ROOT / "benchmarks" / "results" / "nano_quality.jsonl"
PART = "nano"
NO_CONTENT = ("README.md", "data_card.json", "report.json", RESULTS.name)
"""Files beside a checkpoint that change no output."""


def content_hash(folder: Path) -> str:
    """First 16 hex digits of a SHA-256 over names and contents of a checkpoint's files."""
    digest = hashlib.sha256()
    for path in sorted(folder.iterdir()):
        if path.is_file() and path.name not in NO_CONTENT:
            digest.update(f"{path.name} {path.stat().st_size}\n".encode())
            with path.open("rb") as file:
                digest.update(hashlib.file_digest(file, "sha256").digest())
    return digest.hexdigest()[:16]


def device_name(device: str) -> str:
    """The device as a person would name it."""
    if device.startswith("cuda"):
        import torch

        return torch.cuda.get_device_name(device)
    info = Path("/proc/cpuinfo")
    names = info.read_text().splitlines() if info.is_file() else []
    model = next((line for line in names if line.startswith("model name")), "")
    return model.partition(":")[2].strip() or platform.machine()


@dataclass
class Recorder:
    """Writes lines to a file, and prints them.

    Args:
        path: The file that lines are appended to, or None.
        checkpoint: Content hash of the weights.
        model: Name of the checkpoint.
        device: Name of the device.
        dtype: Dtype of activations.
        limit: Most texts and prompts of a kind in a quick run, or None.
    """

    path: Path | None
    checkpoint: str
    model: str
    device: str
    dtype: str = "float32"
    limit: int | None = None
    _common: dict[str, Any] = field(init=False)

    def __post_init__(self) -> None:
        """Finds what is the same in every line."""
        git = subprocess.run(
            ["git", "rev-parse", "--short", "HEAD"], cwd=ROOT, capture_output=True, text=True
        )
        versions = {"python": platform.python_version()}
        for name in ("torch", "tokenizers", "numpy", "deepinfer-sdk"):
            try:
                versions[name] = metadata.version(name)
            except metadata.PackageNotFoundError:
                versions[name] = "not installed"
        self._common = {
            "device": self.device,
            "dtype": self.dtype,
            "versions": versions,
            "commit": git.stdout.strip(),
            "date": datetime.date.today().isoformat(),
            "model": self.model,
            "checkpoint": self.checkpoint,
            "limit": self.limit,
        }

    def add(self, group: str, case: str, value: Any, unit: str, **more: Any) -> None:
        """Records one figure; its line's part is "nano" and its case "group: case".

        Args:
            group: What is measured.
            case: On what, or how.
            value: The figure: a number, or a list of numbers by position or layer; None when there is none.
            unit: Its unit.
            more: What else belongs to it, such as counts.
        """
        line = {"part": PART, "case": f"{group}: {case}", "value": rounded(value), "unit": unit}
        text = json.dumps({**line, **{k: rounded(v) for k, v in more.items()}, **self._common})
        print(text, flush=True)
        if self.path is not None:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            with self.path.open("a", encoding="utf-8") as file:
                file.write(text + "\n")

    def add_rate(self, group: str, case: str, rate: Rate, **more: Any) -> None:
        """Records a rate with its counts and its 95 % interval."""
        low, high = rate.interval()
        self.add(
            group,
            case,
            rate.value,
            "share",
            count=rate.count,
            of=rate.of,
            low=low,
            high=high,
            **more,
        )


def rounded(value: Any) -> Any:
    """A value with its floats at four decimals."""
    if isinstance(value, float):
        return round(value, 4)
    if isinstance(value, list | tuple):
        return [rounded(item) for item in value]
    return value


def read_lines(path: Path, checkpoint: str) -> dict[tuple[str, str], dict[str, Any]]:
    """The newest line of every (group, case) of some weights, quick runs left out.

    Args:
        path: The recorded lines.
        checkpoint: Content hash of the weights.

    Returns:
        The lines; none when there is no such file.
    """
    out: dict[tuple[str, str], dict[str, Any]] = {}
    texts: Sequence[str] = path.read_text(encoding="utf-8").splitlines() if path.is_file() else ()
    for text in texts:
        line = json.loads(text)
        if line["checkpoint"] == checkpoint and line["limit"] is None:
            group, _, case = line["case"].partition(": ")
            out[group, case] = line
    return out
