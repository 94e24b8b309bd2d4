"""What a measurement or a bug report needs to know of an engine."""

from __future__ import annotations

import platform
from typing import TYPE_CHECKING, Any

import torch

import deepinfer
from deepinfer.core.config import EngineConfig

if TYPE_CHECKING:
    from deepinfer.engine.assemble import Parts

__all__ = ["fingerprint"]


def fingerprint(config: EngineConfig, parts: Parts) -> dict[str, Any]:
    """Versions, device, options and parts as plain values.

    Args:
        config: Options of the engine.
        parts: Its parts.

    Returns:
        A dict that JSON can hold. `model` is a digest of configuration, rounding level and a sample of the
        weights.
    """
    device = parts.device
    is_cuda = device.type == "cuda"
    named = {name: getattr(parts, name) for name in ("scheduler", "cache", "drafter", "runner")}
    return {
        "deepinfer": deepinfer.__version__,
        "python": platform.python_version(),
        "torch": torch.__version__,
        "platform": platform.platform(),
        "device": str(device),
        "device_name": torch.cuda.get_device_name(device) if is_cuda else platform.machine(),
        "threads": torch.get_num_threads(),
        "model": parts.info.fingerprint.hex(),
        "config": config.to_dict(),
        "parts": {name: type(part).__name__ for name, part in named.items() if part is not None},
    }
