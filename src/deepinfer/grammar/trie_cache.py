"""The trie of a vocabulary on disk, by the hash of its content."""

from __future__ import annotations

import contextlib
import os
import tempfile
import zipfile
from collections.abc import Callable
from pathlib import Path

import numpy as np

from deepinfer.grammar.slices import Slice, slice_arrays, slices_from_arrays
from deepinfer.grammar.trie import TokenTrie

__all__ = ["load_or_build"]

FORMAT = 1
"""Raised when the stored arrays change their meaning; files of other formats are not read."""

Parts = tuple[TokenTrie, tuple[Slice, ...]]


def load_or_build(folder: Path | None, fingerprint: str, build: Callable[[], Parts]) -> Parts:
    """Reads a vocabulary's trie and slices from disk, or builds and stores them.

    A file that is absent, cut short, or of another format is built again and replaced; a folder that cannot be
    written costs the time of building, never an error. Files are written whole under another name and then renamed,
    so that a reader sees either nothing or all of it.

    Args:
        folder: Where files are kept, or None to keep none.
        fingerprint: Hash of the vocabulary.
        build: Makes the parts.

    Returns:
        The parts.
    """
    if folder is None:
        return build()
    path = folder / f"trie-{FORMAT}-{fingerprint}.npz"
    try:
        return _read(path)
    except (OSError, ValueError, KeyError, EOFError, zipfile.BadZipFile, IndexError):
        parts = build()
    # Without the file the next process builds again: slower, not wrong.
    with contextlib.suppress(OSError):
        _write(path, parts)
    return parts


def _read(path: Path) -> Parts:
    with path.open("rb") as handle, np.load(handle, allow_pickle=False) as file:
        arrays = {name: file[name] for name in file.files}
    trie = TokenTrie.from_arrays(
        {name.removeprefix("trie/"): value for name, value in arrays.items() if name[:5] == "trie/"}
    )
    parts: list[dict[str, np.ndarray]] = [{} for _ in range(int(arrays["num_slices"]))]
    for name, value in arrays.items():
        if name[0].isdigit():
            number, _, key = name.partition("/")
            parts[int(number)][key] = value
    return trie, slices_from_arrays(parts)


def _write(path: Path, parts: Parts) -> None:
    trie, slices = parts
    arrays = {f"trie/{name}": value for name, value in trie.arrays().items()}
    for number, part in enumerate(slices):
        arrays |= {f"{number}/{name}": value for name, value in slice_arrays(part).items()}
    arrays["num_slices"] = np.asarray(len(slices))
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=path.name, suffix=".tmp")
    try:
        with os.fdopen(handle, "wb") as file:
            np.savez(file, allow_pickle=False, **arrays)
        os.replace(temporary, path)
    except BaseException:
        with contextlib.suppress(OSError):
            os.unlink(temporary)
        raise
