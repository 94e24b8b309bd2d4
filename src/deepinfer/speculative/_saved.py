"""Fits and models as JSON files."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from deepinfer.core.errors import ConfigError

__all__ = ["read_json", "write_json"]


def write_json(path: str | Path, values: Mapping[str, Any], *, indent: int | None = None) -> None:
    """Writes plain values, UTF-8, with a newline at the end.

    Args:
        path: The file; it is replaced.
        values: What `read_json` gives back.
        indent: Spaces a level; None for one line.
    """
    Path(path).write_text(json.dumps(values, indent=indent) + "\n", encoding="utf-8")


def read_json(path: str | Path, what: str) -> Any:
    """Reads plain values.

    Args:
        path: A file that `write_json` wrote.
        what: What it should hold, for the error.

    Returns:
        The values, not checked.

    Raises:
        ConfigError: The file holds no JSON, brackets in brackets without end, or bytes that are no UTF-8.
    """
    try:
        return json.loads(Path(path).read_text(encoding="utf-8"))
    except (RecursionError, ValueError) as error:
        raise ConfigError(
            f"{path} holds no {what}: it is no JSON ({error}); give a file that `save` wrote.",
            field="path",
            value=str(path),
        ) from error
