"""A checkpoint and options to the parts of an engine."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

import torch

from deepinfer.core import _checks as checks
from deepinfer.core.config import EngineConfig
from deepinfer.core.errors import ConfigError, MissingDependency, UnsupportedHardware
from deepinfer.core.lazy import optional_import
from deepinfer.core.protocols import ProgressFn
from deepinfer.core.variables import read_variable
from deepinfer.engine.assemble import PART_NAMES
from deepinfer.engine.tokenizer import Tokenizer
from deepinfer.models import load_model, resolve_checkpoint

__all__ = ["as_config", "load_parts", "resolve_device", "resolve_dtype"]


def as_config(config: EngineConfig | Mapping[str, Any] | None) -> EngineConfig:
    """An `EngineConfig`.

    Args:
        config: One, a mapping with its fields, or None for the defaults.

    Returns:
        The config.

    Raises:
        ConfigError: It is neither, or an option is unknown or unusable.
    """
    if config is None:
        return EngineConfig()
    return config if isinstance(config, EngineConfig) else EngineConfig.from_dict(config)


def load_parts(
    path_or_repo: str | os.PathLike[str],
    config: EngineConfig | Mapping[str, Any] | None,
    revision: str | None,
    packed: bool,
    progress: bool | ProgressFn | None,
    overrides: Mapping[str, Any],
) -> tuple[EngineConfig, dict[str, Any]]:
    """Loads a checkpoint and its tokenizer; see `Engine.from_pretrained`.

    Args:
        path_or_repo: Which checkpoint.
        config: Options.
        revision: Branch, tag or commit of a hub repository.
        packed: Keep quantised weights as their bytes.
        progress: Whether loading draws a bar.
        overrides: Single options, and parts.

    Returns:
        The options, and the parts by name.

    Raises:
        ConfigError: An override is unknown or unusable.
        ModelError: The checkpoint cannot be loaded.
        UnsupportedHardware: The device is not there.
    """
    parts = [name for name in PART_NAMES if name not in ("model", "runner")]
    checks.check_bool("packed", packed, ConfigError)
    known = {*EngineConfig.__dataclass_fields__, *parts}
    checks.check_keys("Engine.from_pretrained", overrides, known, ConfigError)
    given = {name: value for name, value in overrides.items() if name in parts}
    options = {name: value for name, value in overrides.items() if name not in parts}
    config = as_config(config).replace(**options)
    device = resolve_device(config.device)
    bars = progress if isinstance(progress, bool) else None
    folder = resolve_checkpoint(path_or_repo, revision, progress=bars)
    if given.get("tokenizer") is None:
        given["tokenizer"] = Tokenizer(folder)
    given["model"] = load_model(
        folder,
        device=device,
        dtype=resolve_dtype(config.dtype),
        rounding=config.rounding,  # type: ignore[arg-type]
        packed=packed,
        progress=progress,
    )
    return config, given


def resolve_device(name: str) -> str:
    """The device to load on.

    Args:
        name: "auto", or a torch device.

    Returns:
        A torch device. "auto" follows DEEPINFER_ACCELERATOR, and without it takes CUDA when there is any.

    Raises:
        UnsupportedHardware: CUDA or another device is asked for and not there.
        ConfigError: The name is no device.
    """
    if name == "auto":
        accelerator = read_variable("DEEPINFER_ACCELERATOR")
        if accelerator is None:
            return "cuda" if torch.cuda.is_available() else "cpu"
        name = {"nvidia": "cuda", "cpu": "cpu", "ascend": "npu"}[accelerator]
    if name.partition(":")[0] == "npu":
        _load_npu()
    try:
        kind = torch.device(name).type
    except RuntimeError as error:
        raise ConfigError(
            f"device is {name!r}, which torch does not know: {error}. Give 'cpu', 'cuda' or 'cuda:0'.",
            field="device",
            value=name,
        ) from error
    if kind == "cpu" or (kind == "cuda" and torch.cuda.is_available()):
        return name
    raise UnsupportedHardware(
        f"device {name!r} is asked for, and torch {torch.__version__} finds no {kind} device here. Use "
        "device='cpu', or unset DEEPINFER_ACCELERATOR.",
        needed=kind,
        found="cpu",
        fallback="device='cpu'",
    )


def _load_npu() -> None:
    try:
        optional_import("torch_npu", package="torch-npu")
    except MissingDependency as error:
        raise UnsupportedHardware(
            "an Ascend NPU is asked for, and torch-npu is not installed: pip install torch-npu, together with "
            "the Ascend runtime. Or use device='cpu'.",
            needed="torch-npu and the Ascend runtime",
            found="neither",
            fallback="device='cpu'",
        ) from error


def resolve_dtype(name: str) -> torch.dtype | None:
    """The dtype to load in.

    Args:
        name: As in `EngineConfig.dtype`.

    Returns:
        The dtype, or None for the loader's choice.
    """
    return None if name == "auto" else getattr(torch, name)
