"""Parts by name: one registry a kind of part, factories that import on first use, and plug-ins."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterator
from importlib import metadata
from typing import Any, Generic, TypeVar

from deepinfer.core import _checks as checks
from deepinfer.core.errors import ConfigError

__all__ = ["Registry"]

T = TypeVar("T")


class Registry(Generic[T]):
    """Names for the implementations of one kind of part.

    A name resolves, in this order, to a factory registered here, to an installed entry point of `group`, or,
    when it holds a colon, to the attribute of a module (`"package.module:Name"`). Nothing is imported before
    it is asked for by name, and registering never replaces a name silently.

    Args:
        kind: What the registry holds, in the singular, for messages.
        group: Entry-point group searched for names that are not registered, or None.
    """

    def __init__(self, kind: str, *, group: str | None = None) -> None:
        self.kind = kind
        self.group = group
        self._factories: dict[str, Callable[..., T] | str] = {}

    def register(
        self, name: str, factory: Callable[..., T] | str, *, replace: bool = False
    ) -> None:
        """Adds a name.

        Args:
            name: The name, without a colon.
            factory: A callable that makes the part, or `"package.module:Name"`, imported on first use.
            replace: Take the place of a factory of the same name.

        Raises:
            ConfigError: The name is malformed or taken.
        """
        if not isinstance(name, str) or not name or ":" in name:
            checks.fail(
                f"{self.kind} name", name, "a non-empty string without a colon", ConfigError
            )
        if name in self._factories and not replace:
            raise ConfigError(
                f"{self.kind} {name!r} is already registered; pass replace=True to take its place.",
                field=self.kind,
                value=name,
            )
        self._factories[name] = factory

    def names(self) -> tuple[str, ...]:
        """Every name that resolves, plug-ins included, sorted; imports nothing."""
        return tuple(sorted({*self._factories, *self._entry_points()}))

    def get(self, name: str) -> Callable[..., T]:
        """The factory of a name.

        Args:
            name: A registered name, an entry point's name, or `"package.module:Name"`.

        Returns:
            The factory.

        Raises:
            ConfigError: The name is unknown (with the nearest known one), or its target cannot be found.
        """
        factory: Callable[..., T] | str | None = self._factories.get(name)
        if factory is None and isinstance(name, str) and ":" in name:
            factory = name
        if factory is None:
            entry = self._entry_points().get(name)
            if entry is not None:
                factory = entry.value
        if factory is None:
            known = self.names()
            nearest = checks.nearest_name(name, known)
            hint = f"did you mean {nearest!r}? " if nearest else ""
            raise ConfigError(
                f"there is no {self.kind} {checks.show(name)}; {hint}Known: {', '.join(known) or 'none'}.",
                field=self.kind,
                value=name,
            )
        return self._load(factory) if isinstance(factory, str) else factory

    def create(self, name: str, *args: Any, **kwargs: Any) -> T:
        """Makes the part of a name.

        Args:
            name: As in `get`.
            args: Passed to the factory.
            kwargs: Passed to the factory.

        Returns:
            The new part.

        Raises:
            ConfigError: As in `get`.
        """
        return self.get(name)(*args, **kwargs)

    def __contains__(self, name: object) -> bool:
        return name in self._factories or name in self._entry_points()

    def __iter__(self) -> Iterator[str]:
        return iter(self.names())

    def __repr__(self) -> str:
        return f"Registry({self.kind!r}, {', '.join(self.names())})"

    def _entry_points(self) -> dict[Any, metadata.EntryPoint]:
        if self.group is None:
            return {}
        return {entry.name: entry for entry in metadata.entry_points(group=self.group)}

    def _load(self, target: str) -> Callable[..., T]:
        module_name, _, attribute = target.partition(":")
        try:
            value: Any = importlib.import_module(module_name)
            for part in attribute.split("."):
                value = getattr(value, part)
        except ModuleNotFoundError as error:
            if error.name and not f"{module_name}.".startswith(f"{error.name}."):
                raise
            raise self._no_target(target, f"no module {error.name!r}") from error
        except AttributeError as error:
            raise self._no_target(target, str(error)) from error
        return value  # type: ignore[no-any-return]

    def _no_target(self, target: str, cause: str) -> ConfigError:
        return ConfigError(
            f"{self.kind} {target!r} cannot be found: {cause}. Give it as 'package.module:Name'.",
            field=self.kind,
            value=target,
        )
