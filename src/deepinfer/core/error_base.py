"""The root of the error tree, which `deepinfer.core.errors` shows as a whole."""

from __future__ import annotations

__all__ = ["DeepInferError"]


class DeepInferError(Exception):
    """Base of everything that deepinfer raises on purpose."""
