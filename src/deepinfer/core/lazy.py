"""Imports that happen on first use: attributes of a package, and packages that may not be installed."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Mapping
from types import ModuleType
from typing import Any

from deepinfer.core.errors import MissingDependency

__all__ = ["lazy_exports", "optional_import"]


def lazy_exports(
    package: str, exports: Mapping[str, str]
) -> tuple[Callable[[str], Any], Callable[[], list[str]]]:
    """Makes `__getattr__` and `__dir__` of a package whose names load on first use (PEP 562).

    Args:
        package: The package's `__name__`.
        exports: Exported name to the module that holds it; a module whose last part equals the name, given
            with a trailing colon (`"pkg.errors:"`), exports the module itself.

    Returns:
        The two functions, to be bound as `__getattr__` and `__dir__` in the package. The first raises
        `MissingDependency` when a package that the name needs is not installed.

    Examples:
        >>> getter, lister = lazy_exports("deepinfer.core", {"FakeClock": "deepinfer.core.clock"})
        >>> getter("FakeClock").__name__
        'FakeClock'
    """

    def get(name: str) -> Any:
        try:
            source = exports[name]
        except KeyError:
            raise AttributeError(f"module {package!r} has no attribute {name!r}") from None
        try:
            module = importlib.import_module(source.removesuffix(":"))
        except ModuleNotFoundError as error:
            missing = (error.name or "").partition(".")[0]
            if missing in ("", __name__.partition(".")[0]):
                raise  # a mistake of ours, which nothing that can be installed repairs
            command = f"pip install {missing}"
            raise MissingDependency(
                f"{package}.{name} needs {missing}, which is not installed. Install it with: {command}",
                package=missing,
                command=command,
            ) from error
        value = module if source.endswith(":") else getattr(module, name)
        setattr(sys.modules[package], name, value)
        return value

    def listing() -> list[str]:
        return sorted(set(exports) | set(vars(sys.modules[package])))

    return get, listing


def optional_import(
    module: str, *, extra: str | None = None, package: str | None = None
) -> ModuleType:
    """Imports a module that a plain installation may lack.

    Args:
        module: Dotted name of the module.
        extra: The deepinfer extra that brings it, or None when it is installed by its own name.
        package: Distribution name when it differs from the module's first part.

    Returns:
        The module.

    Raises:
        MissingDependency: It is not installed; the message holds the command that installs it.
    """
    package = package or module.partition(".")[0]
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as error:
        if error.name is None or error.name.partition(".")[0] != module.partition(".")[0]:
            raise  # the package is there; something that it needs is not, and hiding that misleads
        command = f'pip install "deepinfer-sdk[{extra}]"' if extra else f"pip install {package}"
        raise MissingDependency(
            f"{package} is needed here and not installed. Install it with: {command}",
            package=package,
            extra=extra,
            command=command,
        ) from error
