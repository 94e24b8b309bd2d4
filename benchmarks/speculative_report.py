"""Cases of a benchmark as JSON lines, within the seconds that it has."""

from __future__ import annotations

import datetime
import json
import platform
import subprocess
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

__all__ = ["Report"]


class Report:
    """Cases as JSON lines."""

    def __init__(self, path: Path, seconds: float, device: str) -> None:
        self._file = path.open("a", encoding="utf-8")
        self._began = time.perf_counter()
        self._end = self._began + seconds
        git = ["git", "-C", str(Path(__file__).resolve().parent), "rev-parse", "--short", "HEAD"]
        self._machine = {
            "device": torch.cuda.get_device_name() if device == "cuda" else platform.machine(),
            "versions": {"python": platform.python_version(), "torch": torch.__version__},
            "commit": subprocess.run(git, capture_output=True, text=True).stdout.strip(),
            "date": datetime.date.today().isoformat(),
        }

    @property
    def left_s(self) -> float:
        """Seconds that are left."""
        return self._end - time.perf_counter()

    def add(self, case: str, **values: Any) -> None:
        """Writes a case and shows it."""
        found = {k: float(f"{v:.5g}") if isinstance(v, float) else v for k, v in values.items()}
        line = {"part": "speculative_gpu", "case": case, **found, **self._machine}
        self._file.write(json.dumps(line) + "\n")
        self._file.flush()
        shown = " ".join(f"{k}={v}" for k, v in found.items())
        print(f"[{time.perf_counter() - self._began:6.1f}s] {case:34s} {shown}"[:400], flush=True)

    def run(self, case: str, work: Callable[[], object], least_s: float = 5.0) -> None:
        """Runs a part if there is time; a failure is a line, and the next parts still run."""
        if self.left_s < least_s:
            self.add(case, skipped="no time left")
            return
        try:
            work()
        except Exception as error:
            self.add(case, error=f"{type(error).__name__}: {error}"[:400])
            traceback.print_exc()
