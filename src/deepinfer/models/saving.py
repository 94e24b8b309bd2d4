"""Saving a model in the published layout: quantised, sharded, with index and configuration."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from deepinfer.core.errors import CheckpointMismatch, CheckpointMissing, ConfigError
from deepinfer.models.formats import (
    Layout,
    TensorSpec,
    Weight,
    block_of,
    quantise,
    scale_name,
    stored_tensors,
)
from deepinfer.models.hub import INDEX_NAME, resolve_checkpoint
from deepinfer.models.packed import PackedWeight
from deepinfer.models.registry import architecture_of

__all__ = ["save_pretrained"]

_SHARD_NAME = re.compile(r"model(-\d{5}-of-\d{5})?\.safetensors")
_TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json")
_SHOWN = 8
_HEADER_BYTES = 128
"""More than a tensor's entry takes in the header, its name aside."""


def save_pretrained(
    model: nn.Module | Mapping[str, Tensor],
    folder: str | os.PathLike[str],
    *,
    config: Any = None,
    layout: Layout = "published",
    max_shard_bytes: int = 5 * 10**9,
    tokenizer: str | os.PathLike[str] | None = None,
) -> list[Path]:
    """Writes a checkpoint that `load_model` and other readers of the published layout can load.

    Loading it gives the quantised weights bit for bit, and saving those again changes no value. The same weights always
    give the same bytes. A packed weight is written as the bytes that it holds. Files are written beside the old ones
    and take their place at the end, so a failure leaves an older checkpoint in the folder usable.

    Args:
        model: A model, or its weights by published names: one tensor a weight, unpacked, any float dtype.
        folder: Made if it does not exist. Older `model*.safetensors` files of a checkpoint in it are replaced.
        config: The configuration; None for the model's own `config`.
        layout: "published" quantises (FP8, MXFP4, bf16, fp32 by weight); "plain" writes everything as fp32.
        max_shard_bytes: Most bytes of one file; a weight that is larger gets a file of its own. A weight and its scales
            stay together.
        tokenizer: The checkpoint, by name or folder, whose tokenizer is copied; an engine needs one to take text.
            None copies none, and leaves one that is in `folder` alone.

    Returns:
        The files written, weights first: `model.safetensors`, or `model-0000k-of-0000n.safetensors` and the index, then other
        files of the model (the Engram token map), `config.json` and the tokenizer's.

    Raises:
        CheckpointMissing: `tokenizer` is no such checkpoint here, or has no `tokenizer.json`.
        CheckpointMismatch: Weights are missing, unexpected, of another shape, or not finite.
        ConfigError: No configuration, or an option is out of range.
    """
    if layout not in ("published", "plain"):
        raise ConfigError(
            f"layout is {layout!r}; it must be 'published' or 'plain'.",
            field="layout",
            value=layout,
        )
    if max_shard_bytes < 1:
        raise ConfigError(
            f"max_shard_bytes is {max_shard_bytes}; it must be at least 1.",
            field="max_shard_bytes",
            value=max_shard_bytes,
        )
    config = getattr(model, "config", None) if config is None else config
    if config is None:
        raise ConfigError("weights alone say no configuration; pass config=.", field="config")
    architecture = architecture_of(config.to_dict())
    weights = architecture.weights(config)
    read = _reader(model, weights)
    copies = {} if tokenizer is None else _tokenizer_files(tokenizer)

    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    shards = _plan(weights, layout, max_shard_bytes)
    single = len(shards) == 1
    written: list[tuple[Path, Path]] = []
    weight_map: dict[str, str] = {}
    total = 0
    try:
        for number, names in enumerate(shards, 1):
            suffix = "" if single else f"-{number:05}-of-{len(shards):05}"
            final = folder / f"model{suffix}.safetensors"
            temporary = folder / f".{final.name}.tmp"
            written.append((temporary, final))
            tensors: dict[str, Tensor] = {}
            for name in names:
                tensors |= _stored(name, weights[name], read(name), layout)
            temporary.touch()
            mode = temporary.stat().st_mode
            save_file(tensors, temporary, metadata={"format": "pt"})
            temporary.chmod(mode)  # safetensors makes files that only their owner may read
            weight_map |= dict.fromkeys(tensors, final.name)
            total += sum(tensor.nbytes for tensor in tensors.values())
        for temporary, final in written:
            os.replace(temporary, final)
    finally:
        for temporary, _ in written:
            temporary.unlink(missing_ok=True)

    files = [final for _, final in written]
    for path in folder.glob("model*.safetensors"):
        if _SHARD_NAME.fullmatch(path.name) and path not in files:
            path.unlink()
    index = folder / INDEX_NAME
    if single:
        index.unlink(missing_ok=True)
    else:
        content = {
            "metadata": {"total_size": total},
            "weight_map": dict(sorted(weight_map.items())),
        }
        files.append(_write_json(index, content))
    side = architecture.side_files(model) if isinstance(model, nn.Module) else {}
    side["config.json"] = architecture.config_dict(config, layout)
    files += [_write_json(folder / name, content) for name, content in side.items()]
    return files + [_write(folder / name, content) for name, content in copies.items()]


