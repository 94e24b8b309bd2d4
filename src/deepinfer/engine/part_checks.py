"""Whether what was given as a part can be one."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from deepinfer.core import _checks as checks
from deepinfer.core.errors import ConfigError

__all__ = ["Owner", "check_callable", "check_model", "check_part", "forget_slots", "is_factory"]

_MARK = "_engine_owner"


class Owner:
    """Stands for one engine in the parts that only one engine at a time may use.

    Attributes:
        is_open: Whether the engine still uses its parts; False once it is closed, or while it hands them over.
    """

    __slots__ = ("__weakref__", "_parts", "is_open")

    def __init__(self) -> None:
        self.is_open = True
        self._parts: list[tuple[Any, Any]] = []

    def claim(self, name: str, part: Any) -> None:
        """Takes a part for this engine.

        Args:
            name: What it is, for the message.
            part: The part, or None; one that cannot be marked is taken without.

        Raises:
            ConfigError: Another engine uses it.
        """
        if part is None:
            return
        mark = getattr(part, "__dict__", {}).get(_MARK)
        owner = mark() if mark is not None else None
        if owner is not None and owner is not self and owner.is_open:
            raise ConfigError(
                f"{name} is {checks.show(part)}, which another engine uses; its books and its state are those of one "
                "engine. Close that engine first, use its replace(), or make a second one.",
                field=name,
                value=part,
                limit="a part of its own for every engine",
            )
        try:
            setattr(part, _MARK, weakref.ref(self))
        except AttributeError:  # it has slots
            return
        self._parts.append((part, mark))

    @contextmanager
    def handing_over(self) -> Iterator[None]:
        """Lets another engine claim the parts of this one, which keeps them if that fails."""
        self.is_open = False
        try:
            yield
        except BaseException:
            for part, _ in self._parts:
                setattr(part, _MARK, weakref.ref(self))
            raise
        finally:
            self.is_open = True

    def give_back(self) -> None:
        """Lets others have the parts, as before they were claimed."""
        self.is_open = False
        for part, mark in self._parts:
            current = part.__dict__.get(_MARK)
            if current is not None and current() is self:
                setattr(part, _MARK, mark)
        self._parts.clear()


def is_factory(part: Any, method: str) -> bool:
    """Whether something makes parts rather than being one.

    Args:
        part: What was given.
        method: A method that the part would have.

    Returns:
        True for classes, and for functions without that method.
    """
    return isinstance(part, type) or (isinstance(part, Callable) and not hasattr(part, method))  # type: ignore[arg-type]


def check_part(name: str, part: Any, protocol: Any) -> None:
    """Refuses a part that lacks a member of its protocol.

    Args:
        name: What it is.
        part: The part.
        protocol: The protocol.

    Raises:
        ConfigError: It lacks one.
    """
    wanted = sorted(
        {
            member
            for base in protocol.__mro__
            for member in {*vars(base), *getattr(base, "__annotations__", {})}
            if not member.startswith("_")
        }
    )
    missing = [member for member in wanted if not hasattr(part, member)]
    if missing:
        raise ConfigError(
            f"{name} is {checks.show(part)}, which lacks {', '.join(missing)}; a {name} has "
            f"{', '.join(wanted)}.",
            field=name,
            value=part,
        )


def check_model(model: Any) -> None:
    """Refuses what cannot be a model.

    Args:
        model: The model.

    Raises:
        ConfigError: It is a class, or lacks a method or a field of its configuration.
    """
    wanted = ("config", "new_cache", "forward", "compute_logits")
    missing = [name for name in wanted if not hasattr(model, name)]
    if not missing:
        config = model.config
        fields = ("vocab_size", "max_position_embeddings")
        missing = [f"config.{name}" for name in fields if not hasattr(config, name)]
    if missing or isinstance(model, type):
        what = f"lacks {', '.join(missing)}" if missing else "is a class"
        raise ConfigError(
            f"model is {checks.show(model)}, which {what}; give what load_model returns, or an object with "
            f"{', '.join(wanted)}.",
            field="model",
            value=model,
        )


def forget_slots(runner: Any, num_slots: int) -> None:
    """Empties the slots of a runner that another engine may have used: ids and generations begin again.

    Args:
        runner: May have `release_slot`, and a `cache` with `num_slots`.
        num_slots: Slots that will be given out.

    Raises:
        ConfigError: The runner has fewer.
    """
    there = getattr(getattr(runner, "cache", None), "num_slots", num_slots)
    if num_slots > there:
        checks.fail(
            "max_num_seqs",
            num_slots,
            f"at most {there}, the slots of the runner that was given",
            ConfigError,
        )
    release = getattr(runner, "release_slot", None)
    if release is not None:
        for slot in range(num_slots):
            release(slot)


def check_callable(name: str, part: Any, arguments: str) -> None:
    """Refuses what cannot be called.

    Args:
        name: What it is.
        part: The part, or None.
        arguments: What it is called with, for the message.

    Raises:
        ConfigError: It cannot be called, or is a class where an object is needed.
    """
    is_class = name == "sampler" and isinstance(part, type)  # calling it would make one, not sample
    if is_class or not (part is None or callable(part)):
        raise ConfigError(
            f"{name} is {checks.show(part)}; a {name} is called with {arguments}."
            f"{' Give an object of the class.' if is_class else ''}",
            field=name,
            value=part,
        )
