"""Models: architectures, loading and saving of checkpoints, the embedded checkpoint."""

from __future__ import annotations

from typing import TYPE_CHECKING

from deepinfer.core.lazy import lazy_exports

if TYPE_CHECKING:
    from deepinfer.models.hub import resolve_checkpoint as resolve_checkpoint
    from deepinfer.models.loading import Problem as Problem
    from deepinfer.models.loading import check_checkpoint as check_checkpoint
    from deepinfer.models.loading import load_model as load_model
    from deepinfer.models.packed import PackedWeight as PackedWeight
    from deepinfer.models.registry import ARCHITECTURES as ARCHITECTURES
    from deepinfer.models.registry import Architecture as Architecture
    from deepinfer.models.saving import save_pretrained as save_pretrained

_EXPORTS = {
    "ARCHITECTURES": "deepinfer.models.registry",
    "Architecture": "deepinfer.models.registry",
    "PackedWeight": "deepinfer.models.packed",
    "Problem": "deepinfer.models.loading",
    "check_checkpoint": "deepinfer.models.loading",
    "load_model": "deepinfer.models.loading",
    "resolve_checkpoint": "deepinfer.models.hub",
    "save_pretrained": "deepinfer.models.saving",
}

__all__ = [
    "ARCHITECTURES",
    "Architecture",
    "PackedWeight",
    "Problem",
    "check_checkpoint",
    "load_model",
    "resolve_checkpoint",
    "save_pretrained",
]

__getattr__, __dir__ = lazy_exports(__name__, _EXPORTS)
