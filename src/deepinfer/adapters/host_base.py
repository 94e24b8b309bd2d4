"""Base classes of other software, where it is installed."""

from __future__ import annotations

import importlib

__all__ = ["base_class"]


def base_class(module: str, name: str) -> type:
    """A class to derive from.

    Args:
        module: Where it is defined.
        name: Its name.

    Returns:
        The class, or `object` when the package, or the class in it, is not there.
    """
    try:
        found = getattr(importlib.import_module(module), name)
    except (ImportError, AttributeError):
        return object
    return found if isinstance(found, type) else object
