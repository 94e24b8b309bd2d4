"""The text that the checkpoint never saw, and how much of it stands in the training text all the same."""

from __future__ import annotations

import sys
import sysconfig
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "examples"))

from nano.corpus import Document, build_corpus, long_lines, read_folder
from nano.tasks import TaskWriter

from deepinfer.engine.tokenizer import Tokenizer

__all__ = [
    "CODE_SUFFIXES", "DOCS_SUFFIXES", "Document", "Overlap", "TaskWriter", "held_out_documents",
    "local_training_texts", "overlaps", "stdlib_folder", "subset", "training_texts",
]  # fmt: skip

CODE_SUFFIXES = (".py",)
DOCS_SUFFIXES = (".rst", ".rst.txt")
SUBSET_FIRST, SUBSET_EVERY = 2, 4
LITTLE_OVERLAP = 0.02


def subset(documents: Sequence[Document]) -> list[int]:
    """Numbers of the documents that stand for all of them where measuring all would take too long."""
    return list(range(len(documents)))[SUBSET_FIRST::SUBSET_EVERY]


def held_out_documents(
    root: Path, suffixes: tuple[str, ...], names: Sequence[str] | None
) -> list[Document]:
    """The held-out documents of a folder, in sorted order.

    Args:
        root: The standard library, or the documentation's sources.
        suffixes: What a file's name ends with.
        names: Names that the training held out, which decide when they are known; files that this interpreter
            does not have are left out. Without them every 20th file is taken, as the training does.

    Returns:
        The documents.
    """
    train, held_out = read_folder(root, suffixes, root.name)
    if names is None:
        return held_out
    by_name = {document.name: document for document in train + held_out}
    return [by_name[name] for name in sorted(names) if name in by_name]


def stdlib_folder() -> Path:
    """Standard library of the running interpreter."""
    return Path(sysconfig.get_path("stdlib"))


def training_texts(data: Path, tokenizer: Tokenizer, chunk: int = 1_000_000) -> Iterator[str]:
    """The training text that a folder written by `train_nano.py data` holds, in large pieces."""
    pieces = [tokenizer.token_bytes(token) for token in range(tokenizer.vocab_size)]
    for token in tokenizer.control_ids:
        pieces[token] = b"\n"
    with np.load(data / "streams.npz") as streams:
        for name in ("code", "docs", "tasks"):
            if name in streams.files:
                ids = streams[name]
                parts = (ids[at : at + chunk].tolist() for at in range(0, len(ids), chunk))
                yield b"".join(b"".join(map(pieces.__getitem__, part)) for part in parts).decode()


def local_training_texts(docs: Path | None) -> Iterator[str]:
    """The training text as far as this machine has it: this interpreter's library, its pip, and the docs."""
    train, _ = build_corpus(stdlib_folder(), docs)
    for documents in train.values():
        yield from (document.text for document in documents)


@dataclass(frozen=True)
class Overlap:
    """How many long lines of one document occur in the training text.

    Attributes:
        found: Long lines that do.
        lines: Long lines.
    """

    found: int
    lines: int

    @property
    def is_small(self) -> bool:
        """Whether under 2 % do."""
        return self.found < LITTLE_OVERLAP * self.lines or not self.lines


def overlaps(documents: Sequence[Document], training: Iterable[str]) -> list[Overlap]:
    """Overlap of every document with the training text."""
    wanted = {line for document in documents for line in long_lines(document.text)}
    found: set[str] = set()
    for text in training:
        found.update(wanted.intersection(long_lines(text)))
    return [_overlap(long_lines(document.text), found) for document in documents]


def _overlap(lines: Sequence[str], found: Collection[str]) -> Overlap:
    return Overlap(sum(line in found for line in lines), len(lines))
