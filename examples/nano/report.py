"""One JSON file that tells a run: options, versions, every log line, what each phase cost and why it ended."""

from __future__ import annotations

import json
import platform
import signal
import sys
import time
from argparse import Namespace
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch

import deepinfer

from .storage import replace_file


def say(text: str) -> None:
    """A line of progress on stderr."""
    sys.stderr.write(text + "\n")
    sys.stderr.flush()


def seeds(seed: int) -> dict[str, int]:
    """What each part of a run draws with."""
    return {
        "weights": seed,
        "trunk": seed + 1,
        "prompts": seed + 5,
        "own": seed,
        "draft": seed + 77,
    }


def versions(device: torch.device) -> dict[str, str]:
    """What the numbers depend on beside the options."""
    cuda = device.type == "cuda"
    return {
        "python": platform.python_version(),
        "torch": torch.__version__,
        "numpy": np.__version__,
        "deepinfer": deepinfer.__version__,
        "device": torch.cuda.get_device_name(device) if cuda else platform.machine(),
    }


class Report:
    """The run's record; the file is replaced whole at every line.

    Args:
        path: Where it is written.
        options: The command line.
        device: Where the run computes.
    """

    def __init__(self, path: Path, options: Namespace, device: torch.device) -> None:
        self.path, self._start = path, time.perf_counter()
        self.content: dict[str, Any] = {
            "options": {key: str(value) for key, value in vars(options).items()},
            "versions": versions(device),
            "seeds": seeds(options.seed),
            "phases": {},
            "log": [],
        }

    def log(self, **line: Any) -> None:
        """Adds a line to the log, says it, and writes the file."""
        line = {"at_s": round(time.perf_counter() - self._start, 1), **line}
        self.content["log"].append(line)
        say(json.dumps(line))
        self.write()

    def set(self, **entries: Any) -> None:
        """Sets entries of the top level, and says them."""
        self.content |= entries
        say(json.dumps(entries))
        self.write()

    @contextmanager
    def phase(self, name: str) -> Iterator[dict[str, Any]]:
        """Times a phase; the body may add entries to what is yielded."""
        entry: dict[str, Any] = {}
        start = time.perf_counter()
        self.log(event="phase", phase=name)
        try:
            yield entry
        finally:
            entry["seconds"] = round(time.perf_counter() - start, 1)
            self.content["phases"][name] = entry
            self.write()

    def write(self) -> None:
        """Replaces the file."""
        text = json.dumps(self.content, indent=1) + "\n"
        replace_file(self.path, lambda partial: partial.write_text(text))


class Stopped(Exception):
    """The process was asked to end; what was trained so far is saved."""


class StopRequest:
    """Remembers a SIGTERM until a training loop asks, so that it can save first."""

    def __init__(self) -> None:
        self.requested = False

    def listen(self) -> None:
        """Takes over SIGTERM for this process."""
        signal.signal(signal.SIGTERM, self._note)

    def _note(self, number: int, frame: object) -> None:
        self.requested = True

    def __call__(self) -> bool:
        """Whether a SIGTERM has come."""
        return self.requested
