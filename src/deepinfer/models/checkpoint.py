"""Reading a folder of safetensors files: which tensors it holds, where they lie, and whether the files are whole.

Headers are read first and checked in full (sizes, offsets, duplicates), so that a damaged download is reported by name
before anything is loaded. Data is memory-mapped and read one piece at a time.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open
from torch import Tensor

from deepinfer.core.errors import CheckpointMismatch, CheckpointMissing
from deepinfer.models.formats import DTYPE_CODES, TensorSpec
from deepinfer.models.hub import INDEX_NAME

__all__ = ["Checkpoint", "Shard", "read_header"]

_SINGLE_NAME = "model.safetensors"
_MAX_HEADER_BYTES = 100_000_000
_SHOWN = 5


class Checkpoint:
    """The tensors of a checkpoint folder, by name, with the headers of all its files checked.

    Attributes:
        folder: The folder.
        tensors: Name to shape and dtype.
        files: Name of each tensor to the name of its file.
    """

    def __init__(
        self, folder: Path, tensors: Mapping[str, TensorSpec], files: Mapping[str, str]
    ) -> None:
        self.folder = folder
        self.tensors = tensors
        self.files = files

    @classmethod
    def open(cls, folder: str | Path) -> Checkpoint:
        """Reads the index, if there is one, and the header of every file.

        Args:
            folder: Folder with `model.safetensors.index.json` and its shards, or with one safetensors file.

        Returns:
            The checkpoint; no data is read.

        Raises:
            CheckpointMissing: There are no weights, or files that the index names are absent (all are named).
            CheckpointMismatch: A file is truncated or damaged, or the index and the files disagree.
        """
        folder = Path(folder)
        index = _read_index(folder)
        names = sorted(set(index.values())) if index is not None else [_single_file(folder)]
        missing = [name for name in names if not (folder / name).is_file()]
        if missing:
            raise CheckpointMissing(
                f"{folder} lacks {_some(missing)}, which {INDEX_NAME} names. "
                f"Download the checkpoint again, or remove the index when there is a single file.",
                path=folder / missing[0],
            )
        tensors: dict[str, TensorSpec] = {}
        files: dict[str, str] = {}
        faults: list[tuple[str, str]] = []
        for name in names:
            try:
                header = read_header(folder / name)
            except CheckpointMismatch as error:
                faults.append((name, str(error)))
                continue
            for tensor in header.keys() & tensors.keys():
                faults.append((tensor, f"{tensor} is both in {files[tensor]} and in {name}"))
            tensors |= header
            files |= dict.fromkeys(header, name)
        if index is not None and not faults:
            faults += _compare_index(index, files)
        if faults:
            text = "; ".join(message for _, message in faults[:_SHOWN])
            more = f"; and {len(faults) - _SHOWN} more" if len(faults) > _SHOWN else ""
            raise CheckpointMismatch(
                f"{folder} is damaged: {text}{more}. Download or save it again.",
                tensor=faults[0][0],
                found=faults[0][1],
            )
        return cls(folder, tensors, files)

    def by_file(self) -> Iterator[tuple[str, list[str]]]:
        """Each file with its tensors; files in sorted order, tensors in the order of their headers."""
        groups: dict[str, list[str]] = {}
        for tensor, file in self.files.items():
            groups.setdefault(file, []).append(tensor)
        yield from sorted(groups.items())

    @contextmanager
    def shard(self, file: str) -> Iterator[Shard]:
        """Maps one file for reading.

        Args:
            file: Its name in the folder.

        Raises:
            CheckpointMismatch: The file cannot be read as safetensors.
        """
        path = self.folder / file
        try:
            with safe_open(path, framework="pt") as handle:
                yield Shard(handle, self.tensors)
        except SafetensorError as error:
            raise CheckpointMismatch(
                f"{path} cannot be read ({error}). Download or save it again.", found=str(error)
            ) from error


@dataclass(frozen=True, slots=True)
class Shard:
    """One open file; read from it inside `Checkpoint.shard` only."""

    _handle: Any
    _tensors: Mapping[str, TensorSpec]

    def read(self, name: str, start: int = 0, stop: int | None = None) -> Tensor:
        """Reads rows of a tensor.

        Args:
            name: The tensor.
            start: First row of the leading axis.
            stop: Row after the last one, or None for all.

        Returns:
            The rows, on the CPU, in the stored dtype.
        """
        shape = self._tensors[name].shape
        if not shape or (start == 0 and (stop is None or stop >= shape[0])):
            tensor: Tensor = self._handle.get_tensor(name)
            return tensor
        rows: Tensor = self._handle.get_slice(name)[start:stop]
        return rows


def read_header(path: Path) -> dict[str, TensorSpec]:
    """Reads and checks the header of a safetensors file.

    Args:
        path: The file.

    Returns:
        Name to shape and dtype, in file order.

    Raises:
        CheckpointMismatch: The file is not safetensors, is cut short, or its header contradicts itself.
    """
    size = path.stat().st_size
    with path.open("rb") as file:
        prefix = file.read(8)
        length = int.from_bytes(prefix, "little")
        if len(prefix) == 8 and prefix.startswith(b"version "):
            raise _damaged(path, "it is a Git LFS pointer, not the file itself; run `git lfs pull`")
        if len(prefix) < 8 or length > _MAX_HEADER_BYTES:
            raise _damaged(path, f"its first 8 bytes are no header length ({size} bytes in all)")
        if 8 + length > size:
            raise _damaged(
                path, f"the header alone needs {8 + length} bytes and the file has {size}"
            )
        raw = file.read(length)
    try:
        header = json.loads(raw.decode("utf-8"), object_pairs_hook=_no_duplicates)
        if not isinstance(header, dict):
            raise ValueError("it is not a JSON object")
        header.pop("__metadata__", None)
        entries = [_entry(name, value) for name, value in header.items()]
    except (ValueError, RecursionError) as error:
        raise _damaged(path, f"its header is damaged: {error}") from error
    end = 0
    for name, _, (first, last) in sorted(entries, key=lambda entry: entry[2]):
        if first != end:
            raise _damaged(path, f"the data of {name} starts at byte {first} and not at {end}")
        end = last
    if 8 + length + end != size:
        raise _damaged(
            path, f"its header promises {8 + length + end} bytes and the file has {size}"
        )
    return {name: spec for name, spec, _ in entries}


def _entry(name: str, value: Any) -> tuple[str, TensorSpec, tuple[int, int]]:
    if not isinstance(value, dict) or set(value) != {"dtype", "shape", "data_offsets"}:
        raise ValueError(f"the entry of {name} is not a dtype, a shape and data_offsets")
    dtype, shape, offsets = value["dtype"], value["shape"], value["data_offsets"]
    if dtype not in DTYPE_CODES:
        raise ValueError(f"{name} has the unknown dtype {dtype!r}")
    numbers = [*shape, *offsets] if isinstance(shape, list) and isinstance(offsets, list) else [-1]
    if len(offsets) != 2 or any(type(n) is not int or n < 0 for n in numbers):
        raise ValueError(f"{name} has shape {shape!r} and data_offsets {offsets!r}")
    spec = TensorSpec(tuple(shape), dtype)
    if offsets[1] - offsets[0] != spec.size_bytes:
        raise ValueError(
            f"{name} of {spec} needs {spec.size_bytes} bytes, its data_offsets {offsets} do not"
        )
    return name, spec, (offsets[0], offsets[1])


def _read_index(folder: Path) -> dict[str, str] | None:
    """Tensor name to file name, or None without an index."""
    path = folder / INDEX_NAME
    if not path.is_file():
        return None
    try:
        content = json.loads(path.read_text("utf-8"), object_pairs_hook=_no_duplicates)
        weight_map = content["weight_map"]
        if not isinstance(weight_map, dict) or not weight_map:
            raise ValueError("weight_map is not a filled object")
        names = set()
        for tensor, file in weight_map.items():
            if not isinstance(file, str):
                raise ValueError(f"{tensor} is mapped to {file!r}, not to a file name")
            names.add(file)
        for file in names:
            if Path(file).name != file or file in ("", ".", ".."):
                raise ValueError(f"{file!r} is not the name of a file in the folder")
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        reason = f"no key {error}" if isinstance(error, KeyError) else error
        raise CheckpointMismatch(
            f"{path} is not a usable index: {reason}. Download or save the checkpoint again.",
            found=str(reason),
        ) from error
    return weight_map


def _single_file(folder: Path) -> str:
    if not folder.is_dir():
        raise CheckpointMissing(
            f"{folder} is not a folder. Give the folder that holds config.json and the weights.",
            path=folder,
        )
    if (folder / _SINGLE_NAME).is_file():
        return _SINGLE_NAME
    found = sorted(path.name for path in folder.glob("*.safetensors"))
    if len(found) == 1 and "-of-" not in found[0]:
        return found[0]
    if found:
        raise CheckpointMissing(
            f"{folder} holds {_some(found)} but no {INDEX_NAME}. Download the index too.",
            path=folder / INDEX_NAME,
        )
    others = sorted(
        path.name for path in folder.iterdir() if path.suffix in (".bin", ".pt", ".pth", ".gguf")
    )
    hint = f" It holds {_some(others)}; only safetensors files are read." if others else ""
    raise CheckpointMissing(
        f"{folder} holds no {_SINGLE_NAME} and no {INDEX_NAME}.{hint}", path=folder / _SINGLE_NAME
    )


def _compare_index(index: Mapping[str, str], files: Mapping[str, str]) -> list[tuple[str, str]]:
    faults = []
    for tensor, file in index.items():
        if tensor not in files:
            faults.append((tensor, f"{INDEX_NAME} puts {tensor} into {file}, which lacks it"))
        elif files[tensor] != file:
            faults.append(
                (tensor, f"{INDEX_NAME} puts {tensor} into {file}; it is in {files[tensor]}")
            )
    faults += [
        (tensor, f"{tensor} is in {file} but not in {INDEX_NAME}")
        for tensor, file in files.items()
        if tensor not in index
    ]
    return faults


def _no_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    out = dict(pairs)
    if len(out) != len(pairs):
        names = [name for name, _ in pairs]
        twice = next(name for name in names if names.count(name) > 1)
        raise ValueError(f"{twice!r} occurs twice")
    return out


def _damaged(path: Path, reason: str) -> CheckpointMismatch:
    return CheckpointMismatch(f"{path.name}: {reason}", found=reason)


def _some(names: list[str]) -> str:
    shown = ", ".join(names[:_SHOWN])
    return f"{shown} and {len(names) - _SHOWN} more" if len(names) > _SHOWN else shown