def _tokenizer_files(source: str | os.PathLike[str]) -> dict[str, bytes]:
    """Contents of a checkpoint's tokenizer files by name; read before anything is written."""
    folder = resolve_checkpoint(source, offline=True)
    if not (folder / _TOKENIZER_FILES[0]).is_file():
        raise CheckpointMissing(
            f"{folder} has no {_TOKENIZER_FILES[0]}, so there is no tokenizer to copy. Give the folder of a "
            "checkpoint that has one.",
            path=folder,
        )
    found = (folder / name for name in _TOKENIZER_FILES)
    return {path.name: path.read_bytes() for path in found if path.is_file()}


def _reader(
    model: nn.Module | Mapping[str, Tensor], weights: Mapping[str, Weight]
) -> Callable[[str], Tensor]:
    """A function from a weight's name to its values, after a check that all are there and none besides."""
    if isinstance(model, nn.Module):
        parameters = dict(model.named_parameters())

        def read(name: str) -> Tensor:
            weight = weights[name]
            value = parameters[weight.parameter or name]
            if not weight.index:
                return value
            return (
                value.part(weight.index) if isinstance(value, PackedWeight) else value[weight.index]
            )

        wanted = {weight.parameter or name for name, weight in weights.items()}
        _check_names(parameters.keys(), wanted)
        return read
    _check_names(model.keys(), weights.keys())
    for name, weight in weights.items():
        if tuple(model[name].shape) != weight.shape:
            raise CheckpointMismatch(
                f"{name} has shape {list(model[name].shape)}; the configuration asks for "
                f"{list(weight.shape)}. Give the logical, unpacked weight.",
                tensor=name,
                expected=weight.shape,
                found=tuple(model[name].shape),
            )
    return model.__getitem__


def _check_names(given: Any, wanted: Any) -> None:
    missing, unexpected = sorted(wanted - given), sorted(given - wanted)
    if missing or unexpected:
        parts = [
            f"{len(names)} {what}: {', '.join(names[:_SHOWN])}{', ...' if len(names) > _SHOWN else ''}"
            for what, names in (("missing", missing), ("unexpected", unexpected))
            if names
        ]
        raise CheckpointMismatch(
            f"The weights do not fit the configuration. {'; '.join(parts)}.",
            tensor=(missing or unexpected)[0],
            expected="present" if missing else "absent",
            found="absent" if missing else "present",
        )


def _plan(weights: Mapping[str, Weight], layout: Layout, max_shard_bytes: int) -> list[list[str]]:
    """Names of the weights of each shard: as many as fit, in order."""
    shards: list[list[str]] = [[]]
    room = max_shard_bytes - _HEADER_BYTES
    for name, weight in weights.items():
        specs: Mapping[str, TensorSpec] = stored_tensors(name, weight, layout)
        size = sum(spec.size_bytes + len(key) + _HEADER_BYTES for key, spec in specs.items())
        if size > room and shards[-1]:
            shards.append([])
            room = max_shard_bytes - _HEADER_BYTES
        shards[-1].append(name)
        room -= size
    return shards


def _stored(name: str, weight: Weight, values: Tensor, layout: Layout) -> dict[str, Tensor]:
    """The tensors to write for one weight, on the CPU, each with memory of its own."""
    if isinstance(values, PackedWeight) and layout == "plain":
        values = values.unpack()
    if isinstance(values, PackedWeight):
        code_type = torch.int8 if weight.storage == "mxfp4" else torch.float8_e4m3fn
        return {
            name: values.codes.cpu().clone().view(code_type),
            scale_name(name): values.scale.cpu().clone().view(torch.float8_e8m0fnu),
        }
    values = values.detach()
    if not bool(values.isfinite().all()):
        raise CheckpointMismatch(
            f"{name} holds NaN or infinity, which no layout can store usefully. Check the training run.",
            tensor=name,
            expected="finite values",
            found="NaN or infinity",
        )
    if layout == "plain":
        return {name: values.to("cpu", torch.float32, copy=True).contiguous()}
    if block_of(weight.storage) is None:
        values = values.clone()
    return {
        key: tensor.cpu().contiguous()
        for key, tensor in quantise(name, values, weight.storage).items()
    }


def _write_json(path: Path, content: Any) -> Path:
    # a list is a long table of numbers, which one number a line would make unreadable
    indent = None if isinstance(content, list) else 2
    return _write(path, (json.dumps(content, indent=indent) + "\n").encode("utf-8"))


def _write(path: Path, content: bytes) -> Path:
    temporary = path.with_name(f".{path.name}.tmp")
    temporary.write_bytes(content)
    os.replace(temporary, path)
    return path
