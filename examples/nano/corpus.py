"""The text `nano` learns from: the Python standard library, its documentation, and the bundled pip.

Whole files are held out (every 20th of the sorted standard library and documentation files), and
any training file that shares many lines with a held-out one is dropped, so that a copy of a
held-out file under another name cannot leak in.
"""

from __future__ import annotations

import io
import zipfile
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

HELD_OUT_EVERY = 20
SKIPPED_FOLDERS = {"site-packages", "dist-packages", "__pycache__"}
LONG_LINE = 24
"""Shorter lines are too common to tell a copy by."""


@dataclass(frozen=True)
class Document:
    """One file: a name relative to its source, its text, and where it came from."""

    name: str
    text: str
    source: str


def _decode(data: bytes) -> str | None:
    try:
        text = data.decode("utf-8")
    except UnicodeDecodeError:
        return None
    return text if text and "\0" not in text else None


def _sorted_files(root: Path, suffixes: tuple[str, ...]) -> Iterator[Path]:
    files = (p for p in root.rglob("*") if p.name.endswith(suffixes) and p.is_file())
    yield from sorted(p for p in files if not SKIPPED_FOLDERS.intersection(p.parts))


def read_folder(
    root: Path, suffixes: tuple[str, ...], source: str
) -> tuple[list[Document], list[Document]]:
    """Reads a folder in sorted order and splits it into (training, held-out) documents."""
    train: list[Document] = []
    held_out: list[Document] = []
    for index, path in enumerate(_sorted_files(root, suffixes)):
        text = _decode(path.read_bytes())
        if text is not None:
            target = held_out if index % HELD_OUT_EVERY == HELD_OUT_EVERY - 1 else train
            target.append(Document(str(path.relative_to(root)), text, source))
    return train, held_out


def read_bundled_wheels(stdlib: Path) -> list[Document]:
    """The pip and setuptools wheels that `ensurepip` ships with the interpreter (MIT)."""
    documents = []
    for wheel in sorted((stdlib / "ensurepip" / "_bundled").glob("*.whl")):
        with zipfile.ZipFile(io.BytesIO(wheel.read_bytes())) as archive:
            for name in sorted(archive.namelist()):
                text = _decode(archive.read(name)) if name.endswith(".py") else None
                if text is not None:
                    documents.append(Document(name, text, wheel.stem))
    return documents


def long_lines(text: str) -> list[str]:
    """The stripped lines that are long enough to recognise a copy by."""
    return [line for raw in text.splitlines() if len(line := raw.strip()) >= LONG_LINE]


def drop_copies(
    documents: Iterable[Document], known: set[str], max_share: float
) -> Iterator[Document]:
    """Keeps the documents of whose long lines at most `max_share` are in `known`."""
    for document in documents:
        lines = long_lines(document.text)
        if sum(line in known for line in lines) <= max_share * len(lines):
            yield document


def build_corpus(
    stdlib: Path, docs: Path | None = None, more_stdlibs: Iterable[Path] = ()
) -> tuple[dict[str, list[Document]], dict[str, list[Document]]]:
    """Collects training and held-out documents.

    Args:
        stdlib: Standard library folder (`sysconfig.get_path("stdlib")`).
        docs: Folder of the documentation's reStructuredText sources, if there is one.
        more_stdlibs: Other releases' standard libraries; only their new files are used.

    Returns:
        (training, held-out) documents by domain: "code" and "docs".
    """
    code, code_held_out = read_folder(stdlib, (".py",), f"CPython {stdlib.name}")
    code += read_bundled_wheels(stdlib)
    text, text_held_out = (
        read_folder(docs, (".rst", ".rst.txt"), "Python documentation") if docs else ([], [])
    )
    secret = {line for d in code_held_out + text_held_out for line in long_lines(d.text)}
    known = {line for d in code for line in long_lines(d.text)}
    for other in more_stdlibs:
        train, held_out = read_folder(other, (".py",), f"CPython {other.name}")
        fresh = list(drop_copies(train + held_out, known, 0.5))
        code += fresh
        known |= {line for d in fresh for line in long_lines(d.text)}
    code = list(drop_copies(code, secret, 0.25))
    text = list(drop_copies(text, secret, 0.25))
    return {"code": code, "docs": text}, {"code": code_held_out, "docs": text_held_out}
