"""Every kernel with every entry of its tables, to be compiled for every chip that it is for.

One module a family, each with `cases()`. The tests compile them all, and the page of what is supported is made from them.
"""

from __future__ import annotations

import importlib
import pkgutil
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from deepinfer.kernels.codegen import CompileCase

__all__ = ["all_cases"]


def all_cases() -> list[CompileCase]:
    """The cases of all families, in the order of their names; needs Triton 3.6 or newer."""
    found: list[CompileCase] = []
    for module in sorted(m.name for m in pkgutil.iter_modules(__path__)):
        found += importlib.import_module(f"{__name__}.{module}").cases()
    return found
